"""A replica of the cluster without Ray: one whose bundle did not load, and one whose GPU failed, are replaced."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest

from trtconvert.errors import UserError
from trtconvert.serving import cluster, drawing
from trtconvert.serving.cluster import Cluster, Replica
from trtconvert.serving.dispatch import ReplicaLost
from trtconvert.serving.jobs import Answer, Batch, Drawn, Offer, Order, Refusal, Shape

BATCH = Batch(Shape(None, None, 2, False), (Order(1, None, "png"), Order(2, None, "png")))
OUT_OF_MEMORY = Refusal("machine", "out of memory", "", "", "")
FAULT = Refusal("fault", "drawing failed", "", "", "")
WRONG = Refusal("client", "the prompt is not a class of the model", "", "", "")


class Drawer:
    """Draws what is stated.

    Attributes:
        is_broken: the device takes no more work.
    """

    offer = Offer("seed", None, None, 4, "stated")
    is_broken = False
    answers: tuple[Answer, Answer] = (Drawn(b"1"), Drawn(b"2"))

    def __init__(self, *_: object) -> None:
        pass

    def __call__(self, batch: Batch) -> list[Answer]:
        return list(self.answers)

    def check_device(self) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def replica(monkeypatch, drawer: type[Drawer]) -> Replica:
    monkeypatch.setattr(drawing, "Drawer", drawer)
    monkeypatch.setattr(cluster, "_USELESS_SECONDS", 0.001)
    return Replica("bundle", "cpu", os.getcwd())


def test_a_replica_without_its_bundle_is_lost_and_replaced(monkeypatch):
    """Such as on a machine that joined later. It would answer every batch at once, as a mistake of the client."""
    pytest.importorskip("ray.serve", reason="needs the extra serve")

    class Missing(Drawer):
        def __init__(self, *_: object) -> None:
            raise UserError("bundle is not a bundle", expected="a manifest.json", got="none")

    async def work() -> None:
        made = replica(monkeypatch, Missing)
        assert isinstance(await made.offer(), Refusal)
        await made.check_health()  # the server reads the offer of a first replica, and tells the reason

        class Handle:
            draw = SimpleNamespace(remote=made.draw)

        pool = Cluster.__new__(Cluster)
        pool._handle = Handle
        with pytest.raises(ReplicaLost, match=r"is not a bundle; expected: a manifest.json; got: none"):
            await pool.draw(BATCH)
        with pytest.raises(RuntimeError, match="is not a bundle"):
            await made.check_health()

    asyncio.run(work())


@pytest.mark.parametrize("answer", [FAULT, OUT_OF_MEMORY])
def test_a_replica_whose_gpu_failed_is_replaced(monkeypatch, answer):
    async def work() -> None:
        made = replica(monkeypatch, Drawer)
        drawer = made._drawer
        assert await made.draw(BATCH) == list(drawer.answers)
        drawer.answers, drawer.is_broken = (Drawn(b"1"), answer), True
        await made.check_health()  # nothing has failed
        await made.draw(BATCH)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await made.check_health()
        drawer.is_broken = False
        await made.check_health()
        drawer.answers, drawer.is_broken = (Drawn(b"1"), WRONG), True
        await made.draw(BATCH)
        await made.check_health()

    asyncio.run(work())
