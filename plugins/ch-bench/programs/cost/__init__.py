"""Costs of hooks: time, operations and memory."""
