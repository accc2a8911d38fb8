"""Every family in a pipeline passes ``verify``, compared with the plain model on the full batch.

Five samples form three or four micro-batches of two samples and of one, with different label counts including zero. A
wrongly weighted loss therefore fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError, ShardFormerError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.verify.comparison import Report
from shardformer.verify.small_models import (
    DEFAULT_HEAD,
    SMALL_CONFIGS,
    SmallModelFactory,
    compute_model_loss,
    count_samples,
    is_loss_averaged_over_samples,
)
from shardformer.verify.train_both import VerifyPipeline
from shardformer.verify.verification import verify
from tests.pairwise import in_turn
from tests.verify.deep import EVERY_HEAD, Uneven, deep
from tests.verify.variants import VARIANTS

SCHEDULES = ("gpipe", "1f1b", "interleaved")
ZERO_BUBBLE = ("zbv", "interleaved_zb")
FOUR_KINDS = ("llama", "gpt2", "bert", "t5")
SEQUENCE = {"enable_sequence_parallelism": True}
WITHOUT_SEQUENCE = ("swin", "swinv2", "sam")
SAYS = {"sam": "only the image encoder is split into stages; the last stage also has the full mask decoder"}
Recorded = Callable[[str, object], None]


def check(
    pool: WorkerPool,
    sample: SmallModelFactory,
    schedule: str = "1f1b",
    *,
    pipe: int = 2,
    tensor: int = 1,
    data: int = 1,
    batches: Any = None,
    micro_batches: int | None = None,
    loss_fn: Any = compute_model_loss,
    config: Mapping[str, Any] | None = None,
    steps: int = 2,
    **stages: Any,
) -> Report:
    """Verify a pipeline, and assert that it passes."""
    head = sample.head_class
    if batches is None:
        batches = Uneven(head, batch=5 * data)
    # interleaved schedules need a multiple of the number of stages
    count = micro_batches or (4 if pipe == 4 or "interleaved" in schedule else 3)
    weight = count_samples if is_loss_averaged_over_samples(head) else None
    pipeline = VerifyPipeline(pipe, count, {"schedule": schedule, **stages}, weight)
    report = verify(sample, batches, tensor, data, steps, loss_fn=loss_fn, config=config, pipeline=pipeline, pool=pool)
    assert report.passed, str(report)
    assert report.gradient.where and report.weight.where, "something was compared"
    assert any("over pipe (activation)" in name for name in report.collectives)
    return report


@pytest.mark.reduced(one_in=4)
@pytest.mark.feature("pipeline parallel")
@pytest.mark.parametrize(
    ("family", "schedule"), [*in_turn(SMALL_CONFIGS, ("gpipe",), ("1f1b",)), *in_turn(SMALL_CONFIGS, ("interleaved",))]
)
def test_pipeline_parallel(pool2: WorkerPool, family: str, schedule: str, record_property: Recorded) -> None:
    check(pool2, deep(family), schedule)
    if family in SAYS:
        record_property("feature", f"yes: {SAYS[family]}")


@pytest.mark.full
@pytest.mark.reduced(family=("llama", "t5"))
@pytest.mark.feature("pipeline parallel")
@pytest.mark.parametrize("family", SMALL_CONFIGS)
def test_tensor_times_pipe(pool4: WorkerPool, family: str) -> None:
    report = check(pool4, deep(family), tensor=2)
    assert any("over tensor (block)" in name for name in report.collectives)


@pytest.mark.reduced(family=("bert",))
@pytest.mark.parametrize("family", [family for family in SMALL_CONFIGS if family not in WITHOUT_SEQUENCE])
def test_sequence_parallel_times_pipe(pool4: WorkerPool, family: str) -> None:
    report = check(pool4, deep(family), tensor=2, config=SEQUENCE)
    assert any("reduce_scatter over tensor (block)" in name for name in report.collectives)


@pytest.mark.reduced(family=("llama", "t5"), at_most=1)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", FOUR_KINDS)
def test_four_stages(pool4: WorkerPool, family: str, schedule: str) -> None:
    check(pool4, SmallModelFactory(family).with_min_layers(8), schedule, pipe=4)


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_fewer_micro_batches_than_stages(pool4: WorkerPool, schedule: str, micro_batches: int) -> None:
    check(pool4, deep("gpt2"), schedule, pipe=4, micro_batches=micro_batches)


@pytest.mark.reduced(family=("llama", "t5"), at_most=1)
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5", "vit", "whisper", "albert"])
def test_pipe_times_data(pool4: WorkerPool, family: str) -> None:
    """Each data rank has five samples, with different label counts in each micro-batch."""
    report = check(pool4, deep(family), data=2)
    assert any("over data (gradients)" in name for name in report.collectives), report.collectives


@pytest.mark.reduced(family=("t5",))
@pytest.mark.parametrize("family", [*FOUR_KINDS, "vit"])
def test_all_options_at_once(pool4: WorkerPool, family: str) -> None:
    """Fused norms, flash attention, fused activations and sequence parallelism work with absent layers."""
    check(pool4, deep(family), "interleaved", tensor=2, config={"enable_all_optimization": True})


@pytest.mark.reduced(family=("llama", "t5"), at_most=1)
@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
@pytest.mark.parametrize("family", [*FOUR_KINDS, "vit"])
def test_a_split_backward(pool2: WorkerPool, family: str, schedule: str) -> None:
    check(pool2, deep(family), schedule, micro_batches=4)


READ_BETWEEN = ("whisper with a sum over layers", "beit with a pyramid")
OTHERWISE = ("bloom slow but exact", "bert of one layer")
"""Raise with tensor parallelism, or have fewer layers than there are stages."""


@pytest.mark.parametrize("name", READ_BETWEEN)
def test_settings_that_read_between_layers_raise(pool2: WorkerPool, name: str) -> None:
    with pytest.raises(ConfigError, match="reads the hidden states between its layers"):
        check(pool2, VARIANTS[name].sample)


@pytest.mark.reduced(family=("llama", "t5"), at_most=1)
@pytest.mark.parametrize("family", FOUR_KINDS)
def test_checkpointed_layers(pool2: WorkerPool, family: str) -> None:
    check(pool2, deep(family), "interleaved", recompute_layers=1)


@pytest.mark.reduced(one_in=16, first=4, at_most=2)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in (*READ_BETWEEN, *OTHERWISE)])
def test_other_config_settings(pool2: WorkerPool, name: str) -> None:
    check(pool2, VARIANTS[name].sample)


@pytest.mark.reduced(one_in=6, at_most=2)
@pytest.mark.parametrize("first", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("family", ["t5", "whisper", "blip-2"])
def test_several_stacks_split_anywhere(pool2: WorkerPool, family: str, first: int) -> None:
    """In the encoder, between the stacks and in the decoder, different tensors are sent."""
    check(pool2, deep(family), partition=[first, 6 - first])


@pytest.mark.reduced(one_in=6, at_most=1)
@pytest.mark.parametrize("cut", [[1, 1, 1, 3], [1, 2, 2, 1], [2, 1, 1, 2], [3, 1, 1, 1]])
@pytest.mark.parametrize("family", ["t5", "whisper", "blip-2"])
def test_several_stacks_with_virtual_stages(pool2: WorkerPool, family: str, cut: list[int]) -> None:
    """Both ranks have layers of the encoder and of the decoder."""
    check(pool2, deep(family), "interleaved", partition=cut)


@pytest.mark.full
@pytest.mark.reduced
@pytest.mark.parametrize("cut", [[1, 1, 1, 3], [2, 2, 1, 1]])
@pytest.mark.parametrize("family", ["t5", "blip-2"])
def test_several_stacks_over_four_stages(pool4: WorkerPool, family: str, cut: list[int]) -> None:
    check(pool4, deep(family), pipe=4, partition=cut)


@pytest.mark.reduced(one_in=2, at_most=1)
@pytest.mark.parametrize(
    ("schedule", "cut"),
    [("1f1b", [1, 4]), ("1f1b", [4, 1]), ("gpipe", "uniform"), ("interleaved", [2, 1, 1, 1]), ("zbv", [1, 1, 1, 2])],
)
def test_uneven_partitions(pool2: WorkerPool, schedule: str, cut: Any) -> None:
    check(pool2, deep("llama", num_hidden_layers=5), schedule, partition=cut, micro_batches=4)


# the additional inputs were computed on an earlier stage
OUTPUTS = {
    "T5Model": "last_hidden_state",
    "WhisperModel": "last_hidden_state",
    "Blip2ForImageTextRetrieval": "logits_per_image",
    "Blip2VisionModelWithProjection": "image_embeds",
}
BETWEEN = ("BeitForSemanticSegmentation", "BeitBackbone", "SwinBackbone", "Swinv2Backbone")
MASKED_IMAGES = "ViTForMaskedImageModeling"  # divides by the count plus a small number, which differs between samples


class Output:
    """The distance of one output of a model from the cosine of ``compute_model_loss``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        output = model(**batch)[self.name]
        return compute_model_loss(_Given(output), {})


