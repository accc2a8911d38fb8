"""Images in the text: a layout is validated with images, or batches with images raise on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardformer
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.discovery.derive_policy import derive_policy_from_forward
from shardformer.discovery.reduced_model import UNTRIED, reduce_model
from shardformer.errors import ConfigError, ShardFormerError
from shardformer.layout.sharding_metadata import get_shard_specs, get_sharding_metadata
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.layer_sequence import SequenceParallelHints
from shardformer.policies.policy import Policy
from tests.policies.toy import HIDDEN, Layer

VOCAB, IMAGE, FEATURES, SIDE = 64, 7, 2, 4


class Vision(nn.Module):
    """(B, 3, 4, 4) -> two features for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48)) for _ in range(2))
        self.out = nn.Linear(48, FEATURES * HIDDEN)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(p.device for _, p in self.named_parameters() if p.is_floating_point())

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels.to(self.device, self.dtype).flatten(1)
        for layer in self.layers:
            x = x + layer(x)
        features: Tensor = self.out(x)
        return features.unflatten(-1, (FEATURES, HIDDEN))


class Seer(nn.Module):
    """A language model whose vision tower is registered after its layers.

    Args:
        how: "plain"; "deep" adds features between the layers, too; "again" runs the layers twice with images.
    """

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.config = SimpleNamespace(
            image_token_id=IMAGE, vocab_size=VOCAB, image_size=SIDE, num_channels=3, num_attention_heads=5
        )
        self.how = how
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(HIDDEN)
        self.vision = Vision()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        return self.vision(pixel_values)

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        x, mask, features = self.embed(input_ids), input_ids == IMAGE, None
        if pixel_values is not None:
            features = self.get_image_features(pixel_values)
            if int(mask.sum()) != features.shape[:2].numel():
                raise ValueError("images and their tokens do not match")
            x = x.masked_scatter(mask[..., None].expand_as(x), features.to(x.dtype))
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.how == "deep" and features is not None and number < 2:
                x = x.clone()
                x[mask, :] = x[mask, :] + features.flatten(0, 1)
        if self.how == "again" and features is not None:
            for layer in self.layers:
                x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def seer(how: str = "plain") -> Seer:
    torch.manual_seed(0)
    return Seer(how).double()


def batch_of(images: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 60, (4, 8), generator=generator)
    if not images:
        return {"input_ids": ids}
    ids[:, 2:4] = IMAGE
    return {"input_ids": ids, "pixel_values": torch.randn(4, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)}


def loss_of(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def policy_of(model: Seer) -> Policy:
    reduced = reduce_model(model)
    with torch.enable_grad():
        return derive_policy_from_forward(reduced.model, reduced.forward_fn, reduced)()


@cache
def policy_class(how: str) -> type[Policy]:
    return type(policy_of(seer(how)))


def check(
    plain: Seer,
    policy: Policy,
    batch: dict[str, Tensor],
    options: Mapping[str, Any] = MappingProxyType({}),
    **layout: Any,
) -> None:
    """Assert that the loss and all gradients match the unsharded model.

    Args:
        options: options of ``ShardConfig``.
    """
    expected = copy.deepcopy(plain)
    loss = loss_of(expected(**batch), batch)
    loss.backward()
    gradients = {name: p.grad for name, p in expected.named_parameters()}

    def run(context: ParallelContext) -> set[str]:
        model = shardformer.shard_model(copy.deepcopy(plain), copy.deepcopy(policy), context=context, **options)
        if context.pipe.size > 1:
            sharded_loss = shardformer.Pipeline(model, micro_batches=2, loss_fn=loss_of).step(batch)
        else:
            sharded_loss = loss_of(model(**batch), batch)
            sharded_loss.backward()
        torch.testing.assert_close(sharded_loss.detach(), loss.detach())
        specs, coords = get_shard_specs(model), get_sharding_metadata(model).coords
        for name, p in model.named_parameters():
            if (grad := gradients[name]) is not None:
                assert p.grad is not None, name
                torch.testing.assert_close(p.grad, specs[name].slice_full_tensor(grad, coords), msg=name)
        return {name for name, _ in model.named_parameters()}

    assert set().union(*run_as_threads(run, **layout)) == set(gradients)


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("how", ["plain", "deep"])
def test_stages_are_validated_with_images_and_match_one_device(how: str) -> None:
    plain = seer(how)
    policy: Any = policy_class(how)()
    assert policy.no_pipeline is None and not policy.unproven["pipe"]
    check(plain, policy, batch_of(), pipe=2)
    check(plain, policy, batch_of(images=False), pipe=2)
    check(plain, policy, batch_of(), tensor=2)


@pytest.mark.reduced(at_most=1)
@pytest.mark.filterwarnings("ignore:The attention of Seer cannot be sharded")
@pytest.mark.parametrize("how", ["plain", "deep"])
def test_context_parallelism_with_images_matches_one_device(how: str) -> None:
    plain = seer(how)
    policy = policy_class(how)()
    check(plain, policy, batch_of(), sequence=2)
    check(plain, policy, batch_of(images=False), sequence=2)


@pytest.mark.reduced(how=("deep",))
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"tensor": 3}, {"tensor": 2, "pipe": 2}], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["plain", "deep"])
def test_sequence_parallelism_with_images_matches_one_device(how: str, overlap: bool, layout: dict[str, int]) -> None:
    plain = seer(how)
    policy: Any = policy_class(how)()
    assert policy.no_sequence_parallel is None and not policy.unproven["enable_sequence_parallelism"]
    assert policy.stack.sequence.between == (how == "deep")
    options = {"enable_sequence_parallelism": True, "enable_sequence_overlap": overlap}
    for images in (True, False) if layout == {"tensor": 2} else (True,):
        check(plain, policy, batch_of(images), options, **layout)


