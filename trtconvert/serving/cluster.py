"""Runs replicas of a bundle on a Ray cluster as one deployment of Ray Serve, without Ray's HTTP proxies."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtconvert.errors import BackendUnavailable, TrtconvertError, UserError, first_line
from trtconvert.serving.dispatch import BATCHES_PER_REPLICA, ReplicaLost
from trtconvert.serving.jobs import Answer, Batch, Offer, Refusal, refusal

_NAME = "Replica"
_STORE_BYTES = 512 * 2**20
"""Result memory of a local cluster, for hundreds of images; further results go to the disk."""

_LOOK_SECONDS = 0.5
_LOOK_TIMES_TO_TELL = 60
"""Number of looks at the cluster between two messages about waiting."""

_USELESS_SECONDS = 2.0
"""Time that a replica without its bundle keeps a batch: Ray gives batches to idle replicas, and needs seconds to replace one."""

_REACH_SECONDS = 5.0
_STOP_SECONDS = 20.0
"""Longest wait for idle replicas to stop."""


@dataclass(frozen=True)
class Placement:
    """The placement of replicas.

    Attributes:
        address: address of a Ray cluster; None for a cluster of this machine, which ends with the server.
        least, most: limits of the number of replicas; None for one per GPU of the cluster, or one without GPUs.
        device: "cuda" for a GPU each; "cpu"; "auto" for cuda if the cluster has GPUs.
        cpus: cores that Ray reserves for each.
        patience: longest start of a replica in seconds.
    """

    address: str | None
    least: int | None
    most: int | None
    device: Literal["auto", "cuda", "cpu"]
    cpus: float
    patience: float


class Replica:
    """The deployment's class: one loaded bundle.

    Args:
        bundle: folder of the bundle, the same path on every machine; device: see `Drawer`.
        place: the server's current folder; weights and modules of entry points are loaded from there.
    """

    def __init__(self, bundle: str, device: str, place: str) -> None:
        self._drawer: Any = None
        self._problem: Refusal | None = None
        self._failed = False
        self._lock = asyncio.Lock()
        with suppress(OSError):  # another machine may lack the folder
            os.chdir(place)
        if place not in sys.path:
            sys.path.append(place)
        from trtconvert.serving.drawing import Drawer

        try:
            self._drawer = Drawer(Path(bundle), device)
        except TrtconvertError as error:
            # Ray would retry after an exception, and report a traceback.
            self._problem = refusal(error)

    async def offer(self) -> Offer | Refusal:
        """Return the bundle's offer, or the reason why the bundle did not load."""
        return self._problem or self._drawer.offer

    async def draw(self, batch: Batch) -> list[Answer] | Refusal:
        """Draw one batch at a time, in a thread, so that Ray's health checks are answered meanwhile.

        Returns the reason alone if the bundle did not load.
        """
        if self._problem is not None:
            self._failed = True
            await asyncio.sleep(_USELESS_SECONDS)
            return self._problem
        async with self._lock:
            answers: list[Answer] = await asyncio.to_thread(self._drawer, batch)
        self._failed = any(isinstance(answer, Refusal) and answer.whose != "client" for answer in answers)
        return answers

    async def check_health(self) -> None:
        """Raise RuntimeError if the replica cannot draw any more, so that Ray replaces it.

        The server first hears of a bundle that did not load, by `offer` or `draw`.
        """
        if not self._failed:
            return
        if self._problem is not None:
            raise RuntimeError(self._problem.problem)
        self._drawer.check_device()


