"""The HTTP front, with stand-ins for replicas."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from asking import JSON, ask

from trtconvert.serving.api import BODY_BYTES, Limits
from trtconvert.serving.dispatch import Dispatcher
from trtconvert.serving.jobs import Answer, Batch, Drawn, Offer, Refusal

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

from trtconvert.serving import front as front_module
from trtconvert.serving.front import Front

OFFER = Offer("prompt", None, None, 8, "a machine")
PATH = "/v1/images/generations"


class Replicas:
    """Images are prompts; "no" is refused by the machine, "odd" a fault."""

    def __init__(self) -> None:
        self.running, self.drawn = 1, 0
        self.go = asyncio.Event()

    async def draw(self, batch: Batch) -> Sequence[Answer]:
        await self.go.wait()
        self.drawn += len(batch.orders)
        whose = {"no": "machine", "odd": "fault", "bad": "client"}
        return [
            Refusal(whose[order.prompt], "it failed", "a", "b", "c")
            if order.prompt in whose
            else Drawn(f"{order.prompt} {order.seed}".encode())
            for order in batch.orders
        ]


def served(
    work: Callable[[Front, Replicas], Coroutine[Any, Any, None]], *, seconds: float = 10.0, limit: int = 8
) -> None:
    async def whole() -> None:
        pool = Replicas()
        dispatcher = Dispatcher(pool, batch=4, wait=0, limit=limit)
        front = Front(pool, dispatcher, Limits("cats", images=4, steps=20, most_steps=50), seconds=seconds)
        front.offer = OFFER
        running = asyncio.create_task(dispatcher.run())
        async with asyncio.timeout(10):
            await work(front, pool)
        assert front.active == 0 and dispatcher.pending == 0
        running.cancel()

    asyncio.run(whole())


def test_images_come_in_base64_with_their_seeds():
    async def work(front: Front, pool: Replicas) -> None:
        pool.go.set()
        reply = await ask(front.app, "POST", PATH, {"prompt": "a cat", "n": 2, "seed": 5})
        assert reply.status == 200 and reply.content["created"] > 1e9
        assert [base64.b64decode(image["b64_json"]) for image in reply.content["data"]] == [b"a cat 5", b"a cat 6"]
        assert [image["seed"] for image in reply.content["data"]] == [5, 6]

    served(work)


def test_models_are_listed_by_name():
    async def work(front: Front, pool: Replicas) -> None:
        reply = await ask(front.app, "GET", "/v1/models")
        (model,) = reply.content["data"]
        assert reply.content["object"] == "list" and model["id"] == "cats" and model["object"] == "model"
        assert (await ask(front.app, "GET", "/v1/models/cats")).content == model
        (await ask(front.app, "GET", "/v1/models/dogs")).error(404, "expected: cats", "dogs")

    served(work)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", PATH, 405), ("POST", "/v1/models", 405), ("POST", "/v1/chat/completions", 404)],
)
def test_other_paths_and_methods_are_refused_in_the_apis_shape(method, path, status):
    async def work(front: Front, pool: Replicas) -> None:
        (await ask(front.app, method, path)).error(status, "POST /v1/images/generations", path)

    served(work)


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b'{"prompt": "a"}', (), 415, "Content-Type: application/json"),
        (b"a=b", (("content-type", "application/x-www-form-urlencoded"),), 415, "got: application/x-www-form"),
        ([b"x" * 100_000] * 4, JSON, 413, f"at most {BODY_BYTES} bytes"),
        (b"", (*JSON, ("content-length", str(10**15))), 413, f"got: {10**15} or more"),
        (b"{", (*JSON, ("content-length", "-5")), 400, "not JSON"),
        (b'{"prompt": "a", "n": 9}', JSON, 400, "at most 4"),
        (b'{"prompt": "bad"}', JSON, 400, "it failed"),
        (b'{"prompt": "no"}', JSON, 503, "it failed"),
        (b'{"prompt": "odd"}', JSON, 500, "it failed"),
    ],
)
def test_refusals_have_a_reason(body, headers, status, words):
    async def work(front: Front, pool: Replicas) -> None:
        pool.go.set()
        reply = await ask(front.app, "POST", PATH, body, headers)
        reply.error(status, words)
        assert ("retry-after" in reply.headers) == (status == 503)

    served(work)


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(front_module, "_BODY_SECONDS", 0.05)

    async def work(front: Front, pool: Replicas) -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.02)
            return {"type": "http.request", "body": b" ", "more_body": True}

        from starlette.requests import Request

        with pytest.raises(front_module.ApiError) as raised:
            await front_module._body(
                Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)
            )
        assert raised.value.status == 408

    served(work)


def test_a_full_queue_says_when_to_come_again():
    async def work(front: Front, pool: Replicas) -> None:
        first = [asyncio.create_task(ask(front.app, "POST", PATH, {"prompt": "a", "n": 4})) for _ in range(2)]
        await asyncio.sleep(0.02)
        reply = await ask(front.app, "POST", PATH, {"prompt": "a"})
        reply.error(429, "too many images are waiting", "got: 8 unanswered")
        assert reply.content["error"]["code"] == "rate_limit_exceeded" and int(reply.headers["retry-after"]) >= 1
        pool.go.set()
        assert [one.status for one in await asyncio.gather(*first)] == [200, 200]
        assert (await ask(front.app, "POST", PATH, {"prompt": "a"})).status == 200

    served(work)


def test_a_request_ends_after_its_seconds():
    async def work(front: Front, pool: Replicas) -> None:
        (await ask(front.app, "POST", PATH, {"prompt": "a"})).error(504, "at most 0.05 s")
        pool.go.set()

    served(work, seconds=0.05)


def test_cancelled_requests_are_not_drawn():
    async def work(front: Front, pool: Replicas) -> None:
        busy = [asyncio.create_task(ask(front.app, "POST", PATH, {"prompt": "a", "n": 3, "steps": n})) for n in (1, 2)]
        await asyncio.sleep(0.02)
        leaves = asyncio.Event()
        gone = asyncio.create_task(ask(front.app, "POST", PATH, {"prompt": "a"}, leaves=leaves))
        await asyncio.sleep(0.02)
        leaves.set()
        assert (await gone).status == 499
        pool.go.set()
        await asyncio.gather(*busy)
        assert pool.drawn == 6

    served(work)


def test_unfinished_requests_are_reported_at_the_end():
    async def work(front: Front, pool: Replicas) -> None:
        asking = asyncio.create_task(ask(front.app, "POST", PATH, {"prompt": "a"}))
        await asyncio.sleep(0.02)
        front.cut.set()
        (await asking).error(503, "the server stops")
        pool.go.set()

    served(work)


def test_health_tells_starting_ready_lost_and_draining():
    async def work(front: Front, pool: Replicas) -> None:
        async def states() -> tuple[int, int, str]:
            live, ready = await ask(front.app, "GET", "/health/live"), await ask(front.app, "GET", "/health/ready")
            assert live.content == ready.content == (await ask(front.app, "GET", "/health")).content
            return live.status, ready.status, ready.content["state"]

        assert await states() == (200, 200, "ready")
        front.offer = None
        assert await states() == (200, 503, "starting")
        reply = await ask(front.app, "POST", PATH, {"prompt": "a"})
        reply.error(503, "being loaded")
        assert reply.headers["retry-after"]
        front.offer, pool.running = OFFER, 0
        assert await states() == (200, 503, "lost")
        pool.running, front.draining = 1, True
        assert await states() == (200, 503, "draining")
        (await ask(front.app, "POST", PATH, {"prompt": "a"})).error(503, "is stopping")

    served(work)


def test_metrics_count_what_was_answered():
    async def work(front: Front, pool: Replicas) -> None:
        pool.go.set()
        await ask(front.app, "POST", PATH, {"prompt": "a", "n": 3})
        await ask(front.app, "POST", PATH, {"prompt": 5})
        reply = await ask(front.app, "GET", "/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        values = dict(re.findall(r"^(trtconvert_\S+) (\S+)$", reply.body.decode(), re.MULTILINE))
        expected = {
            'trtconvert_requests_total{status="200"}': 1,
            'trtconvert_requests_total{status="400"}': 1,
            "trtconvert_images_total": 3,
            "trtconvert_batch_images_sum": 3,
            "trtconvert_batch_images_count": 1,
            "trtconvert_request_seconds_count": 1,
            "trtconvert_lost_batches_total": 0,
            "trtconvert_pending_images": 0,
            "trtconvert_replicas": 1,
            "trtconvert_ready": 1,
        }
        assert {name: float(values[name]) for name in expected} == expected

    served(work)
