"""`commhooks advise`: is the network your limit, and which hook would help? Predicted from a short probe; nothing is switched."""
