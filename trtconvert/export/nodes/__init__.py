"""Nodes of our own domain, and their bodies in standard ONNX operators."""
