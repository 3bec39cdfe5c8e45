"""Weights in files: read, named, converted."""