class Cluster:
    """The replicas of one server; implements `trtconvert.serving.dispatch.Pool`.

    Args:
        bundle: folder of the bundle; name: name of the application on the cluster.
        say: prints a line.

    Attributes:
        running: number of running replicas.
        offer: the offer of the replicas, after the first has started.
        failure: why no replica can start.

    Raises:
        BackendUnavailable: the cluster cannot be reached. UserError: this machine has too few GPUs or cores.
    """

    def __init__(self, bundle: Path, name: str, placement: Placement, say: Callable[[str], None]) -> None:
        self.running, self.offer = 0, None
        self.failure: TrtconvertError | None = None
        self._bundle, self._name, self._placement, self._say = bundle, name, placement, say
        self._handle: Any = None
        self._stopping, self._telling = threading.Event(), threading.Lock()
        _connect(placement.address)
        self._gpus = _gpus(placement)

    def start(self) -> None:
        """Start the replicas in background threads."""
        for work in (self._deploy, self._watch):
            threading.Thread(target=work, daemon=True, name=work.__name__).start()

    async def draw(self, batch: Batch) -> Sequence[Answer]:
        """Draw a batch on a replica. Raises ReplicaLost if the replica or its machine is gone, or has not loaded the bundle."""
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        try:
            found: list[Answer] | Refusal = await self._handle.draw.remote(batch)
        except RayTaskError:  # an exception in a replica that keeps running
            raise
        except (RayError, RayServeException) as error:
            raise ReplicaLost(first_line(error)) from error
        if isinstance(found, Refusal):
            raise ReplicaLost(f"{found.problem}; expected: {found.expected}; got: {found.got}")
        return found

    def stop(self) -> None:
        """Stop the replicas, and the server's own cluster, within a limited time. Prints no more changes of replicas."""
        with self._telling:
            self._stopping.set()
        thread = threading.Thread(target=self._leave, daemon=True)
        thread.start()
        thread.join(_STOP_SECONDS)
        if thread.is_alive():
            self._say(f"the replicas did not stop in {_STOP_SECONDS:g} s; `serve shutdown` removes them")

    def _leave(self) -> None:
        import ray
        from ray import serve

        with suppress(Exception):  # the cluster may be gone already
            if self._placement.address is not None:
                serve.delete(self._name)
            ray.shutdown()

    def _deploy(self) -> None:
        from ray import serve

        try:
            serve.start(proxy_location="Disabled")
            replicas = self._replicas()
            deployment = serve.deployment(
                Replica,
                name=_NAME,
                max_ongoing_requests=BATCHES_PER_REPLICA,
                ray_actor_options={"num_cpus": self._placement.cpus, "num_gpus": int(self._gpus)},
                health_check_period_s=2.0,
                graceful_shutdown_timeout_s=10.0,
                **replicas,
            )
            device = "cuda" if self._gpus else "cpu"
            bound = deployment.bind(str(self._bundle.absolute()), device, str(Path.cwd()))  # type: ignore[attr-defined]
            handle = serve.run(bound, name=self._name, route_prefix=None)
            found: Offer | Refusal = handle.offer.remote().result(timeout_s=60)
            if isinstance(found, Refusal):
                self.failure = BackendUnavailable(
                    found.problem, expected=found.expected, got=found.got, remedy=found.remedy
                )
                return
            self._handle, self.offer = handle, found
        except Exception as error:
            if not self._stopping.is_set() and self.failure is None:
                self.failure = _not_deployed(first_line(error))

    def _replicas(self) -> dict[str, Any]:
        least, most = self._placement.least, self._placement.most
        if least is None or most is None:
            import ray

            least = most = max(1, int(ray.cluster_resources().get("GPU", 0))) if self._gpus else 1
        if least == most:
            return {"num_replicas": least}
        # A replica that draws without a pause has BATCHES_PER_REPLICA requests.
        scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": BATCHES_PER_REPLICA * 0.75}
        return {"autoscaling_config": scaling}

    def _watch(self) -> None:
        """Update `running` and print changes of replicas."""
        from ray import serve

        started, told = time.monotonic(), 0
        while not self._stopping.wait(_LOOK_SECONDS):
            try:
                application = serve.status().applications.get(self._name)
            except Exception as error:  # Ray's errors without a controller
                self._tell_running(0, f"the cluster does not answer: {first_line(error)}")
                continue
            deployment = application.deployments.get(_NAME) if application else None
            found = deployment.replica_states if deployment else {}
            states = {str(getattr(state, "value", state)): count for state, count in found.items()}  # an enum, or text
            message = (deployment and deployment.message) or (application and application.message) or ""
            self._tell_running(states.get("RUNNING", 0), "")
            if self.offer is not None:
                continue
            if application is not None and application.status == "DEPLOY_FAILED":
                self.failure = self.failure or _not_deployed(_last_line(message))
            waited = time.monotonic() - started
            if waited > self._placement.patience:
                self.failure = self.failure or _not_deployed(
                    f"none after {waited:.0f} s (--start-seconds); {_first(message) or 'no reason'}"
                )
            told += 1
            if told % _LOOK_TIMES_TO_TELL == 0 and self.failure is None:
                waits = ", ".join(f"{count} {state.lower()}" for state, count in states.items()) or "none yet"
                self._tell(
                    f"waiting for replicas, at most {self._placement.patience:.0f} s: {waits}. {_first(message)}".rstrip()
                )

    def _tell_running(self, running: int, why: str) -> None:
        if running != self.running and self.offer is not None:
            self._tell(f"{running} of the replicas run, {self.running} before" + (f"; {why}" if why else ""))
        self.running = running

    def _tell(self, line: str) -> None:
        with self._telling:
            if not self._stopping.is_set():
                self._say(line)


