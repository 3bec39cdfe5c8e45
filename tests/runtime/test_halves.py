"""Uses of uncomputed predictions by pipelines."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from torch import Tensor

from trtconvert.bundle import GuidanceRecord
from trtconvert.errors import UserError
from trtconvert.guidance import FusedGuidance
from trtconvert.runtime.halves import Halves, Prediction

GUIDANCE = FusedGuidance(GuidanceRecord(scale="s", negative={"c": "negative_c"}), ("batch", 4))
G = 7.5


class Engine:
    """Returns x + u + s · (c − u) for each sample, and keeps the scales of its calls."""

    def __init__(self) -> None:
        self.scales: list[list[float]] = []

    def __call__(self, *, x: Tensor, t: Tensor, c: Tensor, negative_c: Tensor, s: Tensor) -> Tensor:
        assert len(x) == len(t) == len(c) == len(negative_c) == len(s)
        self.scales.append(s.tolist())
        return x + (negative_c + s * (c - negative_c))[:, None]


X, C = torch.arange(8.0).view(2, 4), torch.tensor([1.0, 2.0, 3.0, 5.0])
EXPECTED = X + (C[:2] + G * (C[2:] - C[:2]))[:, None]


def called(engine: Engine, x: Tensor | None = None, halves: Halves | None = None, c: Tensor = C) -> Tensor:
    """The prediction of a call for two samples, u before c."""
    x = torch.cat([X, X]) if x is None else x
    halves = halves or Halves(engine, "t", GUIDANCE, "Model")
    return halves.prediction({"x": x, "t": torch.zeros(len(x)), "c": c}, x, torch.zeros(()))


@pytest.fixture(params=[torch.no_grad, torch.inference_mode])
def mode(request) -> AbstractContextManager[None]:
    return request.param()


SUMS = {
    "u + g (c - u)": lambda u, c: u + G * (c - u),
    "a tensor": lambda u, c: u + torch.tensor(G) * (c - u),
    "a tensor behind": lambda u, c: (c - u) * torch.tensor([G]) + u,
    "of samples": lambda u, c: u + torch.full((2, 1), G) * (c - u),
    "from c": lambda u, c: c + (G - 1) * (c - u),
    "from c, turned": lambda u, c: c - (1 - G) * (c - u),
    "alpha": lambda u, c: u.add(c - u, alpha=G),
    "lerp": lambda u, c: torch.lerp(u, c, G),
    "weights": lambda u, c: G * c + (1 - G) * u,
    "weights, turned": lambda u, c: (1 - G) * u + c * G,
    "a difference of weights": lambda u, c: G * c - (G - 1) * u,
    "weights of the same size": lambda u, c: u + (G * c - G * u),
    "in FP64": lambda u, c: u.double() + G * (c.double() - u.double()),
}


@pytest.mark.parametrize("form", SUMS)
def test_each_form_of_the_sum_is_one_call(mode, form):
    engine = Engine()
    with mode:
        u, c = called(engine).chunk(2)
        assert isinstance(u, Prediction) and u.shape == X.shape and not engine.scales
        found = SUMS[form](u, c)
    assert engine.scales == [[G, G]]
    assert not isinstance(found, Prediction)
    torch.testing.assert_close(found, EXPECTED.to(found.dtype))


@pytest.mark.parametrize(
    "halves_of",
    [
        lambda p: (p[:2], p[2:]),
        lambda p: p.split(2),
        lambda p: p.split([2, 2]),
        lambda p: (p[:, :2].chunk(2)[0], p[:, :2].chunk(2)[1]),
        lambda p: tuple(half[:, :2] for half in p.chunk(2)),
        lambda p: p.detach().float().to("cpu").chunk(2),
    ],
)
def test_halves_and_channels_are_taken_before_anything_is_computed(mode, halves_of):
    engine = Engine()
    with mode:
        u, c = halves_of(called(engine))
        found = u + G * (c - u)
    assert engine.scales == [[G, G]]
    torch.testing.assert_close(found, EXPECTED[:, : found.shape[1]])


def test_a_call_for_each_half_is_joined(mode):
    engine = Engine()
    with mode:
        halves, x = Halves(engine, "t", GUIDANCE, "Model"), X.clone()
        c, u = (called(engine, x, halves, part) for part in (C[2:], C[:2]))
        torch.testing.assert_close(u + G * (c - u), EXPECTED)
    assert engine.scales == [[G, G]]


def test_scales_of_each_sample_are_followed(mode):
    engine = Engine()
    with mode:
        u, c = called(engine).chunk(2)
        found = u + torch.tensor([2.0, 3.0]).view(2, 1) * (c - u)
    assert engine.scales == [[2.0, 3.0]]
    torch.testing.assert_close(found, X + (C[:2] + torch.tensor([2.0, 3.0]) * (C[2:] - C[:2]))[:, None])


@pytest.mark.filterwarnings("ignore:the pipeline uses predictions")
@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda p: p.mean(1), lambda both: both.mean(1)),
        (lambda p: torch.cat(p.chunk(2)), lambda both: both),
        (lambda p: p.chunk(2)[1] * 3, lambda both: both[2:] * 3),
        (lambda p: p.chunk(2)[1].std(), lambda both: both[2:].std()),
        (lambda p: p[0, 1], lambda both: both[0, 1]),
        (lambda p: p.split([0, 4])[1] - p.split([4, 0])[1].sum(), lambda both: both),
        # A factor of channels is none of samples.
        (
            lambda p: p[:2] + torch.arange(4.0) * (p[2:] - p[:2]),
            lambda both: both[:2] + torch.arange(4.0) * (both[2:] - both[:2]),
        ),
        (lambda p: 2 * p[2:] - 2.5 * p[:2], lambda both: 2 * both[2:] - 2.5 * both[:2]),
    ],
)
def test_other_uses_get_what_they_ask_for(mode, use, expected):
    engine = Engine()
    with mode:
        found = use(called(engine)) + 0
    assert {scale for scales in engine.scales for scale in scales} == {1.0}
    torch.testing.assert_close(found, expected(torch.cat([X, X]) + C[:, None]))


@pytest.mark.filterwarnings("ignore:the pipeline uses predictions")
def test_halves_of_other_samples_are_not_taken_for_pairs(mode):
    engine, x = Engine(), torch.randn(4, 4)
    with mode:
        u, c = called(engine, x).chunk(2)
        torch.testing.assert_close(
            u + G * (c - u), x[:2] + C[:2, None] + G * ((x + C[:, None])[2:] - (x + C[:, None])[:2])
        )
    assert engine.scales == [[1.0, 1.0]] * 2


def of_channels(p: Tensor) -> Tensor:
    return p[:, :2]


@pytest.mark.filterwarnings("ignore:the pipeline uses predictions")
@pytest.mark.parametrize("use", [lambda p: p.reshape(-1), lambda p: p.flatten(), lambda p: p.contiguous().view(-1)])
def test_channels_lie_as_torch_takes_them_for(mode, use):
    """reshape reads a tensor's strides, which must be those of the uncomputed prediction."""
    with mode:
        torch.testing.assert_close(
            use(of_channels(called(Engine()))), (torch.cat([X, X]) + C[:, None])[:, :2].reshape(-1)
        )


