"""`commhooks advise`: predict step times with each hook from a short probe, and recommend one."""
