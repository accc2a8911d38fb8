"""The twin of a model: the same classes with a small config, on which a policy is found and proven in seconds."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import PolicyError
from shardformer.policies.infer.prove import Run

HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS, VOCAB, POSITIONS = 6, 2, 8, 70, 2, 127, 64
SMALL_NUMEL = 20_000_000
"""A model up to this size is its own twin where its config cannot be shrunk."""

FIELDS: Mapping[str, int] = {
    r"(hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim|model_dim)": HEADS * HEAD_DIM,
    r"((num|n|encoder|decoder)_(attention_)?heads?|(num|n)_(encoder|decoder)_(attention_)?heads?)": HEADS,
    r"(head_dim|d_kv|attention_head_size|kv_channels|rotary_dim)": HEAD_DIM,
    r"(intermediate_size|ffn_dim|d_ff|ffn_hidden_size|(encoder|decoder)_ffn_dim|n_inner|ffn_size|dim_ff)": WIDTH,
    r"(num_hidden_layers|n_layers?|num_layers|(num_)?(encoder|decoder)_layers)": LAYERS,
    r"vocab_size": VOCAB,
    r"(max_position_embeddings|n_positions|max_target_positions|n_ctx|seq_length)": POSITIONS,
}
KV_FIELDS = r"(num_key_value_heads|num_kv_heads|n_head_kv|n_kv_heads|num_attention_kv_heads|multi_query_group_num)"


def twin_of(model: nn.Module) -> nn.Module:
    """A small model of the class of ``model``, in fp64 on the CPU, in eval mode.

    Raises PolicyError where neither a twin can be built nor the model is small enough to be its own.
    """
    config = getattr(model, "config", None)
    twin = None
    if config is not None and hasattr(config, "to_dict"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                twin = type(model)(shrunk(config))
            except Exception:  # relations between the fields that the names do not tell
                twin = None
    if twin is None or sum(p.numel() for p in twin.parameters()) > SMALL_NUMEL:
        size = sum(p.numel() for p in model.parameters())
        if size > SMALL_NUMEL:
            raise PolicyError(
                f"No small twin of {type(model).__name__} can be built, and it has {size:,} parameters itself",
                rule="A policy is found and proven on a small model of the same classes",
                remedy="Write the roles down (docs/policies.md), or infer them from a small config of yours",
            )
        twin = copy.deepcopy(model)
    return twin.to(device="cpu", dtype=torch.float64).eval().requires_grad_(True)


def model_of(config: Any) -> nn.Module:
    """A small random model of a transformers config: of its first architecture, or the base model.

    Raises PolicyError for what is no config, or one whose model cannot be built small.
    """
    import transformers

    if not hasattr(config, "model_type"):
        raise PolicyError(
            f"infer was given {config!r:.80}",
            rule="It takes a model, or a config of transformers",
            remedy="Build the model first",
        )
    name = next(iter(getattr(config, "architectures", None) or []), "")
    make: Any = getattr(transformers, name, None) or transformers.AutoModel.from_config
    try:
        model: nn.Module = make(shrunk(config))
    except Exception as error:
        raise PolicyError(
            f"No small {name or config.model_type} can be built: {type(error).__name__}: {error!s:.200}",
            rule="A policy is found on a small model of the same classes",
            remedy="Give the model itself, of up to 20 million parameters",
        ) from error
    return model


def shrunk(config: Any) -> Any:
    """A copy of a transformers config with few and small layers, and the relations of its head counts."""
    small = copy.deepcopy(config)
    fields = {name: value for name, value in vars(small).items() if not name.startswith("_")}
    heads = next((v for n, v in fields.items() if _size_of(n) == HEADS and type(v) is int), 0)
    for name, value in fields.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            setattr(small, name, shrunk(value))
        elif type(value) is int and value > 0:
            new = _kv_heads(value, heads) if re.fullmatch(KV_FIELDS, name) else _size_of(name)
            if new is not None:
                setattr(small, name, new)
        elif isinstance(value, list) and name.endswith(("layer_types", "attention_layers")):
            setattr(small, name, value[:LAYERS])
        if name.endswith("token_id") and type(value) is int and value >= VOCAB:
            setattr(small, name, 3)
    return small


def _size_of(name: str) -> int | None:
    return next((size for pattern, size in FIELDS.items() if re.fullmatch(pattern, name)), None)


def _kv_heads(value: int, heads: int) -> int:
    return HEADS if value == heads else 1 if value == 1 else KV_HEADS


def batch_for(model: nn.Module) -> dict[str, Tensor]:
    """A batch of what the model's forward takes.

    Raises PolicyError for a model whose inputs are not known.
    """
    config: Any = getattr(model, "config", None)
    names = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)
    text = getattr(config, "text_config", config)
    vocab = getattr(text, "vocab_size", None)
    batch: dict[str, Tensor] = {}
    if "input_ids" in names and isinstance(vocab, int):
        batch["input_ids"] = torch.randint(5, vocab, (2, 9), generator=generator)
        if "attention_mask" in names:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][1, -2:] = 0
    vision = getattr(config, "vision_config", config)
    if "pixel_values" in names and isinstance(getattr(vision, "image_size", None), int):
        side, channels = vision.image_size, getattr(vision, "num_channels", 3)
        batch["pixel_values"] = torch.randn(2, channels, side, side, generator=generator, dtype=torch.float64)
    if "decoder_input_ids" in names and isinstance(vocab, int):
        batch["decoder_input_ids"] = torch.randint(5, vocab, (2, 7), generator=generator)
    if not batch:
        raise PolicyError(
            f"What to feed {type(model).__name__} is not known: its forward takes {', '.join(names)}",
            rule="A policy is found in one forward, of tokens (input_ids) or images (pixel_values)",
            remedy="Give an example of a batch: infer(model, batch={...})",
        )
    return batch


def runner(model: nn.Module, batch: Mapping[str, Tensor]) -> Run:
    """What calls a model with the batch, without a cache."""
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return lambda m: m(**batch, **extra)
