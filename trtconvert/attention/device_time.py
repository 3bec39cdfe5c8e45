"""Times what runs on this machine's GPU, without the host's part in it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

REPLAYS = 20
"""Of the graph of all calls; the median counts."""

WARM_UP_SECONDS = 0.1
"""A GPU that rests runs at a fraction of its clock, and needs some tens of milliseconds to reach it."""


def device_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median device time of one call in µs, over calls that take turns.

    The calls are captured in a CUDA graph, so that the time is the device's, not that of the host's launches.

    Args:
        calls: enqueue work on torch's current stream. With inputs of their own, so that none finds its own in the cache.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # a first call outside of the graph loads kernels, and TensorRT wants one before a capture
            call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_UP_SECONDS:
        graph.replay()
        torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1000 / len(calls)
