"""The part of the OpenAI images API that bundles can answer. Requests are read strictly, and errors have the API's form.

Source: the API's reference, `POST /v1/images/generations`. `seed` and `steps` are extensions.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtconvert.documents import parse_json
from trtconvert.errors import did_you_mean, first_line
from trtconvert.serving.jobs import FORMATS, ImageFormat, Offer, Order, Range, Refusal, Shape

BODY_BYTES = 256 * 2**10
"""Limit of a body: the longest prompt with twelve bytes a character, the longest JSON escape."""

PROMPT_CHARACTERS = 16_000
"""Limit of a prompt; text encoders read some hundred words."""

SEEDS = 2**63
"""Number of seeds of torch's generators."""

_SHOWN = 200
"""Largest number of characters of a value in messages."""

_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", re.ASCII)


class ApiError(Exception):
    """An error answer.

    Args:
        status: HTTP status.
        param: the wrong field of the request; code: error code for programs.
        retry: seconds until a retry may succeed; None if it cannot.
    """

    def __init__(
        self,
        status: int,
        problem: str,
        *,
        expected: str,
        got: str,
        remedy: str,
        param: str | None = None,
        code: str | None = None,
        retry: int | None = None,
    ) -> None:
        super().__init__(problem)
        self.status, self.retry = status, retry
        kind = {429: "rate_limit_error"}.get(status, "invalid_request_error" if status < 500 else "server_error")
        message = f"{problem}; expected: {expected}; got: {_short(got)}; remedy: {remedy}"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


class _Request(BaseModel):
    """The fields of a request, each with the values to expect. `user` is accepted and ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | None = Field(
        None, max_length=PROMPT_CHARACTERS, description=f"a text of at most {PROMPT_CHARACTERS} characters"
    )
    model: str | None = Field(None, description="the name of the model, see GET /v1/models")
    n: int | None = Field(None, ge=1, description="a whole number from 1")
    size: str | None = Field(None, description="WIDTHxHEIGHT, such as 1024x1024, or auto")
    response_format: Literal["b64_json"] | None = Field(
        None, description="b64_json: images are not kept, and have no address"
    )
    output_format: ImageFormat | None = Field(None, description=", ".join(FORMATS))
    seed: int | None = Field(None, ge=0, lt=SEEDS, description="a whole number from 0 to 2^63 - 1")
    steps: int | None = Field(None, ge=1, description="a whole number from 1")
    user: str | None = Field(None, description="a text")


def _expected(field: str) -> str:
    return str(_Request.model_fields[field].description)


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
        model: the bundle's name for clients.
        images: most images of a request; steps: default number of steps; most_steps: most steps.
    """

    model: str
    images: int
    steps: int
    most_steps: int


@dataclass(frozen=True)
class Generation:
    """A parsed request: images of one shape."""

    shape: Shape
    orders: tuple[Order, ...]


def read_generation(body: bytes, offer: Offer, limits: Limits) -> Generation:
    """Parse a request's body. Raises ApiError if the request is not valid for this bundle."""
    return generation_of(_content(body), offer, limits)


def generation_of(content: dict[str, Any], offer: Offer, limits: Limits) -> Generation:
    """Parse a request from the fields of its body; see `read_generation`."""
    request = _read(content)
    if request.model is not None:
        require_model(request.model, limits)
    _require("n", request.n or 1, limits.images)
    _require("steps", request.steps or limits.steps, limits.most_steps)
    width, height = _size(request.size, offer)
    shown = _shown(request.prompt, offer)
    seed, count = request.seed, request.n or 1
    if seed is not None and seed + count > SEEDS:
        raise _unfit("seed", "a seed such that the seeds of all images, which count up, stay below 2^63", str(seed))
    first = secrets.randbelow(SEEDS - count) if seed is None else seed
    return Generation(
        Shape(height, width, request.steps or limits.steps, shown),
        tuple(Order(first + i, request.prompt, request.output_format or "png") for i in range(count)),
    )


