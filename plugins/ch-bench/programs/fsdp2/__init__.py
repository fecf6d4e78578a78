"""FSDP2 with hooks on weights and gradients: loss, bytes of each collective, and time of a step."""
