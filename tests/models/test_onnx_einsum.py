"""Attention that graphs write as Einsum, in any order of axes, is found, computes the same as ONNX Runtime, and is exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_graphs
import onnxruntime
import pytest
import torch
from onnx_graphs import FROM_HEADS, SCALE, TO_HEADS, TOKENS, plain

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import tables_from_data
from trtconvert.attention.sites import SiteCall
from trtconvert.calib.calibrate import parts_to_convert
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.models.denoiser import intercepted
from trtconvert.models.onnx.model import onnx_model
from trtconvert.recipe import AttentionSection, LayersSection

_SCALE = f"c = Constant<value_float = {SCALE}> ()"
_ROOT = f"c = Constant<value_float = {SCALE**0.5}> ()"
_INVERSE_ROOT = f"c = Constant<value_float = {SCALE**-0.5}> ()"
_FLAT = "flat = Constant<value = int64[3] {0, 0, 64}> ()\njoined = Reshape(attended, flat)"


def _einsum(logits: str, output: str, softmax: str = "p = Softmax<axis = -1>(l)", end: str = FROM_HEADS) -> str:
    """Writes the products of q, k and v, each given as "equation: factor factor"."""
    (of_logits, factors), (of_output, others) = (line.split(": ") for line in (logits, output))
    return f"""{TO_HEADS}
    s = Einsum<equation = "{of_logits}">({factors.replace(" ", ", ")})
    {_SCALE}\nl = Mul(s, c)
    {softmax}
    attended = Einsum<equation = "{of_output}">({others.replace(" ", ", ")})
    {end}"""


def _channels_first(before: str, after: str) -> str:
    """The attention of guided diffusion (Dhariwal, Nichol 2021): heads among the samples, channels before tokens, both scaled."""
    return f"""
    q0 = MatMul(x, q_weight)
    k0 = MatMul(x, k_weight)
    v0 = MatMul(x, v_weight)
    q1 = Transpose<perm = [0, 2, 1]>(q0)
    k1 = Transpose<perm = [0, 2, 1]>(k0)
    v1 = Transpose<perm = [0, 2, 1]>(v0)
    three = Constant<value = int64[3] {{-1, 32, 12}}> ()
    {before}
    s = Einsum<equation = "bct,bcs->bts">(q, k)
    p = Softmax<axis = -1>(s)
    v = Reshape(v1, three)
    a3 = Einsum<equation = "bts,bcs->bct">(p, v)
    {after}
    joined = Transpose<perm = [0, 2, 1]>(turned)
    """


_JOINED = "whole = Constant<value = int64[3] {-1, 64, 12}> ()\nturned = Reshape(a3, whole)"
_RANDOM = np.random.default_rng(1)

_FORMS: dict[str, tuple[str, dict]] = {
    "tokens_before_heads": (
        _einsum("bqhd,bkhd->bhqk: q1 k1", "bhqk,bkhd->bqhd: p v1", end=_FLAT),
        {},
    ),
    "keys_and_values_first": (
        _einsum("b k h d, b q h d -> b h q k: k1 q1", "bkhd,bhqk->bqhd: v1 p", end=_FLAT),
        {},
    ),
    "logits_with_heads_after_queries": (
        _einsum("bqhd,bkhd->bqhk: q1 k1", "bqhk,bkhd->bqhd: p v1", end=_FLAT),
        {},
    ),
    "a_mask_of_such_logits": (
        _einsum(
            "bqhd,bkhd->bqhk: q1 k1", "bqhk,bkhd->bqhd: p v1", "m = Add(l, bias)\np = Softmax<axis = -1>(m)", end=_FLAT
        ),
        {"weights": {"bias": _RANDOM.normal(size=(TOKENS, 2, TOKENS)).astype(np.float32)}},
    ),
    "softmax_over_keys_that_are_not_last": (
        _einsum("bhkd,bhqd->bhkq: k q", "bhkq,bhkd->bhqd: p v", "p = Softmax<axis = 2>(l)"),
        {},
    ),
    "dots": (_einsum("...id,...jd->...ij: q k", "...ij,...jd->...id: p v"), {}),
    "dots_beside_letters": (_einsum("b...id,b...jd->b...ij: q k", "...ij,...jd->...id: p v"), {}),
    "einsum_and_matmul": (
        _einsum("bhid,bhjd->bhij: q k", "bhij,bhjd->bhid: p v").replace(
            'Einsum<equation = "bhij,bhjd->bhid">', "MatMul"
        ),
        {},
    ),
    "matmul_and_einsum": (
        plain(f"s = MatMul(q, kt)\n{_SCALE}\nl = Mul(s, c)\np = Softmax<axis = -1>(l)")
        .replace("attended = MatMul(p, v)", 'attended = Einsum<equation = "bhij,bhjd->bihd">(p, v)')
        .replace(FROM_HEADS, _FLAT),
        {},
    ),
    "keys_of_which_channels_come_first": (
        _einsum("bhid,bhdj->bhij: q kt", "bhij,bhjd->bhid: p v").replace(
            "    s = Einsum", "kt = Transpose<perm = [0, 1, 3, 2]>(k)\n    s = Einsum"
        ),
        {},
    ),
    "channels_before_tokens": (
        _channels_first(
            f"{_ROOT}\nq2 = Mul(q1, c)\nk2 = Mul(c, k1)\nq = Reshape(q2, three)\nk = Reshape(k2, three)", _JOINED
        ),
        {},
    ),
    "channels_before_tokens_scaled_once_apart": (
        _channels_first(
            f"{_INVERSE_ROOT}\nq2 = Reshape(q1, three)\nk2 = Reshape(k1, three)\nq = Div(q2, c)\nk = Div(k2, c)", _JOINED
        ),
        {},
    ),
    "channels_before_tokens_with_a_mask": (
        _channels_first(
            f"{_ROOT}\nq2 = Mul(q1, c)\nk2 = Mul(c, k1)\nq = Reshape(q2, three)\nk = Reshape(k2, three)", _JOINED
        ).replace("p = Softmax<axis = -1>(s)", "m = Add(s, bias)\np = Softmax<axis = -1>(m)"),
        {"weights": {"bias": _RANDOM.normal(size=(TOKENS, TOKENS)).astype(np.float32)}},
    ),
    "channels_before_tokens_in_float16": (
        _channels_first(
            f"{_ROOT}\nch = Cast<to = 10>(c)\nq2 = Mul(q1, ch)\nk2 = Mul(ch, k1)\nq = Reshape(q2, three)\n"
            "k = Reshape(k2, three)",
            _JOINED,
        ),
        {"kind": "float16"},
    ),
    "four_axes_with_channels_before_tokens_joined_to_three": (
        f"""{TO_HEADS}
        qc = Transpose<perm = [0, 1, 3, 2]>(q)
        kc = Transpose<perm = [0, 1, 3, 2]>(k)
        three = Constant<value = int64[3] {{-1, 32, 12}}> ()
        q3 = Reshape(qc, three)
        k3 = Reshape(kc, three)
        other = Constant<value = int64[3] {{-1, 12, 32}}> ()
        v3 = Reshape(v, other)
        {_SCALE}\nqs = Mul(q3, c)
        s = Einsum<equation = "nct,ncs->nts">(qs, k3)
        p = Softmax<axis = -1>(s)
        a3 = Einsum<equation = "nts,nsc->ntc">(p, v3)
        four = Constant<value = int64[4] {{-1, 2, 12, 32}}> ()
        attended = Reshape(a3, four)
        {FROM_HEADS}""",
        {},
    ),
}  # fmt: skip


def _against_runtime(model: DiffusionModel, path: Path, batch: int = 3) -> float:
    """Returns the module's relative distance from ONNX Runtime on random inputs."""
    generator = torch.Generator().manual_seed(7)
    sample = torch.randn(batch, TOKENS, 64, generator=generator)
    timestep = torch.rand(batch, generator=generator) * 900
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    kind = np.float16 if "float16" in session.get_inputs()[0].type else np.float32
    (expected,) = session.run(None, {"sample": sample.numpy().astype(kind), "timestep": timestep.numpy()})
    with torch.no_grad():
        got = model.denoiser(sample=sample, timestep=timestep).numpy()
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("form", _FORMS)
def test_an_einsum_of_attention_is_a_site_whatever_the_order_of_its_axes(form, tmp_path):
    body, options = _FORMS[form]
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", body, **options)
    model = onnx_model(path)
    parts = parts_to_convert(model, AttentionSection(), LayersSection(min_rows=1))
    (site,) = parts.sites
    assert not parts.left_sites
    assert (site.heads, site.head_dim, site.query_tokens, site.folds) == (2, 32, TOKENS, 1)
    assert site.scale == pytest.approx(SCALE, rel=1e-3)
    assert site.masked == ("mask" in form)
    assert not [step for step in model.denoiser._steps if step.op in ("Softmax", "Einsum")]
    assert _against_runtime(model, path) < (2e-3 if options.get("kind") == "float16" else 1e-5)


