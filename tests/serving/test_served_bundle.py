"""A bundle with two replicas on a Ray cluster of this machine: a replica is killed, and the server is stopped under load."""

from __future__ import annotations

import base64
import io
import os
import shutil
import signal
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image
from support import REPOSITORY

from trtconvert.bundle import MANIFEST
from trtconvert.serving.drawing import Drawer
from trtconvert.serving.jobs import Batch, Drawn, Order, Shape

pytest.importorskip("ray.serve", reason="needs the extra serve")

sys.path.append(str(REPOSITORY / "bench"))
from serve import Served, asked, served  # the bench of the same

OPTIONS = ("--replicas", 2, "--cpus", 0.5, "--max-batch", 4, "--queue-limit", 40)


def lose_none(server: Served, requests: int) -> None:
    """Send requests, kill a replica half way, and check that each request got its own image once."""
    seeds = range(requests)
    found = asked(server, seeds, 24, requests // 2, steps=10)
    assert [status for _, status, _, _ in found.answers] == [200] * requests
    assert found.missing_and_doubled(seeds) == (0, 0)
    assert server.metric("trtconvert_lost_batches_total") >= 1, "the replica was at work"
    assert server.metric("trtconvert_images_total") == requests
    images = {seed: content["data"][0]["b64_json"] for seed, _, content, _ in found.answers}
    for seed, expected in zip(seeds, EXPECTED, strict=False):
        assert np.abs(pixels(base64.b64decode(images[seed])) - expected).max() <= 1


EXPECTED: list[np.ndarray] = []
"""Images of the first seeds, drawn by a bundle without a server."""


def pixels(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file)), dtype=np.int16)


@pytest.fixture(scope="module")
def bundle(digits):
    drawer = Drawer(digits, "cpu")
    orders = tuple(Order(seed, None, "png") for seed in range(8))
    EXPECTED[:] = [
        pixels(answer.image)
        for answer in drawer(Batch(Shape(None, None, 10, False), orders))
        if isinstance(answer, Drawn)
    ]
    assert len(EXPECTED) == 8
    drawer.close()
    return digits


@pytest.mark.soak
def test_no_request_is_lost_with_a_replica_or_at_the_end(bundle):
    """A replica is killed half way; a stopping server finishes accepted requests and refuses new ones."""
    with served(bundle, *OPTIONS) as server:
        lose_none(server, 60)
        before = len(server.lines)
        rounds = []
        asking = threading.Thread(target=lambda: rounds.append(asked(server, range(12), 12, steps=60)))
        asking.start()
        while server.metric("trtconvert_pending_images") < 12:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        while server.exchange("GET", "/health/ready")[0] == 200:
            time.sleep(0.01)
        status, refused = server.ask({"seed": 1})
        assert status == 503 and "is stopping" in refused["error"]["message"]
        asking.join()
        assert [status for _, status, _, _ in rounds[0].answers] == [200] * 12
        assert server.process.wait(60) == 0
    said = "\n".join(server.lines[before:])
    assert "SIGTERM: new requests are refused; finishing 12 within 60 s" in said
    assert said.endswith("ended; every request was answered")


@pytest.mark.soak
def test_a_replica_that_does_not_find_the_bundle_refuses_no_request(bundle, tmp_path):
    """It is replaced until it finds the bundle, and the other replica draws."""
    copied = tmp_path / "bundle"
    shutil.copytree(bundle, copied)
    with served(copied, *OPTIONS) as server:
        (copied / MANIFEST).rename(copied / "away")
        os.kill(server.replicas()[0], signal.SIGKILL)
        until = time.monotonic() + 120
        while server.metric("trtconvert_lost_batches_total") < 4:  # the new replica gets batches
            found = asked(server, range(24), 6, steps=10)
            assert [status for _, status, _, _ in found.answers] == [200] * 24, found.answers
            assert time.monotonic() < until


@pytest.mark.soak
def test_a_thousand_requests_and_none_is_lost(bundle):
    with served(bundle, *OPTIONS) as server:
        lose_none(server, 1000)


@pytest.mark.soak
def test_an_end_that_takes_too_long_is_cut_short(bundle):
    """By the limit, which the message names, and by a second signal."""
    for options, signals in ((("--drain-seconds", 0.5), 1), ((), 2)):
        with served(bundle, *OPTIONS, *options) as server:
            rounds = []
            asking = threading.Thread(
                target=lambda server=server, rounds=rounds: rounds.append(asked(server, range(24), 24, steps=100))
            )
            asking.start()
            while server.metric("trtconvert_pending_images") < 24:
                time.sleep(0.01)
            for _ in range(signals):
                server.process.send_signal(signal.SIGTERM)
                time.sleep(0.3)
            assert server.process.wait(60) == 1
            asking.join()
        statuses = [status for _, status, _, _ in rounds[0].answers]
        assert set(statuses) <= {200, 503} and f"{statuses.count(503)} requests were cut short" in server.lines[-1]
