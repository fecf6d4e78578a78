"""DDP communication hooks and wrappers with PyTorch's names."""
