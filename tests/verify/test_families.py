"""Every head class of every family passes ``verify``.

Sizes are odd: vocabulary 127, six heads, two KV heads, MLPs of 70, sequences of 13, over two and four ranks.
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
from shardformer.policies.policy import FAMILIES
from shardformer.verify.comparison import Report
from shardformer.verify.small_models import (
    DEFAULT_HEAD,
    HEAD_CLASSES,
    SMALL_CONFIGS,
    RandomBatchFactory,
    SmallModelFactory,
    compute_model_loss,
)
from shardformer.verify.verification import verify
from tests.pairwise import in_turn
from tests.pools import WorkerPools
from tests.verify.variants import VARIANTS

SEQUENCE = {"enable_sequence_parallelism": True}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": SEQUENCE,
    "overlap": {**SEQUENCE, "enable_sequence_overlap": True},
}
# small models whose family has a policy
REGISTERED = [family for family in SMALL_CONFIGS if family in FAMILIES]
READERS = [
    family
    for family in REGISTERED
    if RandomBatchFactory(DEFAULT_HEAD[family])(0).keys() == {"input_ids", "attention_mask", "labels"}
]
SLOW = "bloom slow but exact"
WITHOUT_SEQUENCE = ("swin", "swinv2", "sam")
OF_QFORMER_ALONE = ("Blip2QFormerModel", "Blip2TextModelWithProjection")
EVERY_HEAD = [(family, head) for family in REGISTERED for head in HEAD_CLASSES[family]]
Recorded = Callable[[str, object], None]
# the communication at the edges of a block, which shows that the mode is on
EDGES = {"plain": {"all_reduce"}, "sequence": {"all_gather", "reduce_scatter"}}
EDGES["overlap"] = EDGES["sequence"]


in_each_mode = pytest.mark.parametrize("mode", list(MODES))
over_two_and_four = pytest.mark.parametrize("tensor", [2, 4])


def assert_equals_the_plain_model(report: Report, mode: str = "plain", tensor: int = 2) -> None:
    assert report.passed, str(report)
    assert tensor == 1 or (report.gradient.where and report.weight.where), "something was compared"
    made = {name.partition(" ")[0] for name in report.collectives if "over tensor (block)" in name}
    assert made >= EDGES[mode] if tensor > 1 else not made


def _runs(sample: SmallModelFactory, mode: str) -> bool:
    """Return whether the model supports sequence parallelism. If not, sharding must raise."""
    head = sample.head_class
    between = head.endswith(("Backbone", "ForSemanticSegmentation")) or "use_weighted_layer_sum" in sample.changes
    return mode == "plain" or not (sample.family in WITHOUT_SEQUENCE or head in OF_QFORMER_ALONE or between)


def check(
    pools: WorkerPools,
    sample: SmallModelFactory,
    batches: RandomBatchFactory,
    tensor: int,
    mode: str,
    dtype: torch.dtype = torch.float64,
) -> str | None:
    """Verify a model, or return why the mode is not supported."""

    def report() -> Report:
        return verify(
            sample, batches, tensor, loss_fn=compute_model_loss, config=MODES[mode], dtype=dtype, pool=pools(tensor)
        )

    if _runs(sample, mode):
        assert_equals_the_plain_model(report(), mode)
        return None
    with pytest.raises(ConfigError, match="does not support enable_sequence_parallelism=True") as refused:
        report()
    return "refused: " + refused.value.what.partition(": ")[2]


@pytest.mark.reduced(family=("t5",), at_most=3)
@pytest.mark.parametrize(("family", "head", "tensor", "mode"), in_turn(EVERY_HEAD, (2, "plain"), (4, "sequence")))
def test_every_head(pools: WorkerPools, family: str, head: str, tensor: int, mode: str) -> None:
    check(pools, SmallModelFactory(family, head), RandomBatchFactory(head), tensor, mode)


@pytest.mark.reduced(tensor=(2,))
@pytest.mark.feature("tensor parallel")
@over_two_and_four
@pytest.mark.parametrize("family", REGISTERED)
def test_tensor_parallel(pools: WorkerPools, family: str, tensor: int) -> None:
    check(pools, SmallModelFactory(family), RandomBatchFactory(DEFAULT_HEAD[family]), tensor, "plain")


@pytest.mark.reduced(one_in=3)
@pytest.mark.feature("sequence parallel")
@pytest.mark.parametrize(("family", "tensor"), in_turn(REGISTERED, (2,), (4,), (2,)))
def test_sequence_parallel(
    pools: WorkerPools, family: str, tensor: int, record_property: Callable[[str, object], None]
) -> None:
    if refused := check(pools, SmallModelFactory(family), RandomBatchFactory(DEFAULT_HEAD[family]), tensor, "sequence"):
        record_property("feature", refused)


@pytest.mark.reduced(one_in=4, first=1)
@pytest.mark.feature("overlap")
@pytest.mark.parametrize(("family", "tensor"), in_turn(REGISTERED, (2,), (2,), (4,)))
def test_sequence_overlap(pools: WorkerPools, family: str, tensor: int, record_property: Recorded) -> None:
    if refused := check(pools, SmallModelFactory(family), RandomBatchFactory(DEFAULT_HEAD[family]), tensor, "overlap"):
        record_property("feature", refused)


@pytest.mark.reduced(family=("llama", "gpt2", "bert", "t5"), at_most=1)
@pytest.mark.parametrize(("family", "mode"), in_turn(REGISTERED, *((mode,) for mode in MODES)))
def test_single_precision(pools: WorkerPools, family: str, mode: str) -> None:
    check(pools, SmallModelFactory(family), RandomBatchFactory(DEFAULT_HEAD[family]), 2, mode, torch.float32)


@pytest.mark.reduced(one_in=16, at_most=2)
@pytest.mark.parametrize(
    ("name", "tensor", "mode"), in_turn([n for n in VARIANTS if n != SLOW], (2, "overlap"), (4, "plain"))
)
def test_other_config_settings(pools: WorkerPools, name: str, tensor: int, mode: str) -> None:
    sample = VARIANTS[name].sample
    check(pools, sample, RandomBatchFactory(sample.head_class, batch_size=3, sequence_length=9), tensor, mode)


def test_models_that_slice_weights_in_the_forward_raise(pools: WorkerPools) -> None:
    with pytest.raises(ConfigError, match="slow_but_exact=True and pretraining_tp=2"):
        verify(
            VARIANTS[SLOW].sample, RandomBatchFactory("BloomForCausalLM"), 2, loss_fn=compute_model_loss, pool=pools(2)
        )


@pytest.mark.reduced(one_in=2)
@over_two_and_four
def test_bert_with_chunked_feed_forward(pools: WorkerPools, tensor: int) -> None:
    sample = SmallModelFactory("bert", changes={"chunk_size_feed_forward": 1})
    assert_equals_the_plain_model(
        verify(sample, RandomBatchFactory("BertForMaskedLM"), tensor=tensor, pool=pools(tensor))
    )
    with pytest.raises(ConfigError, match="chunk_size_feed_forward"):
        verify(sample, RandomBatchFactory("BertForMaskedLM"), tensor=tensor, config=SEQUENCE, pool=pools(tensor))


@pytest.mark.reduced(family=("llama", "t5"), at_most=1)
@pytest.mark.parametrize(("family", "mode"), in_turn(REGISTERED, *((mode,) for mode in reversed(MODES))))
def test_tensor_times_data(pools: WorkerPools, family: str, mode: str) -> None:
    head = DEFAULT_HEAD[family]
    batches = RandomBatchFactory(head, batch_size=6)  # three samples per data rank
    mode = mode if _runs(SmallModelFactory(family), mode) else "plain"
    report = verify(
        SmallModelFactory(family), batches, 2, 2, loss_fn=compute_model_loss, config=MODES[mode], pool=pools(4)
    )
    assert_equals_the_plain_model(report, mode)
    assert any("over data" in name or "over data_tensor" in name for name in report.collectives)


@pytest.mark.reduced(family=("llama", "bert"))
@pytest.mark.parametrize(("family", "data"), in_turn(REGISTERED, (2,), (4,)))
def test_data_parallel(pools: WorkerPools, family: str, data: int) -> None:
    batches = RandomBatchFactory(DEFAULT_HEAD[family], batch_size=4)
    report = verify(
        SmallModelFactory(family), batches, tensor=1, data=data, loss_fn=compute_model_loss, pool=pools(data)
    )
    assert_equals_the_plain_model(report, tensor=1)
    assert list(report.collectives) == ["all_reduce over data (gradients)"]


@pytest.mark.reduced(family=("llama", "gpt2", "bert", "t5"), at_most=1)
@pytest.mark.parametrize(("family", "mode"), in_turn(REGISTERED, *((mode,) for mode in MODES)))
def test_one_process_communicates_nothing(pools: WorkerPools, family: str, mode: str) -> None:
    config = MODES[mode if _runs(SmallModelFactory(family), mode) else "plain"]
    report = verify(
        SmallModelFactory(family),
        RandomBatchFactory(DEFAULT_HEAD[family]),
        1,
        loss_fn=compute_model_loss,
        config=config,
        pool=pools(1),
    )
    assert_equals_the_plain_model(report, tensor=1)
    assert report.collectives == {}


@pytest.mark.reduced(family=("llama", "bert", "t5"), at_most=1)
@pytest.mark.parametrize(("family", "sequence", "tensor"), in_turn(READERS, (1, 2), (3, 4), (1, 4)))
def test_sequences_shorter_than_the_number_of_ranks(
    pools: WorkerPools, family: str, sequence: int, tensor: int
) -> None:
    """Some ranks have an empty shard of the sequence."""
    for mode in ("sequence", "overlap"):
        report = verify(
            SmallModelFactory(family),
            Short(family, sequence),
            tensor=tensor,
            steps=1,
            config=MODES[mode],
            pool=pools(tensor),
        )
        assert_equals_the_plain_model(report, mode)


@dataclass(frozen=True)
class Short:
    """Batches of sequences so short that ``RandomBatchFactory`` would mask them completely."""

    family: str
    sequence: int

    def __call__(self, step: int) -> dict[str, Tensor]:
        ids = torch.randint(5, 127, (3, self.sequence + 1), generator=torch.Generator().manual_seed(step))
        # a causal model with a single token has no next token to predict
        causal = self.family == "chatglm" or DEFAULT_HEAD[self.family].endswith(("LMHeadModel", "ForCausalLM"))
        length = max(self.sequence, 2) if causal else self.sequence
        return {"input_ids": ids[:, :length], "labels": ids[:, :length].clone()}


class OnStates(transformers.PreTrainedModel):
    """Attends to the states of another model. They are a parameter here, so that their gradient is compared."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.states = nn.Parameter(torch.randn(1, 7, config.hidden_size) / 4)

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        kwargs.setdefault("encoder_hidden_states", self.states.repeat(len(input_ids), 1, 1))
        return super().forward(input_ids, **kwargs)


