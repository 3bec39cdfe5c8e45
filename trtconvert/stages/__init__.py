"""The stages of a build, one a module. Each makes a folder in the cache from what the stages before it left, filed under the hash
of what it reads and of the code that it imports.

| module | what it has |
| --- | --- |
| `components`, `calibrate`, `search`, `plan`, `steps`, `reference`, `errors`, `export`, `engines`, `verify` | a stage each |
| `gates` | what becomes of the figures in the end |
| `build` | a build under way, which stages are given |
| `results` | what the calibration, the plan and the choice of steps left, for the stages that read it |
| `converted` | the INT8 sites and layers of a plan |
| `shapes` | sizes and types that engines take |
| `records` | sites and layers as the manifest has them |
| `onnx_files` | ONNX models as stages leave them |
| `common` | names of files, and how a stage runs |
"""
