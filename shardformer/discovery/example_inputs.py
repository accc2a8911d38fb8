"""Example batches for a reduced model, from the arguments of its forward and the sizes in its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardformer.errors import PolicyError
from shardformer.local_ranks.threads import drawing
from shardformer.pipeline.micro_batches import KINDS, special_token_ids
from shardformer.torch_compat import to_list

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


def example_batches(model: nn.Module) -> list[dict[str, Tensor]]:
    """Batches that the model's forward could take: with all that it names, and with only one kind of input.

    Raises UnknownInputsError for a model whose inputs are not known.
    """
    names = inspect.signature(model.forward).parameters
    made = dict(named_inputs(model))
    if not made:
        raise UnknownInputsError(
            f"What to feed {type(model).__name__} is not known: its forward takes {', '.join(names)}",
            rule="A policy is found in one forward, of tokens, images or sound",
            remedy="Give an example of a batch: derive_policy(model, batch={...})",
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


def guessed_batches(model: nn.Module) -> list[dict[str, Tensor]]:
    """Batches that a model could take whose inputs have names of its own: all that its forward cannot do without.

    Tokens, where it has an embedding; else numbers of as many features, or channels, as its first weight takes.
    """
    needed = required_arguments(model)
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


def required_arguments(model: nn.Module) -> list[str]:
    """The arguments that forward cannot do without, as far as they have names for who calls it."""
    arguments = inspect.signature(model.forward).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in arguments if p.default is p.empty and p.kind in named]


def unknown_inputs(model: nn.Module) -> tuple[list[str], list[str]]:
    """The arguments of forward that nothing is made for: those that it needs, and the tensors that it may take."""
    known = {name for name, _ in named_inputs(model)}
    others = {n: p for n, p in inspect.signature(model.forward).parameters.items() if n not in known}
    needed = [name for name in required_arguments(model) if name in others]
    tensors = [n for n, p in others.items() if "Tensor" in str(p.annotation) and not any(w in n for w in NO_INPUTS)]
    return needed, [name for name in tensors if name not in needed]


def with_labels(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
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


def named_inputs(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
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


def forward_call(model: nn.Module, batch: Mapping[str, Tensor], seed: int = 0) -> Forward:
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


# B batch, S sequence, C channels, P patches of all images, D numbers in a patch

MODALITIES = {"image": 1, "audio": 3}
"""What stands in a text -> its number in ``mm_token_type_ids``."""
BEFORE = 2
"""Tokens of a text before what stands in it."""
TILES = (1, 2, 3, 5)
"""Into which an image is cut."""
MediaLayout = dict[str, Tensor]
"""Inputs that go together."""


def insert_media_tokens(model: nn.Module, made: Mapping[str, Tensor]) -> Iterator[MediaLayout]:
    """The batch ``made`` with as many tokens for images and sounds in its texts as the model asks for.

    One for each way to lay out an image that the model could take; nothing for a model whose config names no such
    tokens.
    """
    names = inspect.signature(model.forward).parameters
    config, text = getattr(model, "config", None), made.get("input_ids")
    if text is None:
        return
    known = [[(kind, way, counts) for way, counts in _taken(model, kind, made)] for kind in MODALITIES]
    for chosen in product(*(ways for ways in known if ways)):
        if chosen:
            places = {kind: (_token(config, kind), counts) for kind, _, counts in chosen}
            out = _placed(text, places)
            if "attention_mask" in made:
                mask_BS = made["attention_mask"]
                added = out["input_ids"].shape[1] - text.shape[1]
                out["attention_mask"] = torch.cat([torch.ones(len(text), added).long(), mask_BS], 1)
            out["token_type_ids"] = (out[KINDS] > 0).long()
            own = {name: x for name, x in made.items() if name not in out and name not in _LAYOUT}
            found = {name: x for _, way, _ in chosen for name, x in way.items()}
            yield {name: x for name, x in {**out, **own, **found}.items() if name in names}


def values_beside_text(model: nn.Module) -> list[str]:
    """The inputs of images and sounds that a model takes, in its text or apart from it."""
    names = inspect.signature(model.forward).parameters
    return [name for values in _VALUES.values() for name in values if name in names]


def feature_width(model: nn.Module, made: Mapping[str, Tensor]) -> int:
    """How many numbers the model's features of an image have, where that is not as many as its text's; else 0."""
    features = _method(model, "get_image_features")
    if features is None or _token(getattr(model, "config", None), "image") is None:
        return 0
    for way in _media_layouts("image", model, made):
        if parts := _features(model, features, {**_asked(features, made), **way}):
            return 0 if parts[0].shape[-1] == text_width(model) else parts[0].shape[-1]
    return 0


def _taken(model: nn.Module, kind: str, made: Mapping[str, Tensor]) -> Iterator[tuple[MediaLayout, list[int]]]:
    """The ways that a model takes what stands in a text, and how many tokens each sample has of it then."""
    features = _method(model, f"get_{kind}_features")
    if features is not None and _token(getattr(model, "config", None), kind) is not None:
        for way in _media_layouts(kind, model, made):
            parts = _features(model, features, {**_asked(features, made), **way})
            # what projects them to the width of the text may be behind them
            widths = dict.fromkeys([text_width(model), *(x.shape[-1] for x in parts[:1])])
            for counts in dict.fromkeys(tuple(_counted(parts, way, width)) for width in widths):
                if counts:
                    yield way, list(counts)


def _token(config: Any, kind: str) -> int | None:
    ids = special_token_ids(config)
    return next((ids[name] for name in ids if name.startswith(f"{kind}_token")), None)


_VALUES = {"image": ("pixel_values",), "audio": ("input_features", "input_values")}
_LAYOUT = ("pixel_values", "spatial_shapes", "pixel_attention_mask", "input_features")


def _placed(text_BS: Tensor, places: Mapping[str, tuple[int | None, list[int]]]) -> MediaLayout:
    """Texts of one length, with the tokens in them, and which of them stand for what."""
    longest = max(sum(counts[row] for _, counts in places.values()) for row in range(len(text_BS)))
    rows, kinds = [], []
    for row, words in enumerate(text_BS):
        put = [(token, MODALITIES[kind], counts[row]) for kind, (token, counts) in places.items()]
        missing = longest - sum(count for _, _, count in put)
        ids = [*words[:BEFORE], *(token for token, _, count in put for _ in range(count))]
        of = [0] * BEFORE + [kind for _, kind, count in put for _ in range(count)]
        rest = [*words[torch.arange(missing) % len(words)], *words[BEFORE:]]
        rows.append([int(token) for token in (*ids, *rest) if token is not None])
        kinds.append(of + [0] * len(rest))
    return {"input_ids": torch.tensor(rows), KINDS: torch.tensor(kinds)}


def _media_layouts(kind: str, model: nn.Module, made: Mapping[str, Tensor]) -> Iterator[MediaLayout]:
    names = {*inspect.signature(model.forward).parameters}
    return _images(getattr(model, "config", None), made, names) if kind == "image" else _sounds(made, names)


def _sounds(made: Mapping[str, Tensor], names: set[str]) -> Iterator[MediaLayout]:
    if (sound := made.get("input_features")) is not None:
        masks = {n: torch.ones(len(sound), sound.shape[-1]).long() for n in names if _is_mask_of_sound(n)}
        yield {"input_features": sound, **masks}
        yield {"input_features": sound.mT.contiguous(), **masks}


def _is_mask_of_sound(name: str) -> bool:
    return "mask" in name and "feature" in name


def _images(config: Any, made: Mapping[str, Tensor], names: set[str]) -> Iterator[MediaLayout]:
    vision = getattr(config, "vision_config", config)
    patch, merge = _number(vision, "patch_size"), _number(vision, "spatial_merge_size", "merge_size") or 2
    pixels = made.get("pixel_values")
    generator = torch.Generator().manual_seed(0)
    samples = len(made["input_ids"])
    if "image_grid_thw" in names and patch:
        grids = torch.tensor([[1, 2 * merge, (2 + 2 * (i % 2)) * merge] for i in range(samples)])
        patches = int(grids.prod(-1).sum())
        channels = _number(vision, "in_channels", "num_channels", "in_chans") or 3
        for shape in ((channels * (_number(vision, "temporal_patch_size") or 1) * patch**2,), (channels, patch, patch)):
            flat = torch.randn(patches, *shape, generator=generator)
            yield {"pixel_values": flat, "image_grid_thw": grids}
    if "image_position_ids" in names and patch:
        side = 2 * (_number(vision, "pooling_kernel_size") or 1)
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(samples, side**2, 2)
        values = torch.rand(samples, side**2, 3 * patch**2, generator=generator)
        yield {"pixel_values": values, "image_position_ids": places}
    if "spatial_shapes" in names and patch:
        shapes = torch.tensor([[4, 4], [2, 4]])[torch.arange(samples) % 2]
        mask = (torch.arange(16) < shapes.prod(-1, keepdim=True)).long()
        values = torch.randn(samples, 16, 3 * patch**2, generator=generator)
        yield {"pixel_values": values, "spatial_shapes": shapes, "pixel_attention_mask": mask}
    if pixels is None or pixels.dim() != 4:
        return
    height, width = pixels.shape[-2:]
    for images in (pixels, *(pixels[:, None].repeat(1, tiles, 1, 1, 1) for tiles in TILES)):
        yield {"pixel_values": images}
        if "image_sizes" in names:
            yield {"pixel_values": images, "image_sizes": torch.tensor([[height, width]] * samples)}


def _features(model: nn.Module, features: Callable[..., Any], way: MediaLayout) -> list[Tensor]:
    """What the model makes of images or sounds, one tensor or one for each; nothing where it does not take them so."""
    dtype, known = next(model.parameters()).dtype, inspect.signature(features).parameters
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in way.items()}
    try:
        with torch.no_grad():
            given = features(**{name: x for name, x in cast.items() if name in known})
    except Exception:  # the way of another model
        return []
    pooled = getattr(given, "pooler_output", None)
    given = getattr(given, "last_hidden_state", given) if pooled is None else pooled
    return [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.is_floating_point() and x.dim()]


def _asked(features: Callable[..., Any], made: Mapping[str, Tensor]) -> MediaLayout:
    """What the model's features of images cannot be made without, beside the images, such as a question about them."""
    asked = [p.name for p in inspect.signature(features).parameters.values() if p.default is p.empty]
    return {name: made[name] for name in asked if name in made and name not in _LAYOUT}