def test_attention_without_heads_has_one(tmp_path):
    body = f"""
    q = MatMul(x, q_weight)
    k = MatMul(x, k_weight)
    v = MatMul(x, v_weight)
    {_SCALE}\nqs = Mul(q, c)
    s = Einsum<equation = "bid,bjd->bij">(qs, k)
    p = Softmax<axis = -1>(s)
    joined = Einsum<equation = "bij,bjd->bid">(p, v)
    """
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", body)
    model = onnx_model(path)
    (site,) = parts_to_convert(model, AttentionSection(), LayersSection(min_rows=1)).sites
    assert (site.heads, site.head_dim, site.folds, site.obstacle) == (1, 64, 1, "")
    assert _against_runtime(model, path) < 1e-5


def test_tokens_that_are_taken_apart_are_windows_and_no_heads(tmp_path):
    body = """
    q0 = MatMul(x, q_weight)
    k0 = MatMul(x, k_weight)
    v0 = MatMul(x, v_weight)
    three = Constant<value = int64[3] {-1, 4, 64}> ()
    q = Reshape(q0, three)
    k = Reshape(k0, three)
    v = Reshape(v0, three)
    s = Einsum<equation = "bid,bjd->bij">(q, k)
    p = Softmax<axis = -1>(s)
    a3 = Einsum<equation = "bij,bjd->bid">(p, v)
    whole = Constant<value = int64[3] {-1, 12, 64}> ()
    joined = Reshape(a3, whole)
    """
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", body)
    model = onnx_model(path)
    (site,) = parts_to_convert(model, AttentionSection(), LayersSection(min_rows=1)).sites
    assert (site.heads, site.query_tokens, site.folds) == (1, 4, 3)
    assert _against_runtime(model, path) < 1e-5