@pytest.mark.full
def test_hidden_states_between_layers_are_gathered_only_if_read() -> None:
    plain = seer("deep")
    deep: Any = policy_of(plain)
    without = copy.deepcopy(deep)
    without.stack = replace(deep.stack, sequence=SequenceParallelHints())

    def sent(policy: Any) -> Any:
        def run(context: ParallelContext) -> Any:
            model = shardformer.shard_model(
                copy.deepcopy(plain), copy.deepcopy(policy), context=context, enable_sequence_parallelism=True
            )
            with CollectiveRecorder(context) as recorder:
                loss_of(model(**batch_of(images=False)), batch_of(images=False)).backward()
            return recorder.summarize_calls()

        return run_as_threads(run, tensor=2)[0]

    assert sent(deep) == sent(without)


def test_batches_with_unsupported_images_raise_on_all_ranks() -> None:
    plain = seer("again")
    policy: Any = policy_of(plain)
    assert policy.no_pipeline is None and "pixel_values" in policy.unproven["pipe"]
    check(plain, policy, batch_of(images=False), pipe=2)

    def refused(context: ParallelContext) -> None:
        model = shardformer.shard_model(copy.deepcopy(plain), copy.deepcopy(policy), context=context)
        pipeline = shardformer.Pipeline(model, micro_batches=2, loss_fn=loss_of)
        with pytest.raises(ConfigError, match=r"Seer with the layout .* does not support the input pixel_values"):
            pipeline.step(batch_of())
        pipeline.step(batch_of(images=False))

    run_as_threads(refused, pipe=2)


def test_an_unvalidated_policy_with_images_raises_instead_of_nan() -> None:
    plain = seer()
    reduced = reduce_model(plain)
    with torch.enable_grad():
        policy = derive_policy_from_forward(reduced.model, reduced.forward_fn)()

    def step(context: ParallelContext) -> None:
        model = shardformer.shard_model(copy.deepcopy(plain), copy.deepcopy(policy), context=context)
        shardformer.Pipeline(model, micro_batches=2, loss_fn=loss_of).step(batch_of())

    with pytest.raises(ShardFormerError, match="only on another pipeline stage"):
        run_as_threads(step, pipe=2)


class Strange(Seer):
    """A model with an unknown image layout."""

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        if pixel_values.shape[1:] != (1, 48):
            raise ValueError("another layout")
        return self.vision(pixel_values[:, 0])


@pytest.mark.filterwarnings("ignore:The attention of Strange cannot be sharded")
def test_unvalidated_images_raise_over_sequences_and_are_never_nan_over_stages() -> None:
    torch.manual_seed(0)
    plain = Strange().double()
    policy: Any = policy_of(plain)
    assert policy.unproven["enable_sequence_parallelism"] == {"pixel_values": UNTRIED}
    batch = {**batch_of(), "pixel_values": torch.randn(4, 1, 48, dtype=torch.float64)}

    def refused(context: ParallelContext) -> None:
        model = shardformer.shard_model(copy.deepcopy(plain), copy.deepcopy(policy), context=context)
        with pytest.raises(ConfigError, match="no small batch could be generated"):
            model(**batch)

    def step(context: ParallelContext) -> None:
        model = shardformer.shard_model(copy.deepcopy(plain), copy.deepcopy(policy), context=context)
        shardformer.Pipeline(model, micro_batches=2, loss_fn=loss_of).step(batch)

    run_as_threads(refused, sequence=2)
    with pytest.raises(ShardFormerError, match="only on another pipeline stage"):
        run_as_threads(step, pipe=2)


def test_a_vision_tower_on_another_stage_keeps_its_dtype_without_parameters() -> None:
    plain = seer().float()
    policy = policy_of(seer())

    def check_dtype(context: ParallelContext) -> None:
        model: Any = shardformer.shard_model(copy.deepcopy(plain), copy.deepcopy(policy), context=context)
        stages = get_sharding_metadata(model).stages
        assert stages is not None
        seen = [name for name, _ in model.named_parameters()]
        with stages.placeholders.include_placeholders():
            assert model.vision.dtype == torch.float32
            assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
            assert [tuple(p.shape) for p in model.vision.parameters()] == [p.shape for p in plain.vision.parameters()]
            model.to(torch.bfloat16)
        stages.placeholders.convert_dtypes(model, {})
        with stages.placeholders.include_placeholders():
            assert model.vision.dtype == torch.bfloat16
        assert [name for name, _ in model.named_parameters()] == seen

    run_as_threads(check_dtype, pipe=2)