class GPT2OnStates(OnStates, transformers.GPT2LMHeadModel):
    pass


class BertOnStates(OnStates, transformers.BertLMHeadModel):
    pass


def gpt2_on_states() -> nn.Module:
    return GPT2OnStates(SmallModelFactory("gpt2", changes={"add_cross_attention": True}).get_config())


def bert_on_states() -> nn.Module:
    return BertOnStates(
        SmallModelFactory("bert", changes={"is_decoder": True, "add_cross_attention": True}).get_config()
    )


def batch_with_states(step: int) -> dict[str, Tensor]:
    batch = RandomBatchFactory("GPT2LMHeadModel")(step)
    generator = torch.Generator().manual_seed(step)
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[1:, -2:] = 0
    states = torch.randn(4, 7, 48, generator=generator, dtype=torch.float64)
    return {**batch, "encoder_hidden_states": states, "encoder_attention_mask": mask}


@pytest.mark.reduced(at_most=1, keep=("bert_on_states-4-sequence",))
@in_each_mode
@over_two_and_four
@pytest.mark.parametrize("model_fn", [gpt2_on_states, bert_on_states])
def test_cross_attention(pools: WorkerPools, model_fn: Callable[[], nn.Module], tensor: int, mode: str) -> None:
    """The gradient of the states is compared."""
    batches = RandomBatchFactory("GPT2LMHeadModel")
    report = verify(model_fn, batches, tensor=tensor, config=MODES[mode], pool=pools(tensor))
    assert_equals_the_plain_model(report, mode)


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("mode", ["plain", "overlap"])
@pytest.mark.parametrize("model_fn", [gpt2_on_states, bert_on_states])
def test_cross_attention_on_states_of_the_batch(
    pools: WorkerPools, model_fn: Callable[[], nn.Module], mode: str
) -> None:
    report = verify(
        model_fn, batch_with_states, tensor=2, data=2, loss_fn=loss_beside_states, config=MODES[mode], pool=pools(4)
    )
    assert_equals_the_plain_model(report, mode)


def loss_beside_states(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The parameter is not used by this batch, so it has no gradient in both models."""
    loss: Tensor = model(**batch).loss
    return loss
