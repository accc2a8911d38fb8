"""Small models: all head classes of transformers, with matching batches and a loss that reaches all weights."""

from __future__ import annotations

import pickle
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.gradient_accumulation.micro_batch_loss import MicroBatchLossScaler
from shardformer.gradient_accumulation.micro_batches import split_batch
from shardformer.shard_model_api import resolve_policy_and_origin
from shardformer.verify.small_models import (
    DEFAULT_HEAD,
    FAMILY_OF,
    HEAD_CLASSES,
    HEAD_CONFIG,
    LANGUAGE_MODEL,
    SMALL_CONFIGS,
    RandomBatchFactory,
    SmallModelFactory,
    compute_model_loss,
    count_samples,
    is_loss_averaged_over_samples,
    round_up_to_supported_num_layers,
)
from tests.pipeline.heads import weighing
from tests.verify.variants import VARIANTS, Changed

EVERY_HEAD = {head: Changed(family, {}, head) for head, family in FAMILY_OF.items()}
EVERYTHING = {**EVERY_HEAD, **VARIANTS}

# Parameters that a head, or a variant, has and its forward pass does not use, and why.
UNUSED = {
    "ChatGLMForSequenceClassification": r"transformer\.output_layer\.",  # the head of the language model
    "SwinBackbone": r"swin\.layernorm\.",  # each of its feature maps has a norm of its own
    "BeitForSemanticSegmentation": r"beit\.layers\.3\.",  # it reads what goes into the layers that it names
    "SamModel": r"prompt_encoder\.no_mask_embed\.",  # for prompts without a mask
    "Blip2ForImageTextRetrieval": r"(vision|text)_projection\.",  # of the other way to compare, over the whole batch
    "Blip2TextModelWithProjection": r"query_tokens|.*(crossattention|_query)\.",  # for images
    "bert untied": r"cls\.predictions\.bias",  # shared with the decoder's, where the weights are tied
    "roberta untied": r"lm_head\.bias",
    "albert with wide embeddings, untied": r"predictions\.bias",
    "ernie untied": r"cls\.predictions\.bias",
    "bloom slow but exact": r".*\.(dense|dense_4h_to_h)\.bias",  # transformers multiplies slices of weights alone
}
# Statistics of the whole batch, so that the loss is no mean over rows while it trains.
BATCH_NORM = {"BeitForSemanticSegmentation", "beit with a pyramid"}


def doubled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def half(batch: dict[str, Tensor], start: int) -> dict[str, Tensor]:
    return {name: value[start : start + 2] if value.dim() else value for name, value in batch.items()}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return float(compute_model_loss(model, doubled(batch)))


@pytest.mark.parametrize(
    "family", [family for family in HEAD_CLASSES if family != "chatglm"]
)  # whose code is not in there
def test_all_transformers_heads_are_covered(family: str) -> None:
    modeling = getattr(transformers.models, family.replace("-", "_"))
    classes = {name for name in dir(modeling) if isinstance(getattr(modeling, name), type)}
    models = {n for n in classes if issubclass(getattr(modeling, n), nn.Module) and not n.endswith("PreTrainedModel")}
    models -= {n for n in models if not issubclass(getattr(modeling, n), transformers.PreTrainedModel)}
    assert models == set(HEAD_CLASSES[family]) and len(HEAD_CLASSES[family]) == len(models)


def test_tables_of_heads_are_consistent() -> None:
    assert list(SMALL_CONFIGS) == list(HEAD_CLASSES) == list(DEFAULT_HEAD)
    assert (
        all(head in HEAD_CLASSES[family] for family, head in DEFAULT_HEAD.items())
        and HEAD_CONFIG.keys() <= FAMILY_OF.keys()
    )
    assert LANGUAGE_MODEL.items() <= DEFAULT_HEAD.items()
    assert {variant.family for variant in VARIANTS.values()} == SMALL_CONFIGS.keys()


@pytest.mark.reduced(one_in=8)
@pytest.mark.parametrize("name", EVERYTHING)
def test_head_trains_on_its_batches(name: str) -> None:
    torch.manual_seed(0)
    sample = EVERYTHING[name].sample
    model = sample().double().train()
    assert type(model).__name__ == sample.head_class
    loss = compute_model_loss(model, doubled(RandomBatchFactory(sample.head_class)(0)))
    loss.backward()
    assert loss.dim() == 0 and torch.isfinite(loss)
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(torch.isfinite(grad).all() for grad in grads.values() if grad is not None)
    unused = UNUSED.get(name, UNUSED.get(sample.head_class, "(?!)"))
    assert {n for n, grad in grads.items() if grad is None} == {n for n in grads if re.match(unused, n)}


@pytest.mark.reduced(one_in=8)
@pytest.mark.parametrize("head", EVERY_HEAD)
def test_loss_has_gradients_for_all_weights(head: str) -> None:
    """Gradients at noise level would hide mistakes. A bias may have none, such as the bias of attention keys."""
    torch.manual_seed(0)
    model = EVERY_HEAD[head].sample().double().train()
    compute_model_loss(model, doubled(RandomBatchFactory(head)(0))).backward()
    largest = {n: float(p.grad.abs().max()) for n, p in model.named_parameters() if p.grad is not None}
    top = max(largest.values())
    # a mask decoder's weights for the one mask that is not asked for among several have none
    asked = {n: v for n, v in largest.items() if not n.endswith("bias") and "hypernetworks_mlps.0" not in n}
    assert {n: v / top for n, v in asked.items() if v / top < 1e-6} == {}


