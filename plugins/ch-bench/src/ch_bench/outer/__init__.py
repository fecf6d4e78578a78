"""Ranks far apart: what outer optimizers cost in loss, and the race against the clock over a slow link."""
