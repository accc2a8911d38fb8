"""Pipeline stages of models without a policy: validated, or refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardformer.discovery.derive_policy import DerivedPolicy, derive_pipeline_only_policy
from shardformer.discovery.layer_stacks import find_pipeline_hints
from shardformer.discovery.reduced_model import ReferenceGradients, reduce_model
from shardformer.discovery.shrink_config import shrink_config
from shardformer.discovery.validation import validate_pipeline_stages
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.policies.roles import LayerStack
from shardformer.shard_model_api import resolve_policy_and_origin
from shardformer.verify.small_models import count_samples
from shardformer.verify.train_both import VerifyPipeline
from shardformer.verify.verification import verify
from tests.policies.toy import ScaledToyLM

FOUND: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForCausalLM", {"with_first_layer": ("model.decoder.layernorm_embedding",)}),
    "fsmt": ("FSMTForConditionalGeneration", {"cross_states": ("model.decoder", "encoder_hidden_states")}),
    "mt5": ("MT5ForConditionalGeneration", {"shared_from_first": ("layer.0.SelfAttention.relative_attention_bias",)}),
    "cpmant": ("CpmAntForCausalLM", {"on_every_stage": ("cpmant.position_bias",)}),
    "voxtral_realtime": (
        "VoxtralRealtimeForConditionalGeneration",
        {"with_last_layer": ("model.multi_modal_projector.linear_1", "model.multi_modal_projector.linear_2")},
    ),
}
"""Model type -> class, and the pipeline hints of one of its stacks that registration order does not imply."""
REFUSED = {
    "xlm": ("XLMWithLMHeadModel", "only on another pipeline stage"),
    "pvt_v2": ("PvtV2ForImageClassification", "in two stages it does not run"),
}
"""Models with attention modules and MLPs in separate lists, or with layers that return several outputs."""


def compute_reference(family: str, name: str) -> ReferenceGradients:
    torch.manual_seed(0)
    reduced = reduce_model(
        getattr(transformers, name)(shrink_config(transformers.AutoConfig.for_model(family, architectures=[name])))
    )
    return ReferenceGradients.from_model(reduced.model, reduced.forward_fn)


def stacks_of(policy: Any) -> list[LayerStack]:
    return [policy.stack] if isinstance(policy.stack, LayerStack) else list(policy.stack)


@pytest.mark.reduced(one_in=3, at_most=1)
@pytest.mark.parametrize("family", FOUND)
def test_pipeline_hints_are_inferred_and_required(family: str) -> None:
    name, needs = FOUND[family]
    reference = compute_reference(family, name)
    policy = type(derive_pipeline_only_policy(reference.model))
    stacks = stacks_of(policy)
    assert policy.no_pipeline is None
    assert validate_pipeline_stages(reference, policy, stacks) is None
    ((field, paths),) = needs.items()
    assert any(
        set(paths) <= set(getattr(stack if field == "cross_states" else stack.stages, field) or ()) for stack in stacks
    ), stacks
    if field == "cross_states":
        without = [replace(stack, cross_states=None) for stack in stacks]
    else:
        without = [replace(stack, stages=replace(stack.stages, **{field: ()})) for stack in stacks]
    assert validate_pipeline_stages(reference, policy, without) is not None


@pytest.mark.reduced(one_in=2)
@pytest.mark.parametrize("family", REFUSED)
def test_models_that_cannot_be_split_into_stages_are_refused(family: str) -> None:
    name, why = REFUSED[family]
    policy = derive_pipeline_only_policy(compute_reference(family, name).model)
    policy.model = compute_reference(family, name).model
    assert why in str(policy.no_pipeline_reason())


def test_a_single_layer_cannot_be_validated() -> None:
    reference = compute_reference("opt", "OPTForCausalLM")
    layers: Any = reference.model.get_submodule("model.decoder.layers")
    del layers[1:]
    policy = type("Table", (DerivedPolicy,), {"base": "", "stack": LayerStack("model.decoder.layers", [])})
    assert (
        find_pipeline_hints(ReferenceGradients.from_model(reference.model, reference.forward_fn), policy)[1]
        == "it does not have two layers that run in sequence"
    )


class Keeps(nn.Module):
    """A layer that may read the input of the preceding layer, bypassing the layer sequence."""

    def __init__(self, before: Keeps | None) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(6, 6), torch.zeros(())
        self.reads = [before] if before is not None else []  # not a module of its own

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return x + self.linear(x).tanh() + sum(layer.seen for layer in self.reads)


class OfFour(nn.Module):
    def __init__(self, reader: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for at in range(4):
            self.layers.append(Keeps(self.layers[at - 1] if at == reader else None))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for layer in self.layers:
            layer.seen = torch.zeros(())  # type: ignore[assignment]  # a copy cannot have what autograd made
        return x


@pytest.mark.parametrize(("reader", "is_refused"), [(None, False), (1, True), (2, True), (3, True)])
def test_stages_may_begin_between_the_first_and_the_last_layer(reader: int | None, is_refused: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, dtype=torch.float64)
    policy = type("Table", (DerivedPolicy,), {"base": "", "stack": LayerStack("layers", [])})
    reference = ReferenceGradients.from_model(OfFour(reader).double(), lambda model: model(x))
    assert (validate_pipeline_stages(reference, policy, stacks_of(policy)) is not None) == is_refused


# ------------------------------------------------------------------------------------------- models without a policy


def convnext() -> nn.Module:
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 2, 1, 1], image_size=32)
    model: nn.Module = transformers.ConvNextForImageClassification(config)
    return model


def images(size: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"pixel_values": torch.randn(size, 3, 32, 32, generator=generator), "labels": torch.arange(size) % 2}


@pytest.mark.reduced(one_in=2)
@pytest.mark.parametrize(("pipe", "data"), [(2, 1), (1, 2)])
def test_a_model_without_a_policy_trains_without_tensor_parallelism(pool2: WorkerPool, pipe: int, data: int) -> None:
    pipeline = VerifyPipeline(pipe, 3) if pipe > 1 else None
    report = verify(convnext, partial(images, 6), 1, data, pipeline=pipeline, pool=pool2)
    assert report.passed, str(report)
    assert report.collectives


def toy_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    out: Tensor = model(**batch)
    return out.square().mean()


def tokens(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"ids": torch.randint(101, (4, 9), generator=generator), "scale": torch.rand(4, generator=generator)}


def test_a_model_with_unknown_inputs_trains_over_data_and_pipe(pool2: WorkerPool) -> None:
    policy, source = resolve_policy_and_origin(ScaledToyLM(), None, tp_size=1)
    assert source == "the order of its layers"
    assert "ShardFormer cannot generate example inputs for ScaledToyLM" in policy.notes[0]
    report = verify(ScaledToyLM, tokens, 1, 2, loss_fn=toy_loss, pool=pool2)
    assert report.passed, str(report)
    report = verify(
        ScaledToyLM, tokens, 1, loss_fn=toy_loss, pipeline=VerifyPipeline(2, 2, {}, count_samples), pool=pool2
    )
    assert report.passed, str(report)
