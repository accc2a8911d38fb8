"""Tiny models and data of the tests of integrations, and comparisons with one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from shardformer.weights.state_dict import full_state_dict

VOCAB = 127
"""Size of the vocabulary. Odd, so that tensor-parallel ranks have slices of different sizes."""


def llama(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    heads: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    tokens: dict[str, Any] = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **heads, **tokens, **options}))


def gpt2(seed: int = 0, dropout: float = 0.0) -> Any:
    """Create a GPT-2, whose embedding and head are tied."""
    torch.manual_seed(seed)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes: dict[str, Any] = dict(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop, bos_token_id=1, eos_token_id=2))


def t5(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    tokens: dict[str, Any] = dict(decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **tokens, dropout_rate=0.0))


def bert(seed: int = 0) -> Any:
    """Create a BERT that classifies sequences. Its loss is a mean over samples, which ignores the number of items."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    drop: dict[str, Any] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = transformers.BertConfig(**sizes, **drop, intermediate_size=48, max_position_embeddings=64, num_labels=3)
    return transformers.BertForSequenceClassification(config)


MODELS: dict[str, Callable[..., Any]] = {"llama": llama, "gpt2": gpt2, "t5": t5, "bert": bert}


def token_rows(count: int = 32, length: int = 11, seed: int = 1, *, ragged: bool = False) -> list[dict[str, Any]]:
    """Return rows of random tokens. Each row ignores (-100) a tail of its own length.

    Args:
        ragged: rows have different lengths, up to ``length``.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        kept = int(torch.randint(3, length + 1, (1,), generator=generator))
        ids = torch.randint(3, VOCAB, (kept + 2 if ragged else length,), generator=generator)
        labels = ids.clone()
        labels[kept:] = -100
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def pad_rows(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate rows of different lengths."""
    length = max(len(row["input_ids"]) for row in rows)
    pads = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    padded = {name: [row[name] + [pad] * (length - len(row[name])) for row in rows] for name, pad in pads.items()}
    return {name: torch.tensor(values) for name, values in padded.items()}


def class_rows(count: int = 32, length: int = 11, seed: int = 1) -> list[dict[str, Any]]:
    """Return rows of random tokens with one of three classes each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (count, length), generator=generator).tolist()
    labels = torch.randint(0, 3, (count,), generator=generator).tolist()
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the full weights of a plain or a sharded model. All ranks must call it."""
    from shardformer.integrations.accelerate import unwrap_sharded_model

    sharded = unwrap_sharded_model(model)
    found = dict(model.state_dict()) if sharded is None else full_state_dict(sharded)
    return {name: value.detach().float().cpu().clone() for name, value in found.items()}


def weight_difference(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Return the largest difference of two sets of weights, relative to the largest value of each tensor.

    A tensor without values above 1e-3 has no gradient, except for rounding errors: the key biases of BERT.
    """
    assert ours.keys() == reference.keys()
    pairs = [(ours[name], reference[name]) for name in reference]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs)


def largest_difference(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of two series of numbers."""
    pairs = list(zip(ours, reference, strict=True))
    assert pairs
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
