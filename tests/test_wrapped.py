"""Denoisers around other denoisers."""

from __future__ import annotations

import pytest
import torch

from trtconvert.evaluate.drawing import _AllSteps, _FiniteWatch
from trtconvert.models.denoiser import _Moved
from trtconvert.models.drawings import CountedDenoiser
from trtconvert.wrapped import WrappedDenoiser, apart, begin


class Inside:
    guidance, reuse, device = "guidance", "reuse", torch.device("cpu")

    def __init__(self) -> None:
        self.trajectories = self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x

    def reset_cache(self) -> None:
        self.trajectories += 1

    def apart(self) -> Inside:
        return Inside()


WRAPPERS = {
    "moved": lambda inside: _Moved(inside, torch.device("cpu")),
    "watched": lambda inside: _FiniteWatch(inside, 1),
    "counted": lambda inside: CountedDenoiser(inside, lambda: None),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_have_what_samplers_read(wrap):
    inside = Inside()
    wrapped = wrap(inside)
    assert (wrapped.guidance, wrapped.reuse, wrapped.device) == ("guidance", "reuse", torch.device("cpu"))
    begin(wrapped)
    assert inside.trajectories == 1
    other = apart(wrapped)
    other(torch.ones(1, 1))
    begin(other)
    assert type(other) is type(wrapped) and (inside.calls, inside.trajectories) == (0, 1)


def test_a_drawing_of_all_steps_skips_none():
    wrapped = _AllSteps(Inside())
    assert wrapped.reuse is None and wrapped.guidance == "guidance"


def test_a_denoiser_without_caches_is_not_copied():
    wrapped = WrappedDenoiser(lambda x: x)
    assert apart(wrapped) is wrapped and not hasattr(wrapped, "guidance")
