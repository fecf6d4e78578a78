"""The command `bench`: costs of hooks compared with PyTorch's."""
