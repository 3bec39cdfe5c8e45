"""Numbers that are none are found wherever they are, in every type."""

import pytest
import torch

from trtconvert.weights.finite import is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_number_is_found(dtype, bad):
    for shape in ((7, 33), (1,), (2, 3, 4, 5)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert is_finite(x)
        for place in {0, x.numel() // 2, x.numel() - 1}:
            spoiled = x.clone()
            spoiled.view(-1)[place] = bad
            assert not is_finite(spoiled)
            if x.dim() == 2:
                assert not is_finite(spoiled.T) and is_finite(x.T)


def test_integers_and_nothing_are_finite():
    assert is_finite(torch.tensor([1, 2])) and is_finite(torch.zeros(0)) and is_finite(torch.tensor(3.0))
