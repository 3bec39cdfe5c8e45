"""Block masks in a TensorRT engine, on one GPU: attention with a mask that follows the timestep, and without a mask.

    python bench/sparse_engine.py [--tokens 4096 16384 32768] [--output FOLDER]

Engines of one `Int8Attention` node, 24 heads, FP16, scales measured. One engine has a table of masks, a density for each
timestep bin and blocks drawn at random for each head, and gathers the bin's on the device, as exported models do; its time at
each density stands against that of the engine without a mask, and of TensorRT's own attention. Device time of calls in a CUDA
graph, median. For the gain in a whole model, run `trtconvert compile` on bundles with and without attention.sparse. Writes
sparse_engine.md; nothing is asserted, tests/gpu/test_block_masks_on_gpu.py compares the numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from linear import write_table
from rich.console import Console
from torch import Tensor

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import BLOCK
from trtconvert.bundle import TensorRecord
from trtconvert.engine import tensorrt
from trtconvert.engine.attention_choice import TIMESTEP_MAX, AttentionCase, one_node_model
from trtconvert.engine.engine_timer import EngineRunner
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.nodes.attention import append_input, attention_nodes
from trtconvert.export.nodes.attention_body import BLOCK_MASK, INPUTS
from trtconvert.progress import Reporter
from trtconvert.recipe import EngineSection

HEADS, DIMS = 24, (64, 128)
MODES = (Mode.PRECISION, Mode.BALANCED, Mode.AGGRESSIVE, Mode.FP8)
DENSITIES = (1.0, 0.5, 0.25, 0.1, 0.05)
"""Density of each timestep bin; as many bins as `one_node_model` has."""
INPUT_SETS = 3


def case_of(tokens: int, dim: int) -> AttentionCase:
    shape = (1, tokens, HEADS, dim)
    return AttentionCase(shape, shape, "BNHD", ir.DataType.FLOAT16, "dynamic", True)


def model_of(tokens: int, dim: int, mode: Mode, masked: bool) -> ir.Model:
    """Returns a model of one node in one mode in all timestep bins."""
    model = one_node_model(case_of(tokens, dim))
    (node,) = attention_nodes(model).values()
    modes = node.inputs[INPUTS.index("modes")]
    assert modes is not None
    modes.const_value = ir.tensor(np.full(len(DENSITIES), int(mode), np.int32), name=modes.name)
    if masked:
        append_input(node, BLOCK_MASK, mask_of_bin(model, node, tokens))
    return model


def mask_of_bin(model: ir.Model, node: ir.Node, tokens: int) -> ir.Value:
    """Returns the mask of the timestep's bin, gathered from a table of masks."""
    blocks = -(-tokens // BLOCK)
    drawn = np.random.default_rng(0).random((len(DENSITIES), HEADS, blocks, blocks)).argsort(-1)
    kept = np.array([max(1, round(density * blocks)) for density in DENSITIES])
    table = ir.val("masks", const_value=ir.tensor(drawn < kept[:, None, None, None], name="masks"))
    factor = ir.val("per_bin", const_value=ir.tensor(np.float32(len(DENSITIES) / TIMESTEP_MAX), name="per_bin"))
    for constant in (table, factor):
        model.graph.register_initializer(constant)
    scaled = ir.node("Mul", [node.inputs[3], factor])
    index = ir.node("Cast", [scaled.outputs[0]], {"to": ir.DataType.INT64})
    chosen = ir.node("Gather", [table, index.outputs[0]], {"axis": 0})
    model.graph.insert_before(node, [scaled, index, chosen])
    mask = chosen.outputs[0]
    mask.dtype, mask.shape = ir.DataType.BOOL, ir.Shape([1, HEADS, blocks, blocks])
    return mask


def runner_of(model: ir.Model) -> EngineRunner:
    trt = tensorrt.load()
    inputs = [
        TensorRecord(name=str(x.name), dtype=x.dtype.numpy().name, shape=list(x.shape.numpy()))
        for x in model.graph.inputs
        if x.dtype is not None and x.shape is not None
    ]
    with Reporter(Console(quiet=True)).stage("engine") as bar:
        plan = tensorrt.build_lowered(trt, model, Path("attention.onnx"), inputs, [{}], EngineSection(), bar)
    return EngineRunner(trt, plan)


def feeds(tokens: int, dim: int) -> list[dict[str, Tensor]]:
    def drawn() -> Tensor:
        return torch.randn(1, tokens, HEADS, dim, device="cuda", dtype=torch.float16)

    return [{name: drawn() for name in "qkv"} | {"timestep": torch.zeros(1, device="cuda")} for _ in range(INPUT_SETS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--output", type=Path, default=Path("out/bench"), metavar="FOLDER")
    given = parser.parse_args()
    heading = " | ".join(f"{density:.0%} of the blocks" for density in DENSITIES)
    lines = [
        f"| N D | mode | TensorRT's own, µs | no mask, µs | {heading} |",
        "| --- | --- | ---: | ---: |" + " ---: |" * len(DENSITIES),
    ]
    for tokens in given.tokens:
        for dim in DIMS:
            inputs = feeds(tokens, dim)
            # Heads first, as in a whole network.
            native = one_node_model(case_of(tokens, dim).heads_first())
            lower_to_native(native)
            turned = [feed | {name: feed[name].view(1, HEADS, tokens, dim) for name in "qkv"} for feed in inputs]
            own = runner_of(native).microseconds(turned)
            for mode in MODES:
                times = []
                for masked in (False, True):
                    model = model_of(tokens, dim, mode, masked)
                    lower_to_plugin(model)
                    runner = runner_of(model)
                    for index in range(len(DENSITIES) if masked else 1):
                        for feed in inputs:
                            feed["timestep"].fill_((index + 0.5) / len(DENSITIES) * TIMESTEP_MAX)
                        times.append(runner.microseconds(inputs))
                cells = " | ".join(f"{us:.0f}: {times[0] / us:.2f}×" for us in times[1:])
                lines.append(f"| {tokens} {dim} | {mode.name.lower()} | {own:.0f} | {times[0]:.0f} | {cells} |")
                print(lines[-1], flush=True)
    write_table(lines, given.output / "sparse_engine.md")


if __name__ == "__main__":
    main()
