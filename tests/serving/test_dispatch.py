"""The queue of images: batches by shape, the limit, lost replicas, and disconnecting clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from trtconvert.serving.dispatch import BATCHES_PER_REPLICA, Dispatcher, QueueFull, ReplicaLost
from trtconvert.serving.jobs import Answer, Batch, Drawn, Order, Refusal, Shape

SMALL, LARGE = Shape(8, 8, 5, True), Shape(16, 16, 5, True)


@dataclass
class Replicas:
    """A pool whose images are their seeds in words.

    Attributes:
        batches: that came, in their order; ends: seeds that end the replica which draws them.
        go: until it is set nothing is answered.
    """

    running: int = 1
    ends: Callable[[Batch], bool] = lambda batch: False
    batches: list[Batch] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def draw(self, batch: Batch) -> Sequence[Answer]:
        self.batches.append(batch)
        await self.go.wait()
        if self.ends(batch):
            raise ReplicaLost("killed")
        return [Drawn(str(order.seed).encode()) for order in batch.orders]

    @property
    def seeds(self) -> list[list[int]]:
        return [[order.seed for order in batch.orders] for batch in self.batches]


def orders(*seeds: int) -> list[Order]:
    return [Order(seed, None, "png") for seed in seeds]


def images(*seeds: int) -> list[Drawn]:
    return [Drawn(str(seed).encode()) for seed in seeds]


def with_queue(
    work: Callable[[Dispatcher, Replicas], Coroutine[Any, Any, None]],
    replicas: Replicas | None = None,
    *,
    wait: float = 0.02,
    limit: int = 100,
) -> None:
    async def whole() -> None:
        pool = replicas or Replicas()
        dispatcher = Dispatcher(pool, batch=4, wait=wait, limit=limit)
        running = asyncio.create_task(dispatcher.run())
        async with asyncio.timeout(10):
            await work(dispatcher, pool)
        assert dispatcher.pending == 0
        running.cancel()

    asyncio.run(whole())


def test_images_of_one_shape_are_drawn_together():
    async def work(dispatcher: Dispatcher, pool: Replicas) -> None:
        pool.go.set()
        asked = [(SMALL, 1), (LARGE, 2), (SMALL, 3), (LARGE, 4), (SMALL, 5)]
        found = await asyncio.gather(*(dispatcher.draw(shape, orders(seed)) for shape, seed in asked))
        assert found == [images(seed) for _, seed in asked]
        assert pool.seeds == [[1, 3, 5], [2, 4]]

    with_queue(work)


def test_a_full_batch_does_not_wait_and_a_large_request_is_split():
    async def work(dispatcher: Dispatcher, pool: Replicas) -> None:
        pool.go.set()
        assert await dispatcher.draw(SMALL, orders(*range(8))) == images(*range(8))
        assert pool.seeds == [[0, 1, 2, 3], [4, 5, 6, 7]]

    with_queue(work, wait=1000)


def test_batches_are_filled_up_while_all_replicas_are_busy():
    async def work(dispatcher: Dispatcher, pool: Replicas) -> None:
        tasks = []
        for seed in range(2 * BATCHES_PER_REPLICA + 4):
            tasks.append(asyncio.create_task(dispatcher.draw(SMALL, orders(seed))))
            await asyncio.sleep(0.002)
        assert len(pool.batches) == BATCHES_PER_REPLICA, "no more are on their way"
        pool.go.set()
        assert await asyncio.gather(*tasks) == [images(seed) for seed in range(len(tasks))]
        assert max(map(len, pool.seeds)) == 4

    with_queue(work, wait=0)


def test_no_shape_waits_for_one_that_is_asked_for_more():
    async def work(dispatcher: Dispatcher, pool: Replicas) -> None:
        first = [asyncio.create_task(dispatcher.draw(SMALL, orders(seed, seed))) for seed in range(BATCHES_PER_REPLICA)]
        await asyncio.sleep(0.01)
        rare = asyncio.create_task(dispatcher.draw(LARGE, orders(100)))
        await asyncio.sleep(0.01)
        often = [asyncio.create_task(dispatcher.draw(SMALL, orders(*range(4)))) for _ in range(5)]
        await asyncio.sleep(0.01)
        pool.go.set()
        await asyncio.gather(*first, rare, *often)
        assert pool.seeds.index([100]) <= BATCHES_PER_REPLICA

    with_queue(work, wait=0)


def test_requests_beyond_the_queue_are_refused_whole():
    async def work(dispatcher: Dispatcher, pool: Replicas) -> None:
        first = asyncio.create_task(dispatcher.draw(SMALL, orders(1, 2, 3)))
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFull) as full:
            await dispatcher.draw(SMALL, orders(4, 5, 6))
        assert full.value.seconds >= 0 and dispatcher.pending == 3
        second = asyncio.create_task(dispatcher.draw(SMALL, orders(4, 5)))
        pool.go.set()
        assert await first == images(1, 2, 3) and await second == images(4, 5)

    with_queue(work, limit=5)


def test_requests_of_a_lost_replica_are_redrawn_and_answered_once():
    lost = []

    def ends(batch: Batch) -> bool:
        lost.append(batch)
        return len(lost) == 1

    async def work(dispatcher: Dispatcher, pool: Replicas) -> None:
        told = []
        dispatcher.on_lost = lambda: told.append(1)
        pool.go.set()
        found = await asyncio.gather(*(dispatcher.draw(SMALL, orders(seed)) for seed in range(4)))
        assert found == [images(seed) for seed in range(4)]
        assert pool.seeds == [[0, 1, 2, 3]] * 2 and len(told) == 1

    with_queue(work, Replicas(ends=ends))


def test_an_image_that_ends_every_replica_takes_no_other_with_it():
    async def work(dispatcher: Dispatcher, pool: Replicas) -> None:
        pool.go.set()
        found = await asyncio.gather(*(dispatcher.draw(SMALL, orders(seed)) for seed in range(4)))
        assert [found[seed] for seed in (0, 1, 3)] == [images(seed) for seed in (0, 1, 3)]
        (answer,) = found[2]
        assert isinstance(answer, Refusal) and answer.whose == "machine" and "3 lost replicas: killed" in answer.got
        assert pool.seeds[:2] == [[0, 1, 2, 3]] * 2 and sorted(pool.seeds[2:]) == [[0], [1], [2], [3]]

    with_queue(work, Replicas(ends=lambda batch: any(order.seed == 2 for order in batch.orders)))


def test_a_replica_that_fails_is_a_fault_and_nothing_hangs():
    class Failing(Replicas):
        async def draw(self, batch: Batch) -> Sequence[Answer]:
            raise ValueError("odd")

    async def work(dispatcher: Dispatcher, pool: Replicas) -> None:
        for answer in await dispatcher.draw(SMALL, orders(1, 2)):
            assert isinstance(answer, Refusal) and answer.whose == "fault" and answer.got == "odd"

    with_queue(work, Failing())


def test_requests_that_leave_the_queue_are_not_drawn():
    async def work(dispatcher: Dispatcher, pool: Replicas) -> None:
        busy = [asyncio.create_task(dispatcher.draw(LARGE, orders(seed, seed, seed, seed))) for seed in range(2)]
        await asyncio.sleep(0.01)
        gone = asyncio.create_task(dispatcher.draw(SMALL, orders(7, 8)))
        stays = asyncio.create_task(dispatcher.draw(SMALL, orders(9)))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.sleep(0.01)
        assert dispatcher.pending == 9
        pool.go.set()
        assert await stays == images(9)
        await asyncio.gather(*busy)
        assert pool.seeds[-1] == [9]

    with_queue(work, wait=0)


def test_more_replicas_get_more_batches():
    async def work(dispatcher: Dispatcher, pool: Replicas) -> None:
        tasks = [asyncio.create_task(dispatcher.draw(SMALL, orders(seed, 0, 0, 0))) for seed in range(10)]
        await asyncio.sleep(0.02)
        assert len(pool.batches) == BATCHES_PER_REPLICA
        pool.running = 3
        while len(pool.batches) < 3 * BATCHES_PER_REPLICA:
            await asyncio.sleep(0.02)
        pool.go.set()
        await asyncio.gather(*tasks)

    with_queue(work)
