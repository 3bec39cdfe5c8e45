"""NaN and Inf are found at every place, in every type."""

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


@pytest.mark.parametrize("dtype", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu"])
def test_every_number_of_fp8(dtype):
    numbers = torch.arange(256, dtype=torch.uint8).view(getattr(torch, f"float8_{dtype}"))
    finite = numbers.float().isfinite()
    assert [is_finite(x) for x in numbers] == finite.tolist()
    assert is_finite(numbers[finite]) and not is_finite(numbers.view(16, 16).T)


def test_both_parts_of_complex_numbers_count():
    x = torch.complex(torch.ones(3, 5), torch.ones(3, 5))
    assert is_finite(x) and is_finite(x.T.conj())
    for bad in (complex(1, torch.inf), complex(torch.nan, 1)):
        x[1, 2] = bad
        assert not is_finite(x) and not is_finite(x.T.conj())


def test_integers_and_nothing_are_finite():
    assert is_finite(torch.tensor([1, 2])) and is_finite(torch.zeros(0)) and is_finite(torch.tensor(3.0))
