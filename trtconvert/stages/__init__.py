"""The stages of a build, one module each; `trtconvert/pipeline.py` runs them in order.

A stage writes a folder in the cache from the outputs of earlier stages. The key of a stage is the hash of its input and of the
code that it imports.

| module | content |
| --- | --- |
| `components`, `calibrate`, `search`, `plan`, `steps`, `reference`, `errors`, `export`, `engines`, `verify` | one stage each |
| `component_errors` | the stages that verify text encoders and the VAE |
| `gates` | the check of the measured figures |
| `build` | the inputs of stages: recipe, model, cache |
| `results` | outputs of the calibration, the plan and the choice of steps, for later stages |
| `converted` | the INT8 sites and layers of a plan |
| `shapes` | sizes and types of engines |
| `records` | sites and layers in the manifest's form |
| `onnx_files` | checks and native forms of ONNX models |
| `common` | names of files, and the runner of a stage |
"""
