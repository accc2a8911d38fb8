"""Generates example batches for a model from the argument names of its `forward` and the sizes in its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import InputError, PolicyError
from shardformer.gradient_accumulation.micro_batches import KINDS, get_special_token_ids
from shardformer.random_state import fork_rng, fork_rng_with_seed, seed_all_generators
from shardformer.torch_compat import TorchDispatchMode, tolist_or_ones, tree_leaves
from shardformer.transformers_compat import filter_forward_kwargs, find_embeddings

Forward = Callable[[nn.Module], Any]  # a function that calls a model with a batch
BATCH, LENGTH, TARGET_LENGTH = 2, 9, 7
SIDE = 64  # height and width of images if the config does not specify them
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
"""No input is generated for optional forward arguments whose names contain one of these words."""
AUDIO_SAMPLES = 3200  # length of audio inputs, from which feature extractors compute a few frames


class UnknownInputsError(PolicyError):
    """Raised if no example inputs can be generated, because a model's `forward` arguments are unknown."""


def convert_batch_to_forward_kwargs(batch: Any, model: nn.Module) -> dict[str, Any]:
    """Convert a dict, a tensor or a sequence of tensors to keyword arguments for a model's `forward`.

    Values of a dict that the forward pass does not accept, such as the target of a loss function, are left out.

    Raises:
        InputError: if the batch has another type, or more tensors than the forward pass has arguments.
    """
    if isinstance(batch, Mapping):
        return filter_forward_kwargs(batch, model)
    values = (batch,) if isinstance(batch, Tensor) else batch
    names = list(inspect.signature(model.forward).parameters)
    if not isinstance(values, (list, tuple)) or len(values) > len(names):
        received = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (list, tuple)) else "")
        arguments, first = ", ".join(names), names[0] if names else "x"
        raise InputError(
            f"batch must contain the arguments of {type(model).__name__}.forward({arguments}), but got {received}.",
            remedy=f'Pass a dict, such as batch={{"{first}": tensor}}.',
        )
    return dict(zip(names, values, strict=False))


def make_example_batches(model: nn.Module) -> list[dict[str, Tensor]]:
    """Generate example batches that a model may accept, such as batches with only text or only images.

    Raises:
        UnknownInputsError: if no argument of `forward` is known.
    """
    names = inspect.signature(model.forward).parameters
    inputs = dict(iter_inputs_for_known_arguments(model))
    if not inputs:
        example = ", ".join(f'"{name}": tensor' for name in get_required_forward_args(model))
        arguments = ", ".join(names)
        raise UnknownInputsError(
            f"ShardFormer cannot generate example inputs for {type(model).__name__}.forward({arguments}).",
            remedy=f"Pass an example batch: shardformer.derive_policy(model, batch={{{example}}}). On the command "
            "line, pass FILE.py:function, where the function returns (model_fn, batch_fn) (docs/add-a-model.md).",
        )
    text = ("input_ids", "attention_mask", "decoder_input_ids")
    only_text = {name: x for name, x in inputs.items() if name in text}
    others = {name: x for name, x in inputs.items() if name not in text[:2]}
    audio = {name: x for name, x in inputs.items() if name in ("input_values", "input_features", "decoder_input_ids")}
    ways = [inputs, only_text, others, audio]
    ways = [way for i, way in enumerate(ways) if way and way not in ways[:i]]
    if "input_ids" in inputs and (codebooks := _get_config_field(getattr(model, "config", None), "num_codebooks")):
        ways.append({**only_text, "input_ids": inputs["input_ids"].repeat(codebooks, 1)})  # one row per audio codebook
    return ways


def guess_example_batches(model: nn.Module) -> list[dict[str, Tensor]]:
    """Guess random input batches for a model whose `forward` arguments have no well-known names.

    The values are tokens if the model has an embedding. Otherwise they are floats whose features or channels match the
    first weight.
    """
    needed = get_required_forward_args(model)
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


def guess_only_argument(model: nn.Module) -> list[dict[str, Tensor]]:
    """Guess input batches for a model with one required argument, or return an empty list for other models."""
    return guess_example_batches(model) if len(get_required_forward_args(model)) == 1 else []


def get_required_forward_args(model: nn.Module) -> list[str]:
    """Return the names of a model's `forward` arguments without default values."""
    arguments = inspect.signature(model.forward).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in arguments if p.default is p.empty and p.kind in named]


