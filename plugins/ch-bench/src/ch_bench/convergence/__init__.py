"""How training goes with every hook."""
