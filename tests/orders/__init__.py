"""Every order of completion: a run whose collectives complete late and in random orders equals the plain run to the bit."""