def require_model(name: str, limits: Limits) -> None:
    """Raise ApiError if the server has another model."""
    if name != limits.model:
        raise ApiError(
            404,
            "the server does not have this model",
            expected=limits.model,
            got=name,
            remedy="use the expected name",
            param="model",
            code="model_not_found",
        )


def generation_body(images: Sequence[str], orders: Sequence[Order], created: int, shape: Shape) -> dict[str, Any]:
    """Return the body of an answer. `images` are files in base64; the seed of an image draws it again."""
    data = [{"b64_json": image, "seed": order.seed} for image, order in zip(images, orders, strict=True)]
    size = {} if shape.width is None else {"size": f"{shape.width}x{shape.height}"}
    return {"created": created, "output_format": orders[0].format, **size, "data": data}


def error_of(refusal: Refusal) -> ApiError:
    """Convert a replica's refusal to an error answer."""
    status = {"client": 400, "machine": 503, "fault": 500}[refusal.whose]
    return ApiError(
        status,
        refusal.problem,
        expected=refusal.expected or "-",
        got=refusal.got or "-",
        remedy=refusal.remedy or "-",
        retry=5 if status == 503 else None,
    )


def _content(body: bytes) -> dict[str, Any]:
    try:
        content = parse_json(body)
    except ValueError as error:
        raise ApiError(
            400,
            "the body is not JSON",
            expected="an object with the fields of an images request, in UTF-8",
            got=first_line(error),
            remedy="correct the body",
        ) from error
    if not isinstance(content, dict):
        raise ApiError(
            400,
            "the body is not an object",
            expected='an object such as {"prompt": "…"}',
            got=type(content).__name__,
            remedy="correct the body",
        )
    return content


def _read(content: dict[str, Any]) -> _Request:
    if unknown := [name for name in content if name not in _Request.model_fields]:
        raise ApiError(
            400,
            "a field is unknown",
            expected="some of " + ", ".join(_Request.model_fields),
            got=unknown[0],
            remedy=did_you_mean(unknown[0], _Request.model_fields, "leave it out"),
            param=_short(unknown[0]),
            code="unknown_parameter",
        )
    try:
        return _Request.model_validate(content)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise _unfit(name, _expected(name), repr(content[name])) from error


def _unfit(name: str, expected: str, got: str) -> ApiError:
    return ApiError(
        400,
        f"{name} is not valid",
        expected=expected,
        got=got,
        remedy=f"correct {name}, or leave it out",
        param=name,
        code="invalid_value",
    )


def _require(name: str, number: int, most: int) -> None:
    if number > most:
        raise _unfit(name, f"at most {most} on this server", str(number))


def _size(text: str | None, offer: Offer) -> tuple[int | None, int | None]:
    """Return width and height. If the bundle's size is unknown, the replica checks them."""
    ranges = offer.width, offer.height
    if text is None or text == "auto":
        width, height = (None if of is None else of.opt for of in ranges)
        return width, height
    found = _SIZE.fullmatch(text)
    width, height = (int(found[1]), int(found[2])) if found else (0, 0)
    if found is None or not (_within(width, offer.width) and _within(height, offer.height)):
        widths, heights = ("the model's own" if of is None else str(of) for of in ranges)
        raise _unfit("size", f"WIDTHxHEIGHT with widths {widths}, heights {heights}, or auto", text)
    return width, height


def _within(size: int, of: Range | None) -> bool:
    return of is None or of.low <= size <= of.high


def _shown(prompt: str | None, offer: Offer) -> bool | str:
    if offer.shows == "prompt" and prompt is None:
        raise ApiError(
            400,
            "prompt is missing",
            expected=_expected("prompt"),
            got="none",
            remedy="add prompt",
            param="prompt",
            code="missing_required_parameter",
        )
    if prompt is None:
        return False
    if offer.shows == "label":
        return prompt
    if offer.shows == "seed":
        raise _unfit("prompt", "no prompt: the model draws by the seed alone", prompt)
    return True
