"""The number of tokens of prompts: the length that a pipeline pads them to, and the range for engines (`model.options.tokens`).

A pipeline that pads prompts to a length of its caller's choice (`LENGTH`) is called with other lengths. Other pipelines are
called with embeddings of other lengths instead of prompts, and the lengths of prompts are found by calls with prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trtconvert.bundle import DiffusersRecord
from trtconvert.errors import UserError
from trtconvert.models.call_options import LENGTH, PROMPTS, TOKENS
from trtconvert.models.observation import Observed, refuse_numbers
from trtconvert.models.pipelines import PipelineCaller
from trtconvert.models.probes import first_step
from trtconvert.models.size_steps import Range
from trtconvert.runtime.arguments import take_apart

Shapes = Mapping[str, tuple[int, ...]]

REMOVE_COMPONENT = (
    "leave the component out of the recipe's section components, and name the others in place of `all`: the pipeline's own model "
    "then does the work"
)
"""The remedy for a component that cannot be converted."""


def settled_lengths(caller: PipelineCaller, given: Range | None, sizes: Mapping[str, int]) -> Range | None:
    """Returns the range of prompt lengths in the pipeline's calls, and sets the caller up for the range; None for one length.

    Args:
        given: (min, opt, max) of the recipe, or None.
        sizes: the other sizes of a call, with the batch.
    Raises:
        UserError: prompts have different lengths, and the recipe has no range; or a length has no effect.
    """
    if given is None:
        _refuse_different(caller, sizes)
        return None
    low, _, high = given
    if LENGTH in caller.arguments:
        raise UserError(
            f"the recipe gives the number of tokens of prompts twice: {LENGTH} in model.options.call, and model.options.tokens",
            expected="one of them",
            got=f"{caller.arguments[LENGTH]} and {given}",
            remedy=f"take {LENGTH} out of model.options.call",
        )
    if caller.takes_prompts:
        caller.pads = LENGTH in caller.parameters
        # Long enough for a prompt of one letter.
        pair = (max(low, min(8, high - 1)) if low < high else max(1, high - 1), high)
        if caller.pads and not _follows(caller, sizes, *pair, captions=["a"] * sizes["batch"]):
            caller.pads = False  # it cuts prompts at the length, and pads them to another
        if not caller.pads and not _takes_embeddings_alone(caller, sizes, high):
            raise UserError(
                f"{caller.kind} does not let its caller say how many tokens prompts have",
                expected=f"a pipeline with an argument {LENGTH}, or one that takes embeddings instead of prompts",
                got=f"tokens: {list(given)}",
                remedy=f"take model.options.tokens out of the recipe, and {_other_than_a_range(caller)}",
            )
    elif low == high:
        return None  # embeddings are noise of that many tokens
    if low < high and not caller.pads and not (caller.takes_embeddings and _follows(caller, sizes, low, high)):
        raise UserError(
            f"the denoiser of {caller.kind} gets the same for {low} tokens as for {high}",
            expected="one length",
            got=f"tokens: {list(given)}",
            remedy="take model.options.tokens out of the recipe",
        )
    return None if caller.pads and low == high else given


def _follows(
    caller: PipelineCaller, sizes: Mapping[str, int], *lengths: int, captions: Sequence[str] | None = None
) -> bool:
    """Whether the shapes of the denoiser's inputs follow the number of tokens."""
    calls = [caller.denoiser_arguments({**sizes, TOKENS: length}, captions) for length in lengths]
    refuse_numbers(TOKENS, calls[0][0], calls[1][0])
    return len({_shapes(tensors) for _, tensors in calls}) > 1


def _shapes(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(x.shape)) for name, x in tensors.items())


def _shortest_and_longest(caller: PipelineCaller) -> tuple[str, ...]:
    """Returns the prompts with the fewest and the most tokens, by each of the pipeline's tokenizers."""
    texts = tuple(dict.fromkeys(caller.prompts))
    tokenizers: list[Any] = [x for name, x in caller.pipe.components.items() if "tokenizer" in name and callable(x)]
    found: dict[str, None] = {}
    for tokenizer in tokenizers:
        try:
            counts = {x: len(tokenizer(x, verbose=False)["input_ids"]) for x in texts}
        except Exception:  # a tokenizer of conversations or of a class of its own
            return texts if len(texts) <= len(PROMPTS) else (min(texts, key=len), max(texts, key=len))
        found |= dict.fromkeys((min(texts, key=counts.__getitem__), max(texts, key=counts.__getitem__)))
    return tuple(found)


def _refuse_different(caller: PipelineCaller, sizes: Mapping[str, int]) -> None:
    texts = _shortest_and_longest(caller) if caller.takes_prompts else ()
    if len(texts) < 2:
        return
    shapes = [_shapes_without_length(caller, sizes, text) for text in texts]
    for name, shape in shapes[0].items():
        axis = next((i for i, size in enumerate(shape) if any(other[name][i] != size for other in shapes)), None)
        if axis is None:
            continue
        found = [of[name][axis] for of in shapes]
        cut = caller.signature[LENGTH].default if LENGTH in caller.parameters else None
        most = max(*found, min(4 * max(found), cut if isinstance(cut, int) else 4 * max(found)))
        raise UserError(
            f"the pipeline passes '{name}' with as many tokens as its longest prompt has",
            expected="a number of tokens that prompts are padded to, or a range of them",
            got=", ".join(f"{size} for {texts[found.index(size)]!r}" for size in (min(found), max(found))),
            remedy=f"give model.options.tokens as [min, opt, max], such as {[min(found), max(found), most]}"
            if _takes_embeddings_alone(caller, sizes, max(found))
            else _other_than_a_range(caller),
        )


