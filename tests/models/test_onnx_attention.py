"""Attention is found in every form that ONNX graphs write it in, and the module computes the same as ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_graphs
import pytest
from onnx_graphs import FROM_HEADS, SCALE, TO_HEADS, TOKENS, WIDTH, plain

from trtconvert.attention.sites import Site
from trtconvert.calib.calibrate import Parts, parts_to_convert
from trtconvert.errors import UserError
from trtconvert.models.onnx.model import onnx_model
from trtconvert.recipe import AttentionSection, LayersSection

_LOGITS = "s = MatMul(q, kt)"
_SCALE = f"c = Constant<value_float = {SCALE}> ()"
_ROOT = f"c = Constant<value_float = {SCALE**0.5}> ()"
_INVERSE = f"c = Constant<value_float = {1 / SCALE}> ()"
_PACKED = """
    packed = MatMul(x, qkv_weight)
    biased3 = Add(packed, qkv_bias)
"""
_MASKED = (",float[batch, 1, 1, 12] mask", ",bool[batch, 1, 1, 12] mask")

_FORMS: dict[str, tuple[str, dict]] = {
    "scaled_by_product": (plain(f"{_LOGITS}\n{_SCALE}\nl = Mul(s, c)\np = Softmax<axis = -1>(l)"), {}),
    "scaled_by_division": (plain(f"{_LOGITS}\n{_INVERSE}\nl = Div(s, c)\np = Softmax<axis = 3>(l)"), {}),
    "scaled_queries": (plain(f"{_SCALE}\nqs = Mul(c, q)\ns = MatMul(qs, kt)\np = Softmax<axis = -1>(s)"), {}),
    "scaled_on_both_sides": (
        plain(f"{_ROOT}\nqs = Mul(q, c)\nks = Mul(kt, c)\ns = MatMul(qs, ks)\np = Softmax<axis = -1>(s)"),
        {},
    ),
    "scaled_keys_before_their_transpose": (
        plain(
            "s = MatMul(q, kt)\np = Softmax<axis = -1>(s)",
            transposed=f"{_SCALE}\nks = Mul(k, c)\nkt = Transpose<perm = [0, 1, 3, 2]>(ks)",
        ),
        {},
    ),
    "scaled_by_the_shape": (
        plain(
            """shape_q = Shape(q)
            last = Constant<value = int64 {3}> ()
            size = Gather(shape_q, last)
            real = Cast<to = 1>(size)
            root = Sqrt(real)
            s = MatMul(q, kt)
            l = Div(s, root)
            p = Softmax<axis = -1>(l)"""
        ),
        {},
    ),
    "keys_transposed_at_once": (
        plain(
            f"{_LOGITS}\n{_SCALE}\nl = Mul(s, c)\np = Softmax<axis = -1>(l)",
            transposed="kt = Transpose<perm = [0, 2, 3, 1]>(k1)",
        ),
        {},
    ),
    "softmax_in_float32": (
        plain(f"{_LOGITS}\n{_SCALE}\nl = Mul(s, c)\nw = Cast<to = 1>(l)\nn = Softmax<axis = -1>(w)\np = Cast<to = 10>(n)")
        .replace("c = Constant<value_float", "c32 = Constant<value_float")
        .replace("l = Mul(s, c)", "c = Cast<to = 10>(c32)\nl = Mul(s, c)"),
        {"kind": "float16"},
    ),
    "rows_without_numbers_left_out": (
        plain(
            f"""{_LOGITS}\n{_SCALE}\nl = Mul(s, c)\nn = Softmax<axis = -1>(l)
            none = Constant<value_float = 0.0> ()
            bad = IsNaN(n)
            p = Where(bad, none, n)"""
        ),
        {},
    ),
    "a_factor_of_each_head": (
        plain(f"{_LOGITS}\n{_SCALE}\nt = Mul(s, heat)\nl = Mul(t, c)\np = Softmax<axis = -1>(l)"),
        {"weights": {"heat": np.float32([[[1.5]], [[0.5]]])}},
    ),
    "exponentials": (
        plain(
            f"""{_LOGITS}\n{_SCALE}\nl = Mul(s, c)
            most = ReduceMax<axes = [-1]>(l)
            less = Sub(l, most)
            e = Exp(less)
            last = Constant<value = int64[1] {{3}}> ()
            sums = ReduceSum(e, last)
            p = Div(e, sums)"""
        ),
        {},
    ),
    "added_mask": (
        plain(f"{_LOGITS}\n{_SCALE}\nl = Mul(s, c)\nm = Add(l, mask)\np = Softmax<axis = -1>(m)"),
        {"inputs": _MASKED[0]},
    ),
    "added_mask_before_the_scale": (
        plain(f"{_LOGITS}\n{_SCALE}\nm = Add(mask, s)\nl = Mul(m, c)\np = Softmax<axis = -1>(l)"),
        {"inputs": _MASKED[0]},
    ),
    "constant_mask": (
        plain(f"{_LOGITS}\n{_SCALE}\nl = Mul(s, c)\nm = Add(l, bias)\np = Softmax<axis = -1>(m)"),
        {"weights": {"bias": np.random.default_rng(1).normal(size=(1, 2, TOKENS, TOKENS)).astype(np.float32)}},
    ),
    "kept_by_truth_values": (
        plain(
            f"{_LOGITS}\n{_SCALE}\nl = Mul(s, c)\nlow = Constant<value_float = -3.4e38> ()\nm = Where(mask, l, low)\n"
            "p = Softmax<axis = -1>(m)"
        ),
        {"inputs": _MASKED[1]},
    ),
    "dropped_by_truth_values": (
        plain(
            f"{_LOGITS}\n{_SCALE}\nl = Mul(s, c)\nlow = Constant<value_float = -1e9> ()\ngone = Not(mask)\n"
            "m = Where(gone, low, l)\np = Softmax<axis = -1>(m)"
        ),
        {"inputs": _MASKED[1]},
    ),
    "added_and_kept": (
        plain(
            f"{_LOGITS}\n{_SCALE}\nl = Mul(s, c)\nb = Add(l, bias)\nlow = Constant<value_float = -1e9> ()\n"
            "m = Where(mask, b, low)\np = Softmax<axis = -1>(m)"
        ),
        {
            "inputs": _MASKED[1],
            "weights": {"bias": np.random.default_rng(1).normal(size=(TOKENS, TOKENS)).astype(np.float32)},
        },
    ),
    "packed_and_split": (
        f"""{_PACKED}
        q0, k0, v0 = Split<axis = -1>(biased3)
        shape = Constant<value = int64[4] {{0, 0, 2, 32}}> ()
        q1 = Reshape(q0, shape)
        k1 = Reshape(k0, shape)
        v1 = Reshape(v0, shape)
        q = Transpose<perm = [0, 2, 1, 3]>(q1)
        kt = Transpose<perm = [0, 2, 3, 1]>(k1)
        v = Transpose<perm = [0, 2, 1, 3]>(v1)
        {_LOGITS}\n{_SCALE}\nl = Mul(s, c)\np = Softmax<axis = -1>(l)
        attended = MatMul(p, v)
        {FROM_HEADS}""",
        {},
    ),
    "packed_and_taken_apart": (
        f"""{_PACKED}
        shape = Constant<value = int64[5] {{0, 0, 3, 2, 32}}> ()
        five = Reshape(biased3, shape)
        turned = Transpose<perm = [2, 0, 3, 1, 4]>(five)
        i0 = Constant<value = int64 {{0}}> ()
        i1 = Constant<value = int64 {{1}}> ()
        i2 = Constant<value = int64 {{2}}> ()
        q = Gather<axis = 0>(turned, i0)
        k = Gather<axis = 0>(turned, i1)
        v = Gather<axis = 0>(turned, i2)
        kt = Transpose<perm = [0, 1, 3, 2]>(k)
        {_SCALE}\nqs = Mul(q, c)\ns = MatMul(qs, kt)\np = Softmax<axis = -1>(s)
        attended = MatMul(p, v)
        {FROM_HEADS}""",
        {},
    ),
    "heads_among_the_samples": (
        f"""{TO_HEADS}
        three = Constant<value = int64[3] {{-1, 12, 32}}> ()
        q3 = Reshape(q, three)
        k3 = Reshape(k, three)
        v3 = Reshape(v, three)
        kt = Transpose<perm = [0, 2, 1]>(k3)
        s = MatMul(q3, kt)\n{_SCALE}\nl = Mul(s, c)\np = Softmax<axis = -1>(l)
        a3 = MatMul(p, v3)
        four = Constant<value = int64[4] {{-1, 2, 12, 32}}> ()
        attended = Reshape(a3, four)
        {FROM_HEADS}""",
        {},
    ),
    "einsum": (
        f"""{TO_HEADS}
        s = Einsum<equation = "b h i d, b h j d -> b h i j">(q, k)
        {_SCALE}\nl = Mul(s, c)\np = Softmax<axis = -1>(l)
        attended = Einsum<equation = "bhij,bhjd->bhid">(p, v)
        {FROM_HEADS}""",
        {},
    ),
    "attention_of_opset_23": (f"{TO_HEADS}\nattended = Attention(q, k, v)\n{FROM_HEADS}", {"opset": 23}),
    "attention_of_opset_23_with_flat_heads": (
        f"{TO_HEADS}\njoined = Attention<q_num_heads = 2, kv_num_heads = 2, scale = {SCALE}>(q0, k0, v0)",
        {"opset": 23},
    ),
    "attention_of_opset_23_with_a_mask": (
        f"{TO_HEADS}\nattended = Attention(q, k, v, mask)\n{FROM_HEADS}",
        {"opset": 23, "inputs": ",bool[batch, 1, 12, 12] mask"},
    ),
    "attention_of_opset_23_with_a_mask_of_keys": (
        f"{TO_HEADS}\nattended = Attention(q, k, v, mask)\n{FROM_HEADS}",
        {"opset": 23, "inputs": ",bool[batch, 1, 1, 12] mask"},
    ),
    "multi_head_attention": (
        f"{TO_HEADS}\njoined = com.microsoft.MultiHeadAttention<num_heads = 2>(q0, k0, v0)",
        {},
    ),
}  # fmt: skip


def converted(path: Path, **options) -> Parts:
    options.setdefault("conditions", "random")
    return parts_to_convert(onnx_model(path, **options), AttentionSection(), LayersSection(min_rows=1))


@pytest.mark.parametrize("form", _FORMS)
def test_a_form_of_attention_is_one_site(form, tmp_path):
    body, options = _FORMS[form]
    values = {"mask": 1} if "bool" in options.get("inputs", "") else {}
    parts = converted(onnx_graphs.denoiser(tmp_path / "model.onnx", body, **options), values=values)
    (site,) = parts.sites
    assert not parts.left_sites
    assert (site.heads, site.head_dim, site.query_tokens, site.folds) == (2, 32, TOKENS, 1)
    assert site.scale == pytest.approx(SCALE, rel=1e-3)
    assert site.masked == ("mask" in form or "kept" in form or "dropped" in form)
    # Packed queries, keys and values have one layer.
    outputs = [layer.out_channels for layer in (*parts.layers, *parts.left_layers) if layer.rows > 1]
    assert sorted(outputs) == ([WIDTH, 3 * WIDTH] if "packed" in form else [WIDTH] * 4)


_OF_OPSET_24 = {
    "past keys and values": "attended = Attention(q, k, v, , k, v)",
    "a softcap of 5": "attended = Attention<softcap = 5.0>(q, k, v)",
    "lengths of keys": "n = Constant<value = int64[1] {8}> ()\nattended = Attention(q, k, v, , , , n)",
    "a mask of 10 keys": "attended = Attention(q, k, v, mask)",
}


@pytest.mark.parametrize("got", _OF_OPSET_24)
def test_other_attention_of_opset_24_is_refused_with_what_to_give(got, tmp_path):
    path = onnx_graphs.denoiser(
        tmp_path / "model.onnx",
        f"{TO_HEADS}\n{_OF_OPSET_24[got]}\n{FROM_HEADS}",
        opset=24,
        weights={"mask": np.ones((12, 10), np.bool_)},
    )
    with pytest.raises(UserError, match=rf"(?s)Attention attended cannot be converted.*expected: .*got: {got}"):
        onnx_model(path)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_causal_attention_counts(kind, tmp_path):
    """`onnx_model` compares with ONNX Runtime."""
    mask = np.random.default_rng(0).normal(size=(TOKENS, TOKENS)).astype(np.float32)
    path = onnx_graphs.denoiser(
        tmp_path / "model.onnx",
        f"{TO_HEADS}\nattended = Attention<is_causal = 1>(q, k, v, mask)\n{FROM_HEADS}",
        opset=24,
        weights={"mask": mask > -1 if kind == "bool" else mask},
    )
    (site,) = converted(path).sites
    assert site.masked


@pytest.mark.parametrize(
    "line",
    [
        "r = Constant<value_float = 1.4142135> ()\nd = Div(y, r)\ne = Erf(d)\na = Add(e, o)\nm = Mul(y, a)\nz = Mul(m, h)",
        "r = Constant<value_float = 0.70710677> ()\nd = Mul(r, y)\ne = Erf(d)\na = Add(o, e)\nm = Mul(h, y)\nz = Mul(m, a)",
        "r = Constant<value_float = 0.70710677> ()\nd = Mul(r, y)\ne = Erf(d)\na = Add(o, e)\nm = Mul(h, a)\nz = Mul(m, y)",
    ],
)
def test_gelus_are_one_step_however_they_are_written(line, tmp_path):
    body = plain(f"{_LOGITS}\np = Softmax<axis = -1>(s)").replace(
        "joined = Reshape(back, flat)",
        "y = Reshape(back, flat)\no = Constant<value_float = 1.0> ()\nh = Constant<value_float = 0.5> ()\n"
        f"{line}\njoined = Identity(z)",
    )
    model = onnx_model(onnx_graphs.denoiser(tmp_path / "model.onnx", body))
    assert [step.op for step in model.denoiser._steps if step.op in ("Gelu", "Erf")] == ["Gelu"]


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_a_graph_in_16_bits_is_read_in_full_precision(kind, tmp_path):
    body = plain(f"{_LOGITS}\nl = Mul(s, scale)\np = Softmax<axis = -1>(l)")
    path = onnx_graphs.denoiser(
        tmp_path / "model.onnx", body, kind=kind, weights={"scale": np.full((1,), SCALE, np.float32)}
    )
    model = onnx_model(path)
    assert {str(x.dtype) for x in model.denoiser.parameters()} == {"torch.float32"}
    assert model.inputs[0].shape == ("batch", TOKENS, WIDTH)


_LEFT = {
    "it stands between MatMul s and Neg p": "s = MatMul(q, kt)\np0 = Softmax<axis = -1>(s)\np = Neg(p0)",
    "its softmax is over samples or heads, not over keys": "s = MatMul(q, kt)\np = Softmax<axis = 1>(s)",
    "it stands between Abs a and MatMul attended": "s = MatMul(q, kt)\na = Abs(s)\np = Softmax<axis = -1>(a)",
    "which is no large negative number": (
        "s = MatMul(q, kt)\nlow = Constant<value_float = -1.0> ()\nz = Less(s, low)\na = Where(z, low, s)\n"
        "p = Softmax<axis = -1>(a)"
    ),
    "its scores or probabilities are also read by amax": (
        "s = MatMul(q, kt)\np = Softmax<axis = -1>(s)\nshares = ReduceMax<axes = [-1]>(p)\nv2 = Mul(v, shares)"
    ),
    # Two attentions of the same queries and keys, whose projections an exporter has merged.
    "its probabilities are also read by MatMul": "s = MatMul(q, kt)\np = Softmax<axis = -1>(s)\nv2 = MatMul(p, v)",
}


@pytest.mark.parametrize("reason", _LEFT)
def test_unmatched_attention_is_refused_with_the_nearest_pattern(reason, tmp_path):
    values = "v2" if "v2" in _LEFT[reason] else "v"
    body = plain(_LEFT[reason]).replace("attended = MatMul(p, v)", f"attended = MatMul(p, {values})")
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", body)
    with pytest.raises(Exception, match="no attention was found") as refused:
        onnx_model(path)
    told = str(refused.value)
    assert "Softmax: " in told and reason in told


def test_a_scale_that_follows_the_sizes_is_no_scale_of_attention(tmp_path):
    body, _ = _FORMS["scaled_by_the_shape"]
    path = onnx_graphs.denoiser(tmp_path / "model.onnx", body.replace("int64 {3}", "int64 {0}"))
    onnx_model(path, sizes={"batch": 2})
    with pytest.raises(Exception, match="its scale differs between the sizes of the inputs"):
        onnx_model(path, sizes={"batch": [1, 2, 4]})


def test_an_unmatched_softmax_beside_attention_is_listed(tmp_path):
    body = plain(f"{_LOGITS}\n{_SCALE}\nl = Mul(s, c)\np = Softmax<axis = -1>(l)").replace(
        "joined = Reshape(back, flat)",
        "joined0 = Reshape(back, flat)\ngate = Softmax<axis = -1>(joined0)\njoined = Mul(gate, joined0)",
    )
    parts = converted(onnx_graphs.denoiser(tmp_path / "model.onnx", body))
    (left,) = parts.left_sites
    assert len(parts.sites) == 1 and isinstance(left, Site)
    assert left.obstacle.startswith("Softmax: no product of queries and keys before it")
    assert left.obstacle.endswith("it stands between Reshape joined0 and Mul joined")
