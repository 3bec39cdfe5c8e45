"""The stages that compare the exported text encoders and VAE with FP32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from trtconvert.bundle import ComponentRecord, EngineRecord
from trtconvert.cache import Stage
from trtconvert.evaluate.gates import check_component
from trtconvert.stages.build import Build
from trtconvert.stages.common import ENGINE, EXAMPLE, OUTPUT_ERRORS, Engines, component_of

if TYPE_CHECKING:
    from trtconvert.evaluate.component_example import ComponentExample
    from trtconvert.progress import Bar


def verified_component(build: Build, name: str, exported: Stage, engines: Engines) -> tuple[float, Engines]:
    """Compares a component with FP32 in torch: its TensorRT engine if there is one, else its exported model on ONNX Runtime.

    Returns:
        The largest relative L2 error of an output, and the engines with their errors.
    Raises:
        GateError: the error is above `verify.max_component_error`, or an output is not finite.
    """
    runs = [(record, stage) for record, stage in engines if record.backend == "tensorrt"]
    reads = {"onnx": exported.key, "engines": [stage.key for _, stage in runs]}

    def make(folder: Path, bar: Bar) -> None:
        from trtconvert.evaluate.component_example import ComponentExample
        from trtconvert.runtime.session import OnnxRuntimeComponent

        component = component_of(exported)
        example = ComponentExample.load(exported.folder / EXAMPLE, component)
        if runs:
            errors = engine_errors(example, component, *runs[0])
        else:
            errors = example.errors(OnnxRuntimeComponent(exported.folder / component.onnx, component))
        (folder / OUTPUT_ERRORS).write_text(json.dumps(errors))

    verified = build.stage(f"verify {name}", reads, make)
    errors = json.loads((verified.folder / OUTPUT_ERRORS).read_text())
    error = check_component(name, component_of(exported), errors, build.recipe.verify.max_component_error)
    return error, [
        (record.model_copy(update={"error": error}) if (record, stage) in runs else record, stage)
        for record, stage in engines
    ]


def engine_errors(
    example: ComponentExample, component: ComponentRecord, record: EngineRecord, stage: Stage
) -> dict[str, float]:
    """Returns the relative L2 error of each output of a component's engine, from the engine's record and stage."""
    from contextlib import closing

    from trtconvert.runtime.bundles import engine_component

    with closing(engine_component(stage.folder / ENGINE, record, component)) as engine:
        return example.errors(engine)