@pytest.mark.filterwarnings("ignore:the pipeline uses predictions")
@pytest.mark.parametrize(
    "read",
    [
        lambda p: p.numpy(),
        np.asarray,
        lambda p: p.tolist(),
        copy.deepcopy,
        lambda p: pickle.loads(pickle.dumps(p)),
        lambda p: p.data_ptr() and p,
    ],
)
def test_numbers_can_be_had_where_torch_asks_nobody(read):
    with torch.no_grad():
        found = read(of_channels(called(Engine())))
        torch.testing.assert_close(torch.as_tensor(found) + 0, (torch.cat([X, X]) + C[:, None])[:, :2])


def first_channel(u: Tensor) -> None:
    u[:, 0] = 0


def first_sample(u: Tensor) -> None:
    u[0] = 0


@pytest.mark.filterwarnings("ignore:the pipeline uses predictions")
@pytest.mark.parametrize("write", [first_channel, first_sample, lambda u: u.view(-1).mul_(2), lambda u: u.T.zero_()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sum_contains_writes_into_a_view(mode, write, dtype):
    def drawn(both: Tensor) -> Tensor:
        u, c = both.to(dtype).chunk(2)
        write(u)
        return u + G * (c - u)

    engine = Engine()
    with mode:
        torch.testing.assert_close(drawn(called(engine)), drawn(torch.cat([X, X]) + C[:, None]))
    assert engine.scales == [[1.0, 1.0]] * 2  # no third call for a sum without the written half


def test_a_step_leaves_nothing_in_memory():
    """The garbage collector runs once in many steps, and tensors in cycles would fill the GPU."""
    kept = []
    gc.disable()
    try:
        with torch.no_grad():
            for _ in range(3):
                x = torch.cat([X, X])
                kept.append(weakref.ref(x))
                u, c = called(Engine(), x).chunk(2)
                u + G * (c - u)
                del x, u, c
    finally:
        gc.enable()
    assert [x() for x in kept] == [None] * 3


def test_conditions_of_other_samples_are_told_in_the_call():
    with pytest.raises(UserError, match=r"'c' does not have a row(.|\n)*4 rows, or a multiple(.|\n)*\[3\]"):
        called(Engine(), c=C[:3])


@pytest.mark.parametrize("x", [X[None], X[:0]])
def test_denoiser_refuses_inputs_without_a_batch(x):
    def refusing(**inputs: Tensor) -> Tensor:
        raise UserError(f"x has the shape {list(inputs['x'].shape)}")

    with pytest.raises(UserError, match="x has the shape"):
        Halves(refusing, "t", GUIDANCE, "Model").prediction(
            {"x": x, "t": torch.zeros(1), "c": C[:1]}, x, torch.zeros(())
        )


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.mul_(2),
        lambda p: p.chunk(2)[0].add_(1),
        lambda p: p.zero_(),
        lambda p: torch.mul(X, 2, out=p.chunk(2)[0]),
        lambda p: torch._foreach_mul_([p], 2),
    ],
)
def test_writing_into_a_half_is_refused(mode, use):
    with mode, pytest.raises(UserError, match=r"writes into a prediction(.|\n)*engine.guidance: separate"):
        use(called(Engine()))


def test_inputs_that_are_written_to_before_they_are_read_are_told(mode):
    x = torch.cat([X, X])
    with mode:
        u, c = called(Engine(), x).chunk(2)
        x.add_(1)
        with pytest.raises(UserError, match=r"wrote into 'x'(.|\n)*engine.guidance: separate"):
            u + G * (c - u)


def test_inference_tensors_that_are_written_to_count_as_they_were():
    """Inference tensors have no version counter."""
    engine = Engine()
    with torch.inference_mode():
        x, condition = torch.cat([X, X]), C.clone()
        u, c = called(engine, x, c=condition).chunk(2)
        x.add_(1)
        condition.zero_()
        torch.testing.assert_close(u + G * (c - u), EXPECTED)
        assert engine.scales == [[G, G]]

        halves, x = Halves(engine, "t", GUIDANCE, "Model"), X.clone()
        c = called(engine, x, halves, C[2:])
        x.add_(1)
        u = called(engine, x, halves, C[:2])
        with pytest.warns(RuntimeWarning, match="outside the sum of guidance"):
            found = u + G * (c - u)  # of other samples: no sum of guidance
    torch.testing.assert_close(found, (X + 1 + C[:2, None]) + G * (C[2:, None] - 1 - C[:2, None]))
