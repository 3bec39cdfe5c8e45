"""Conditions for linear layers that our INT8 kernel computes faster beside other plugins, as in U-Nets. The plan and the engines
share the conditions.

TensorRT's own layers compute the linear layers of transformers.
"""

from __future__ import annotations

FEWEST_ROWS, FEWEST_OUTPUTS = 1024, 2**21
"""Below these limits the kernel, which does not split the depth, leaves multiprocessors idle."""

SAVED_PER_OPERATION = 0.74e-9
"""µs per operation that INT8 products save on an H100."""

ROWS_APART, PER_NUMBER_APART = 3.0, 1e-6
"""µs of a kernel that quantises rows, and µs of each number: two bytes are read, one is written."""

LEAST_SAVED, LEAST_DEPTH = 0.5, 640
"""µs that a product must save, and the least depth. At less depth, writing the result dominates; the result of GEGLU has half the
width."""


def saved_us(rows: int, outputs: int, depth: int) -> float:
    """Returns the µs that an INT8 product saves over one in 16 bits."""
    return SAVED_PER_OPERATION * 2 * rows * outputs * depth


def rows_apart_us(rows: int, depth: int) -> float:
    """Returns the µs of a kernel that quantises rows and does nothing else."""
    return ROWS_APART + PER_NUMBER_APART * rows * depth


def pays(rows: int, outputs: int, depth: int, *, normed: bool, geglu: bool) -> bool:
    """Returns whether the kernel fills the GPU, and saves more than quantising its rows costs.

    Args:
        outputs: channels of the product. normed: a layer norm quantises the rows. geglu: GEGLU follows, which halves the width.
    """
    width = outputs // 2 if geglu else outputs
    if rows < FEWEST_ROWS or rows * width < FEWEST_OUTPUTS or (depth < LEAST_DEPTH and not geglu):
        return False
    return saved_us(rows, outputs, depth) - (0.0 if normed else rows_apart_us(rows, depth)) >= LEAST_SAVED
