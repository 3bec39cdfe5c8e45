"""The checks of the C API of weighted sums, which need no GPU."""

from __future__ import annotations

import ctypes
import math

import pytest

from trtconvert.c_structs import MOST_TERMS, WEIGHTED_SUM_VERSION, Term, WeightedSumParams
from trtconvert.library import library_path, run

pytestmark = pytest.mark.skipif(library_path() is None, reason="no library is installed; 'pip install .' builds it")


def params(terms: list[tuple[float, int]], **changed: int) -> WeightedSumParams:
    given = {
        "struct_size": ctypes.sizeof(WeightedSumParams), "version": WEIGHTED_SUM_VERSION, "count": 7,
        "num_terms": len(terms), "data_type": 0,
    }  # fmt: skip
    found = WeightedSumParams(**given | changed)
    for index, (factor, data_type) in enumerate(terms):
        found.terms[index] = Term(None, factor, data_type)
    return found


@pytest.mark.parametrize("data_type", [0, 1, 2])
@pytest.mark.parametrize("terms", [[(1.0, 0)], [(-2.5, 2), (0.0, 1), (1e-30, 0), (3.0, 2)]], ids=len)
def test_sums_of_one_to_four_terms_of_any_type_are_taken(terms, data_type):
    run("trtconvert_weighted_sum_check", params(terms, data_type=data_type))


@pytest.mark.parametrize(
    ("terms", "changed", "said"),
    [
        ([(1.0, 0)], {"version": WEIGHTED_SUM_VERSION + 1}, "rebuild the caller with this library's weighted_sum.h"),
        ([(1.0, 0)], {"count": 0}, "count: expected 1..2^40, got 0"),
        ([], {}, "num_terms: expected 1..4, got 0"),
        ([(1.0, 0)], {"num_terms": MOST_TERMS + 1}, "num_terms: expected 1..4, got 5"),
        ([(1.0, 0)], {"data_type": 3}, "data_type: expected 0 (float16), 1 (bfloat16) or 2 (float32), got 3"),
        ([(1.0, 0), (1.0, -1)], {}, "terms: data_type: expected 0 (float16), 1 (bfloat16) or 2 (float32), got -1"),
        ([(math.nan, 0)], {}, "terms: factor: expected a finite number, got nan"),
    ],
    ids=str,
)
def test_refusals_say_what_is_wrong(terms, changed, said):
    with pytest.raises(RuntimeError) as failure:
        run("trtconvert_weighted_sum_check", params(terms, **changed))
    assert said in str(failure.value)


@pytest.mark.parametrize("name", ["x", "sum"])
def test_pointers_of_runs_are_checked_before_a_device_is_asked(name):
    given = params([(1.0, 0)])
    given.terms[0].x, given.sum = (None, 16) if name == "x" else (16, 3)
    with pytest.raises(RuntimeError, match=r"terms: x: expected a device pointer|sum: expected a pointer aligned to 2"):
        run("trtconvert_weighted_sum_run", given)
