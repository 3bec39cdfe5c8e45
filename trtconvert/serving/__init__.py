"""Serves bundles over HTTP with the OpenAI images API on a Ray cluster, and in NVIDIA Triton Inference Server.

A request passes the HTTP front (`front.py`), the queue of images by shape (`dispatch.py`), a replica on the cluster
(`cluster.py`), and the bundle (`drawing.py`). Only `cluster.py` uses Ray. The queue is ours: Ray Serve's batching and HTTP proxy
know neither shapes of images, nor a queue limit in images, nor lost replicas whose batches are drawn again.
"""
