"""Replicas of a bundle on a Ray cluster, as one deployment of Ray Serve.

Ray's own HTTP proxies are not started: `front.py` is what clients reach.
"""

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
"""Of a local cluster's memory for results: hundreds of images; what does not fit goes to the disk."""

_LOOK_SECONDS = 0.5
_LOOK_TIMES_TO_TELL = 60
"""Looks at the cluster, after which what it waits for is told."""

_REACH_SECONDS = 5.0
_STOP_SECONDS = 20.0
"""What taking replicas down may take. They have nothing to do by then."""


@dataclass(frozen=True)
class Placement:
    """Where replicas run.

    Attributes:
        address: of a Ray cluster; None for one of this machine's own, which ends with the server.
        least, most: replicas; None for one per GPU of the cluster, one without GPUs. Between different numbers Ray decides.
        device: "cuda", a GPU for each; "cpu"; "auto" where the cluster has GPUs now.
        cpus: cores that Ray sets aside for each.
        patience: seconds in which a replica has to be there.
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
        bundle: its folder, at the same place on every machine; device: of `Drawer`.
        place: the server's current folder, where weights and modules of entry points are looked for.
    """

    def __init__(self, bundle: str, device: str, place: str) -> None:
        self._drawer: Any = None
        self._problem: Refusal | None = None
        self._lock = asyncio.Lock()
        with suppress(OSError):  # another machine may have no such folder
            os.chdir(place)
        if place not in sys.path:
            sys.path.append(place)
        from trtconvert.serving.drawing import Drawer

        try:
            self._drawer = Drawer(Path(bundle), device)
        except TrtconvertError as error:
            # Raised, it would be tried again and again, and arrive as a traceback.
            self._problem = refusal(error)

    async def offer(self) -> Offer | Refusal:
        """What it draws, or why it cannot."""
        return self._problem or self._drawer.offer

    async def draw(self, batch: Batch) -> list[Answer]:
        """See `Drawer`. One batch after the other; meanwhile Ray gets its answers."""
        if self._problem is not None:
            return [self._problem] * len(batch.orders)
        async with self._lock:
            return await asyncio.to_thread(self._drawer, batch)


class Cluster:
    """The replicas of one server. A `trtconvert.serving.dispatch.Pool`.

    Args:
        bundle: folder; name: of the application on the cluster; batch: images of a batch.
        say: tells people a line.

    Attributes:
        running: replicas that draw.
        offer: what they draw, once one of them is there.
        failure: why none will be.

    Raises:
        BackendUnavailable: there is no such cluster. UserError: this machine has too few GPUs or cores.
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
        """Begin to bring up replicas, in threads of this object's own."""
        for work in (self._deploy, self._watch):
            threading.Thread(target=work, daemon=True, name=work.__name__).start()

    async def draw(self, batch: Batch) -> Sequence[Answer]:
        """
        Raises:
            ReplicaLost: the replica went, or its machine.
        """
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        try:
            return await self._handle.draw.remote(batch)
        except RayTaskError:  # an exception in the replica, which goes on
            raise
        except (RayError, RayServeException) as error:
            raise ReplicaLost(first_line(error)) from error

    def stop(self) -> None:
        """Take the replicas down, and the cluster where it is the server's own. Waits for a limited time.

        Nothing is told from here on of replicas that come or go.
        """
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

        with suppress(Exception):  # the cluster may have gone before
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
        # A replica that draws without a break has all the batches that it may have.
        scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": BATCHES_PER_REPLICA * 0.75}
        return {"autoscaling_config": scaling}

    def _watch(self) -> None:
        """Keep `running` up to date; say what comes and goes."""
        from ray import serve

        started, told = time.monotonic(), 0
        while not self._stopping.wait(_LOOK_SECONDS):
            try:
                application = serve.status().applications.get(self._name)
            except Exception as error:  # whatever Ray raises where its controller has gone
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
                    f"none after {waited:.0f} s (--start-seconds); {first_line(Exception(message))}"
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
    """What a traceback says in the end."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason"


def _not_deployed(got: str) -> BackendUnavailable:
    return BackendUnavailable(
        "the replicas do not come up",
        expected="a replica that has loaded the bundle, at the same path and with the same trtconvert on every machine",
        got=got,
        remedy="look into Ray's logs (/tmp/ray/session_latest/logs), free or add GPUs, ask for fewer --replicas or --cpus, or "
        "set RAY_AUTH_MODE as where the cluster was started",
    )


def require_reachable(address: str) -> None:
    """Ray itself would try for minutes.

    Raises:
        UserError: an address of another form; BackendUnavailable: nothing listens there.
    """
    host, colon, port = address.rpartition(":")
    if address == "auto":
        return
    if not (colon and host and "/" not in host and port.isascii() and port.isdigit() and int(port) < 2**16):
        raise UserError(
            "--address names no Ray cluster",
            expected="auto, or HOST:PORT as `ray start --head` prints it",
            got=address,
            remedy="correct it, or leave it out for a cluster of this machine alone",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
    except OSError as error:
        raise _unreachable(address, error.strerror or first_line(error)) from error


def _has_token() -> bool:
    """Whether Ray would find a token for clusters that want one, as those of `ray start` do."""
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or (Path.home() / ".ray" / "auth_token").is_file()


def _unreachable(address: str | None, got: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"the Ray cluster cannot {'start on this machine' if address is None else f'be reached at {address}'}",
        expected="a cluster with the Ray and the Python of this machine",
        got=got,
        remedy="start one with `ray start --head`, or leave out --address for one of this machine alone"
        if address is not None
        else "look into /tmp/ray/session_latest/logs",
    )


def _connect(address: str | None) -> None:
    """
    Raises:
        BackendUnavailable: there is no such cluster.
    """
    if address is not None:
        require_reachable(address)
    # Ray reads these when it is imported. It tells its makers how it is used, unless it is asked not to; and what starts here
    # alone lets nobody in who does not know its token, since whoever reaches a cluster's ports may run anything there.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None or _has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    if address is None:
        os.environ.pop("RAY_ADDRESS", None)
    import ray
    import ray.serve  # which sets up its log

    # What its routers say of every hesitation; what becomes of replicas is told by `Cluster`.
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
    except Exception as error:  # of many classes
        raise _unreachable(address, _reason(error)) from error


def _reason(error: BaseException) -> str:
    """What was first: Ray's errors hold those below them in their text."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.startswith("ray.exceptions.")]
    return lines[-1].removeprefix("ray.exceptions.") if lines else first_line(error)


def _gpus(placement: Placement) -> bool:
    """Whether replicas take a GPU each.

    Raises:
        UserError: the server's own cluster, which nothing is added to, has not what its replicas want.
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
                    remedy=f"ask for fewer --replicas, or {option}, or give the --address of a larger Ray cluster",
                )
    return on_gpus
