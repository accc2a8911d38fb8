"""Example batches for a reduced model, from the arguments of its forward and the sizes in its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import PolicyError
from shardformer.pipeline.micro_batches import KINDS, special_token_ids
from shardformer.random_state import fixed_seed
from shardformer.torch_compat import to_list, tree_leaves

Forward = Callable[[nn.Module], Any]  # A function that calls a model with a batch
BATCH, LENGTH, TARGET_LENGTH = 2, 9, 7
SIDE = 64  # Height and width of images if the config does not specify them
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
"""Parts of the names of optional forward arguments for which no input is generated."""
AUDIO_SAMPLES = 3200  # Audio samples, from which feature extractors compute a few frames


class UnknownInputsError(PolicyError):
    """Raised if no inputs can be generated for the forward of a model."""


def example_batches(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return batches that the forward may accept: with all known arguments, and with one kind of input only.

    Raises:
        UnknownInputsError: if no argument of the forward is known.
    """
    names = inspect.signature(model.forward).parameters
    inputs = dict(generate_inputs(model))
    if not inputs:
        raise UnknownInputsError(
            f"The inputs of {type(model).__name__} are unknown: its forward takes {', '.join(names)}",
            rule="A policy is derived from one forward with tokens, images or audio",
            remedy="Pass an example batch: derive_policy(model, batch={...})",
        )
    text = ("input_ids", "attention_mask", "decoder_input_ids")
    only_text = {name: x for name, x in inputs.items() if name in text}
    others = {name: x for name, x in inputs.items() if name not in text[:2]}
    audio = {name: x for name, x in inputs.items() if name in ("input_values", "input_features", "decoder_input_ids")}
    ways = [inputs, only_text, others, audio]
    ways = [way for i, way in enumerate(ways) if way and way not in ways[:i]]
    if "input_ids" in inputs and (codebooks := _field(getattr(model, "config", None), "num_codebooks")):
        ways.append({**only_text, "input_ids": inputs["input_ids"].repeat(codebooks, 1)})  # one row per audio codebook
    return ways


