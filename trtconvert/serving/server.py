"""`trtconvert serve`: runs the HTTP front, the queue and the replicas until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtconvert.bundle import check_files, read_unchanged
from trtconvert.errors import TrtconvertError, UserError, first_line
from trtconvert.serving.api import Limits

if TYPE_CHECKING:
    from trtconvert.serving.cluster import Cluster, Placement
    from trtconvert.serving.front import Front

_PACKAGES = ("ray", "starlette", "uvicorn", "prometheus_client")
_BACKLOG = 1024
_LOOK_SECONDS = 0.1
_CUT_SECONDS = 5.0
"""Time to answer unfinished requests with an error."""


@dataclass(frozen=True)
class Options:
    """See `trtconvert serve --help`. All seconds are limits.

    Attributes:
        batch: largest number of images of a batch; the bundle may take fewer.
        wait: longest wait of an image for others in seconds.
        queue: largest number of unanswered images.
    """

    host: str
    port: int
    limits: Limits
    batch: int
    wait: float
    queue: int
    request_seconds: float
    drain_seconds: float


def serve(bundle: Path, options: Options, placement: Placement, say: Callable[[str], None]) -> int:
    """Serve a bundle until a signal. Returns the exit code, 1 if requests were cut short.

    Raises:
        UserError: the folder is not a bundle, or the address is taken.
        BackendUnavailable: no replica starts.
    """
    require_packages()
    read_unchanged(bundle, lambda manifest: check_files(bundle, manifest))
    with _listening(options.host, options.port) as listener:
        from trtconvert.serving.cluster import Cluster

        cluster = Cluster(bundle, f"trtconvert-{options.limits.model}", placement, say)
        try:
            unfinished = asyncio.run(_served(cluster, listener, options, say))
        finally:
            cluster.stop()
    if unfinished:
        say(f"ended; {unfinished} requests were cut short with status 503")
        return 1
    say("ended; every request was answered")
    return 0


def require_packages() -> None:
    """Raise UserError if a package for serving is not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            "serving needs packages that are not installed",
            expected=", ".join(_PACKAGES),
            got=f"no {', '.join(missing)}",
            remedy="pip install 'trtconvert[serve]'",
        )


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a listening socket.

    Raises:
        UserError: the address is not one of this machine, or is taken.
    """
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _no_address(host, port, error) from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise _no_address(host, port, error) from error
        yield listener


def _no_address(host: str, port: int, error: Exception) -> UserError:
    return UserError(
        f"the server cannot listen at {host}, port {port}",
        expected="an address of this machine, and a free port",
        got=getattr(error, "strerror", None) or first_line(error),
        remedy="give another --host or --port; --port 0 takes a free port",
    )


async def _served(cluster: Cluster, listener: socket.socket, options: Options, say: Callable[[str], None]) -> int:
    """Answer requests until a signal. Returns the number of requests that were cut short."""
    import uvicorn

    from trtconvert.serving.dispatch import Dispatcher
    from trtconvert.serving.front import Front

    dispatcher = Dispatcher(cluster, batch=options.batch, wait=options.wait, limit=options.queue)
    front = Front(cluster, dispatcher, options.limits, seconds=options.request_seconds)
    # h11 limits the size of headers.
    config = uvicorn.Config(
        front.app,
        http="h11",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # we handle signals

    server = Server(config)
    signals = list[signal.Signals]()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.append, number)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        say(f"listening at {address}; loading the model")
        cluster.start()
        while not signals:
            await asyncio.sleep(_LOOK_SECONDS)
            if cluster.failure is not None:
                raise cluster.failure
            if serving.done():
                serving.result()
                raise TrtconvertError(
                    "the HTTP server stopped",
                    expected="a running server",
                    got="its end without an error",
                    remedy="start it again",
                )
            if front.offer is None and cluster.offer is not None and cluster.running:
                dispatcher.batch = min(options.batch, cluster.offer.batch)
                front.offer = cluster.offer
                say(f"ready: {address}/v1/images/generations, {cluster.running} replicas, {cluster.offer.backend}")
        return await _drained(front, options.drain_seconds, signals, say)
    finally:
        server.should_exit = True
        with contextlib.suppress(Exception):
            await asyncio.wait_for(serving, 5)


async def _drained(front: Front, seconds: float, signals: list[signal.Signals], say: Callable[[str], None]) -> int:
    """Refuse new requests and finish running ones. Returns the number of requests that were cut short."""
    front.draining = True
    if front.active:
        say(
            f"{signals[0].name}: new requests are refused; finishing {front.active} within {seconds:g} s; a second signal ends "
            "the server at once"
        )
    until = time.monotonic() + seconds
    while front.active and time.monotonic() < until and len(signals) < 2:
        await asyncio.sleep(_LOOK_SECONDS / 2)
    if unfinished := front.active:
        front.cut.set()
        with contextlib.suppress(TimeoutError):  # a request's body may still be arriving
            async with asyncio.timeout(_CUT_SECONDS):
                while front.active:
                    await asyncio.sleep(_LOOK_SECONDS / 2)
    return unfinished
