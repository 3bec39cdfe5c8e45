"""Attention that a model writes out in several calls, as models do that are older than `scaled_dot_product_attention`:

    scores = q·kᵀ, by matmul, bmm, baddbmm or einsum
    scores = scores · scale + mask, or masked_fill, or where, with a large negative number; casts
    output = softmax(scores)·v, likewise; before it casts, and dropout that drops nothing

A forward's calls are followed by the identity of its tensors. Each is computed as it is written. The product with the values is
handed over with the queries, keys, values, mask and scale that it follows from. Whoever takes it may compute the attention in
another way: then nothing reads the scores, and an exporter drops them. Or it returns the product as it is written. So nothing has
to be known of a model before it runs, and what is not followed is computed as ever.
"""

from trtconvert.unfused.follower import Proceed, Unfused, UnfusedAttention, left_softmax, unfused_attention
from trtconvert.unfused.steps import Softmax

__all__ = ["Proceed", "Softmax", "Unfused", "UnfusedAttention", "left_softmax", "unfused_attention"]
