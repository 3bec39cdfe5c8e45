"""The HTTP front of the queue: the images API, health and metrics."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trtconvert.serving.api import (
    BODY_BYTES,
    ApiError,
    Limits,
    error_of,
    generation_body,
    read_generation,
    require_model,
)
from trtconvert.serving.dispatch import Dispatcher, Pool, QueueFull
from trtconvert.serving.jobs import Answer, Offer, Refusal

_BODY_SECONDS = 10.0
"""Time limit of a request's body, against clients that send it byte by byte."""

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_SIZES = (1, 2, 4, 8, 16, 32, 64)

Handler = Callable[[Request], Awaitable[Response]]


class _Metrics:
    """Prometheus metrics of one server."""

    def __init__(self, dispatcher: Dispatcher, pool: Pool, ready: Callable[[], bool]) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("trtconvert_requests", "Requests for images, by status.", ["status"], registry=registry)
        self.seconds = Histogram(
            "trtconvert_request_seconds", "Time from a request to its images.", buckets=_SECONDS, registry=registry
        )
        self.images = Counter("trtconvert_images", "Answered images.", registry=registry)
        self.batches = Histogram("trtconvert_batch_images", "Images of a batch.", buckets=_SIZES, registry=registry)
        self.batch_seconds = Histogram(
            "trtconvert_batch_seconds",
            "Time of a batch from the queue to a replica and back.",
            buckets=_SECONDS,
            registry=registry,
        )
        lost = Counter("trtconvert_lost_batches", "Batches of lost replicas.", registry=registry)
        dispatcher.on_lost = lost.inc
        dispatcher.on_batch = self._batch
        for name, text, read in (
            ("trtconvert_pending_images", "Unanswered images.", lambda: dispatcher.pending),
            ("trtconvert_replicas", "Running replicas.", lambda: pool.running),
            ("trtconvert_ready", "1 if requests are accepted.", lambda: float(ready())),
        ):
            Gauge(name, text, registry=registry).set_function(read)

    def _batch(self, images: int, seconds: float) -> None:
        self.batches.observe(images)
        self.batch_seconds.observe(seconds)