def _takes_embeddings_alone(caller: PipelineCaller, sizes: Mapping[str, int], tokens: int) -> bool:
    """Whether a call works with embeddings of so many tokens instead of prompts. GLM-Image reads prompts beside embeddings."""
    if not caller.takes_embeddings:
        return False
    try:
        caller.first_call(range(sizes["batch"]), {**sizes, TOKENS: tokens})
    except UserError:
        return False
    return True


def _other_than_a_range(caller: PipelineCaller) -> str:
    """Returns the remedy for prompts of different lengths in a pipeline without embeddings."""
    pads = sorted(name for name in caller.parameters if "pad" in name)
    if pads:
        return f"pad prompts, by {' or '.join(pads)} in model.options.call"
    return (
        "give model.options.prompts texts of one number of tokens, such as one text alone: the engine then takes prompts of "
        "this length; or convert the denoiser through a function of your own, model.source: "
        "package.module:function, with inputs of a symbolic length"
    )


def _shapes_without_length(caller: PipelineCaller, sizes: Mapping[str, int], text: str) -> Shapes:
    arguments = caller.first_call([0] * sizes["batch"], sizes, captions=[text] * sizes["batch"])
    return dict(_shapes(caller.taken_apart(arguments)[1]))


@dataclass(frozen=True)
class PromptLengths:
    """Lengths of prompts in a pipeline that does not pad them to its caller's length.

    Attributes:
        given: (min, opt, max) of the recipe.
        prompts: number of tokens that the denoiser gets for some prompts, counted as in `given`.
    """

    given: Range
    prompts: Mapping[str, int]

    def of_encoder(self, caller: PipelineCaller, sizes: Mapping[str, int], model: nn.Module) -> Range | None:
        """Returns the lengths at a text encoder for those at the denoiser; None if the encoder always gets the same length.

        Args:
            sizes: of a call without a length.
        Raises:
            UserError: the difference between both lengths is not the same for every prompt.
        """
        own = {text: encoder_tokens(caller, sizes, model, text) for text in self.prompts}
        if len(set(own.values())) == 1:
            return None
        more = {own[text] - count for text, count in self.prompts.items()}
        if len(more) > 1:
            raise UserError(
                f"{type(model).__name__} gets more tokens than the denoiser, by a number that differs between prompts",
                expected="the same difference for every prompt",
                got=", ".join(f"{own[text]} and {count} for {text!r}" for text, count in self.prompts.items()),
                remedy=REMOVE_COMPONENT,
            )
        offset = more.pop()
        low, opt, high = (count + offset for count in self.given)
        return low, opt, high


def encoder_tokens(caller: PipelineCaller, sizes: Mapping[str, int], model: nn.Module, text: str) -> int:
    """Returns the number of tokens that a text encoder gets for a prompt."""
    batch = sizes["batch"]
    _, tensors = take_apart(caller.first_call([0] * batch, sizes, model, captions=[text] * batch))
    return next((x.shape[1] for x in tensors.values() if x.dim() == 2), 0)


def prompt_lengths(
    caller: PipelineCaller,
    inputs: Observed,
    record: DiffusersRecord,
    timestep: str,
    given: Range,
    sizes: Mapping[str, int],
    prediction: Sequence[int | str],
) -> PromptLengths:
    """Returns the lengths of the recipe's prompts, and of the negative prompts, at the denoiser.

    Args:
        inputs: observed with embeddings.
        record, timestep: of the denoiser, see `DiffusersDenoiser`.
        given: see `PromptLengths`.
        sizes: of a call without a length.
        prediction: symbolic shape of the denoiser's output.
    Raises:
        UserError: a prompt's number of tokens is outside of the range.
    """
    found: dict[str, int] = {}
    for text in _shortest_and_longest(caller):
        for shapes in first_step(caller, record, timestep, sizes, prediction, [text] * sizes["batch"]).shapes:
            for name, shape in shapes.items():
                for size, dim in zip(shape, inputs.shapes.get(name, ()), strict=False):
                    tokens = _tokens(inputs, given, size, dim)
                    if tokens is None:
                        continue
                    if not given[0] <= tokens <= given[2]:
                        _refuse_outside(record, given, tokens, text)
                    found.setdefault(text, tokens)  # the first call is that of the prompt
        found.setdefault(text, given[1])  # a fixed axis: one length
    return PromptLengths(given, found)


def _tokens(inputs: Observed, given: Range, size: int, dim: int | str) -> int | None:
    """Returns a size as a number of tokens, counted as in `given`; None for another size, or the expected one."""
    low, opt, high = given
    if isinstance(dim, str) and dim.startswith(TOKENS) and low < high:
        return size - inputs.dims[dim][1] + opt
    return None if isinstance(dim, str) or low < high or size == dim else size - dim + opt


def _refuse_outside(record: DiffusersRecord, given: Range, tokens: int, text: str) -> None:
    low, opt, high = min(given[0], tokens), given[1], max(given[2], tokens)
    raise UserError(
        f"prompts of {record.pipeline} have lengths outside of model.options.tokens",
        expected=f"{given[0]} to {given[2]} tokens" if given[0] < given[2] else f"{given[0]} tokens",
        got=f"{tokens} for {text!r}, or for its negative prompt",
        remedy=f"give model.options.tokens as {[low, opt, high]}",
    )
