"""Hooks under trainers that own the training loop."""
