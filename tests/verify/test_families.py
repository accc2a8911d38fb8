"""Nobody can tell: every head class of every family, sharded, against the plain model.

Sizes are odd throughout: vocabulary 127, six heads, two KV heads, MLPs of 70, sequences of 13, over two and four ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.pool import Pools
from shardformer.samples import HEADS, LANGUAGE_MODEL, SMALL, Batches, Sample, sample_loss
from shardformer.verify import Report, verify

SEQUENCE = {"enable_sequence_parallelism": True}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": SEQUENCE,
    "overlap": {**SEQUENCE, "enable_sequence_overlap": True},
}
EVERY_HEAD = [(family, head) for family, heads in HEADS.items() for head in heads]
# What a block's two edges communicate, which shows that the mode was on.
EDGES = {"plain": {"all_reduce"}, "sequence": {"all_gather", "reduce_scatter"}}
EDGES["overlap"] = EDGES["sequence"]

in_each_mode = pytest.mark.parametrize("mode", list(MODES))
over_two_and_four = pytest.mark.parametrize("tensor", [2, 4])


@dataclass(frozen=True)
class Changed:
    """A language model with other settings than the small one's."""

    family: str
    changes: Mapping[str, Any]
    head: str = ""


VARIANTS: dict[str, Changed] = {
    "bert untied": Changed("bert", {"tie_word_embeddings": False}),
    "bert of three layers": Changed("bert", {"num_hidden_layers": 3}),
    "bert of one layer": Changed("bert", {"num_hidden_layers": 1}),
    "bert with eager attention": Changed("bert", {"attn_implementation": "eager"}),
    "bert of one token type": Changed("bert", {"type_vocab_size": 1, "hidden_act": "relu"}),
    "gpt2 untied": Changed("gpt2", {"tie_word_embeddings": False}),
    "gpt2 of three layers": Changed("gpt2", {"n_layer": 3, "n_inner": None}),
    "gpt2 with upcast attention": Changed(
        "gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
    ),
    "llama with biases": Changed("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with biases, as many KV heads as heads": Changed(
        "llama", {"attention_bias": True, "num_key_value_heads": 6, "num_hidden_layers": 3}
    ),
    "llama tied": Changed("llama", {"tie_word_embeddings": True}),
    "llama with a head dim of its own": Changed("llama", {"head_dim": 10}),
    "llama with three KV heads": Changed("llama", {"num_key_value_heads": 3}),
    "llama with one KV head": Changed("llama", {"num_key_value_heads": 1}),
    "llama with four KV heads": Changed("llama", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "llama with nine heads on three": Changed(
        "llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 54}
    ),
    "llama with groups that ranks cut": Changed("llama", {"num_attention_heads": 12, "num_key_value_heads": 3}),
    "llama with five heads on one": Changed(
        "llama", {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 50}
    ),
    "t5 gated": Changed("t5", {"feed_forward_proj": "gated-gelu"}),
    "t5 untied": Changed("t5", {"tie_word_embeddings": False, "num_layers": 3, "num_decoder_layers": 1}),
    "t5 with a head dim of its own": Changed(
        "t5", {"d_kv": 5, "feed_forward_proj": "gated-silu", "tie_word_embeddings": False}
    ),
}


def assert_nobody_can_tell(report: Report, mode: str = "plain", tensor: int = 2) -> None:
    assert report.passed, str(report)
    assert report.gradient.where and report.weight.where, "something was compared"
    made = {name.partition(" ")[0] for name in report.collectives if "over tensor (block)" in name}
    assert made >= EDGES[mode] if tensor > 1 else not made


@pytest.mark.parametrize("family", list(SMALL))
def test_the_heads_are_all_that_transformers_has(family: str) -> None:
    modeling = getattr(transformers.models, family)
    classes = {name for name in dir(modeling) if isinstance(getattr(modeling, name), type)}
    models = {n for n in classes if issubclass(getattr(modeling, n), nn.Module) and not n.endswith("PreTrainedModel")}
    models -= {n for n in models if not issubclass(getattr(modeling, n), transformers.PreTrainedModel)}
    assert models == set(HEADS[family])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@in_each_mode
@over_two_and_four
@pytest.mark.parametrize(("family", "head"), EVERY_HEAD, ids=[head for _, head in EVERY_HEAD])
def test_every_head(pools: Pools, family: str, head: str, tensor: int, mode: str, dtype: torch.dtype) -> None:
    report = verify(
        Sample(family, head),
        Batches(head),
        tensor=tensor,
        loss_fn=sample_loss,
        config=MODES[mode],
        dtype=dtype,
        pool=pools(tensor),
    )
    assert_nobody_can_tell(report, mode)


@pytest.mark.parametrize(("tensor", "mode"), [(2, "plain"), (2, "overlap"), (4, "plain"), (4, "sequence")])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_other_settings(pools: Pools, name: str, tensor: int, mode: str) -> None:
    sample = Sample(VARIANTS[name].family, changes=VARIANTS[name].changes)
    batches = Batches(sample.head_class, batch=3, sequence=9)
    report = verify(sample, batches, tensor=tensor, config=MODES[mode], pool=pools(tensor))
    assert_nobody_can_tell(report, mode)


@over_two_and_four
def test_bert_in_chunks_of_the_sequence(pools: Pools, tensor: int) -> None:
    sample = Sample("bert", changes={"chunk_size_feed_forward": 1})
    assert_nobody_can_tell(verify(sample, Batches("BertForMaskedLM"), tensor=tensor, pool=pools(tensor)))
    with pytest.raises(ConfigError, match="chunk_size_feed_forward"):
        verify(sample, Batches("BertForMaskedLM"), tensor=tensor, config=SEQUENCE, pool=pools(tensor))


@in_each_mode
@pytest.mark.parametrize("family", list(SMALL))
def test_tensor_times_data(pools: Pools, family: str, mode: str) -> None:
    head = LANGUAGE_MODEL[family]
    batches = Batches(head, batch=6)  # three samples on each data rank
    report = verify(Sample(family), batches, tensor=2, data=2, config=MODES[mode], pool=pools(4))
    assert_nobody_can_tell(report, mode)
    assert any("over data" in name or "over data_tensor" in name for name in report.collectives)


@pytest.mark.parametrize("data", [2, 4])
@pytest.mark.parametrize("family", list(SMALL))
def test_data_alone(pools: Pools, family: str, data: int) -> None:
    batches = Batches(LANGUAGE_MODEL[family], batch=4)
    report = verify(Sample(family), batches, tensor=1, data=data, pool=pools(data))
    assert_nobody_can_tell(report, tensor=1)
    assert list(report.collectives) == ["all_reduce over data (gradients)"]


@pytest.mark.parametrize("family", list(SMALL))
def test_one_process_communicates_nothing(pools: Pools, family: str) -> None:
    head = LANGUAGE_MODEL[family]
    for config in MODES.values():
        report = verify(Sample(family), Batches(head), tensor=1, config=config, pool=pools(1))
        assert_nobody_can_tell(report, tensor=1)
        assert report.collectives == {}


@over_two_and_four
@pytest.mark.parametrize("sequence", [1, 3])
@pytest.mark.parametrize("family", list(SMALL))
def test_sequences_shorter_than_the_ranks(pools: Pools, family: str, sequence: int, tensor: int) -> None:
    """Some ranks hold nothing of the sequence."""
    for mode in ("sequence", "overlap"):
        report = verify(
            Sample(family), Short(family, sequence), tensor=tensor, steps=1, config=MODES[mode], pool=pools(tensor)
        )
        assert_nobody_can_tell(report, mode)


@dataclass(frozen=True)
class Short:
    """Batches of sequences so short that ``Batches`` would pad them away."""

    family: str
    sequence: int

    def __call__(self, step: int) -> dict[str, Tensor]:
        ids = torch.randint(5, 127, (3, self.sequence + 1), generator=torch.Generator().manual_seed(step))
        # a causal model predicts the next token: with a single one there is none, so it gets two
        length = max(self.sequence, 2) if self.family in ("gpt2", "llama") else self.sequence
        return {"input_ids": ids[:, :length], "labels": ids[:, :length].clone()}


# ------------------------------------------------------------------------------------------------------ cross-attention


class GPT2OnStates(transformers.GPT2LMHeadModel):
    """Reads the states of another model, here a parameter, so that their gradient is compared too."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.states = nn.Parameter(torch.randn(1, 7, config.hidden_size) / 4)

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        kwargs.setdefault("encoder_hidden_states", self.states.repeat(len(input_ids), 1, 1))
        return super().forward(input_ids, **kwargs)


class BertOnStates(transformers.BertLMHeadModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.states = nn.Parameter(torch.randn(1, 7, config.hidden_size) / 4)

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        kwargs.setdefault("encoder_hidden_states", self.states.repeat(len(input_ids), 1, 1))
        return super().forward(input_ids, **kwargs)


def gpt2_on_states() -> nn.Module:
    return GPT2OnStates(Sample("gpt2", changes={"add_cross_attention": True}).config())


def bert_on_states() -> nn.Module:
    return BertOnStates(Sample("bert", changes={"is_decoder": True, "add_cross_attention": True}).config())


def batch_with_states(step: int) -> dict[str, Tensor]:
    batch = Batches("GPT2LMHeadModel")(step)
    generator = torch.Generator().manual_seed(step)
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[1:, -2:] = 0
    states = torch.randn(4, 7, 48, generator=generator, dtype=torch.float64)
    return {**batch, "encoder_hidden_states": states, "encoder_attention_mask": mask}


@in_each_mode
@over_two_and_four
@pytest.mark.parametrize("model_fn", [gpt2_on_states, bert_on_states])
def test_cross_attention(pools: Pools, model_fn: Callable[[], nn.Module], tensor: int, mode: str) -> None:
    """The states' gradient, a parameter here, is one of those compared."""
    batches = Batches("GPT2LMHeadModel")
    report = verify(model_fn, batches, tensor=tensor, config=MODES[mode], pool=pools(tensor))
    assert_nobody_can_tell(report, mode)


@pytest.mark.parametrize("mode", ["plain", "overlap"])
@pytest.mark.parametrize("model_fn", [gpt2_on_states, bert_on_states])
def test_cross_attention_on_states_of_the_batch(pools: Pools, model_fn: Callable[[], nn.Module], mode: str) -> None:
    report = verify(
        model_fn, batch_with_states, tensor=2, data=2, loss_fn=loss_beside_states, config=MODES[mode], pool=pools(4)
    )
    assert_nobody_can_tell(report, mode)


def loss_beside_states(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The parameter is not read by such a batch; it has no gradient, on one device as on many."""
    loss: Tensor = model(**batch).loss
    return loss
