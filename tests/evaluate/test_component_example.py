import math
from types import SimpleNamespace

import pytest
import torch

from trtconvert.errors import GateError
from trtconvert.evaluate import component_example
from trtconvert.evaluate.component_example import ComponentExample
from trtconvert.evaluate.gates import check_component


def source(module, outputs, **example):
    specs = lambda names: tuple(SimpleNamespace(name=name) for name in names)  # noqa: E731
    return SimpleNamespace(module=module, inputs=specs(example), outputs=specs(outputs), example=example)


class Sums(torch.nn.Module):
    def forward(self, *inputs):
        return torch.stack([x.float() for x in inputs]).cumsum(0).unbind()


def test_a_saved_call_keeps_the_order_of_inputs_and_outputs(tmp_path):
    names = [f"{letter}{number}" for number in range(6) for letter in "zay"]
    example = {name: torch.full((2, 3), place + 1.0) for place, name in enumerate(names)}
    made = ComponentExample.of(source(Sums(), [f"out_{name}" for name in names], **example), torch.device("cpu"))
    made.save(tmp_path / "call")
    found = ComponentExample.load(tmp_path / "call")
    assert list(found.inputs) == names
    assert found.errors(Sums()) == {f"out_{name}": pytest.approx(0, nan_ok=True) for name in names}
    assert found.errors(lambda *inputs: tuple(1.5 * x for x in Sums()(*inputs)))["out_y5"] == pytest.approx(0.5)


def test_a_value_that_is_not_kept_counts_when_it_is_not_finite(monkeypatch):
    monkeypatch.setattr(component_example, "MOST_KEPT", 10)
    example = ComponentExample.of(source(Sums(), ["y"], x=torch.rand(7, 9)), torch.device("cpu"))
    assert example.outputs["y"].numel() <= 10
    broken = example.inputs["x"].clone()
    broken.view(-1)[1] = math.inf
    assert math.isnan(example.errors(lambda x: broken)["y"])
    with pytest.raises(GateError, match=r"error of 'y' of vae against float32"):
        check_component("vae", {"x": 0.0, "y": math.nan}, 0.5)


def test_the_worst_output_decides():
    assert check_component("text_encoder", {"a": 0.01, "b": 0.02}, 0.02) == 0.02
    with pytest.raises(GateError, match=r"(?s)'b' of text_encoder.*<= 0\.02.*components\.text_encoder\.dtype"):
        check_component("text_encoder", {"a": 0.01, "b": 0.021}, 0.02)
