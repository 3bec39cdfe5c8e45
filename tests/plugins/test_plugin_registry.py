"""The plugin library in the real TensorRT versions, on a machine without a GPU. `make tensorrt` fetches them.

One binary must register, create plugins and refuse bad ones in each. What the plugin does with shapes needs a network and
therefore a GPU in TensorRT itself; int8_attention/test_plugin.py calls it without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support import REPOSITORY

from trtconvert.library import library_path

VERSIONS = ("10.6", "10.15", "11.2")

# Runs in a process of its own: one process holds one TensorRT. Prints what it found as JSON.
PROBE = """
import json, sys
import numpy as np
import tensorrt_bindings as trt

found = {"version": trt.__version__}
registry = trt.get_plugin_registry()
before = {c.name for c in registry.all_creators}
handle = registry.load_library(sys.argv[1])
found["new"] = sorted({c.name for c in registry.all_creators} - before)
creator = registry.get_creator("Int8Attention", "1", "")
found["fields"] = [field.name for field in creator.field_names]

def create(phase, **attributes):
    fields = []
    for name, value in attributes.items():
        if isinstance(value, bytes):
            fields.append(trt.PluginField(name, value, trt.PluginFieldType.CHAR))
        elif isinstance(value, float):
            fields.append(trt.PluginField(name, np.array([value], np.float32), trt.PluginFieldType.FLOAT32))
        else:
            fields.append(trt.PluginField(name, np.array([value], np.int32), trt.PluginFieldType.INT32))
    return creator.create_plugin("layer", trt.PluginFieldCollection(fields), phase)

good = dict(layout=b"BNHD", softmax_scale=0.125, timestep_max=1000.0, scaling=b"dynamic", smooth_k=0)
good |= dict(rotary=1, norm=1, norm_eps=1e-6, norm_split=0, kv_heads=0, k_head=0, v_head=0, parts=1, block_mask=0, key_index=0)
plugin = create(trt.TensorRTPhase.BUILD, **good)
found["plugin"] = plugin.interface_info.kind
kinds = trt.PluginCapabilityType
core, build, runtime = (plugin.get_capability_interface(kind) for kind in (kinds.CORE, kinds.BUILD, kinds.RUNTIME))
found["core"] = [core.plugin_name, core.plugin_version, core.plugin_namespace]
found["outputs"] = build.num_outputs
found["interfaces"] = [c.interface_info.kind for c in (core, build, runtime)]
found["defaults"] = create(trt.TensorRTPhase.BUILD) is not None
found["from_engine"] = create(trt.TensorRTPhase.RUNTIME, serialization_version=5, **good) is not None
found["from_other_engine"] = create(trt.TensorRTPhase.RUNTIME, serialization_version=9, **good) is not None
found["bad"] = {}
for name, value in {"layout": b"BDNH", "softmax_scale": -1.0, "smooth_k": 7, "scaling": 3}.items():
    found["bad"][name] = create(trt.TensorRTPhase.BUILD, **{name: value}) is not None
found["layers"] = {}
given = {
    "ResidualNorm": [
        trt.PluginField("epsilon", np.array([1e-6], np.float32), trt.PluginFieldType.FLOAT32),
        trt.PluginField("starts_early", np.array([1], np.int32), trt.PluginFieldType.INT32),
    ],
    "Linear": [trt.PluginField("geglu", np.array([1], np.int32), trt.PluginFieldType.INT32)],
    "GroupNorm": [
        trt.PluginField("epsilon", np.array([1e-6], np.float32), trt.PluginFieldType.FLOAT32),
        trt.PluginField("groups", np.array([32], np.int32), trt.PluginFieldType.INT32),
        trt.PluginField("silu", np.array([1], np.int32), trt.PluginFieldType.INT32),
        trt.PluginField("channels_last", np.array([1], np.int32), trt.PluginFieldType.INT32),
    ],
    "ChannelsLastAdd": [],
    "QuantiseRows": [trt.PluginField("mode_set", np.array([4], np.int32), trt.PluginFieldType.INT32)],
    "QuantiseChangedRows": [trt.PluginField("place", np.array([0], np.int32), trt.PluginFieldType.INT32)],
    "Int8Linear": [trt.PluginField("mode_set", np.array([4], np.int32), trt.PluginFieldType.INT32)],
    "Int8ResidualNorm": [trt.PluginField("mode_set", np.array([4], np.int32), trt.PluginFieldType.INT32)],
    "Int8GroupNorm": [trt.PluginField("groups", np.array([32], np.int32), trt.PluginFieldType.INT32)],
    "Int8Conv": [],
}
for name, fields in given.items():
    of_layer = registry.get_creator(name, "1", "")
    layer = of_layer.create_plugin("layer", trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
    outputs = layer.get_capability_interface(kinds.BUILD).num_outputs
    found["layers"][name] = [[field.name for field in of_layer.field_names], outputs]
    del layer, of_layer
del core, build, runtime, plugin, creator  # their code goes with the library
registry.deregister_library(handle)
found["gone"] = [registry.get_creator(name, "1", "") is None for name in found["new"]]
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=VERSIONS)
def probed(request: pytest.FixtureRequest) -> tuple[str, dict, str]:
    """(version, findings, what the plugin logged) of one TensorRT version."""
    folder = REPOSITORY / "third_party" / "tensorrt" / request.param
    if not folder.exists():
        pytest.skip(f"TensorRT {request.param} is not here; 'make tensorrt' fetches it")
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder / "lib"), "PYTHONPATH": str(folder / "python")}
    library = library_path()
    assert library is not None, "expected the shared library, got none; 'pip install .' builds it"
    command = [sys.executable, "-c", PROBE, str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout.splitlines()[-1]), done.stderr


