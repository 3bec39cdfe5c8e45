"""The queue of images to draw: gathers those of one shape into batches, hands these to replicas, and draws again what a replica
has taken with it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trtconvert.serving.jobs import Answer, Batch, Order, Refusal, Shape

BATCHES_PER_REPLICA = 2
"""Batches that are on their way to a replica at once: one is drawn, the next one is there when it ends. More of them would be
bound to a replica long before it comes to them, and could not be filled up any more."""

_TRIES = 3
"""Replicas that may be lost while they draw an image. Then it is taken for what ends them."""

_LOOK_AGAIN = 0.5
"""Seconds after which a full pool is asked again how many replicas it has."""


class ReplicaLost(Exception):
    """The replica that drew a batch has gone, and nobody knows how far it came."""


class Pool(Protocol):
    """Replicas of a bundle."""

    @property
    def running(self) -> int:
        """Replicas that draw now."""
        ...

    async def draw(self, batch: Batch) -> Sequence[Answer]:
        """An answer for each order. Raises ReplicaLost."""
        ...


class QueueFull(Exception):
    """There is no room for so many images.

    Attributes:
        seconds: after which there may be.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


@dataclass(eq=False)
class _Waiting:
    """An image that is asked for.

    Attributes:
        since: when it came, of time.monotonic(); lost: replicas that have gone while they drew it.
    """

    order: Order
    answer: asyncio.Future[Answer]
    since: float
    lost: int = 0


class Dispatcher:
    """See the module. Used in one event loop, within which `run` has to be a task.

    Args:
        pool: who draws.
        batch: images of a batch at most.
        wait: seconds that an image waits for others of its shape while a replica has nothing to do.
        limit: images that are asked for and not answered, at most.

    Attributes:
        pending: how many there are; batch: as given, and may be changed.
        on_batch: told of each batch that was drawn: its images, and the seconds that it took; on_lost: of each that was lost.
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
        self._seconds_per_image = 1.0  # as of late

    async def draw(self, shape: Shape, orders: Sequence[Order]) -> list[Answer]:
        """An answer for each order. Who is cancelled meanwhile is not drawn any more, unless that has begun.

        Raises:
            QueueFull: some of them would have no place.
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
                one.answer.cancel()  # nothing to one that has come
            self._changed.set()

    async def run(self) -> None:
        """Hands out batches, for ever."""
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
        """Hand out what is ready, as far as there is somebody. Returns: seconds after which to look again without a change."""
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
        """When the batch of a shape is to go: with its last image, or a while after its first one came. In order of age either
        way, so that no shape waits for ever for one that is asked for more often."""
        queue = self._queues[shape]
        return queue[0].since + (0 if len(queue) >= self.batch or queue[0].lost else self._wait)

    def _taken(self, shape: Shape) -> list[_Waiting]:
        """The next batch, out of the queue. What may end replicas goes alone."""
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
            answers = [Refusal("fault", "a replica failed", "images", str(error), "look into its log")] * len(waiting)
        seconds = time.monotonic() - started
        self._seconds_per_image += 0.2 * (seconds / BATCHES_PER_REPLICA / len(waiting) - self._seconds_per_image)
        self.on_batch(len(waiting), seconds)
        for one, answer in zip(waiting, answers, strict=True):
            if not one.answer.done():
                one.answer.set_result(answer)

    def _again(self, shape: Shape, waiting: list[_Waiting], error: ReplicaLost) -> None:
        """Back to where they were, but for those that seem to end every replica."""
        for one in waiting:
            one.lost += 1
        for one in [one for one in waiting if one.lost == _TRIES and not one.answer.done()]:
            one.answer.set_result(
                Refusal(
                    "machine",
                    "every replica that drew this image was lost",
                    "a replica that stays",
                    f"{_TRIES} that went: {error}",
                    "look into the log of the server, and ask again later",
                )
            )
        queue = self._queues.setdefault(shape, deque())
        queue.extendleft(reversed([one for one in waiting if one.lost < _TRIES]))
