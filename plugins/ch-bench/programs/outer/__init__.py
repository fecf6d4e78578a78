"""Training over slow links: loss of outer optimizers, and the race to a given loss."""
