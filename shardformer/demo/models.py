"""What is trained: a small language model of a family, with random weights, or one that the user gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from shardformer.demo.settings import FAMILIES, HEAD_DIM, Settings
from shardformer.demo.text import MASK, NOTHING, VOCAB_SIZE, Text, bytes_as_tokens, check_length, read_text
from shardformer.errors import ConfigError
from shardformer.testing.zoo import LANGUAGE_MODEL
from shardformer.transformers_compat import load_transformers
from shardformer.verify.model_source import ModelSource, Pretrained, find_model

TASK: Mapping[str, str] = MappingProxyType({"bert": "masked", "gpt2": "causal", "llama": "causal", "t5": "continue"})
TASK_IN_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "causal": "guess the next token",
        "masked": "guess the 15 % of the tokens that are masked",
        "continue": "read the first half of a stretch and write the second",
    }
)
LEARNING_RATE = 5e-4
"""Of hidden size 256. At twice that LLaMA is chaotic: two runs of the plain model that only put the samples of a batch
in another order are 3e-3 apart after 60 steps; at this one no family is 1e-6 apart after 120."""
LEARNING_RATE_OF_GIVEN = 1e-4
"""For weights that are trained already, or a config of any size."""


@dataclass(frozen=True)
class SmallModel:
    """A small random language model that reads bytes: call it to build it. Without dropout. Picklable."""

    family: str
    layers: int
    hidden: int
    sequence: int

    def config(self) -> Any:
        transformers = load_transformers()

        num_heads, wide = self.hidden // HEAD_DIM, 8 * self.hidden // 3
        same = dict(vocab_size=VOCAB_SIZE, pad_token_id=NOTHING, bos_token_id=NOTHING, eos_token_id=NOTHING)
        same |= dict(hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=num_heads)
        own: dict[str, dict[str, Any]] = {
            "bert": dict(intermediate_size=4 * self.hidden, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
            "gpt2": dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
            "llama": dict(num_key_value_heads=max(num_heads // 2, 1), intermediate_size=wide),
            # gated, as T5 v1.1 and FLAN: the ReLU of the first T5 makes rounding errors grow
            "t5": dict(
                num_decoder_layers=self.layers, d_kv=HEAD_DIM, d_ff=wide, feed_forward_proj="gated-gelu",
                dropout_rate=0.0, decoder_start_token_id=NOTHING,
            ),
        }  # fmt: skip
        positions = {} if self.family == "t5" else {"max_position_embeddings": self.sequence}
        return transformers.AutoConfig.for_model(self.family, **same, **positions, **own[self.family])

    def __call__(self) -> nn.Module:
        transformers = load_transformers()

        model: nn.Module = getattr(transformers, LANGUAGE_MODEL[self.family])(self.config())
        return model


@dataclass(frozen=True, eq=False)
class Chosen:
    """A model and a text that fit each other.

    Args:
        title: the model, for people.
        family: what transformers calls its family.
        model_fn: builds it; picklable.
        text: tokens of its vocabulary.
        mask: its token for what is masked.
        token: what a token is, for people.
        learning_rate: AdamW's.
    """

    title: str
    family: str
    model_fn: Callable[[], nn.Module]
    text: Text
    mask: int
    token: str
    learning_rate: float


def choose(settings: Settings) -> Chosen:
    """The model and the text that are asked for.

    Raises ConfigError for a model that is not found or of another family, InputError for a text that is too short.
    """
    title, raw = read_text(settings.data)
    if settings.model is not None:
        chosen = _given(settings, title, raw)
    else:
        family = settings.family or "gpt2"
        layers, hidden = settings.layers or 4, settings.hidden or 256
        depth = "1 layer" if layers == 1 else f"{layers} layers"
        chosen = Chosen(
            f"{LANGUAGE_MODEL[family]}, {depth}, hidden size {hidden}, random weights",
            family,
            SmallModel(family, layers, hidden, settings.sequence),
            Text(title, len(raw), bytes_as_tokens(raw)),
            MASK,
            "a byte",
            LEARNING_RATE * min(1.0, 256 / hidden),
        )
    check_length(chosen.text, settings.batch, settings.sequence)
    return chosen


def _given(settings: Settings, title: str, raw: bytes) -> Chosen:
    assert settings.model is not None
    source = find_model(settings.model, dropout=False)
    if source.model_type not in FAMILIES or not isinstance(source.model_fn, Pretrained):
        what = f"is of the family {source.model_type!r}" if source.model_type else "names no family"
        raise ConfigError(
            f"--model {settings.model} {what}",
            rule=f"The demo trains language models of {', '.join(FAMILIES)}, from a folder, a config.json or the hub",
            remedy="Give one of these; `shardformer verify` takes any model",
        )
    source = source.with_head(LANGUAGE_MODEL[source.model_type])
    source.batches(settings.batch, settings.sequence)  # refuses a sequence longer than the model's positions
    assert isinstance(source.model_fn, Pretrained)
    tokens, mask, token = _tokenize(source, raw)
    weights = "random weights" if source.model_fn.random else "its own weights"
    return Chosen(
        f"{source.head} of {settings.model}, {weights}",
        source.model_type,
        source.model_fn,
        Text(title, len(raw), tokens),
        mask,
        token,
        LEARNING_RATE_OF_GIVEN,
    )


def _tokenize(source: ModelSource, raw: bytes) -> tuple[torch.Tensor, int, str]:
    """The text in the model's tokens, the one for what is masked, and what a token is."""
    transformers = load_transformers()

    assert isinstance(source.model_fn, Pretrained)
    where = source.model_fn.where
    if not source.model_fn.random and _has_tokenizer(where):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            where, local_files_only=source.model_fn.local, trust_remote_code=False
        )
        tokenizer.model_max_length = int(1e12)  # the whole text in a row, of which a batch takes stretches
        ids = tokenizer(raw.decode(errors="replace"), add_special_tokens=False)["input_ids"]
        mask = tokenizer.mask_token_id
        return torch.tensor(ids, dtype=torch.int32), MASK if mask is None else mask, "a word or part of one"
    if source.config.vocab_size < VOCAB_SIZE:
        raise ConfigError(
            f"{where} has no tokenizer, and a vocabulary of {source.config.vocab_size}",
            rule=f"Without a tokenizer a token is a byte, for which a vocabulary of {VOCAB_SIZE} is enough",
            remedy="Save the tokenizer beside the model, or leave --model out",
        )
    return bytes_as_tokens(raw), MASK, "a byte"


def _has_tokenizer(where: str) -> bool:
    folder = Path(where)
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")
    return not folder.is_dir() or any((folder / file).is_file() for file in files)
