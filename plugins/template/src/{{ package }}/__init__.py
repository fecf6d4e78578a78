"""A starting point: one hook and one wrapper. Keep this file and ``_plugin.py`` free of torch."""
