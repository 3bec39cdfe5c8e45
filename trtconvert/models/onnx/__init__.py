"""ONNX models as sources: a graph becomes a torch module that computes the same, with its attention and layers recognised.

From there on it is a model like any other: torch's exporter makes a new graph of it, whatever program wrote the file, with the
operators, the type and the sizes that engines need.

| module | task |
| --- | --- |
| `files` | reads a graph and its weights, and refuses unfit ones, without torch |
| `flaws` | finds damage in the file |
| `steps` | the graph as a list of steps |
| `sizes` | computes steps on sizes, which are known while a graph is traced |
| `operators` | computes steps on tensors: `elementwise`, `shapes`, `reductions`, `products`, `multi_head`, each with a `call` |
| `attention`, `layers` | fuse patterns of several steps |
| `denoiser` | the steps as a module |
| `inputs` | tells the inputs apart, and their sizes |
| `sampling` | draws samples |
| `model` | puts everything together as a `DiffusionModel` |
"""
