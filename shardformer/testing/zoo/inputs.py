"""What to feed a small model: batches made of the names of its forward's arguments and the sizes in its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import PolicyError
from shardformer.testing.draws import drawing

Forward = Callable[[nn.Module], Any]
"""Calls a model with a batch."""
BATCH, LENGTH, TARGET_LENGTH = 2, 9, 7
SIDE = 64
"""Of an image, where the config does not say it."""
NO_INPUTS = (
    "embeds",
    "past",
    "cache",
    "labels",
    "position",
    "head_mask",
    "outputs",
    "logits_to_keep",
    "attention_mask",
)
"""In the names of what forward may take instead of its inputs, or beside them."""
SOUND = 3200
"""Samples of sound, of which feature extractors make a few frames."""


class UnknownInputsError(PolicyError):
    """What a model's forward takes is known to its author alone."""


def batches_for(model: nn.Module) -> list[dict[str, Tensor]]:
    """Batches that the model's forward could take: with all that it names, and with only one kind of input.

    Raises UnknownInputsError for a model whose inputs are not known.
    """
    names = inspect.signature(model.forward).parameters
    made = dict(inputs_of(model))
    if not made:
        raise UnknownInputsError(
            f"What to feed {type(model).__name__} is not known: its forward takes {', '.join(names)}",
            rule="A policy is found in one forward, of tokens, images or sound",
            remedy="Give an example of a batch: infer(model, batch={...})",
        )
    text = ("input_ids", "attention_mask", "decoder_input_ids")
    only_text = {name: x for name, x in made.items() if name in text}
    others = {name: x for name, x in made.items() if name not in text[:2]}
    sound = {name: x for name, x in made.items() if name in ("input_values", "input_features", "decoder_input_ids")}
    ways = [made, only_text, others, sound]
    ways = [way for i, way in enumerate(ways) if way and way not in ways[:i]]
    if "input_ids" in made and (books := _field(getattr(model, "config", None), "num_codebooks")):
        ways.append({**only_text, "input_ids": made["input_ids"].repeat(books, 1)})  # a row for each code of a sound
    return ways


def guessed_for(model: nn.Module) -> list[dict[str, Tensor]]:
    """Batches that a model could take whose inputs have names of its own: all that its forward cannot do without.

    Tokens, where it has an embedding; else numbers of as many features, or channels, as its first weight takes.
    """
    needed = needed_by(model)
    modules = list(model.modules())
    words = min((m.num_embeddings for m in modules if isinstance(m, nn.Embedding)), default=0)
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = []
    if first := next((m for m in modules if isinstance(m, nn.Linear | nn.Conv2d)), None):
        size = first.weight.shape[1]
        shapes = [(BATCH, LENGTH, size), (BATCH, size)]
        shapes = [(BATCH, size, SIDE, SIDE)] if isinstance(first, nn.Conv2d) else shapes
    if not needed:
        return []
    if words:
        return [{name: torch.randint(words, (BATCH, LENGTH), generator=generator) for name in needed}]
    return [{name: torch.randn(*shape, generator=generator) for name in needed} for shape in shapes]


def needed_by(model: nn.Module) -> list[str]:
    """The arguments that forward cannot do without, as far as they have names for who calls it."""
    arguments = inspect.signature(model.forward).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in arguments if p.default is p.empty and p.kind in named]


def unknown_inputs(model: nn.Module) -> tuple[list[str], list[str]]:
    """The arguments of forward that nothing is made for: those that it needs, and the tensors that it may take."""
    known = {name for name, _ in inputs_of(model)}
    others = {n: p for n, p in inspect.signature(model.forward).parameters.items() if n not in known}
    needed = [name for name in needed_by(model) if name in others]
    tensors = [n for n, p in others.items() if "Tensor" in str(p.annotation) and not any(w in n for w in NO_INPUTS)]
    return needed, [name for name in tensors if name not in needed]