def guess_batches(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return batches for a model with unknown argument names, with values for all required arguments.

    The values are tokens if the model has an embedding; otherwise floats with the input features or channels of the
    first weight.
    """
    needed = get_required_arguments(model)
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


def get_required_arguments(model: nn.Module) -> list[str]:
    """Return the names of required forward arguments."""
    arguments = inspect.signature(model.forward).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in arguments if p.default is p.empty and p.kind in named]


def unknown_inputs(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the forward arguments for which no input is generated: the required ones and the optional tensors."""
    known = {name for name, _ in generate_inputs(model)}
    others = {n: p for n, p in inspect.signature(model.forward).parameters.items() if n not in known}
    needed = [name for name in get_required_arguments(model) if name in others]
    tensors = [n for n, p in others.items() if "Tensor" in str(p.annotation) and not any(w in n for w in NO_INPUTS)]
    return needed, [name for name in tensors if name not in needed]


def with_labels(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    """Yield copies of the batch with labels: tokens, or one class per sample.

    The first candidate omits ``decoder_input_ids``, which some models derive from the labels.
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


def generate_inputs(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a value for each forward argument with a known name."""
    names = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    generator = torch.Generator().manual_seed(0)
    vocab = _field(config, "vocab_size", "text_config", "decoder", "encoder") or _vocab_size(model)

    fields = vars(config) if hasattr(config, "__dict__") else {}
    special = [x for n, x in fields.items() if n.endswith(("_token_id", "_token_index"))]  # such as image tokens

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
        shape = (BATCH, config.max_length, bins) if bins and hasattr(config, "max_length") else (BATCH, AUDIO_SAMPLES)
        yield "input_values", torch.randn(*shape, generator=generator)
    if "decoder_input_ids" in names and vocab:
        yield "decoder_input_ids", tokens(TARGET_LENGTH)
    for name in names:  # inputs of a submodel, such as qformer_input_ids
        part = getattr(config, f"{name.removesuffix('_input_ids')}_config", None)
        if name.endswith("_input_ids") and name != "decoder_input_ids" and (words := _field(part, "vocab_size")):
            yield name, torch.randint(min(5, words - 1), words, (BATCH, LENGTH), generator=generator)


def _vocab_size(model: nn.Module) -> int:
    try:
        table: Any = model.get_input_embeddings()  # type: ignore[operator]  # a method of transformers' models
    except (AttributeError, RuntimeError):  # "not implemented" is one of these
        return 0
    return table.num_embeddings if isinstance(table, nn.Embedding) else 0


def _field(config: Any, name: str, *parts: str) -> Any:
    found = (getattr(c, name, None) for c in (config, *(getattr(config, part, None) for part in parts)))
    return next((value for value in found if isinstance(value, int | list | tuple)), None)


def forward_call(model: nn.Module, batch: Mapping[str, Tensor], seed: int = 0) -> Forward:
    """Return a function that runs a forward on the batch, in the dtype of ``model`` and without a KV cache.

    Every call uses the same random seed.
    """
    dtype = next(model.parameters()).dtype
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def run(m: nn.Module) -> Any:
        with fixed_seed(seed):
            return m(**cast, **extra)

    return run


# B batch, S sequence, C channels, P patches of all images, D numbers in a patch

MODALITIES = {"image": 1, "audio": 3}  # Modality -> its value in ``mm_token_type_ids``
LEADING_TOKENS = 2  # Text tokens before the media tokens
TILES = (1, 2, 3, 5)  # Numbers of tiles of an image
MediaLayout = dict[str, Tensor]  # Consistent inputs of one modality: values, sizes and masks


def insert_media_tokens(model: nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[MediaLayout]:
    """Yield ``inputs`` with placeholder tokens for images and audio inserted into the texts.

    Yields one batch for each media layout that the model accepts, and none if the config defines no media tokens.
    """
    names = inspect.signature(model.forward).parameters
    config, text = getattr(model, "config", None), inputs.get("input_ids")
    if text is None:
        return
    known = [[(m, layout, counts) for layout, counts in _accepted_layouts(model, m, inputs)] for m in MODALITIES]
    for chosen in product(*filter(None, known)):
        if chosen:
            places = {modality: (_token(config, modality), counts) for modality, _, counts in chosen}
            out = _insert_tokens(text, places)
            if "attention_mask" in inputs:
                mask_BS = inputs["attention_mask"]
                added = out["input_ids"].shape[1] - text.shape[1]
                out["attention_mask"] = torch.cat([torch.ones(len(text), added).long(), mask_BS], 1)
            out["token_type_ids"] = (out[KINDS] > 0).long()
            own = {name: x for name, x in inputs.items() if name not in out and name not in _LAYOUT}
            found = {name: x for _, way, _ in chosen for name, x in way.items()}
            yield {name: x for name, x in {**out, **own, **found}.items() if name in names}


def find_media_inputs(model: nn.Module) -> list[str]:
    """Return the image and audio inputs that a model accepts."""
    names = inspect.signature(model.forward).parameters
    return [name for values in _VALUES.values() for name in values if name in names]


def get_image_feature_width(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Return the width of image features if it differs from the width of the text; otherwise 0."""
    features = _find_method(model, "get_image_features")
    if features is None or _token(getattr(model, "config", None), "image") is None:
        return 0
    for way in _media_layouts("image", model, inputs):
        if parts := _features(model, features, {**_required_inputs(features, inputs), **way}):
            return 0 if parts[0].shape[-1] == get_text_width(model) else parts[0].shape[-1]
    return 0


def _accepted_layouts(
    model: nn.Module, modality: str, inputs: Mapping[str, Tensor]
) -> Iterator[tuple[MediaLayout, list[int]]]:
    """Yield the media layouts that a model accepts, with the number of media tokens of each sample."""
    features = _find_method(model, f"get_{modality}_features")
    if features is not None and _token(getattr(model, "config", None), modality) is not None:
        for way in _media_layouts(modality, model, inputs):
            parts = _features(model, features, {**_required_inputs(features, inputs), **way})
            # a later projection may change the width to that of the text
            widths = dict.fromkeys([get_text_width(model), *(x.shape[-1] for x in parts[:1])])
            for counts in dict.fromkeys(tuple(_features_per_sample(parts, way, width)) for width in widths):
                if counts:
                    yield way, list(counts)


def _token(config: Any, modality: str) -> int | None:
    ids = special_token_ids(config)
    return next((ids[name] for name in ids if name.startswith(f"{modality}_token")), None)


_VALUES = {"image": ("pixel_values",), "audio": ("input_features", "input_values")}
_LAYOUT = ("pixel_values", "spatial_shapes", "pixel_attention_mask", "input_features")


def _insert_tokens(text_BS: Tensor, places: Mapping[str, tuple[int | None, list[int]]]) -> MediaLayout:
    """Return texts of equal length with media tokens inserted, and the modality of each token."""
    longest = max(sum(counts[row] for _, counts in places.values()) for row in range(len(text_BS)))
    rows, token_types = [], []
    for row, words in enumerate(text_BS):
        put = [(token, MODALITIES[modality], counts[row]) for modality, (token, counts) in places.items()]
        missing = longest - sum(count for _, _, count in put)
        ids = [*words[:LEADING_TOKENS], *(token for token, _, count in put for _ in range(count))]
        of = [0] * LEADING_TOKENS + [modality for _, modality, count in put for _ in range(count)]
        remaining = [*words[torch.arange(missing) % len(words)], *words[LEADING_TOKENS:]]
        rows.append([int(token) for token in (*ids, *remaining) if token is not None])
        token_types.append(of + [0] * len(remaining))
    return {"input_ids": torch.tensor(rows), KINDS: torch.tensor(token_types)}


def _media_layouts(modality: str, model: nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[MediaLayout]:
    names = {*inspect.signature(model.forward).parameters}
    return (
        _image_layouts(getattr(model, "config", None), inputs, names)
        if modality == "image"
        else _audio_layouts(inputs, names)
    )


def _audio_layouts(inputs: Mapping[str, Tensor], names: set[str]) -> Iterator[MediaLayout]:
    if (audio := inputs.get("input_features")) is not None:
        masks = {n: torch.ones(len(audio), audio.shape[-1]).long() for n in names if "mask" in n and "feature" in n}
        yield {"input_features": audio, **masks}
        yield {"input_features": audio.mT.contiguous(), **masks}


def _image_layouts(config: Any, inputs: Mapping[str, Tensor], names: set[str]) -> Iterator[MediaLayout]:
    vision = getattr(config, "vision_config", config)
    patch, merge = _number(vision, "patch_size"), _number(vision, "spatial_merge_size", "merge_size") or 2
    pixels = inputs.get("pixel_values")
    generator = torch.Generator().manual_seed(0)
    samples = len(inputs["input_ids"])
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
    """Return the features that the model computes from images or audio; empty if it does not accept the layout."""
    dtype, known = next(model.parameters()).dtype, inspect.signature(features).parameters
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in way.items()}
    try:
        with torch.no_grad():
            given = features(**{name: x for name, x in cast.items() if name in known})
    except Exception:  # a layout for another model
        return []
    pooled = getattr(given, "pooler_output", None)
    given = getattr(given, "last_hidden_state", given) if pooled is None else pooled
    return [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.is_floating_point() and x.dim()]


def _required_inputs(features: Callable[..., Any], inputs: Mapping[str, Tensor]) -> MediaLayout:
    """Return required inputs of the feature function other than the media, such as a question about an image."""
    required = [p.name for p in inspect.signature(features).parameters.values() if p.default is p.empty]
    return {name: inputs[name] for name in required if name in inputs and name not in _LAYOUT}


def _features_per_sample(parts: Sequence[Tensor], way: MediaLayout, width: int) -> list[int]:
    """Return the number of features per sample, each of size ``width``; empty if the sizes do not fit."""
    # patches of all images are concatenated
    units = to_list(way["image_grid_thw"].prod(-1)) if "image_grid_thw" in way else []
    samples = len(units) or len(next(iter(way.values())))
    if len(parts) == 1 and units:
        share, remaining = divmod(sum(units) * width, parts[0].numel())
        return [] if remaining or not share else [n // share for n in units]
    if len(parts) == 1:
        return [parts[0].numel() // width // samples] * samples
    counts = [x.numel() // width for x in parts]
    return counts if len(counts) == samples and all(counts) else []


def get_text_width(model: nn.Module) -> int:
    """Return the width of a token embedding."""
    table: Any = model.get_input_embeddings()  # type: ignore[operator]  # a method of transformers' models
    return int(table.weight.shape[-1])


def _find_method(model: nn.Module, name: str) -> Callable[..., Any] | None:
    around = (model, getattr(model, "model", None), getattr(model, "base_model", None))
    return next((method for m in around if callable(method := getattr(m, name, None))), None)


def _number(config: Any, *names: str) -> int:
    found = (getattr(config, name, None) for name in names)
    return next((x for x in found if type(x) is int), 0)
