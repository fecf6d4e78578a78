"""Programs of this project's records. They are not installed: start them here, with `python -m programs.NAME`."""
