"""Serving bundles: over HTTP in the shape of the OpenAI images API on a Ray cluster, and in NVIDIA Triton Inference Server.

A request goes front (HTTP, `front.py`) → queue of images by shape (`dispatch.py`) → a replica on some machine of the cluster
(`cluster.py`) → the bundle (`drawing.py`). Of these only `cluster.py` knows Ray.
"""
