"""Convergence study: training with every hook, compared at equal steps and at equal bytes."""
