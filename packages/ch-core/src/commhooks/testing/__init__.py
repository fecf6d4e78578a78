"""Test kit: real gloo processes, simulated ranks, and the contract that every hook must pass."""

from commhooks.testing.spawn import WorkerError, spawn

__all__ = ["WorkerError", "spawn"]