def labelled(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    """The batch with labels, such that the model could make its own loss of them: tokens, or a class of each sample.

    Of a model that makes its decoder's tokens of the labels, without those first.
    """
    if "labels" not in inspect.signature(model.forward).parameters or "labels" in batch:
        return
    tokens = batch.get("decoder_input_ids", batch.get("input_ids"))
    if tokens is not None:
        labels = tokens.clone()
        labels[0, :2] = -100
        yield {**{name: x for name, x in batch.items() if name != "decoder_input_ids"}, "labels": labels}
        yield {**batch, "labels": labels}
    yield {**batch, "labels": torch.arange(next(iter(batch.values())).shape[0]) % 2}


def inputs_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What the names of its forward's arguments say, each by itself."""
    names = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    generator = torch.Generator().manual_seed(0)
    vocab = _field(config, "vocab_size", "text_config", "decoder", "encoder") or _words(model)

    fields = vars(config) if hasattr(config, "__dict__") else {}
    special = [x for n, x in fields.items() if n.endswith(("_token_id", "_token_index"))]  # of an image, without one

    def tokens(length: int) -> Tensor:
        words = [word for word in range(5, max(6, (vocab or 0) - 8)) if word not in special] or [5]
        return torch.tensor(words)[torch.randint(len(words), (BATCH, length), generator=generator)]

    if "input_ids" in names and vocab:
        yield "input_ids", tokens(LENGTH)
        if "attention_mask" in names:
            mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
            mask[1, -2:] = 0
            yield "attention_mask", mask
    side = _field(config, "image_size", "vision_config") or SIDE
    channels = _field(config, "num_channels", "vision_config") or 3
    if "spatial_shapes" in names and (patch := _field(config, "patch_size", "vision_config")):
        yield "spatial_shapes", torch.tensor([[3, 3], [3, 3]])
        yield "pixel_attention_mask", torch.ones(BATCH, LENGTH, dtype=torch.int64)
        yield "pixel_values", torch.randn(BATCH, LENGTH, channels * patch**2, generator=generator)
    elif "pixel_values" in names:
        height, width = (side, side) if isinstance(side, int) else side
        yield "pixel_values", torch.randn(BATCH, channels, height, width, generator=generator)
    bins = _field(config, "num_mel_bins", "audio_config", "encoder_config") or _field(config, "feature_size")
    if "input_features" in names and bins:
        positions = _field(config, "max_source_positions", "audio_config")
        frames = 2 * positions if positions else LENGTH * (_field(config, "audio_length_per_tok") or 2)
        yield "input_features", torch.randn(BATCH, bins, frames, generator=generator)
    elif "input_features" in names and (bins := _field(config, "feature_projection_input_dim")):
        yield "input_features", torch.randn(BATCH, LENGTH, bins, generator=generator)
    if "input_values" in names:
        shape = (BATCH, config.max_length, bins) if bins and hasattr(config, "max_length") else (BATCH, SOUND)
        yield "input_values", torch.randn(*shape, generator=generator)
    if "decoder_input_ids" in names and vocab:
        yield "decoder_input_ids", tokens(TARGET_LENGTH)
    for name in names:  # a part with tokens of its own, such as qformer_input_ids
        part = getattr(config, f"{name.removesuffix('_input_ids')}_config", None)
        if name.endswith("_input_ids") and name != "decoder_input_ids" and (words := _field(part, "vocab_size")):
            yield name, torch.randint(min(5, words - 1), words, (BATCH, LENGTH), generator=generator)


def _words(model: nn.Module) -> int:
    """The rows of the embedding of tokens; 0 where there is none."""
    try:
        table: Any = model.get_input_embeddings()  # type: ignore[operator]  # a method of transformers' models
    except (AttributeError, RuntimeError):  # "not implemented" is one of these
        return 0
    return table.num_embeddings if isinstance(table, nn.Embedding) else 0


def _field(config: Any, name: str, *parts: str) -> Any:
    found = (getattr(c, name, None) for c in (config, *(getattr(config, part, None) for part in parts)))
    return next((value for value in found if isinstance(value, int | list | tuple)), None)


def runner(model: nn.Module, batch: Mapping[str, Tensor], seed: int = 0) -> Forward:
    """What calls a model with the batch, in the precision of ``model``, without a cache.

    A forward that draws random numbers draws the same in each call.
    """
    dtype = next(model.parameters()).dtype
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def run(m: nn.Module) -> Any:
        with drawing(seed):
            return m(**cast, **extra)

    return run