_JOIN = "joined = Reshape(back, flat)"
_ATTENTION = plain(f"s = MatMul(q, kt)\n{_SCALE}\nl = Mul(s, c)\np = Softmax<axis = -1>(l)")
_OTHERS = {
    "softmax_between_other_einsums": _ATTENTION.replace(
        _JOIN,
        'y = Reshape(back, flat)\ng = Einsum<equation = "bnd,bmd->bdn">(y, y)\nw = Softmax<axis = -1>(g)\n'
        'joined = Einsum<equation = "bdn,bnd->bnd">(w, y)',
    ),
    "no_product_of_values_after_it": _ATTENTION.replace(
        _JOIN,
        'y = Reshape(back, flat)\ng = Einsum<equation = "bnd,bmd->bnm">(y, y)\nw = Softmax<axis = -1>(g)\n'
        'joined = Einsum<equation = "bnm,bnd->bmd">(w, y)',
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", _OTHERS)
def test_einsums_that_are_no_attention_are_computed_and_told(form, tmp_path):
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", _OTHERS[form])
    model = onnx_model(path)
    parts = parts_to_convert(model, AttentionSection(), LayersSection(min_rows=1))
    (left,) = parts.left_sites
    assert len(parts.sites) == 1 and "Einsum" in left.obstacle and "->" in left.obstacle
    assert _against_runtime(model, path) < 1e-5


_SMALL = """
    first = Constant<value = int64[1] {0}> ()
    end = Constant<value = int64[1] {32}> ()
    last = Constant<value = int64[1] {2}> ()
    small = Slice(x, first, end, last)
"""


def test_keys_that_heads_share_have_one_head(tmp_path):
    body = _SMALL + _ATTENTION.replace(
        _JOIN,
        'y = Reshape(back, flat)\nl2 = Einsum<equation = "bhid,bmd->bhim">(q, small)\np2 = Softmax<axis = -1>(l2)\n'
        'a2 = Einsum<equation = "bhim,bmd->bihd">(p2, small)\nz = Reshape(a2, flat)\njoined = Add(y, z)',
    )
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", body)
    model = onnx_model(path)
    parts = parts_to_convert(model, AttentionSection(), LayersSection(min_rows=1))
    assert [(site.heads, site.kv_heads, site.obstacle) for site in parts.sites] == [(2, 2, ""), (2, 1, "")]
    assert not parts.left_sites
    assert _against_runtime(model, path) < 1e-5


def test_an_einsum_of_positions_is_a_mask(tmp_path):
    """Additions of relative positions to logits are no second product of queries and keys."""
    body = _einsum(
        "bhid,bhjd->bhij: q k",
        "bhij,bhjd->bhid: p v",
        'r = Einsum<equation = "bhid,ijd->bhij">(q, table)\nm = Add(r, l)\np = Softmax<axis = -1>(m)',
    )
    weights = {"table": _RANDOM.normal(size=(TOKENS, TOKENS, 32)).astype(np.float32) / 6}
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", body, weights=weights)
    model = onnx_model(path)
    (site,) = parts_to_convert(model, AttentionSection(), LayersSection(min_rows=1)).sites
    assert site.masked
    assert _against_runtime(model, path) < 1e-5


@pytest.mark.parametrize(
    "form", ["channels_before_tokens", "channels_before_tokens_with_a_mask", "tokens_before_heads"]
)
def test_attention_of_einsums_is_exported_for_varying_batches(form, tmp_path):
    body, options = _FORMS[form]
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", body, **options)
    model = onnx_model(path, sizes={"batch": [1, 2, 4]})
    tables = {}

    def handler(call: SiteCall) -> torch.Tensor:
        tables[call.name] = tables_from_data(call.q, call.k, call.v, Mode.BALANCED)
        return call.exact()

    with torch.no_grad():
        intercepted(model, handler)(**model.example(0, {"batch": 4}))
    exported = trace(model, tables, SiteOptions(1000.0, "calibrated", True), dims=model.dims)
    assert len(tables) == 1
    assert not isinstance(exported.graph.inputs[0].shape[0], int)


def test_keys_and_values_that_samples_share_are_multiplied_as_they_are(tmp_path):
    body = _ATTENTION.replace(
        _JOIN,
        "y = Reshape(back, flat)\ns2 = MatMul(q, shared)\nl2 = Mul(s2, c)\np2 = Softmax<axis = -1>(l2)\n"
        "a2 = MatMul(p2, taken)\nt2 = Transpose<perm = [0, 2, 1, 3]>(a2)\nz = Reshape(t2, flat)\njoined = Add(y, z)",
    )
    weights = {
        "shared": _RANDOM.normal(size=(32, 7)).astype(np.float32),
        "taken": _RANDOM.normal(size=(7, 32)).astype(np.float32),
    }
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", body, weights=weights)
    model = onnx_model(path)
    (left,) = model.left_sites
    assert left.obstacle.startswith("Softmax: no product of queries and keys")
    assert _against_runtime(model, path) < 1e-5
