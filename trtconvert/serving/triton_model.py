"""A model of Triton Inference Server's Python backend that draws with a bundle. `trtconvert export-triton` copies this file to
`model.py`.

The first dimension of a request is its number of images. Images of all requests in Triton's batch are drawn in batches by shape.

Source: the Python backend's documentation, `TritonPythonModel`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]  # the backend has it

from trtconvert.serving.api import ApiError, Limits, error_of, generation_of
from trtconvert.serving.drawing import Drawer
from trtconvert.serving.jobs import Answer, Batch, Drawn, Order, Refusal, Shape

FIELDS = {"PROMPT": "prompt", "SEED": "seed", "SIZE": "size", "STEPS": "steps", "FORMAT": "output_format"}
"""Inputs, with their names in the images API."""

IMAGE, SEED = "IMAGE", "SEED"


class TritonPythonModel:
    """See the module. One instance draws one batch at a time."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the bundle, onto the instance's GPU if it has one."""
        config = json.loads(args["model_config"])
        given = {name: int(value["string_value"]) for name, value in config.get("parameters", {}).items()}
        on_gpu = args["model_instance_kind"] == "GPU"
        folder = Path(args["model_repository"]) / args["model_version"] / "bundle"
        self._drawer = Drawer(folder, f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu")
        self._batch = min(self._drawer.offer.batch, config["max_batch_size"])
        self._limits = Limits(args["model_name"], 1, given["steps"], given["max_steps"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a response for each request."""
        found: list[list[tuple[Shape, Order]] | ApiError] = []
        for request in requests:
            try:
                found.append(self._orders(request))
            except ApiError as error:
                found.append(error)
        answers = self._drawn([pair for pairs in found if not isinstance(pairs, ApiError) for pair in pairs])
        responses, start = [], 0
        for pairs in found:
            if isinstance(pairs, ApiError):
                responses.append(_failed(pairs))
                continue
            responses.append(_response(pairs, answers[start : start + len(pairs)]))
            start += len(pairs)
        return responses

    def finalize(self) -> None:
        """Free the engines."""
        self._drawer.close()

    def _orders(self, request: Any) -> list[tuple[Shape, Order]]:
        """Return the shape and order of each image of a request. Raises ApiError if one cannot be drawn."""
        rows: list[dict[str, Any]] = []
        for name, field in FIELDS.items():
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is None:
                continue
            values = tensor.as_numpy().reshape(-1).tolist()
            rows = rows or [{} for _ in values]
            for row, value in zip(rows, values, strict=True):
                row[field] = _text(name, value) if isinstance(value, bytes) else value
        if not rows:
            raise ApiError(
                400,
                "the request has no inputs, and so an unknown number of images",
                expected=f"one of {', '.join(FIELDS)}, of shape [images, 1]",
                got="none",
                remedy="add SEED or PROMPT",
            )
        orders = []
        for row in rows:
            generation = generation_of(row, self._drawer.offer, self._limits)
            orders.append((generation.shape, generation.orders[0]))
        return orders

    def _drawn(self, asked: Sequence[tuple[Shape, Order]]) -> list[Answer]:
        """Return an answer for each order."""
        of_shape: dict[Shape, list[int]] = {}
        for place, (shape, _) in enumerate(asked):
            of_shape.setdefault(shape, []).append(place)
        answers: dict[int, Answer] = {}
        for shape, places in of_shape.items():
            for start in range(0, len(places), self._batch):
                part = places[start : start + self._batch]
                drawn = self._drawer(Batch(shape, tuple(asked[place][1] for place in part)))
                answers |= dict(zip(part, drawn, strict=True))
        return [answers[place] for place in range(len(asked))]


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(
            400, f"{name} is not text", expected="UTF-8", got=repr(value), remedy=f"correct {name}", param=name
        ) from error


def _response(pairs: Sequence[tuple[Shape, Order]], answers: Sequence[Answer]) -> Any:
    files = []
    for answer in answers:
        if isinstance(answer, Refusal):
            return _failed(error_of(answer))
        assert isinstance(answer, Drawn)
        files.append([answer.image])
    seeds = np.array([[order.seed] for _, order in pairs], dtype=np.int64)
    images = np.array(files, dtype=np.object_)
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(IMAGE, images), pb_utils.Tensor(SEED, seeds)])


def _failed(error: ApiError) -> Any:
    kinds = pb_utils.TritonError
    code = kinds.INVALID_ARG if error.status < 500 else kinds.UNAVAILABLE if error.status == 503 else kinds.INTERNAL
    return pb_utils.InferenceResponse(error=kinds(error.body["error"]["message"], code))
