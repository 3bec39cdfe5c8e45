"""How many tokens prompts have: those that a pipeline pads them to, and the range that engines take (`model.options.tokens`).

Pipelines that pad prompts to a length of the caller's (`LENGTH`) are called with other lengths. The others are called with
embeddings of other lengths, in the place of those that their text encoders give, and prompts are what they come to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from trtconvert.bundle import DiffusersRecord
from trtconvert.errors import UserError
from trtconvert.models.call_options import LENGTH, TOKENS
from trtconvert.models.observation import Observed, refuse_numbers
from trtconvert.models.pipelines import Called, PipelineCaller
from trtconvert.models.probes import no_noise, stand_in
from trtconvert.runtime.arguments import take_apart

Range = tuple[int, int, int]
Shapes = Mapping[str, tuple[int, ...]]


def settled_lengths(caller: PipelineCaller, given: Range | None, sizes: Mapping[str, int]) -> Range | None:
    """What of the recipe's lengths is a size of the pipeline's calls, which it sets up for them.

    Args:
        given: (min, opt, max) of the recipe, None where it says nothing; sizes: the other sizes of a call, batch among them.
    Raises:
        UserError: prompts have different lengths, and the recipe has no range; or a length has no effect.
    """
    if given is None:
        _refuse_different(caller, sizes)
        return None
    kind, (low, _, high) = type(caller.pipe).__name__, given
    if LENGTH in caller.arguments:
        raise UserError(
            f"the recipe says twice how many tokens prompts have: {LENGTH} in model.options.call, and model.options.tokens",
            expected="one of them",
            got=f"{caller.arguments[LENGTH]} and {given}",
            remedy=f"take {LENGTH} out of model.options.call",
        )
    if caller.takes_prompts:
        caller.pads = LENGTH in caller.parameters
        # Of a prompt of a letter, and of lengths at which it is not cut.
        pair = (max(low, min(8, high - 1)) if low < high else max(1, high - 1), high)
        if caller.pads and not _follows(caller, sizes, *pair, captions=["a"] * sizes["batch"]):
            caller.pads = False  # it cuts prompts at a length, and pads them to no other
        if not caller.pads and not caller.takes_embeddings:
            raise UserError(
                f"{kind} does not let its caller say how many tokens prompts have",
                expected=f"a pipeline with an argument {LENGTH}, or one that takes embeddings in the place of prompts",
                got=f"tokens: {list(given)}",
                remedy=f"take model.options.tokens out of the recipe, and {_other_than_a_range(caller)}",
            )
    elif low == high:
        return None  # embeddings are noise of that many tokens
    if low < high and not caller.pads and not (caller.takes_embeddings and _follows(caller, sizes, low, high)):
        raise UserError(
            f"the denoiser of {kind} gets the same for {low} tokens as for {high}",
            expected="one length",
            got=f"tokens: {list(given)}",
            remedy="take model.options.tokens out of the recipe",
        )
    return None if caller.pads and low == high else given


def _follows(
    caller: PipelineCaller, sizes: Mapping[str, int], *lengths: int, captions: Sequence[str] | None = None
) -> bool:
    """Whether what the denoiser gets follows the number of tokens.

    Args:
        captions: see `PipelineCaller`.
    """
    calls = [caller.denoiser_arguments({**sizes, TOKENS: length}, captions) for length in lengths]
    refuse_numbers(TOKENS, calls[0][0], calls[1][0])
    return len({_shapes(tensors) for _, tensors in calls}) > 1


def _shapes(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(x.shape)) for name, x in tensors.items())


def _extremes(caller: PipelineCaller) -> tuple[str, ...]:
    """The shortest and the longest prompt."""
    return tuple(dict.fromkeys((min(caller.prompts, key=len), max(caller.prompts, key=len))))


def _refuse_different(caller: PipelineCaller, sizes: Mapping[str, int]) -> None:
    """
    Raises:
        UserError: the denoiser gets as many tokens as a prompt has, so that an engine of one length would refuse the next.
    """
    texts = _extremes(caller)
    if not caller.takes_prompts or len(texts) < 2:
        return
    shapes = [_natural(caller, sizes, text) for text in texts]
    for name, shape in shapes[0].items():
        axis = next((i for i, size in enumerate(shape) if shapes[1][name][i] != size), None)
        if axis is None:
            continue
        found = [of[name][axis] for of in shapes]
        cut = caller.signature[LENGTH].default if LENGTH in caller.parameters else None
        most = max(*found, min(4 * max(found), cut if isinstance(cut, int) else 4 * max(found)))
        raise UserError(
            f"the pipeline passes '{name}' with as many tokens as its longest prompt has",
            expected="a number of tokens that prompts are padded to, or a range of them",
            got=", ".join(f"{size} for {text!r}" for size, text in zip(found, texts, strict=True)),
            remedy=f"give model.options.tokens as [min, opt, max], such as {[min(found), max(found), most]}"
            if caller.takes_embeddings
            else _other_than_a_range(caller),
        )


def _other_than_a_range(caller: PipelineCaller) -> str:
    """What to do about prompts of different lengths where the pipeline takes no embeddings."""
    pads = sorted(name for name in caller.parameters if "pad" in name)
    if pads:
        return f"pad prompts, by {' or '.join(pads)} in model.options.call"
    return (
        "give model.options.prompts texts that have as many tokens as each other, as one text alone has: the engine then takes "
        "prompts of that length; or convert the denoiser through a function of your own, model.source: "
        "package.module:function, whose inputs have a length that varies"
    )


def _natural(caller: PipelineCaller, sizes: Mapping[str, int], text: str) -> Shapes:
    """Shapes of what the denoiser gets for a prompt at first."""
    arguments = caller.first_call([0] * sizes["batch"], sizes, captions=[text] * sizes["batch"])
    return dict(_shapes(caller.taken_apart(arguments)[1]))


@dataclass(frozen=True)
class PromptLengths:
    """Lengths of prompts that a pipeline does not pad to what its caller says.

    Attributes:
        given: (min, opt, max) of the recipe; prompts: tokens that the denoiser gets for some prompts, in the same terms.
    """

    given: Range
    prompts: Mapping[str, int]

    def of_encoder(self, caller: PipelineCaller, sizes: Mapping[str, int], model: nn.Module) -> Range | None:
        """The lengths that a text encoder takes for those of the denoiser; None where it is always given as many tokens.

        Args:
            sizes: of a call without a length.
        Raises:
            UserError: they are not as many more or fewer for every prompt.
        """
        own = {text: encoder_tokens(caller, sizes, model, text) for text in self.prompts}
        if len(set(own.values())) == 1:
            return None
        more = {own[text] - count for text, count in self.prompts.items()}
        if len(more) > 1:
            raise UserError(
                f"{type(model).__name__} gets tokens of which another share comes to the denoiser with each prompt",
                expected="as many more, or fewer, for every prompt",
                got=", ".join(f"{own[text]} and {count} for {text!r}" for text, count in self.prompts.items()),
                remedy="take the component out of the recipe: the pipeline's own then does its work",
            )
        offset = more.pop()
        low, opt, high = (count + offset for count in self.given)
        return low, opt, high


def encoder_tokens(caller: PipelineCaller, sizes: Mapping[str, int], model: nn.Module, text: str) -> int:
    """How many tokens a text encoder is given for a prompt."""
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
    """What the prompts of the recipe, and those that guidance leads away from, come to.

    Args:
        inputs: that were observed with embeddings; record, timestep: of the denoiser, see `DiffusersDenoiser`.
        given: see `PromptLengths`; sizes: of a call without a length; prediction: shape of what the denoiser gives.
    Raises:
        UserError: one of them has more or fewer tokens than the range holds.
    """
    found: dict[str, int] = {}
    for text in _extremes(caller):
        for shapes in _first_step(caller, record, timestep, sizes, prediction, text):
            for name, shape in shapes.items():
                for size, dim in zip(shape, inputs.shapes.get(name, ()), strict=False):
                    tokens = _in_terms_of(inputs, given, size, dim)
                    if tokens is None:
                        continue
                    if not given[0] <= tokens <= given[2]:
                        _refuse_outside(record, given, tokens, text)
                    found.setdefault(
                        text, tokens
                    )  # the first call is of the prompt, as is the first of its text encoder
        found.setdefault(text, given[1])  # a fixed axis: one length
    return PromptLengths(given, found)


def _in_terms_of(inputs: Observed, given: Range, size: int, dim: int | str) -> int | None:
    """What a size is as a number of tokens; None where it is none, or is as it should be."""
    low, opt, high = given
    if isinstance(dim, str) and dim.startswith(TOKENS) and low < high:
        return size - inputs.dims[dim][1] + opt
    return None if isinstance(dim, str) or low < high or size == dim else size - dim + opt


def _refuse_outside(record: DiffusersRecord, given: Range, tokens: int, text: str) -> None:
    low, opt, high = min(given[0], tokens), given[1], max(given[2], tokens)
    raise UserError(
        f"prompts of {record.pipeline} come to lengths that model.options.tokens does not hold",
        expected=f"{given[0]} to {given[2]} tokens" if given[0] < given[2] else f"{given[0]} tokens",
        got=f"{tokens} for {text!r}, or for what guidance leads away from",
        remedy=f"give model.options.tokens as {[low, opt, high]}",
    )


def _first_step(
    caller: PipelineCaller,
    record: DiffusersRecord,
    timestep: str,
    sizes: Mapping[str, int],
    prediction: Sequence[int | str],
    text: str,
) -> list[Shapes]:
    """Shapes of what the denoiser gets in the first step's calls."""
    calls: list[Shapes] = []
    first: list[float] = []
    zeros: Callable[..., Tensor] = no_noise(timestep, prediction)

    def seeing(**named: Tensor) -> Tensor:
        at = float(named[timestep].flatten()[0])
        if first and at != first[0]:
            raise Called({})
        first[:] = [at]
        calls.append(dict(_shapes(named)))
        return zeros(**named)

    seeds = [0] * sizes["batch"]
    with caller.denoising_with(stand_in(seeing, record, timestep)):
        try:
            caller.until_called(seeds, sizes, [text] * len(seeds))
        except UserError:
            if not calls:  # else it has drawn to its end
                raise
    return calls
