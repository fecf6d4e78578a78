"""Comparison of the public names of PyTorch's, Lightning's and torchft's hook modules with ours."""
