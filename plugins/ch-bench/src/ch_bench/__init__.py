"""Programs that measure commhooks on your machine."""
