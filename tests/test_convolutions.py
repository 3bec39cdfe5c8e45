"""cuDNN's settings in a block, in programs with settings of their own."""

from typing import Any

import pytest
import torch

from trtconvert.convolutions import cudnn_convolutions

PRECISIONS = ["torch.backends", "torch.backends.cudnn", "torch.backends.cudnn.conv"]


def settings():
    cudnn: Any = torch.backends.cudnn
    return cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision


@pytest.fixture(params=PRECISIONS)
def owner(request):
    owner: Any = torch.backends
    parts = owner.cudnn.conv, owner.cudnn.rnn
    for name in request.param.split(".")[2:]:
        owner = getattr(owner, name)
    before = [part.fp32_precision for part in parts]
    yield owner
    owner.fp32_precision = "none"
    for part, precision in zip(parts, before, strict=True):
        part.fp32_precision = precision
    assert torch.backends.cudnn.allow_tf32  # raises an error where the parts differ


@pytest.mark.parametrize("precision", ["none", "ieee", "tf32"])
def test_a_block_has_its_settings_and_the_program_keeps_its_own(owner, precision):
    owner.fp32_precision = precision
    before = settings()
    with cudnn_convolutions(tf32=True, benchmark=True):
        assert settings() == (True, True, False, "tf32")
        with pytest.raises(ValueError), cudnn_convolutions(tf32=False, deterministic=True):
            assert settings() == (True, False, True, "ieee")
            raise ValueError
        assert settings() == (True, True, False, "tf32")
    assert settings() == before
