"""A hook for an unchanged training script, and a check of every hook on this machine. It has commands and no public names."""
