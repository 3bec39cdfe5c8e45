"""Latency and throughput of a served bundle, and the fate of its requests when a replica is killed.

    python bench/serve.py BUNDLE [--replicas 2] [--requests 1000] [--clients 1 4 16] [--steps 20] [--kill] [--json FILE]
    python bench/serve.py BUNDLE --minutes 60 [--kill-every 5] [--clients 8] [--steps 20]

Starts `trtconvert serve BUNDLE` on this machine. Each client requests one image after the other. For each number of clients the
script prints the latency of a request (median, 95th and 99th percentile) and images per second. With --kill there is one round,
and one replica is killed (SIGKILL) when half of the requests are answered. Every request has its own seed, and the script
counts answers by seed: none may be missing or duplicate. Nothing is asserted about speed.

With --minutes the clients ask without a break, and one replica is killed every --kill-every minutes. Seeds repeat:
the bench counts requests without an image, images that differ from the first image of their seed, and the memory of all processes
of the server by the minute.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import processor

START_SECONDS, ANSWER_SECONDS = 300, 300
KILL_AFTER = 0.05
"""Seconds after an answer until the replicas have begun their next batches."""

REPLICA = "ray::ServeReplica"
"""Ray's name for the processes of replicas."""


@dataclass
class Served:
    """A server that is ready, and its output."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str]

    def ask(self, content: dict[str, Any]) -> tuple[int, Any]:
        """Returns the status and content of the answer to a request for images."""
        return self.exchange("POST", "/v1/images/generations", content)

    def exchange(self, method: str, path: str, content: dict[str, Any] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        with contextlib.closing(connection):
            body = None if content is None else json.dumps(content)
            connection.request(method, path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read()
        return reply.status, json.loads(text) if reply.getheader(
            "content-type"
        ) == "application/json" else text.decode()

    def metric(self, name: str) -> float:
        """Returns a counter or gauge without labels."""
        _, text = self.exchange("GET", "/metrics")
        (value,) = re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)
        return float(value)

    def processes(self) -> dict[int, str]:
        """Returns the process ids and command lines of the server's processes on this machine."""
        parents = dict[int, int]()
        names = dict[int, str]()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                stat = (folder / "stat").read_text()
                parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
                names[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )

        def is_ours(pid: int) -> bool:
            while pid > 1 and pid != self.process.pid:
                pid = parents.get(pid, 0)
            return pid == self.process.pid

        return {pid: name for pid, name in sorted(names.items()) if is_ours(pid)}

    def replicas(self) -> list[int]:
        """Returns the process ids of the replicas."""
        return [pid for pid, name in self.processes().items() if name.startswith(REPLICA)]

    def memory(self) -> int:
        """Returns the bytes of the server's processes (proportional set size)."""
        total = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
                total += 1024 * int(found[1]) if found else 0
        return total