OURS = ["Int8Attention", "Linear", "ResidualNorm", "GroupNorm", "ChannelsLastAdd", "QuantiseRows"]
OURS += ["QuantiseChangedRows", "Int8Linear", "Int8ResidualNorm", "Int8GroupNorm", "Int8Conv"]
ROWS = ["mode_set", "timestep_max", "factor", "offset", "timestep"]
"""Attributes of plugins that give quantised rows."""
STEPS = ["stride_y", "stride_x", "pad_y", "pad_x"]
"""Of a convolution."""
LAYER = ["mode_set", "activation", "bias", "residual", "bfloat16"]
"""Attributes of plugins that read quantised rows."""
PRODUCTS = ["quantised", "out_factor", "out_offset", "timestep", "timestep_max", "changes", "parts"]
"""Further attributes of a linear layer."""


def test_the_library_registers_its_creators(probed: tuple[str, dict, str]) -> None:
    version, found, _ = probed
    assert found["version"].startswith(version + ".")
    assert found["new"] == sorted(OURS)
    of_layers = [
        "rotary",
        "norm",
        "norm_eps",
        "norm_split",
        "kv_heads",
        "k_head",
        "v_head",
        "parts",
        "block_mask",
        "key_index",
    ]
    assert found["fields"] == ["layout", "softmax_scale", "timestep_max", "scaling", "smooth_k", *of_layers]
    assert found["gone"] == [True] * len(OURS)


def test_plugins_are_created_and_answer(probed: tuple[str, dict, str]) -> None:
    _, found, _ = probed
    assert found["plugin"] == "PLUGIN"
    assert found["core"] == ["Int8Attention", "1", ""]
    assert found["interfaces"] == ["PLUGIN_V3ONE_CORE", "PLUGIN_V3ONE_BUILD", "PLUGIN_V3ONE_RUNTIME"]
    assert found["outputs"] == 1
    assert found["layers"] == {
        "ResidualNorm": [["epsilon", "starts_early"], 2],
        "Linear": [["geglu"], 1],
        "GroupNorm": [["epsilon", "groups", "silu", "channels_last"], 1],
        "ChannelsLastAdd": [[], 1],
        "QuantiseRows": [[*ROWS, "starts_early"], 2],
        "QuantiseChangedRows": [["factor", "activation", "place"], 3],
        "Int8Linear": [[*LAYER, *PRODUCTS], 1],
        "Int8ResidualNorm": [[*ROWS, "epsilon", "normed", "starts_early"], 3],
        "Int8GroupNorm": [["epsilon", "groups", "silu", "timestep_max", "shift", "factor", "timestep"], 2],
        "Int8Conv": [[*STEPS, "bias", "residual", "timestep", "bfloat16", "timestep_max"], 1],
    }
    assert found["defaults"] and found["from_engine"]


def test_bad_attributes_are_refused_with_a_logged_reason(probed: tuple[str, dict, str]) -> None:
    _, found, logged = probed
    assert found["bad"] == {"layout": False, "softmax_scale": False, "smooth_k": False, "scaling": False}
    assert not found["from_other_engine"]
    # TensorRT has no logger before a builder or runtime exists, which need a GPU: the reasons go to stderr.
    for reason in ("got 'BDNH'", "got -1", "got 7", "attribute 'scaling': expected text", "build the engine again"):
        assert reason in logged
