"""JSON and safetensors headers from users; YAML is in test_recipe.py."""

import json
import os

import pytest

from trtconvert.documents import HEADER_BYTES, JSON_DEPTH, parse_json, read_json, safetensors_header


def test_json_is_read_as_json():
    value = {"a": [1, 2.5, None, True, "σ \U0001f600"], "b": {"c": {}}}
    assert parse_json(json.dumps(value)) == parse_json(json.dumps(value, ensure_ascii=False).encode()) == value
    deep = "[" * JSON_DEPTH + "]" * JSON_DEPTH
    assert parse_json(deep) == json.loads(deep)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1, "a": 1}', "the key 'a' twice"),
        ('[{"b": {"c": 1, "d": 2, "c": 3}}]', "the key 'c' twice"),
        ("[" * (JSON_DEPTH + 1) + "]" * (JSON_DEPTH + 1), "deep within each other"),
        ("[" * 100_000, "deep within each other"),
        ('{"a":' * 100_000, "deep within each other"),
        ('["\\ud800"]', "half of a surrogate pair"),
        ('{"\\udc00": 1}', "half of a surrogate pair"),
        ('["a\\u0000b"]', "a NUL character in 'a\\x00b'"),
        ("[1", "delimiter"),
        ("", "Expecting value"),
        (b"\xff\xfe", "decode"),
        ("[" + "1" * 5000 + "]", "limit"),
    ],
)
def test_ambiguous_and_invalid_json_is_refused(text, problem):
    with pytest.raises(ValueError) as refused:
        parse_json(text)
    assert problem in str(refused.value)


def test_only_whole_files_of_some_size_are_read(tmp_path):
    (tmp_path / "large.json").write_text("[" + " " * 100 + "]")
    assert read_json(tmp_path / "large.json", 102) == []
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for name, problem in (
        ("large.json", "a file of more than 101 bytes"),
        ("pipe.json", "a pipe, not a file"),
        ("zero.json", "a device, not a file"),
        (".", "Is a directory"),
    ):
        with pytest.raises(OSError) as refused:
            read_json(tmp_path / name, 101)
        assert refused.value.strerror == problem


def header(text: str, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text.encode()


ONE = '"x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}'


def test_the_header_of_safetensors_is_read_alone(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(header(f"{{{ONE}}}  ") + b"tensors")
    assert safetensors_header(tmp_path / "x.safetensors").keys() == {"x"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (header(f"{{{ONE}, {ONE}}}"), "the key 'x' twice"),
        (header("[]"), "not a JSON object"),
        (header(f"{{{ONE}}}", 10_000), "cut off"),
        (header(f"{{{ONE}}}", HEADER_BYTES + 1), "the limit is"),
        (header("", 2**64 - 1), "the limit is"),
        (b"", "cut off"),
        (header("[" * 100_000), "deep within each other"),
    ],
)
def test_a_header_that_is_none_is_refused(tmp_path, content, problem):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        safetensors_header(tmp_path / "x.safetensors")
