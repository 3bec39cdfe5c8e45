"""Requests of the images API: accepted requests, and refusals with their messages."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from trtconvert.serving.api import BODY_BYTES, PROMPT_CHARACTERS, SEEDS, ApiError, Limits, error_of, read_generation
from trtconvert.serving.jobs import Offer, Order, Range, Refusal, Shape

LIMITS = Limits("sdxl", images=4, steps=20, most_steps=50)
PROMPTS = Offer("prompt", Range(256, 512, 1024), Range(512, 768, 1024), 8, "a machine")
DIGITS = Offer("caption", None, None, 64, "a machine")
SEEDED = Offer("seed", None, None, 64, "a machine")
LABELS = Offer("label", Range(32, 32, 32), Range(32, 32, 32), 64, "a machine")


def read(content: Any, offer: Offer = PROMPTS):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return read_generation(body, offer, LIMITS)


def test_a_request_becomes_an_order_for_each_image():
    asked = {"model": "sdxl", "prompt": "a cat", "n": 3, "size": "1024x256", "seed": 7, "steps": 4, "user": "me"}
    generation = read(asked | {"response_format": "b64_json", "output_format": "webp"})
    assert generation.shape == Shape(256, 1024, 4, True)
    assert generation.orders == tuple(Order(7 + i, "a cat", "webp") for i in range(3))


@pytest.mark.parametrize("size", [None, "auto"])
def test_omitted_fields_take_the_bundles_or_the_servers_defaults(size):
    asked = {"prompt": ""} | ({} if size is None else {"size": size})
    one, other = read(asked), read(asked)
    assert one.shape == Shape(512, 768, 20, True) and len(one.orders) == 1 and one.orders[0].format == "png"
    assert one.orders != other.orders, "seeds are drawn"
    assert read({}, DIGITS).shape == Shape(None, None, 20, False)
    assert read({"prompt": "7"}, DIGITS).shape.shown is True
    assert read({"prompt": "207"}, LABELS).shape == Shape(32, 32, 20, "207")


def refused(content: Any, offer: Offer = PROMPTS) -> dict[str, Any]:
    with pytest.raises(ApiError) as raised:
        read(content, offer)
    assert 400 <= raised.value.status < 500
    error = raised.value.body["error"]
    assert error["type"] == "invalid_request_error"
    assert all(label in error["message"] for label in ("expected: ", "got: ", "remedy: "))
    assert len(error["message"]) < 1000
    return error


GOOD = {"prompt": "a cat"}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"prompt": 5}, "prompt", "a text"),
        ({"prompt": ["a"]}, "prompt", "a text"),
        ({"prompt": "a" * (PROMPT_CHARACTERS + 1)}, "prompt", "at most"),
        ({"n": 0}, "n", "from 1"),
        ({"n": 5}, "n", "at most 4"),
        ({"n": 10**400}, "n", "at most 4"),
        ({"n": "2"}, "n", "whole number"),
        ({"n": True}, "n", "whole number"),
        ({"n": 1.5}, "n", "whole number"),
        ({"steps": 51}, "steps", "at most 50"),
        ({"steps": -1}, "steps", "from 1"),
        ({"seed": -1}, "seed", "from 0"),
        ({"seed": SEEDS}, "seed", "to 2^63"),
        ({"seed": SEEDS - 1, "n": 2}, "seed", "below 2^63"),
        ({"size": "2048x512"}, "size", "widths 512 to 1024, heights 256 to 1024"),
        ({"size": "512x0"}, "size", "WIDTHxHEIGHT"),
        ({"size": "0512x512"}, "size", "WIDTHxHEIGHT"),
        ({"size": "512x512\n"}, "size", "WIDTHxHEIGHT"),
        ({"size": "٥١٢x512"}, "size", "WIDTHxHEIGHT"),
        ({"size": "9" * 5000 + "x512"}, "size", "WIDTHxHEIGHT"),
        ({"size": [512, 512]}, "size", "WIDTHxHEIGHT"),
        ({"response_format": "url"}, "response_format", "b64_json"),
        ({"output_format": "gif"}, "output_format", "png, jpeg, webp"),
        ({"model": "flux"}, "model", "sdxl"),
        ({"sede": 5}, "sede", "did you mean 'seed'?"),
        ({"quality": "high"}, "quality", "leave it out"),
    ],
)
def test_invalid_fields_are_refused_by_name(change, param, words):
    error = refused(GOOD | change)
    assert error["param"] == param and words in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"prompt"',
        b"{",
        b"\xff\xfe",
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a\\u0000b"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"n": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "a", "seed": NaN}',
        b'{"prompt": "a", "seed": 1e400}',
    ],
)
def test_damaged_bodies_are_refused(body):
    refused(body)


def test_random_damage_is_never_more_than_a_refusal():
    source = random.Random(5)
    whole = json.dumps(GOOD | {"n": 2, "size": "512x512", "seed": 3, "steps": 4}).encode()
    read_count = 0
    for _ in range(3000):
        body = bytearray(whole)
        for _ in range(source.randint(1, 4)):
            place = source.randrange(len(body))
            body[place : place + source.randint(0, 3)] = source.choice(
                [b"", b"[", b'"', b"\\", b"9", b"\xc3", b"-", b"e9"]
            )
        try:
            read(bytes(body))
            read_count += 1
        except ApiError as error:
            assert 400 <= error.status < 500
    assert 0 < read_count < 3000


@pytest.mark.parametrize(
    ("content", "offer", "words"),
    [
        ({"prompt": "a"}, SEEDED, "by the seed alone"),
        ({"prompt": "7", "size": "16x0"}, DIGITS, "widths the model's own, heights the model's own, or auto"),
        ({"prompt": "7", "size": "64x32"}, LABELS, "widths 32, heights 32"),
    ],
)
def test_requests_that_a_bundle_does_not_support_are_refused(content, offer, words):
    assert words in refused(content, offer)["message"]


def test_a_size_that_the_bundle_does_not_say_is_for_the_replica_to_refuse():
    assert read({"prompt": "7", "size": "8x16"}, DIGITS).shape == Shape(16, 8, 20, True)
    wide = Offer("prompt", None, Range(64, 64, 128), 8, "a machine")
    assert read({"prompt": "7", "size": "96x40"}, wide).shape == Shape(40, 96, 20, True)
    assert "widths 64 to 128" in refused({"prompt": "7", "size": "32x40"}, wide)["message"]


def test_the_longest_prompt_fits_into_a_body():
    assert len(json.dumps({"prompt": "😀" * PROMPT_CHARACTERS})) < BODY_BYTES


@pytest.mark.parametrize(("whose", "status"), [("client", 400), ("machine", 503), ("fault", 500)])
def test_refusals_have_a_status_by_their_cause(whose, status):
    error = error_of(Refusal(whose, "no", "a", "b", "c"))
    assert error.status == status and (error.retry is not None) == (status == 503)
