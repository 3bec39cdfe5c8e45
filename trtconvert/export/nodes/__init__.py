"""The nodes of our own domain: `common.py` has what all kinds share. Of each kind, `KIND.py` has what lowerings and backends ask
of its nodes, and `KIND_body.py` their arithmetic in standard ONNX operators."""