def find_unknown_forward_args(model: nn.Module) -> tuple[list[str], list[str]]:
    """Find the required and optional `forward` arguments for which no example input can be generated."""
    known = {name for name, _ in iter_inputs_for_known_arguments(model)}
    others = {n: p for n, p in inspect.signature(model.forward).parameters.items() if n not in known}
    needed = [name for name in get_required_forward_args(model) if name in others]
    tensors = [n for n, p in others.items() if "Tensor" in str(p.annotation) and not any(w in n for w in NO_INPUTS)]
    return needed, [name for name in tensors if name not in needed]


def iter_batches_with_labels(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    """Yield copies of a batch with possible labels: the input tokens, or one class index per sample.

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


def iter_inputs_for_known_arguments(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Generate a random tensor for each `forward` argument with a well-known name, such as ``input_ids``."""
    names = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    generator = torch.Generator().manual_seed(0)
    vocab = _get_config_field(config, "vocab_size", "text_config", "decoder", "encoder") or _get_vocab_size(model)

    fields = vars(config) if hasattr(config, "__dict__") else {}
    special = [x for n, x in fields.items() if n.endswith(("_token_id", "_token_index"))]  # such as image tokens

    def sample_token_ids(sequence_length: int) -> Tensor:
        words = [word for word in range(5, max(6, (vocab or 0) - 8)) if word not in special] or [5]
        return torch.tensor(words)[torch.randint(len(words), (BATCH, sequence_length), generator=generator)]

    if "input_ids" in names and vocab:
        yield "input_ids", sample_token_ids(LENGTH)
        if "attention_mask" in names:
            mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
            mask[1, -2:] = 0
            yield "attention_mask", mask
    side = _get_config_field(config, "image_size", "vision_config") or SIDE
    channels = _get_config_field(config, "num_channels", "vision_config") or 3
    if "spatial_shapes" in names and (patch := _get_config_field(config, "patch_size", "vision_config")):
        yield "spatial_shapes", torch.tensor([[3, 3], [3, 3]])
        yield "pixel_attention_mask", torch.ones(BATCH, LENGTH, dtype=torch.int64)
        yield "pixel_values", torch.randn(BATCH, LENGTH, channels * patch**2, generator=generator)
    elif "pixel_values" in names:
        height, width = (side, side) if isinstance(side, int) else side
        yield "pixel_values", torch.randn(BATCH, channels, height, width, generator=generator)
    bins = _get_config_field(config, "num_mel_bins", "audio_config", "encoder_config") or _get_config_field(
        config, "feature_size"
    )
    if "input_features" in names and bins:
        positions = _get_config_field(config, "max_source_positions", "audio_config")
        frames = 2 * positions if positions else LENGTH * (_get_config_field(config, "audio_length_per_tok") or 2)
        yield "input_features", torch.randn(BATCH, bins, frames, generator=generator)
    elif "input_features" in names and (bins := _get_config_field(config, "feature_projection_input_dim")):
        yield "input_features", torch.randn(BATCH, LENGTH, bins, generator=generator)
    if "input_values" in names:
        shape = (BATCH, config.max_length, bins) if bins and hasattr(config, "max_length") else (BATCH, AUDIO_SAMPLES)
        yield "input_values", torch.randn(*shape, generator=generator)
    if "decoder_input_ids" in names and vocab:
        yield "decoder_input_ids", sample_token_ids(TARGET_LENGTH)
    for name in names:  # inputs of a submodel, such as qformer_input_ids
        part = getattr(config, f"{name.removesuffix('_input_ids')}_config", None)
        if (
            name.endswith("_input_ids")
            and name != "decoder_input_ids"
            and (words := _get_config_field(part, "vocab_size"))
        ):
            yield name, torch.randint(min(5, words - 1), words, (BATCH, LENGTH), generator=generator)


def _get_vocab_size(model: nn.Module) -> int:
    table = find_embeddings(model, "input")
    return table.num_embeddings if isinstance(table, nn.Embedding) else 0


def _get_config_field(config: Any, field_name: str, *sub_config_names: str) -> Any:
    found = (
        getattr(c, field_name, None)
        for c in (config, *(getattr(config, sub_config, None) for sub_config in sub_config_names))
    )
    return next((value for value in found if isinstance(value, int | list | tuple)), None)


def make_forward_fn(model: nn.Module, batch: Mapping[str, Tensor], seed: int = 0) -> Forward:
    """Return a function that runs a model on a fixed batch, without a KV cache.

    Floating-point inputs are cast to the dtype of ``model``. Every call uses the same random seed.
    """
    dtype = next(model.parameters()).dtype
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def run_forward(m: nn.Module) -> Any:
        with fork_rng_with_seed(seed):
            return m(**cast, **extra)

    return run_forward


SEEDS = {0.5: 207, 0.99: 1470, 0.01: 1751}
"""Values to try instead of random numbers, with seeds for which NumPy and Python first draw about the same value.

A model may skip layers if a random number is below or above a threshold.
"""


@dataclass(frozen=True)
class ConstantDrawsForward:
    """A forward pass in which floating-point random numbers are replaced by ``value``."""

    forward_fn: Forward
    value: float

    def __call__(self, model: nn.Module) -> Any:
        with fork_rng(), _ConstantDraws(self.value):
            return self.forward_fn(model)


def draw_like(other_forward_fn: Forward, forward_fn: Forward) -> Forward:
    """Return ``forward_fn`` with the constants that ``other_forward_fn`` uses instead of random numbers, if any."""
    if isinstance(other_forward_fn, ConstantDrawsForward):
        return replace(other_forward_fn, forward_fn=forward_fn)
    return forward_fn


class _ConstantDraws(TorchDispatchMode):
    """Dispatch mode in which random floating-point tensors are constant, so that they do not depend on their shape.

    Ranks that hold shards, or only some of the layers, would otherwise draw different numbers than one process. Other
    random numbers (indices, permutations, NumPy, Python) are drawn from the same seed after each operation.
    """

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._value = value

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        seed_all_generators(SEEDS[self._value], include_cuda=False)
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not _transforms_input(func):
            for x in tree_leaves(out):
                if isinstance(x, Tensor) and (x.is_floating_point() or x.dtype == torch.bool):
                    x.fill_(self._value)
        return out


def _transforms_input(random_operator: Any) -> bool:
    """Return whether a random operator transforms an input, such as attention with dropout, instead of drawing."""
    arguments = random_operator._schema.arguments
    if not arguments or str(arguments[0].type) != "Tensor":
        return False
    overwrites = arguments[0].alias_info is not None and arguments[0].alias_info.is_write
    return not (overwrites or random_operator._schema.name.endswith(("_like", "::bernoulli")))


# B batch, S sequence, C channels, P patches of all images, D numbers in a patch

MODALITIES = {"image": 1, "audio": 3}  # the value of each modality in ``mm_token_type_ids``
LEADING_TOKENS = 2  # number of text tokens before the media tokens
TILES = (1, 2, 3, 5)  # numbers of tiles of an image
MediaLayout = dict[str, Tensor]  # consistent inputs of one modality: values, sizes and masks


def iter_batches_with_media_tokens(model: nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[MediaLayout]:
    """Yield batches whose token sequences contain placeholder tokens for images or audio.

    Yields one batch for each format of the media that the model accepts, and none if the config has no media tokens.
    """
    names = inspect.signature(model.forward).parameters
    config, text = getattr(model, "config", None), inputs.get("input_ids")
    if text is None:
        return
    known = [
        [(m, layout, counts) for layout, counts in _iter_media_inputs_and_token_counts(model, m, inputs)]
        for m in MODALITIES
    ]
    for chosen in product(*filter(None, known)):
        if chosen:
            places = {modality: (_get_media_token_id(config, modality), counts) for modality, _, counts in chosen}
            out = _insert_media_placeholder_tokens(text, places)
            if "attention_mask" in inputs:
                mask_BS = inputs["attention_mask"]
                added = out["input_ids"].shape[1] - text.shape[1]
                out["attention_mask"] = torch.cat([torch.ones(len(text), added).long(), mask_BS], 1)
            out["token_type_ids"] = (out[KINDS] > 0).long()
            own = {name: x for name, x in inputs.items() if name not in out and name not in _LAYOUT}
            found = {name: x for _, layout, _ in chosen for name, x in layout.items()}
            yield {name: x for name, x in {**out, **own, **found}.items() if name in names}


def get_media_argument_names(model: nn.Module) -> list[str]:
    """Return the names of `forward` arguments for images or audio."""
    names = inspect.signature(model.forward).parameters
    return [name for values in _VALUES.values() for name in values if name in names]


def get_image_feature_dim(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Return the size of a model's image features, or 0 if it equals the size of the text embeddings."""
    features = _find_model_method(model, "get_image_features")
    if features is None or _get_media_token_id(getattr(model, "config", None), "image") is None:
        return 0
    for layout in _iter_possible_media_inputs("image", model, inputs):
        if parts := _compute_media_features(
            model, features, {**_select_required_feature_inputs(features, inputs), **layout}
        ):
            return 0 if parts[0].shape[-1] == get_text_embedding_dim(model) else parts[0].shape[-1]
    return 0


def _iter_media_inputs_and_token_counts(
    model: nn.Module, modality: str, inputs: Mapping[str, Tensor]
) -> Iterator[tuple[MediaLayout, list[int]]]:
    """Yield image or audio inputs that a model accepts, with the number of placeholder tokens per sample."""
    features = _find_model_method(model, f"get_{modality}_features")
    if features is not None and _get_media_token_id(getattr(model, "config", None), modality) is not None:
        for layout in _iter_possible_media_inputs(modality, model, inputs):
            parts = _compute_media_features(
                model, features, {**_select_required_feature_inputs(features, inputs), **layout}
            )
            # a later projection may change the width to that of the text
            widths = dict.fromkeys([get_text_embedding_dim(model), *(x.shape[-1] for x in parts[:1])])
            for counts in dict.fromkeys(tuple(_count_features_per_sample(parts, layout, width)) for width in widths):
                if counts:
                    yield layout, list(counts)


def _get_media_token_id(config: Any, modality: str) -> int | None:
    ids = get_special_token_ids(config)
    return next((ids[name] for name in ids if name.startswith(f"{modality}_token")), None)


_VALUES = {"image": ("pixel_values",), "audio": ("input_features", "input_values")}
_LAYOUT = ("pixel_values", "spatial_shapes", "pixel_attention_mask", "input_features")


def _insert_media_placeholder_tokens(
    text_ids_BS: Tensor, token_id_and_counts_by_modality: Mapping[str, tuple[int | None, list[int]]]
) -> MediaLayout:
    """Insert placeholder tokens for images or audio into texts, and return the token ids and token types."""
    longest = max(
        sum(counts[row] for _, counts in token_id_and_counts_by_modality.values()) for row in range(len(text_ids_BS))
    )
    rows, token_types = [], []
    for row, words in enumerate(text_ids_BS):
        put = [
            (token, MODALITIES[modality], counts[row])
            for modality, (token, counts) in token_id_and_counts_by_modality.items()
        ]
        missing = longest - sum(count for _, _, count in put)
        ids = [*words[:LEADING_TOKENS], *(token for token, _, count in put for _ in range(count))]
        of = [0] * LEADING_TOKENS + [modality for _, modality, count in put for _ in range(count)]
        remaining = [*words[torch.arange(missing) % len(words)], *words[LEADING_TOKENS:]]
        rows.append([int(token) for token in (*ids, *remaining) if token is not None])
        token_types.append(of + [0] * len(remaining))
    return {"input_ids": torch.tensor(rows), KINDS: torch.tensor(token_types)}


def _iter_possible_media_inputs(modality: str, model: nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[MediaLayout]:
    names = {*inspect.signature(model.forward).parameters}
    return (
        _iter_possible_image_inputs(getattr(model, "config", None), inputs, names)
        if modality == "image"
        else _iter_possible_audio_inputs(inputs, names)
    )


def _iter_possible_audio_inputs(inputs: Mapping[str, Tensor], argument_names: set[str]) -> Iterator[MediaLayout]:
    if (audio := inputs.get("input_features")) is not None:
        masks = {
            n: torch.ones(len(audio), audio.shape[-1]).long() for n in argument_names if "mask" in n and "feature" in n
        }
        yield {"input_features": audio, **masks}
        yield {"input_features": audio.mT.contiguous(), **masks}


def _iter_possible_image_inputs(
    config: Any, inputs: Mapping[str, Tensor], argument_names: set[str]
) -> Iterator[MediaLayout]:
    vision = getattr(config, "vision_config", config)
    patch, merge = (
        _get_first_int_config_field(vision, "patch_size"),
        _get_first_int_config_field(vision, "spatial_merge_size", "merge_size") or 2,
    )
    pixels = inputs.get("pixel_values")
    generator = torch.Generator().manual_seed(0)
    samples = len(inputs["input_ids"])
    if "image_grid_thw" in argument_names and patch:
        grids = torch.tensor([[1, 2 * merge, (2 + 2 * (i % 2)) * merge] for i in range(samples)])
        patches = int(grids.prod(-1).sum())
        channels = _get_first_int_config_field(vision, "in_channels", "num_channels", "in_chans") or 3
        for shape in (
            (channels * (_get_first_int_config_field(vision, "temporal_patch_size") or 1) * patch**2,),
            (channels, patch, patch),
        ):
            flat = torch.randn(patches, *shape, generator=generator)
            yield {"pixel_values": flat, "image_grid_thw": grids}
    if "image_position_ids" in argument_names and patch:
        side = 2 * (_get_first_int_config_field(vision, "pooling_kernel_size") or 1)
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(samples, side**2, 2)
        values = torch.rand(samples, side**2, 3 * patch**2, generator=generator)
        yield {"pixel_values": values, "image_position_ids": places}
    if "spatial_shapes" in argument_names and patch:
        shapes = torch.tensor([[4, 4], [2, 4]])[torch.arange(samples) % 2]
        mask = (torch.arange(16) < shapes.prod(-1, keepdim=True)).long()
        values = torch.randn(samples, 16, 3 * patch**2, generator=generator)
        yield {"pixel_values": values, "spatial_shapes": shapes, "pixel_attention_mask": mask}
    if pixels is None or pixels.dim() != 4:
        return
    height, width = pixels.shape[-2:]
    for images in (pixels, *(pixels[:, None].repeat(1, tiles, 1, 1, 1) for tiles in TILES)):
        yield {"pixel_values": images}
        if "image_sizes" in argument_names:
            yield {"pixel_values": images, "image_sizes": torch.tensor([[height, width]] * samples)}


def _compute_media_features(
    model: nn.Module, feature_fn: Callable[..., Any], media_inputs: MediaLayout
) -> list[Tensor]:
    """Compute image or audio features, or return an empty list if the model rejects the input format."""
    dtype, known = next(model.parameters()).dtype, inspect.signature(feature_fn).parameters
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in media_inputs.items()}
    try:
        with torch.no_grad():
            output = feature_fn(**{name: x for name, x in cast.items() if name in known})
    except Exception:  # a layout for another model
        return []
    pooled = getattr(output, "pooler_output", None)
    output = getattr(output, "last_hidden_state", output) if pooled is None else pooled
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point() and x.dim()]


def _select_required_feature_inputs(feature_fn: Callable[..., Any], inputs: Mapping[str, Tensor]) -> MediaLayout:
    """Select additional inputs that ``feature_fn`` requires, such as a question about the image."""
    required = [p.name for p in inspect.signature(feature_fn).parameters.values() if p.default is p.empty]
    return {name: inputs[name] for name in required if name in inputs and name not in _LAYOUT}


def _count_features_per_sample(features: Sequence[Tensor], media_inputs: MediaLayout, feature_dim: int) -> list[int]:
    """Count the image or audio features of each sample. Returns an empty list if no size matches ``feature_dim``."""
    # patches of all images are concatenated
    units = tolist_or_ones(media_inputs["image_grid_thw"].prod(-1)) if "image_grid_thw" in media_inputs else []
    samples = len(units) or len(next(iter(media_inputs.values())))
    if len(features) == 1 and units:
        share, remaining = divmod(sum(units) * feature_dim, features[0].numel())
        return [] if remaining or not share else [n // share for n in units]
    if len(features) == 1:
        return [features[0].numel() // feature_dim // samples] * samples
    counts = [x.numel() // feature_dim for x in features]
    return counts if len(counts) == samples and all(counts) else []


def get_text_embedding_dim(model: nn.Module) -> int:
    table: Any = model.get_input_embeddings()  # type: ignore[operator]  # a method of transformers' models
    return int(table.weight.shape[-1])


def _find_model_method(model: nn.Module, method_name: str) -> Callable[..., Any] | None:
    owners = (model, getattr(model, "model", None), getattr(model, "base_model", None))
    return next((method for m in owners if callable(method := getattr(m, method_name, None))), None)


def _get_first_int_config_field(config: Any, *field_names: str) -> int:
    found = (getattr(config, name, None) for name in field_names)
    return next((x for x in found if type(x) is int), 0)
