"""Post-local SGD: averaging of parameters every few steps, over groups of ranks."""
