"""Kills, recoveries and torchft's own tests, with real Managers."""
