"""`trtconvert serve`: a front, a queue and replicas, from the first message to the last."""

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
"""In which requests that are not finished are answered so."""


@dataclass(frozen=True)
class Options:
    """See `trtconvert serve --help`. All seconds are limits.

    Attributes:
        batch: images drawn at once, fewer where the bundle takes fewer.
        wait: seconds that an image waits for others.
        queue: images that are asked for and not answered.
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
    """Serve a bundle until a signal comes. Returns: the exit code, 1 where requests were left unanswered.

    Raises:
        UserError: no bundle, or the address is taken.
        BackendUnavailable: no replica comes up.
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
        say(f"ended; {unfinished} requests were answered that their images are not drawn (503)")
        return 1
    say("ended; every request was answered")
    return 0


def require_packages() -> None:
    """
    Raises:
        UserError: what serving needs is not installed.
    """
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
    """A socket that listens; requests wait there until they are answered.

    Raises:
        UserError: the address is none of this machine, or taken.
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
        f"nothing can listen at {host}, port {port}",
        expected="an address of this machine, and a port that is free",
        got=getattr(error, "strerror", None) or first_line(error),
        remedy="give another --host or --port; --port 0 takes a free one",
    )


async def _served(cluster: Cluster, listener: socket.socket, options: Options, say: Callable[[str], None]) -> int:
    """Answer requests until a signal comes. Returns: requests that were cut short."""
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
            yield  # signals are ours

    server = Server(config)
    signals = list[signal.Signals]()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.append, number)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        say(f"listening at {address}; the model is being loaded")
        cluster.start()
        while not signals:
            await asyncio.sleep(_LOOK_SECONDS)
            if cluster.failure is not None:
                raise cluster.failure
            if serving.done():
                serving.result()
                raise TrtconvertError(
                    "the HTTP server ended", expected="to go on", got="an end", remedy="start it again"
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
    """Take no more requests, and finish what there is. Returns: requests that were cut short."""
    front.draining = True
    if front.active:
        say(
            f"{signals[0].name}: no more requests are taken; {front.active} are finished, in at most {seconds:g} s; "
            "a second signal ends at once"
        )
    until = time.monotonic() + seconds
    while front.active and time.monotonic() < until and len(signals) < 2:
        await asyncio.sleep(_LOOK_SECONDS / 2)
    if unfinished := front.active:
        front.cut.set()
        with contextlib.suppress(TimeoutError):  # of a body that still comes
            async with asyncio.timeout(_CUT_SECONDS):
                while front.active:
                    await asyncio.sleep(_LOOK_SECONDS / 2)
    return unfinished
