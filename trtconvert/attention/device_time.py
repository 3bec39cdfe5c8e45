"""Times work on this machine's GPU without the host's share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

BURSTS, REPLAYS = 5, 4
"""Bursts, and replays of the graph of all calls in each. The median of all replays counts: a short dip of the clock slows all
replays of one burst."""

WARM_UP_SECONDS = 0.1
"""An idle GPU runs at a fraction of its clock and needs some tens of milliseconds to reach the full clock."""


def device_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Returns the median device time of one call in µs.

    The calls run in turn in one CUDA graph, so that the host's launches do not count.

    Args:
        calls: functions that enqueue work on torch's current stream. Each needs inputs of its own, so that no cache holds them.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # the first call loads kernels, and TensorRT requires one before a capture
            call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    milliseconds = list[float]()
    for _ in range(BURSTS):
        started = time.perf_counter()
        while time.perf_counter() - started < WARM_UP_SECONDS / BURSTS:
            graph.replay()
            torch.cuda.synchronize()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        milliseconds += [start.elapsed_time(end) for start, end in events]
    return statistics.median(milliseconds) * 1000 / len(calls)
