"""Reduced configs: the meaning of each number is measured, so unknown model types need no table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from shardformer.discovery.config_fields import ConfigFieldMeaning, infer_field_meanings
from shardformer.discovery.derive_policy import derive_policy
from shardformer.discovery.shrink_config import ODD, ConfigShrinker, build_meta_model
from shardformer.policies.roles import MLP, Attention


class OddConfig(transformers.PreTrainedConfig):
    """Config of a language model with unusual field names."""

    model_type = "odd"

    def __init__(self, **fields: Any) -> None:
        self.span, self.voices, self.echoes, self.reach = 1024, 16, 4, 64
        self.meadow, self.storeys, self.lexicon = 2816, 24, 32_000
        super().__init__(**fields)


class Listening(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.reach, self.shared = config.reach, config.voices // config.echoes
        self.ask = nn.Linear(config.span, config.voices * config.reach)
        self.offer, self.tell = (nn.Linear(config.span, config.echoes * config.reach) for _ in range(2))
        self.close = nn.Linear(config.voices * config.reach, config.span)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.reach)).transpose(1, 2) for f in (self.ask, self.offer, self.tell))
        k, v = (y.repeat_interleave(self.shared, dim=1) for y in (k, v))
        heard = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.close(heard.transpose(1, 2).flatten(2))
        return out


class Storey(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.calm, self.still = nn.LayerNorm(config.span), nn.LayerNorm(config.span)
        self.listening = Listening(config)
        self.spread, self.gather = nn.Linear(config.span, config.meadow), nn.Linear(config.meadow, config.span)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.listening(self.calm(x))
        return x + self.gather(F.gelu(self.spread(self.still(x))))


class OddModel(nn.Module):
    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.lexicon, config.span)
        self.storeys = nn.ModuleList(Storey(config) for _ in range(config.storeys))
        self.said = nn.Linear(config.span, config.lexicon, bias=False)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.words

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for storey in self.storeys:
            x = storey(x)
        logits: Tensor = self.said(x)
        return logits


@pytest.fixture(scope="module")
def odd() -> nn.Module:
    with torch.device("meta"):
        return OddModel(OddConfig())


def test_meaning_of_unknown_config_fields_is_measured(odd: nn.Module) -> None:
    small = ConfigShrinker(odd).make_small_config()
    assert (small.span, small.voices, small.echoes, small.reach) == (
        ODD.hidden_size,
        ODD.num_heads,
        ODD.fewer_heads,
        ODD.head_dim,
    )
    assert (small.meadow, small.storeys, small.lexicon) == (ODD.widths[0], 2, ODD.words)


@pytest.mark.slow
def test_unknown_model_type_is_shrunk(odd: nn.Module) -> None:
    policy: Any = derive_policy(odd)
    attention, mlp = policy.stack.blocks
    assert isinstance(attention, Attention) and isinstance(mlp, MLP)
    assert policy.stack.layers == "storeys" and policy.no_pipeline is None
    assert {attention.projections.q, attention.projections.out} == {"ask", "close"}


class Named(OddModel):
    """A model whose constructor needs more than a config."""

    def __init__(self, config: OddConfig, name: str) -> None:
        super().__init__(config)
        self.name = name


@pytest.mark.slow
def test_model_without_config_constructor_is_its_own_reduced_model(odd: nn.Module) -> None:
    policy: Any = derive_policy(Named(ConfigShrinker(odd).make_small_config(), "mine"))
    assert policy.stack.layers == "storeys"


@pytest.mark.parametrize(
    ("model_type", "name", "expected"),
    [
        (
            "mistral",
            "MistralForCausalLM",
            {"num_attention_heads": ConfigFieldMeaning.HEADS, "num_key_value_heads": ConfigFieldMeaning.HEADS},
        ),
        (
            "bert",
            "BertForMaskedLM",
            {"num_attention_heads": ConfigFieldMeaning.HEADS, "intermediate_size": ConfigFieldMeaning.WIDTH},
        ),
        (
            "t5",
            "T5ForConditionalGeneration",
            {
                "d_kv": ConfigFieldMeaning.HEAD_DIM,
                "num_heads": ConfigFieldMeaning.HEADS,
                "d_ff": ConfigFieldMeaning.WIDTH,
            },
        ),
        (
            "falcon",
            "FalconForCausalLM",
            {"num_attention_heads": ConfigFieldMeaning.HEADS, "hidden_size": ConfigFieldMeaning.HIDDEN},
        ),
        (
            "mixtral",
            "MixtralForCausalLM",
            {"num_local_experts": ConfigFieldMeaning.EXPERTS, "intermediate_size": ConfigFieldMeaning.WIDTH},
        ),
        (
            "recurrent_gemma",
            "RecurrentGemmaForCausalLM",
            {"num_attention_heads": ConfigFieldMeaning.HEADS},
        ),  # blocks of a diagonal
        (
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            {"qk_nope_head_dim": ConfigFieldMeaning.HEAD_DIM, "kv_lora_rank": ConfigFieldMeaning.WIDTH},
        ),
        (
            "vit",
            "ViTForImageClassification",
            {"patch_size": None, "num_channels": None, "hidden_size": ConfigFieldMeaning.HIDDEN},
        ),
    ],
)
def test_measured_config_fields_match_their_names(
    model_type: str, name: str, expected: dict[str, ConfigFieldMeaning | None]
) -> None:
    model = build_meta_model(transformers.AutoConfig.for_model(model_type, architectures=[name]))
    kinds = infer_field_meanings(ConfigShrinker(model).fields)
    assert {field: kinds.get((field,)) for field in expected} == expected


def test_shrinking_keeps_other_config_fields(odd: nn.Module) -> None:
    ConfigShrinker(odd).make_small_config()
    assert vars(odd.config)["span"] == 1024
