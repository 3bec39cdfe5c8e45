"""Rewrites of a model in place. Each returns the number of its changes.

Nodes of our domain are lowered in three ways: `function`, `native` and `plugin`. Other rewrites fuse nodes into plugins, or
change into forms that TensorRT computes faster.
"""