class Front:
    """A server's application.

    Args:
        pool: the replicas; dispatcher: their queue.
        limits: limits of requests; seconds: longest time of a request.

    Attributes:
        app: the ASGI application.
        offer: the bundle's offer; None until a replica has loaded the bundle, and requests get status 503.
        draining: new requests are refused.
        active: number of unanswered requests; cut: event that ends them with status 503.
    """

    def __init__(self, pool: Pool, dispatcher: Dispatcher, limits: Limits, *, seconds: float) -> None:
        self.offer: Offer | None = None
        self.draining, self.active, self.cut = False, 0, asyncio.Event()
        self._pool, self._dispatcher, self._limits, self._seconds = pool, dispatcher, limits, seconds
        self._created = int(time.time())
        self._metrics = _Metrics(dispatcher, pool, lambda: self.ready)
        routes = [
            Route("/v1/images/generations", self._generations, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name}", self._model, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/health/live", self._health, methods=["GET"]),
            Route("/health/ready", self._readiness, methods=["GET"]),
            Route("/metrics", self._read_metrics, methods=["GET"]),
        ]
        handlers: Any = {ApiError: _answer_error, HTTPException: _answer_http_error, Exception: _answer_fault}
        self.app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    @property
    def ready(self) -> bool:
        return self.offer is not None and not self.draining and self._pool.running > 0

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        running = asyncio.create_task(self._dispatcher.run())
        try:
            yield
        finally:
            running.cancel()

    # The API ------------------------------------------------------------------------------------------------------

    async def _generations(self, request: Request) -> Response:
        started = time.monotonic()
        self.active += 1
        status = 500
        try:
            answer = await self._images(request)
            status = answer.status_code
            return answer
        except ApiError as error:
            status = error.status
            raise
        except ClientDisconnect:
            status = 499  # nginx's status for a client that disconnected
            return Response(status_code=status)
        finally:
            self.active -= 1
            self._metrics.requests.labels(str(status)).inc()
            if status == 200:
                self._metrics.seconds.observe(time.monotonic() - started)

    async def _images(self, request: Request) -> Response:
        if self.draining:
            raise _later(
                "the server is stopping", "a server that accepts requests", "a server that finishes its last ones"
            )
        body = await _body(request)
        if self.offer is None:
            raise _later("the model is being loaded", "a replica with the model", "none yet")
        generation = read_generation(body, self.offer, self._limits)
        try:
            async with asyncio.timeout(self._seconds):
                answers = await self._drawn_for(request, generation.shape, generation.orders)
        except QueueFull as error:
            raise ApiError(
                429,
                "too many images are waiting",
                expected="room in the queue for the images of this request",
                got=f"{self._dispatcher.pending} unanswered images",
                remedy="send the request again after the seconds of Retry-After",
                code="rate_limit_exceeded",
                retry=min(600, max(1, math.ceil(error.seconds))),
            ) from error
        except TimeoutError as error:
            raise ApiError(
                504,
                "the images were not drawn in time",
                expected=f"at most {self._seconds:g} s",
                got="more",
                remedy="request fewer images or steps, or try later; the server's --request-seconds sets the limit",
                code="timeout",
                retry=5,
            ) from error
        images = list[str]()
        for answer in answers:
            if isinstance(answer, Refusal):
                raise error_of(answer)
            images.append(base64.b64encode(answer.image).decode("ascii"))
        self._metrics.images.inc(len(images))
        return JSONResponse(generation_body(images, generation.orders, int(time.time()), generation.shape))

    async def _drawn_for(self, request: Request, *work: Any) -> list[Answer]:
        """Return the answers, and drop waiting images if the client disconnects or the server stops."""
        drawing = asyncio.create_task(self._dispatcher.draw(*work))
        left, cut = asyncio.create_task(_left(request)), asyncio.create_task(self.cut.wait())
        try:
            await asyncio.wait((drawing, left, cut), return_when=asyncio.FIRST_COMPLETED)
            if drawing.done():
                return drawing.result()
            if left.done():
                raise ClientDisconnect
            raise _later("the server stops", "an answer before the server stops", "a longer request")
        finally:
            for task in (drawing, left, cut):
                task.cancel()
            await asyncio.gather(drawing, left, cut, return_exceptions=True)

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def _model(self, request: Request) -> Response:
        require_model(request.path_params["name"], self._limits)
        return JSONResponse(self._description())

    def _description(self) -> dict[str, Any]:
        return {"id": self._limits.model, "object": "model", "created": self._created, "owned_by": "trtconvert"}

    # Health and metrics ---------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        state = "draining" if self.draining else "starting" if self.offer is None else "ready" if self.ready else "lost"
        backend = self.offer.backend if self.offer else None
        return {
            "state": state,
            "replicas": self._pool.running,
            "pending_images": self._dispatcher.pending,
            "backend": backend,
        }

    async def _health(self, _request: Request) -> Response:
        """Answer liveness, independent of replicas."""
        return JSONResponse(self._state())

    async def _readiness(self, _request: Request) -> Response:
        return JSONResponse(self._state(), 200 if self.ready else 503)

    async def _read_metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _body(request: Request) -> bytes:
    """Read a request's body. Raises ApiError for another content type, a large body, or a timeout."""
    kind = request.headers.get("content-type", "none")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            415,
            "the body has the wrong content type",
            expected="the header Content-Type: application/json",
            got=kind,
            remedy="add the header",
        )
    length = request.headers.get("content-length", "0")
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            if not length.isdigit() or int(length[:20]) <= BODY_BYTES:
                async for part in request.stream():
                    body += part
                    if len(body) > BODY_BYTES:
                        break
                else:
                    return bytes(body)
    except TimeoutError as error:
        raise ApiError(
            408,
            "the body did not arrive in time",
            expected=f"the whole body within {_BODY_SECONDS:g} s",
            got=f"{len(body)} bytes",
            remedy="send the request again",
        ) from error
    raise ApiError(
        413,
        "the body is too large",
        expected=f"at most {BODY_BYTES} bytes",
        got=f"{max(len(body), int(length[:20]) if length.isdigit() else 0)} or more",
        remedy="shorten the prompt",
    )


async def _left(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _later(problem: str, expected: str, got: str) -> ApiError:
    return ApiError(503, problem, expected=expected, got=got, remedy="try again later", code="unavailable", retry=5)


async def _answer_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {} if error.retry is None else {"Retry-After": str(error.retry)}
    if error.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not read
    return JSONResponse(error.body, error.status, headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    wrong = ApiError(
        error.status_code,
        "the path does not exist" if error.status_code == 404 else "the path does not take this method",
        expected="POST /v1/images/generations, GET /v1/models, /health, /health/ready or /metrics",
        got=f"{request.method} {request.url.path}",
        remedy="correct the path or the method",
    )
    return JSONResponse(wrong.body, error.status_code, dict(error.headers or {}))


async def _answer_fault(_request: Request, error: Exception) -> Response:
    fault = ApiError(
        500,
        "the server failed",
        expected="an answer",
        got=type(error).__name__,
        remedy="report the error with the server's log",
    )
    return JSONResponse(fault.body, 500)
