"""Adapters for trainers that own the training loop, one module each, and their common part."""
