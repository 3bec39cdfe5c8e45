import math
from types import SimpleNamespace

import pytest
import torch

from trtconvert.bundle import ComponentRecord, TensorRecord
from trtconvert.errors import GateError, UserError
from trtconvert.evaluate import component_example
from trtconvert.evaluate.component_example import ComponentExample
from trtconvert.evaluate.gates import check_component


def source(module, outputs, **example):
    specs = lambda names: tuple(SimpleNamespace(name=name) for name in names)  # noqa: E731
    return SimpleNamespace(module=module, inputs=specs(example), outputs=specs(outputs), example=example)


def record(inputs, outputs, dtype="float16"):
    """A component's record with given tensors."""
    names = lambda given: [TensorRecord(name=name, dtype=dtype, shape=["batch", 3]) for name in given]  # noqa: E731
    return ComponentRecord(
        onnx="text_encoder.onnx", inputs=names(inputs), outputs=names(outputs), dims={}, profiles=[], engines=[]
    )


class Sums(torch.nn.Module):
    def forward(self, *inputs):
        return torch.stack([x.float() for x in inputs]).cumsum(0).unbind()


def test_a_saved_call_keeps_the_order_of_inputs_and_outputs(tmp_path):
    names = [f"{letter}{number}" for number in range(6) for letter in "zay"]
    example = {name: torch.full((2, 3), place + 1.0) for place, name in enumerate(names)}
    made = ComponentExample.of(source(Sums(), [f"out_{name}" for name in names], **example), torch.device("cpu"))
    made.save(tmp_path / "call")
    found = ComponentExample.load(tmp_path / "call", record(names, [f"out_{name}" for name in names]))
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
    with pytest.raises(GateError, match=r"(?s)error of 'y' of vae against float32.*NaN or Inf") as raised:
        check_component("vae", record("x", "y"), {"x": 0.0, "y": math.nan}, 0.5)
    assert "max_component_error" not in str(raised.value)  # no limit lets NaN pass


def test_no_pixel_of_an_upsampling_escapes(monkeypatch):
    """The odd subsampling step sees an error at every eighth value."""
    monkeypatch.setattr(component_example, "MOST_KEPT", 8 * 64)
    example = ComponentExample.of(source(Sums(), ["y"], x=torch.ones(64, 64)), torch.device("cpu"))
    for place in range(8):
        wrong = torch.ones(64, 64)
        wrong[:, place::8] = 2
        assert example.errors(lambda x, wrong=wrong: wrong)["y"] == pytest.approx(8**-0.5, rel=0.2), place


def test_outputs_of_zeros_and_of_nothing():
    """Untrained models often give zeros."""
    example = ComponentExample.of(
        source(Sums(), "yz", x=torch.zeros(2, 3), w=torch.zeros(2, 3)),
        torch.device("cpu"),
    )
    assert example.errors(Sums()) == {"y": 0, "z": 0}
    assert example.errors(lambda x, w: (x, w + 1e-3))["z"] == math.inf
    empty = ComponentExample.of(source(Sums(), "y", x=torch.zeros(2, 0)), torch.device("cpu"))
    assert empty.errors(Sums()) == {"y": 0}


def test_whole_numbers_and_truth_values_are_compared():
    example = ComponentExample.of(
        source(Sums(), "yz", x=torch.tensor([1, 2]), w=torch.tensor([True, False])), torch.device("cpu")
    )
    assert example.errors(lambda x, w: (x, x + w.long())) == {"y": 0, "z": 0}
    assert example.errors(lambda x, w: (x == 1, x + w.long()))["y"] > 0.5


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_full_precision_that_is_not_finite_is_refused(value):
    x = torch.ones(2, 3)
    x[1, 1] = value
    model = source(Sums(), "y", x=x)
    model.name = "text_encoder"
    with pytest.raises(
        UserError, match=r"(?s)text_encoder.*'y' is not finite in FP32.*1 of 6.*weights of text_encoder"
    ):
        ComponentExample.of(model, torch.device("cpu"))


def test_the_call_of_another_component_is_refused(tmp_path):
    ComponentExample.of(source(Sums(), "y", x=torch.ones(2, 3)), torch.device("cpu")).save(tmp_path / "call")
    for inputs, outputs in (("xw", "y"), ("w", "y"), ("x", "z"), ("x", "yz")):
        with pytest.raises(
            UserError, match=r"(?s)does not hold the call.*inputs/0/x, outputs/0/y.*build the bundle again"
        ):
            ComponentExample.load(tmp_path / "call", record(inputs, outputs))
    example = ComponentExample.load(tmp_path / "call", record("x", "y"))
    with pytest.raises(UserError, match=r"(?s)'y'.*6 values.*8, of an output of shape \[2, 4\]"):
        example.errors(lambda x: torch.ones(2, 4))


def test_the_worst_output_decides():
    component = record("x", "ab")
    assert check_component("text_encoder", component, {"a": 0.01, "b": 0.02}, 0.02) == 0.02
    with pytest.raises(GateError, match=r"(?s)'b' of text_encoder.*<= 0\.02.*components\.text_encoder\.dtype"):
        check_component("text_encoder", component, {"a": 0.01, "b": 0.021}, 0.02)


def test_a_component_in_float32_is_not_told_to_become_float32():
    with pytest.raises(GateError, match=r"raise verify\.max_component_error, or leave vae out") as raised:
        check_component("vae", record("x", "y", "float32"), {"y": 1.0}, 0.5)
    assert "dtype" not in str(raised.value) and "layers" not in str(raised.value)