class _Given(nn.Module):
    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self) -> dict[str, Tensor]:
        return {"output": self.output}


def loss_of(head: str) -> Any:
    return Output(OUTPUTS[head]) if head in OUTPUTS else compute_model_loss


@pytest.mark.reduced(family=("whisper",), at_most=2)
@pytest.mark.parametrize(
    ("family", "head"),
    [(family, head) for family, head in EVERY_HEAD if head not in (*BETWEEN, MASKED_IMAGES)],
    ids=[head for _, head in EVERY_HEAD if head not in (*BETWEEN, MASKED_IMAGES)],
)
def test_every_head(pool2: WorkerPool, family: str, head: str) -> None:
    check(pool2, deep(family, head), loss_fn=loss_of(head))


def test_a_head_whose_loss_is_a_max_of_means(pool2: WorkerPool) -> None:
    check(pool2, deep("vit", MASKED_IMAGES), batches=Uneven(MASKED_IMAGES, batch=4), micro_batches=2)


REFUSED = [(family, head, {}) for family, head in EVERY_HEAD if head in BETWEEN]
REFUSED.append(("whisper", "WhisperForAudioClassification", {"use_weighted_layer_sum": True}))


@pytest.mark.parametrize(("family", "head", "changes"), REFUSED, ids=[head for _, head, _ in REFUSED])
def test_models_that_read_between_layers_raise(
    pool2: WorkerPool, family: str, head: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="reads the hidden states between its layers, but a stage has only those"):
        check(pool2, deep(family, head, **changes))


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_models_that_collect_from_every_layer_raise(pool2: WorkerPool, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=True does not work with pipeline parallelism"):
        check(pool2, deep("bert", attn_implementation="eager", **{name: True}))


@pytest.mark.reduced(one_in=4)
@pytest.mark.parametrize(
    ("family", "head"), [(family, head) for family, head in EVERY_HEAD if head in OUTPUTS], ids=list(OUTPUTS)
)
def test_a_loss_on_the_output_of_an_earlier_stage_raises(pool2: WorkerPool, family: str, head: str) -> None:
    with pytest.raises(ShardFormerError, match="it uses a model output that only an earlier pipeline stage"):
        check(pool2, deep(family, head))


TIED: Mapping[str, Mapping[str, bool]] = {
    "gpt2": {},
    "bert": {},
    "bloom": {},
    "llama": {"tie_word_embeddings": True},
    "t5": {},
}


@pytest.mark.reduced(family=("bert", "llama", "t5"), at_most=1)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("family", TIED)
def test_tied_embedding_and_head_on_two_stages(pool2: WorkerPool, family: str, schedule: str) -> None:
    """With zbv both ends are on the first rank, and only T5 uses its embedding in the middle as well."""
    report = check(pool2, deep(family, **TIED[family]), schedule, micro_batches=4)
    summed = any("all_reduce over pipe (gradients)" in name for name in report.collectives)
    assert summed == (schedule != "zbv" or family == "t5"), report.collectives


@pytest.mark.full
@pytest.mark.reduced(family=("t5",))
@pytest.mark.parametrize("family", ["gpt2", "t5", "albert"])
def test_tied_weights_over_all_axes(pools: Any, family: str) -> None:
    check(pools(4), deep(family), tensor=2, config=SEQUENCE)
    check(pools(4), deep(family), data=2)


def test_untied_gradients_are_not_reduced_over_stages(pool2: WorkerPool) -> None:
    report = check(pool2, deep("llama"))
    assert not any("over pipe (gradients)" in name for name in report.collectives)


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_single_precision(pool2: WorkerPool, family: str) -> None:
    pipeline = VerifyPipeline(2, 3)
    report = verify(deep(family), Uneven(DEFAULT_HEAD[family]), 1, dtype=torch.float32, pipeline=pipeline, pool=pool2)
    assert report.passed, str(report)