@contextlib.contextmanager
def served(bundle: Path, *options: object) -> Iterator[Served]:
    """Yields `trtconvert serve` at a free port, once it is ready. SIGTERM stops the server in the end."""
    command = [sys.executable, "-m", "trtconvert.cli", "serve", str(bundle), "--port", "0", *map(str, options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines, ready = list[str](), threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("ready: "):
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        ready.wait(START_SECONDS)
        found = re.search(r"^ready: http://[^ ]*:(\d+)/", "\n".join(lines), re.MULTILINE)
        if found is None:
            raise RuntimeError("the server does not come up:\n" + "\n".join(lines))
        yield Served(process, int(found[1]), lines)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
        reader.join(10)


@dataclass
class Round:
    """The answers to a number of requests.

    Attributes:
        answers: (seed, status, content, seconds) as they came.
        seconds: of all together.
    """

    answers: list[tuple[int, int, Any, float]] = field(default_factory=list)
    seconds: float = 0.0

    def missing_and_doubled(self, seeds: Sequence[int]) -> tuple[int, int]:
        """Returns the number of seeds without an image, and of images beyond one for each seed."""
        images = Counter(
            image["seed"] for _, status, content, _ in self.answers if status == 200 for image in content["data"]
        )
        return sum(images[seed] == 0 for seed in seeds), sum(images.values()) - len(images)


def asked(server: Served, seeds: Sequence[int], clients: int, kill_at: int | None = None, **fields: Any) -> Round:
    """Asks for an image of each seed.

    Args:
        clients: number of concurrent clients; kill_at: number of answers before a replica is killed; fields: of the requests.
    """
    left, found, lock = list(reversed(seeds)), Round(), threading.Lock()
    started = time.perf_counter()

    def work() -> None:
        while True:
            with lock:
                if not left:
                    return
                seed = left.pop()
            began = time.perf_counter()
            try:
                status, content = server.ask({"seed": seed, **fields})
            except (OSError, http.client.HTTPException) as error:
                status, content = 0, str(error)
            with lock:
                found.answers.append((seed, status, content, time.perf_counter() - began))
                if len(found.answers) == kill_at:
                    threading.Timer(KILL_AFTER, lambda: os.kill(server.replicas()[0], signal.SIGKILL)).start()

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.seconds = time.perf_counter() - started
    return found


SEEDS = 500
"""Seeds that a long load repeats."""


@dataclass
class Load:
    """Counts of a long load.

    Attributes:
        asked, answered: requests, and requests with an image; different: images that differ from the first one of their seed.
        kills: replicas that were killed; memory: bytes by the minute.
    """

    asked: int = 0
    answered: int = 0
    different: int = 0
    kills: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)


def load(server: Served, clients: int, minutes: float, kill_every: float, **fields: Any) -> Load:
    """Asks without a break, and kills a replica every few minutes.

    Args:
        clients: number of requests at a time; fields: of the requests.
    """
    counts, first, lock = Load(), dict[int, str](), threading.Lock()
    end = time.monotonic() + 60 * minutes

    def work() -> None:
        while time.monotonic() < end:
            with lock:
                seed = counts.asked % SEEDS
                counts.asked += 1
            try:
                status, content = server.ask({"seed": seed, **fields})
            except (OSError, http.client.HTTPException):
                status, content = 0, {}
            with lock:
                if status != 200:
                    counts.refused[status] += 1
                    continue
                counts.answered += 1
                image = hashlib.sha256(content["data"][0]["b64_json"].encode()).hexdigest()
                counts.different += first.setdefault(seed, image) != image

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    next_kill = time.monotonic() + 60 * kill_every
    while (now := time.monotonic()) < end:
        if now >= next_kill and (replicas := server.replicas()):
            os.kill(replicas[counts.kills % len(replicas)], signal.SIGKILL)
            counts.kills, next_kill = counts.kills + 1, now + 60 * kill_every
        counts.memory.append(server.memory())
        time.sleep(max(1.0, min(60.0, end - time.monotonic(), next_kill - time.monotonic())))
    for thread in threads:
        thread.join()
    return counts


def tell_load(server: Served, given: argparse.Namespace) -> None:
    found = load(server, given.clients[-1], given.minutes, given.kill_every, steps=given.steps)
    memory = [round(size / 2**20) for size in found.memory]
    print(
        f"{given.minutes:g} minutes, {given.clients[-1]} clients: {found.asked} requests, {found.answered} images, refused "
        f"{dict(found.refused)}, {found.different} images that differ from the first of their seed, {found.kills} replicas "
        f"killed, {server.metric('trtconvert_lost_batches_total'):.0f} batches drawn again"
    )
    print(f"memory of the server's processes by the minute, MiB: {memory}")
    if given.json is not None:
        row = dataclasses.asdict(found) | {"memory": memory, "minutes": given.minutes}
        given.json.write_text(
            json.dumps({"machine": processor(), "date": str(datetime.date.today()), "load": row}, indent=1)
        )


def figures(clients: int, found: Round) -> dict[str, Any]:
    times = sorted(seconds for _, status, _, seconds in found.answers if status == 200)
    cuts = statistics.quantiles(times, n=100) if len(times) > 1 else times * 99
    return {
        "clients": clients,
        "answered": len(times),
        "refused": dict(Counter(status for _, status, _, _ in found.answers if status != 200)),
        "median_ms": 1e3 * statistics.median(times),
        "p95_ms": 1e3 * cuts[94],
        "p99_ms": 1e3 * cuts[98],
        "images_per_s": len(times) / found.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--replicas", default="2")
    parser.add_argument("--cpus", default="1")
    parser.add_argument("--max-batch", default="8")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--minutes", type=float, help="duration of requests without a break")
    parser.add_argument("--kill-every", type=float, default=5.0, metavar="MINUTES")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = [
        "--replicas",
        given.replicas,
        "--cpus",
        given.cpus,
        "--max-batch",
        given.max_batch,
        "--queue-limit",
        1000,
    ]
    started = time.perf_counter()
    with served(given.bundle, *options) as server:
        until_ready = time.perf_counter() - started
        print(f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores; {server.lines[-1]}")
        print(
            f"{given.replicas} replicas, batches of at most {given.max_batch}, {given.steps} steps, ready in {until_ready:.1f} s"
        )
        seeds, rows = range(given.requests), []
        asked(server, range(20), 4, steps=given.steps)  # warms up
        if given.minutes:
            tell_load(server, given)
            return
        for clients in given.clients[-1:] if given.kill else given.clients:
            found = asked(server, seeds, clients, len(seeds) // 2 if given.kill else None, steps=given.steps)
            rows.append(row := figures(clients, found))
            latency = f"{row['median_ms']:.0f} ms, 95 % {row['p95_ms']:.0f}, 99 % {row['p99_ms']:.0f}"
            print(
                f"{clients:4} clients: {row['answered']} answered, {sum(row['refused'].values())} refused; latency {latency}; "
                f"{row['images_per_s']:.1f} images/s"
            )
            if given.kill:
                row["missing"], row["doubled"] = found.missing_and_doubled(seeds)
                row["lost_batches"] = server.metric("trtconvert_lost_batches_total")
                print(
                    f"      one replica killed half way: {row['missing']} requests without an image, {row['doubled']} images "
                    f"twice; {row['lost_batches']:.0f} batches drawn again"
                )
    print(server.lines[-1])
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": processor(), "rounds": rows}, indent=1))


if __name__ == "__main__":
    main()
