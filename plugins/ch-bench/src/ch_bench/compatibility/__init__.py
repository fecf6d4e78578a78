"""Every public name of PyTorch's, Lightning's and torchft's hook modules beside ours."""
