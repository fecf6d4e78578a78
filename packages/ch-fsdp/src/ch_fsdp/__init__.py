"""Not built yet: this package has no hooks of its own in this version."""