def _counted(parts: Sequence[Tensor], way: MediaLayout, width: int) -> list[int]:
    """How many features of this width the model makes of what each sample has; nothing where they do not fit."""
    units = _units(way)
    samples = len(units) or len(next(iter(way.values())))
    if len(parts) == 1 and units:
        share, rest = divmod(sum(units) * width, parts[0].numel())
        return [] if rest or not share else [n // share for n in units]
    if len(parts) == 1:
        return [parts[0].numel() // width // samples] * samples
    counts = [x.numel() // width for x in parts]
    return counts if len(counts) == samples and all(counts) else []


def _units(way: MediaLayout) -> list[int]:
    """Of how many patches each image is, where they lie one behind the other."""
    return to_list(way["image_grid_thw"].prod(-1)) if "image_grid_thw" in way else []


def text_width(model: nn.Module) -> int:
    """How many numbers a token is."""
    table: Any = model.get_input_embeddings()  # type: ignore[operator]  # a method of transformers' models
    return int(table.weight.shape[-1])


def _method(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """Of the model, or of what it is built around."""
    around = (model, getattr(model, "model", None), getattr(model, "base_model", None))
    return next((method for m in around if callable(method := getattr(m, name, None))), None)


def _number(config: Any, *names: str) -> int:
    found = (getattr(config, name, None) for name in names)
    return next((x for x in found if type(x) is int), 0)
