"""Tensors that threads read ahead from files and memory, and items that are made ahead, on the host."""

import threading

import pytest
import torch

from trtconvert.errors import UserError
from trtconvert.runtime import reading
from trtconvert.runtime.reading import Place, Spent, one_ahead, read_ahead

CPU = torch.device("cpu")


@pytest.fixture
def wanted(tmp_path, monkeypatch):
    """Return orders of tensors of several types and sizes, larger than a piece, and the expected tensors."""
    monkeypatch.setattr(reading, "_PIECE", 512)
    generator = torch.Generator().manual_seed(0)
    orders, expected, start = [], [], 3
    with (tmp_path / "numbers").open("wb") as file:
        file.write(b"abc")
        for index, shape in enumerate([(7,), (40, 33), (), (0,), (3, 5, 2), (400,)] * 3):
            made = (torch.randn(shape, generator=generator) * 100).to(
                [torch.float32, torch.float16, torch.int8, torch.bfloat16][index % 4]
            )
            file.write(made.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            place = Place(tmp_path / "numbers", start, made.dtype, shape)
            start += made.nbytes
            turned = torch.randn(30, 20, generator=generator).T
            orders.append((index, [turned, place, torch.ones(0)]))
            expected.append([turned, made, torch.ones(0)])
    return orders, expected


@pytest.mark.parametrize("limit", [0, 2000, 10**9])
@pytest.mark.parametrize("inference", [False, True])
def test_numbers_come_in_order(wanted, limit, inference):
    orders, expected = wanted
    spent = Spent()
    with torch.inference_mode(inference):
        found = list(read_ahead(orders, CPU, limit, spent))
    assert [item for item, _ in found] == [item for item, _ in orders]
    for (_, tensors), should in zip(found, expected, strict=True):
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(tensors, should, strict=True))
    assert spent.read == sum(x.nbytes for tensors in expected for x in tensors)


def test_no_more_is_read_than_the_limit(wanted):
    orders, taken = wanted[0], []
    reader = read_ahead((taken.append(item) or (item, sources) for item, sources in orders), CPU, 1)
    next(reader)
    assert taken == [0]
    reader.close()


def test_a_file_that_has_become_shorter(wanted, tmp_path):
    orders, _ = wanted
    content = (tmp_path / "numbers").read_bytes()
    (tmp_path / "numbers").write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"(?s)numbers became shorter.*remedy: "):
        list(read_ahead(orders, CPU, 10**9))


def test_the_next_item_is_made_while_one_is_used():
    made, go = [], threading.Event()

    def items():
        for index in range(4):
            made.append(index)
            if index == 1:
                go.set()
            yield index

    ahead = one_ahead(items(), CPU)
    assert next(ahead) == 0 and go.wait(10) and made == [0, 1]
    assert list(ahead) == [1, 2, 3]


def test_the_source_is_closed_when_its_reader_goes():
    ended = []

    def items():
        try:
            yield 1
            raise ValueError("of the second")
        finally:
            ended.append(True)

    ahead = one_ahead(items(), CPU)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="of the second"):
        next(ahead)

    def endless():
        try:
            while True:
                yield 1
        finally:
            ended.append(True)

    ahead = one_ahead(endless(), CPU)
    next(ahead)
    ahead.close()
    assert ended == [True, True]
