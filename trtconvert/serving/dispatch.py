"""The queue of images: forms batches of one shape, sends them to replicas, and sends batches of lost replicas again."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trtconvert.serving.jobs import Answer, Batch, Order, Refusal, Shape

BATCHES_PER_REPLICA = 2
"""Batches sent to a replica at once: one is drawn, and the next one waits there. Further batches could no longer be filled up."""

_TRIES = 3
"""Replicas that may be lost while they draw an image, before the image counts as the cause."""

_LOOK_AGAIN = 0.5
"""Seconds between readings of the number of replicas of a busy pool."""


class ReplicaLost(Exception):
    """The replica that drew a batch is gone."""


class Pool(Protocol):
    """Replicas of a bundle."""

    @property
    def running(self) -> int:
        """Number of running replicas."""
        ...

    async def draw(self, batch: Batch) -> Sequence[Answer]:
        """Return an answer for each order. Raises ReplicaLost."""
        ...


class QueueFull(Exception):
    """The queue has no room for the images.

    Attributes:
        seconds: estimated time until the queue has room.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


@dataclass(eq=False)
class _Waiting:
    """A waiting image.

    Attributes:
        since: arrival in seconds of time.monotonic(); lost: number of replicas lost while they drew the image.
    """

    order: Order
    answer: asyncio.Future[Answer]
    since: float
    lost: int = 0


class Dispatcher:
    """See the module. Runs in one event loop, with `run` as a task.

    Args:
        pool: the replicas.
        batch: largest number of images of a batch.
        wait: longest wait in seconds of an image for others of its shape while a replica is idle.
        limit: largest number of pending images.

    Attributes:
        pending: number of unanswered images; batch: as given; may be changed.
        on_batch: called with the images and seconds of each drawn batch; on_lost: called for each lost batch.
    """

    def __init__(self, pool: Pool, *, batch: int, wait: float, limit: int) -> None:
        self.pending = 0
        self.on_batch: Callable[[int, float], object] = lambda images, seconds: None
        self.on_lost: Callable[[], object] = lambda: None
        self._pool, self._wait, self._limit = pool, wait, limit
        self.batch = batch
        self._queues: dict[Shape, deque[_Waiting]] = {}
        self._changed = asyncio.Event()
        self._sent = set[asyncio.Task[None]]()
        self._seconds_per_image = 1.0  # moving average

    async def draw(self, shape: Shape, orders: Sequence[Order]) -> list[Answer]:
        """Return an answer for each order. If the caller is cancelled, images that still wait are dropped.

        Raises:
            QueueFull: the queue has no room for all of them.
        """
        if self.pending + len(orders) > self._limit:
            replicas = max(1, self._pool.running)
            raise QueueFull(self.pending * self._seconds_per_image / replicas)
        loop, now = asyncio.get_running_loop(), time.monotonic()
        waiting = [_Waiting(order, loop.create_future(), now) for order in orders]
        self.pending += len(waiting)
        try:
            self._queues.setdefault(shape, deque()).extend(waiting)
            self._changed.set()
            return list(await asyncio.gather(*(one.answer for one in waiting)))
        finally:
            self.pending -= len(waiting)
            for one in waiting:
                one.answer.cancel()  # without effect on finished answers
            self._changed.set()

    async def run(self) -> None:
        """Send batches until cancelled."""
        try:
            while True:
                self._changed.clear()
                delay = self._hand_out()
                try:
                    async with asyncio.timeout(delay):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            for task in self._sent:
                task.cancel()

    def _hand_out(self) -> float | None:
        """Send ready batches to free replicas. Returns the seconds until the next look; None to wait for a change."""
        while True:
            for shape in list(self._queues):
                self._drop_cancelled(shape)
            if not self._queues:
                return None
            if len(self._sent) >= BATCHES_PER_REPLICA * max(1, self._pool.running):
                return _LOOK_AGAIN
            shape = min(self._queues, key=self._ready_at)
            if (delay := self._ready_at(shape) - time.monotonic()) > 0:
                return delay
            task = asyncio.create_task(self._send(shape, self._taken(shape)))
            self._sent.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._sent.discard(task)
        self._changed.set()

    def _drop_cancelled(self, shape: Shape) -> None:
        self._queues[shape] = left = deque(one for one in self._queues[shape] if not one.answer.done())
        if not left:
            del self._queues[shape]

    def _ready_at(self, shape: Shape) -> float:
        """Return when a shape's batch is ready: when it is full, or `wait` seconds after its first image.

        Both follow the age of the first image, so that frequent shapes do not starve others.
        """
        queue = self._queues[shape]
        return queue[0].since + (0 if len(queue) >= self.batch or queue[0].lost else self._wait)

    def _taken(self, shape: Shape) -> list[_Waiting]:
        """Take the next batch out of the queue. An image that may kill replicas goes alone."""
        queue = self._queues[shape]
        alone = queue[0].lost == _TRIES - 1
        batch = list[_Waiting]()
        while queue and len(batch) < (1 if alone else self.batch) and (alone or queue[0].lost < _TRIES - 1):
            batch.append(queue.popleft())
        if not queue:
            del self._queues[shape]
        return batch

    async def _send(self, shape: Shape, waiting: list[_Waiting]) -> None:
        started = time.monotonic()
        batch = Batch(shape, tuple(one.order for one in waiting))
        try:
            answers = list(await self._pool.draw(batch))
        except ReplicaLost as error:
            self.on_lost()
            self._again(shape, waiting, error)
            return
        except Exception as error:
            answers = [Refusal("fault", "a replica failed", "images", str(error), "read the replica's log")] * len(
                waiting
            )
        seconds = time.monotonic() - started
        self._seconds_per_image += 0.2 * (seconds / BATCHES_PER_REPLICA / len(waiting) - self._seconds_per_image)
        self.on_batch(len(waiting), seconds)
        for one, answer in zip(waiting, answers, strict=True):
            if not one.answer.done():
                one.answer.set_result(answer)

    def _again(self, shape: Shape, waiting: list[_Waiting], error: ReplicaLost) -> None:
        """Put images back at the front of the queue, and refuse those that have lost every replica."""
        for one in waiting:
            one.lost += 1
        for one in [one for one in waiting if one.lost == _TRIES and not one.answer.done()]:
            one.answer.set_result(
                Refusal(
                    "machine",
                    "every replica that drew this image was lost",
                    "a replica that survives the image",
                    f"{_TRIES} lost replicas: {error}",
                    "read the server's log, and send the request again later",
                )
            )
        queue = self._queues.setdefault(shape, deque())
        queue.extendleft(reversed([one for one in waiting if one.lost < _TRIES]))