@pytest.mark.reduced(one_in=8)
@pytest.mark.parametrize("name", EVERYTHING)
def test_batch_loss_is_mean_of_half_batch_losses(name: str) -> None:
    torch.manual_seed(0)
    sample = EVERYTHING[name].sample
    model = sample().double().train(name not in BATCH_NORM)
    for step in (0, 1):
        batch = RandomBatchFactory(sample.head_class)(step)
        halves = [loss_of(model, half(batch, start)) for start in (0, 2)]
        # some losses are had in fp32
        assert loss_of(model, batch) == pytest.approx(sum(halves) / 2, rel=1e-6)
        assert halves[0] != pytest.approx(halves[1], rel=1e-6), "the rows differ"


@pytest.mark.parametrize("head", EVERY_HEAD)
def test_batch_depends_on_its_step(head: str) -> None:
    batches = RandomBatchFactory(head, batch_size=3)
    first, again, other = batches(0), pickle.loads(pickle.dumps(batches))(0), batches(1)
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert {len(value) for value in first.values() if value.dim()} == {3}
    if "attention_mask" in first and "MultipleChoice" not in head and "DoubleHeads" not in head:
        assert not first["attention_mask"].all(), "some of it is padding"


@pytest.mark.parametrize("family", SMALL_CONFIGS)
def test_sample_is_a_value(family: str) -> None:
    sample = pickle.loads(pickle.dumps(SmallModelFactory(family)))
    assert sample == SmallModelFactory(family)
    torch.manual_seed(0)
    first = sample().state_dict()
    torch.manual_seed(0)
    assert all(torch.equal(value, first[name]) for name, value in SmallModelFactory(family)().state_dict().items())


@pytest.mark.reduced(one_in=8)
@pytest.mark.parametrize("name", EVERYTHING)
def test_loss_is_deterministic(name: str) -> None:
    """A model in training mode has one loss per batch, so there is no dropout or stochastic depth."""
    sample = EVERYTHING[name].sample
    model, batch = sample().double().train(), RandomBatchFactory(sample.head_class)(0)
    assert loss_of(model, batch) == loss_of(model, batch)


@pytest.mark.parametrize(
    "head", [head for head in EVERY_HEAD if head in DEFAULT_HEAD.values() or head.endswith("Model")]
)
def test_no_embedding_starts_at_zero(head: str) -> None:
    assert [n for n, p in EVERY_HEAD[head].sample().named_parameters() if p.dim() > 1 and not p.any()] == []


def test_attention_windows_are_shifted_and_padded() -> None:
    shifts: list[Any] = []
    for family in ("swin", "swinv2"):
        config = SmallModelFactory(family).get_config()
        grid = config.image_size // config.patch_size
        assert config.depths[0] > 1 and grid > config.window_size and grid % config.window_size
        shifts += [getattr(module, "shift_size", 0) for module in SmallModelFactory(family)().modules()]
    assert any(shifts)


def test_family_without_small_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"family='brt'.*Did you mean 'bert'"):
        SmallModelFactory("brt")


def test_model_without_loss_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"Identity returned no loss: its output of type Tensor.*Pass a function loss_fn"
    ):
        compute_model_loss(nn.Identity(), {"input": torch.ones(2, 3)})


def test_outputs_are_counted_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"logits": x, "again": x.t(), "deep": ({"ids": torch.ones(2, dtype=torch.long)}, None)}

    x = torch.randn(2, 3)
    wave = torch.arange(3, dtype=torch.float64).cos()
    assert float(compute_model_loss(Twice(), {"x": x})) == pytest.approx(float((x.double() - wave).square().mean()))


def _split(head: str, sample: SmallModelFactory) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    config = sample.get_config()
    changes = config.to_dict() if hasattr(config, "to_dict") else {}
    batch = doubled(RandomBatchFactory(head, num_labels=config.num_labels, changes=changes)(0))
    model = sample().double()
    return model, split_batch(batch, [2, 2], getattr(model, "main_input_name", None))


@pytest.mark.parametrize("head", FAMILY_OF)
def test_head_has_enough_layers_for_pipeline(head: str) -> None:
    sample = SmallModelFactory(FAMILY_OF[head], head).with_min_layers(5)
    model = sample()
    policy, _ = resolve_policy_and_origin(model, None)
    policy.set_model(model)
    units = sum(len(segment.layer_calls) for segment in policy.layer_sequence().stacks)
    assert units == round_up_to_supported_num_layers(sample.family, head, 5) and units in (5, 6)
    assert round_up_to_supported_num_layers(sample.family, head, 1) >= 2


@pytest.mark.reduced(one_in=8)
@pytest.mark.parametrize("head", FAMILY_OF)
def test_per_sample_losses_are_those_without_torch_mean(head: str) -> None:
    model, parts = _split(head, SmallModelFactory(FAMILY_OF[head], head))
    weights = MicroBatchLossScaler(parts, [2, 2])
    refused = pytest.raises(ConfigError, match="loss_weight") if is_loss_averaged_over_samples(head) else nullcontext()
    with refused:
        for index, part in enumerate(parts):
            with weighing(weights, index):
                loss = compute_model_loss(model, part)
            weights.scale_loss(index, loss)
        weights.run_deferred_checks()
    assert count_samples(parts[0]) == 2