def _first(message: str) -> str:
    return message.strip().splitlines()[0] if message.strip() else ""


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason"


def _not_deployed(got: str) -> BackendUnavailable:
    return BackendUnavailable(
        "the replicas do not start",
        expected="a replica with the bundle, at the same path and with the same trtconvert on every machine",
        got=got,
        remedy="read Ray's logs (/tmp/ray/session_latest/logs), free or add GPUs, use fewer --replicas or --cpus, or set "
        "RAY_AUTH_MODE as on the cluster",
    )


def require_reachable(address: str) -> None:
    """Check the address of a cluster, which Ray would try for minutes.

    Raises:
        UserError: the address has a wrong form. BackendUnavailable: no cluster listens there.
    """
    host, colon, port = address.rpartition(":")
    if address == "auto":
        return
    if not (colon and host and "/" not in host and port.isascii() and port.isdigit() and int(port) < 2**16):
        raise UserError(
            "--address is not the address of a Ray cluster",
            expected="auto, or HOST:PORT as printed by `ray start --head`",
            got=address,
            remedy="correct the option, or leave it out for a cluster of this machine alone",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
    except OSError as error:
        raise _unreachable(address, error.strerror or first_line(error)) from error


def _has_token() -> bool:
    """Return whether Ray finds a token for clusters that need one, such as those of `ray start`."""
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or (Path.home() / ".ray" / "auth_token").is_file()


def _unreachable(address: str | None, got: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"the Ray cluster cannot {'start on this machine' if address is None else f'be reached at {address}'}",
        expected="a cluster with the Ray and the Python of this machine",
        got=got,
        remedy="start a cluster with `ray start --head`, or leave out --address for a cluster of this machine alone"
        if address is not None
        else "read the logs in /tmp/ray/session_latest/logs",
    )


def _connect(address: str | None) -> None:
    """Connect to a cluster, or start one. Raises BackendUnavailable if that fails."""
    if address is not None:
        require_reachable(address)
    # Ray reads these variables at import. They turn off usage reports, and protect a cluster of our own by a token, because
    # clients of a cluster's ports can run any code.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None or _has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    if address is None:
        os.environ.pop("RAY_ADDRESS", None)
    import ray
    import ray.serve  # sets up its log

    # Hides the routers' warnings; `Cluster` prints changes of replicas.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    if address is None:
        own["_node_ip_address"] = "127.0.0.1"
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **(own if address is None else {}),
        )
    except Exception as error:  # Ray raises many classes
        raise _unreachable(address, _reason(error)) from error


def _reason(error: BaseException) -> str:
    """Return the root cause: texts of Ray's errors contain the errors below them."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.startswith("ray.exceptions.")]
    return lines[-1].removeprefix("ray.exceptions.") if lines else first_line(error)


def _gpus(placement: Placement) -> bool:
    """Return whether replicas take a GPU each.

    Raises:
        UserError: the server's own cluster, which cannot grow, has too few GPUs or cores.
    """
    import ray

    there = ray.cluster_resources()
    on_gpus = placement.device == "cuda" or (placement.device == "auto" and there.get("GPU", 0) >= 1)
    if placement.address is None:
        replicas = placement.least or 1
        for name, each, option in (("GPU", int(on_gpus), "--device cpu"), ("CPU", placement.cpus, "fewer --cpus")):
            if replicas * each > there.get(name, 0):
                raise UserError(
                    f"this machine has too few {name}s for its replicas",
                    expected=f"{replicas * each:g} {name}s, {each:g} for each of {replicas}",
                    got=f"{there.get(name, 0):g}",
                    remedy=f"use fewer --replicas, or {option}, or the --address of a larger Ray cluster",
                )
    return on_gpus
