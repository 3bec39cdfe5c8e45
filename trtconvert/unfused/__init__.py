"""Finds attention that a model writes out in several calls, as models from before `scaled_dot_product_attention` do:

    scores = q·kᵀ, by matmul, bmm, baddbmm or einsum
    scores = scores · scale + mask, or masked_fill, or where, with a large negative number; casts
    output = softmax(scores)·v, by the same functions, after casts, and dropout that drops nothing

The calls of a forward are followed by the identity of its tensors, and each call is computed as written. At the product with the
values a hook gets the attention, with its queries, keys, values, mask and scale. The hook may compute the attention in another
way: then nothing reads the scores, and an exporter drops them. Or the hook returns the product as written. No knowledge of the
model is needed before it runs. Calls that are not followed are computed as usual.
"""

from trtconvert.unfused.follower import Attention, Proceed, Unfused, UnfusedAttention, left_softmax, unfused_attention
from trtconvert.unfused.steps import Softmax

__all__ = ["Attention", "Proceed", "Softmax", "Unfused", "UnfusedAttention", "left_softmax", "unfused_attention"]
