"""Shaped links, and the bytes that cross them."""
