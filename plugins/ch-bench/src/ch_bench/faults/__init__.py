"""Kills, recoveries and torchft's own tests, over a real manager."""
