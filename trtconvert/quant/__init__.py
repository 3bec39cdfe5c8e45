"""Decisions about a model's operations, and their INT8 computation in torch."""
