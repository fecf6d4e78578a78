"""Shaped links between processes of this machine."""
