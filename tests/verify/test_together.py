"""Models with several inputs: their example batches, and how data ranks split them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardformer.discovery.example_inputs import (
    iter_batches_with_media_tokens,
    iter_inputs_for_known_arguments,
    make_forward_fn,
)
from shardformer.discovery.reduced_model import ReducedModel
from shardformer.errors import ConfigError, PolicyError
from shardformer.gradient_accumulation.micro_batches import get_special_token_ids
from shardformer.verify import model_source
from shardformer.verify import model_source as any_type
from shardformer.verify.model_source import ReducedModelFactory, find_model_source, get_main_class_names_by_model_type
from shardformer.verify.train_both import VerifyJob, VerifyPipeline, check_samples_are_independent, get_rank_batch
from shardformer.verify.training_options import VerifyTraining
from tests.sharding.plain_models import in_fp64

IMAGE = 126
TEXT = dict(
    hidden_size=24, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1, intermediate_size=20,
    vocab_size=127,
)  # fmt: skip


def qwen() -> nn.Module:
    vision = dict(depth=1, embed_dim=24, hidden_size=24, num_heads=3, mlp_ratio=1)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    ids = dict(image_token_id=IMAGE, video_token_id=125, vision_start_token_id=124, vision_end_token_id=123)
    config = transformers.Qwen2VLConfig(text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, **ids)
    return transformers.Qwen2VLForConditionalGeneration(config).double()


def llava() -> nn.Module:
    vision = dict(
        model_type="clip_vision_model", hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=28,
        intermediate_size=20, patch_size=14,
    )  # fmt: skip
    config = transformers.LlavaConfig(text_config={**TEXT, "model_type": "llama"}, vision_config=vision)
    config.image_token_id = config.image_token_index = IMAGE
    return transformers.LlavaForConditionalGeneration(config).double()


def clip() -> nn.Module:
    small = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20)
    text, vision = {**small, "vocab_size": 127, "eos_token_id": 2}, {**small, "image_size": 28, "patch_size": 14}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision)).double()


def of_clip(step: int) -> Mapping[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "input_ids": torch.randint(5, 127, (4, 9), generator=generator),
        "pixel_values": torch.randn(4, 3, 28, 28, generator=generator),
        "return_loss": torch.tensor(True),
    }


def of_qwen(step: int) -> Mapping[str, Tensor]:
    model = qwen()
    return next(iter_batches_with_media_tokens(model, dict(iter_inputs_for_known_arguments(model))))


@pytest.mark.parametrize(("model_fn", "tokens"), [(qwen, [4, 8]), (llava, [4, 4])])
def test_the_text_has_one_placeholder_per_feature(model_fn: Any, tokens: list[int]) -> None:
    model = model_fn()
    batch = next(iter_batches_with_media_tokens(model, dict(iter_inputs_for_known_arguments(model))))
    assert (batch["input_ids"] == IMAGE).sum(-1).tolist() == tokens
    assert batch["attention_mask"].shape == batch["input_ids"].shape
    assert torch.isfinite(model(**in_fp64(batch)).logits).all()


def test_a_model_without_image_tokens_has_no_placeholders() -> None:
    model = clip()
    assert [*iter_batches_with_media_tokens(model, dict(iter_inputs_for_known_arguments(model)))] == []


def test_data_ranks_get_the_patches_of_their_own_images() -> None:
    job = VerifyJob(qwen, of_qwen, 1, 2, 1, torch.float64, None, None, {}, ids=get_special_token_ids(qwen().config))
    batch = {name: x for name, x in of_qwen(0).items() if name != "mm_token_type_ids"}
    words = batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] == 7, 8)
    words[1, -3:] = 7  # each stands for 16 patches of the second sample, which the config does not specify
    parts = [get_rank_batch(job, batch, rank, 2) for rank in (0, 1)]
    assert [len(part["pixel_values"]) for part in parts] == [16, 32]
    assert [part["image_grid_thw"].tolist() for part in parts] == [[[1, 4, 4]], [[1, 4, 8]]]


@pytest.mark.parametrize(
    ("cut", "remedy"),
    [
        ({"data": 2, "training": VerifyTraining(average_loss_over="tokens")}, "--average-loss-over ranks"),
        ({"pipeline": VerifyPipeline(1, 2)}, "--micro-batches 1"),
    ],
)
def test_contrastive_batches_are_not_split(cut: dict[str, Any], remedy: str) -> None:
    whole = VerifyJob(clip, of_clip, 1, 1, 1, torch.float64, None, None, {})
    check_samples_are_independent(whole, clip())
    check_samples_are_independent(replace(whole, data=2), clip())  # compared with the plain model on the same shards
    with pytest.raises(ConfigError, match=r"logits_per_\w+ of CLIPModel compares all samples of a batch") as caught:
        check_samples_are_independent(replace(whole, **cut), clip())
    assert remedy in caught.value.remedy


def test_every_model_type_has_a_class() -> None:
    known = {"clip": "CLIPModel", "qwen2_vl": "Qwen2VLForConditionalGeneration", "siglip": "SiglipModel"}
    assert known.items() <= get_main_class_names_by_model_type().items()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Replace the small models by precomputed ones."""
    for known in (model_source._make_reduced_model, model_source._make_example_batch):
        known.cache_clear()
    yield lambda reduced_of: monkeypatch.setattr(any_type, "reduce_model", reduced_of)
    for known in (model_source._make_reduced_model, model_source._make_example_batch):
        known.cache_clear()


def test_unknown_inputs_are_reported(small: Any) -> None:
    def none(model: nn.Module, with_media_tokens: bool) -> ReducedModel:
        raise PolicyError("TypeError.", rule="", remedy="")

    small(none)
    with pytest.raises(ConfigError, match=r"Cannot create an example batch .*TypeError.*inputs bbox, ") as caught:
        ReducedModelFactory("bros").get_config()
    assert "FILE.py:function" in caught.value.remedy
    with pytest.raises(ConfigError, match=r"cannot generate values for the inputs past_values"):
        ReducedModelFactory("patchtst").get_config()


def test_a_contrastive_model_gets_different_pairs(small: Any) -> None:
    two = {name: x[:2] for name, x in of_clip(0).items() if x.dim()}
    small(lambda model, with_media_tokens: ReducedModel(clip(), make_forward_fn(clip(), two), two))
    source = find_model_source("clip")
    batch = source.make_batch_fn(4)(0)
    assert source.loss_fn is None and bool(batch["return_loss"])
    assert len({tuple(row) for row in batch["input_ids"].tolist()}) == 4
    assert (batch["input_ids"] != source.make_batch_fn(4)(1)["input_ids"]).any()


@pytest.mark.parametrize(("model_fn", "inputs"), [(clip, {"pixel_values", "return_loss"}), (qwen, {"image_grid_thw"})])
def test_a_folder_of_a_multimodal_model_gets_the_same_batches(model_fn: Any, inputs: set[str], tmp_path: Path) -> None:
    model_fn().save_pretrained(tmp_path)
    source = find_model_source(str(tmp_path))
    batch = source.make_batch_fn(3)(0)
    assert inputs <= batch.keys() and len(batch["input_ids"]) == 3
    assert source.loss_fn is not None and torch.isfinite(source.loss_fn(source.model_fn(), batch))
    with pytest.raises(ConfigError, match="--tokens 9 has no effect"):
        source.make_batch_fn(3, 9)
