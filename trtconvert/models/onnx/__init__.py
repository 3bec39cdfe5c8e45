"""ONNX models as sources: a graph becomes a torch module that computes the same, with attention and layers that are found in it.

From there on it is a model as any other: what is exported of it is made anew, by torch's exporter, whatever wrote the file that
it came from, in the operators, the type and the sizes that engines are for.

| module | what it does |
| --- | --- |
| `files` | reads a graph and its weights, and refuses what cannot be used, without torch |
| `steps` | the graph as a list of steps, constants folded |
| `sizes` | what a step computes of sizes, which are known while a graph is traced |
| `operators` | what it computes of tensors: `elementwise`, `shapes`, `reductions`, `products`, `multi_head`; each of a `call` |
| `attention`, `layers` | patterns of several steps that become one |
| `denoiser` | the steps as a module |
| `inputs` | which input is what, of which sizes |
| `sampling` | draws samples |
| `model` | all of it as a `DiffusionModel` |
"""
