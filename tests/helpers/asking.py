"""Requests to an ASGI application in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def content(self) -> Any:
        return json.loads(self.body)

    def error(self, status: int, *parts: str) -> str:
        """Check that it is an error of the API with expected, got and remedy. Returns: the message."""
        assert self.status == status, self.body
        error = self.content["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        for part in ("expected: ", "got: ", "remedy: ", *parts):
            assert part in error["message"], error["message"]
        return error["message"]


JSON = (("content-type", "application/json"),)


async def ask(
    app: Any,
    method: str,
    path: str,
    body: Any = b"",
    headers: tuple[tuple[str, str], ...] = JSON,
    leaves: asyncio.Event | None = None,
) -> Reply:
    """
    Args:
        body: bytes, a list of them as they come, or a value for JSON; leaves: when the client goes, never by default.
    """
    if not isinstance(body, (bytes, list)) or (isinstance(body, list) and not all(isinstance(x, bytes) for x in body)):
        body = json.dumps(body).encode()
    parts = body if isinstance(body, list) else [body]
    messages = [{"type": "http.request", "body": part, "more_body": i + 1 < len(parts)} for i, part in enumerate(parts)]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    path, _, query = path.partition("?")
    await app(
        {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        },
        receive,
        send,
    )
    start = sent[0]
    found = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    return Reply(start["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))
