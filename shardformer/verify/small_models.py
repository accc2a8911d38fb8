"""Small models with random weights and random batches, for each supported model family and head class.

Their sizes are unusual, to reveal sharding errors: a vocabulary of 127, six heads of size 8, two KV heads, MLPs of 70,
images of 5 x 5 patches, windows that do not divide them. Dropout, stochastic depth, random masking and caches are off.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch import Generator, Tensor, nn

from shardformer.errors import ConfigError, check_choice
from shardformer.torch_compat import get_storage_id, has_real_data
from shardformer.transformers_compat import import_transformers

_BERT: dict[str, Any] = dict(
    vocab_size=127, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=70,
    max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
)  # fmt: skip
_LLAMA: dict[str, Any] = dict(
    vocab_size=127, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    intermediate_size=70, max_position_embeddings=64, classifier_dropout=0.0, bos_token_id=1, eos_token_id=2,
    pad_token_id=0,
)  # fmt: skip
_OPT: dict[str, Any] = dict(
    vocab_size=127, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, ffn_dim=70,
    max_position_embeddings=64, dropout=0.0, bos_token_id=2, eos_token_id=2, pad_token_id=1, use_cache=False,
)  # fmt: skip
_WIDE = 0.2  # Standard deviation of initial weights. With the usual 0.02, attention would hardly affect the loss
_IMAGE_SIZES: dict[str, Any] = dict(image_size=20, patch_size=4)
_VIT: dict[str, Any] = dict(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=70, **_IMAGE_SIZES,
)  # fmt: skip
# 7 x 7 patches in windows of 3 (padded, and shifted in the second layer), then 4 x 4. The decoder upsamples by 7.
_SWIN: dict[str, Any] = dict(
    image_size=28, patch_size=4, embed_dim=24, depths=[2, 1], num_heads=[3, 6], window_size=3, mlp_ratio=1.46,
    drop_path_rate=0.0, encoder_stride=7, initializer_range=_WIDE,
)  # fmt: skip
QFORMER: Mapping[str, Any] = MappingProxyType({**_BERT, "encoder_hidden_size": 48, "cross_attention_frequency": 2})
"""BLIP-2's Q-Former. Its first layer attends to the image, its second layer does not."""

SMALL_CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "gpt2": dict(
        vocab_size=127, n_embd=48, n_layer=2, n_head=6, n_inner=70, n_positions=64, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, summary_first_dropout=0.0, classifier_dropout=0.0, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    ),
    "llama": _LLAMA,
    "t5": dict(
        vocab_size=127, d_model=48, d_kv=8, num_layers=2, num_heads=6, d_ff=70, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=2, classifier_dropout=0.0,
    ),
    "opt": _OPT,
    "bloom": dict(
        vocab_size=127, hidden_size=48, n_layer=2, n_head=6, hidden_dropout=0.0, attention_dropout=0.0,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=False,
    ),
    "falcon": dict(
        vocab_size=127, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_kv_heads=2,
        new_decoder_architecture=True, ffn_hidden_size=70, max_position_embeddings=64, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, use_cache=False,
    ),
    "gpt_neo": dict(
        vocab_size=127, hidden_size=48, num_layers=2, num_heads=6, intermediate_size=70, window_size=5,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=64, classifier_dropout=0.0,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=False,
    ),
    "gptj": dict(
        vocab_size=127, n_embd=48, n_layer=2, n_head=6, n_inner=70, n_positions=64, rotary_dim=4, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, use_cache=False,
    ),
    "qwen2": {**_LLAMA, "use_cache": False},
    "qwen3": {**_LLAMA, "head_dim": 8, "use_cache": False},
    "mistral": {**_LLAMA, "sliding_window": 5, "use_cache": False},
    "roberta": {**_BERT, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "use_cache": False},
    "albert": {**_BERT, "embedding_size": 30, "classifier_dropout_prob": 0.0},
    "ernie": {**_BERT, "use_cache": False},
    "whisper": dict(
        vocab_size=127, d_model=48, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=70, decoder_ffn_dim=70, max_source_positions=15,
        max_target_positions=64, classifier_proj_size=30, dropout=0.0, decoder_start_token_id=3, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, begin_suppress_tokens=None, use_cache=False,
    ),
    "vit": {**_VIT, "encoder_stride": 4},
    "beit": {
        **_VIT, "vocab_size": 127, "use_relative_position_bias": True, "drop_path_rate": 0.0,
        "pool_scales": [1, 2], "auxiliary_channels": 30,
    },
    "swin": _SWIN,
    "swinv2": {**_SWIN, "pretrained_window_sizes": [0, 0]},
    "sam": dict(
        vision_config=dict(
            hidden_size=48, num_hidden_layers=2, num_attention_heads=6, mlp_dim=70, output_channels=48,
            num_pos_feats=24, window_size=3, global_attn_indexes=[1], initializer_range=_WIDE, **_IMAGE_SIZES,
        ),
        prompt_encoder_config=dict(hidden_size=48, mask_input_channels=12, **_IMAGE_SIZES),
        mask_decoder_config=dict(hidden_size=48, num_attention_heads=6, mlp_dim=70, iou_head_hidden_dim=30),
        initializer_range=_WIDE,
    ),
    "blip-2": dict(
        vision_config={**_VIT, "initializer_range": 0.02},
        qformer_config=dict(QFORMER),
        text_config={**_OPT, "model_type": "opt"},
        num_query_tokens=5, image_text_hidden_size=30, image_token_index=4,
    ),
}  # fmt: skip


def _add_suffixes(prefix: str, *suffixes: str) -> tuple[str, ...]:
    return tuple(prefix + suffix for suffix in suffixes)


_CLASSIFY, _TAG, _ANSWER = "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"
_IMAGES = ("Model", "ForImageClassification", "ForMaskedImageModeling")

HEAD_CLASSES: dict[str, tuple[str, ...]] = {
    "bert": _add_suffixes(
        "Bert", "Model", "ForPreTraining", "LMHeadModel", "ForMaskedLM", "ForNextSentencePrediction", _CLASSIFY,
        "ForMultipleChoice", _TAG, _ANSWER,
    ),
    "gpt2": _add_suffixes("GPT2", "Model", "LMHeadModel", "DoubleHeadsModel", _CLASSIFY, _TAG, _ANSWER),
    "llama": _add_suffixes("Llama", "Model", "ForCausalLM", _CLASSIFY, _ANSWER, _TAG),
    "t5": _add_suffixes("T5", "Model", "ForConditionalGeneration", "EncoderModel", _CLASSIFY, _TAG, _ANSWER),
    "opt": _add_suffixes("OPT", "Model", "ForCausalLM", _CLASSIFY, _ANSWER),
    "bloom": _add_suffixes("Bloom", "Model", "ForCausalLM", _CLASSIFY, _TAG, _ANSWER),
    "falcon": _add_suffixes("Falcon", "Model", "ForCausalLM", _CLASSIFY, _TAG, _ANSWER),
    "gpt_neo": _add_suffixes("GPTNeo", "Model", "ForCausalLM", _CLASSIFY, _TAG, _ANSWER),
    "gptj": _add_suffixes("GPTJ", "Model", "ForCausalLM", _CLASSIFY, _ANSWER),
    "qwen2": _add_suffixes("Qwen2", "Model", "ForCausalLM", _CLASSIFY, _TAG, _ANSWER),
    "qwen3": _add_suffixes("Qwen3", "Model", "ForCausalLM", _CLASSIFY, _TAG, _ANSWER),
    "mistral": _add_suffixes("Mistral", "Model", "ForCausalLM", _CLASSIFY, _TAG, _ANSWER),
    "roberta": _add_suffixes(
        "Roberta", "Model", "ForCausalLM", "ForMaskedLM", _CLASSIFY, "ForMultipleChoice", _TAG, _ANSWER
    ),
    "albert": _add_suffixes(
        "Albert", "Model", "ForPreTraining", "ForMaskedLM", _CLASSIFY, _TAG, _ANSWER, "ForMultipleChoice"
    ),
    "ernie": _add_suffixes(
        "Ernie", "Model", "ForPreTraining", "ForCausalLM", "ForMaskedLM", "ForNextSentencePrediction", _CLASSIFY,
        "ForMultipleChoice", _TAG, _ANSWER,
    ),
    "whisper": _add_suffixes("Whisper", "Model", "ForConditionalGeneration", "ForCausalLM", "ForAudioClassification"),
    "vit": _add_suffixes("ViT", *_IMAGES),
    "beit": _add_suffixes("Beit", *_IMAGES, "ForSemanticSegmentation", "Backbone"),
    "swin": _add_suffixes("Swin", *_IMAGES, "Backbone"),
    "swinv2": _add_suffixes("Swinv2", *_IMAGES, "Backbone"),
    "sam": _add_suffixes("Sam", "Model", "VisionModel"),
    "blip-2": _add_suffixes(
        "Blip2", "Model", "ForConditionalGeneration", "ForImageTextRetrieval", "VisionModel", "QFormerModel",
        "TextModelWithProjection", "VisionModelWithProjection",
    ),
}  # fmt: skip

DEFAULT_HEAD: dict[str, str] = {
    "bert": "BertForMaskedLM", "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM",
    "t5": "T5ForConditionalGeneration", "opt": "OPTForCausalLM", "bloom": "BloomForCausalLM",
    "falcon": "FalconForCausalLM", "gpt_neo": "GPTNeoForCausalLM", "gptj": "GPTJForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM",
    "roberta": "RobertaForMaskedLM", "albert": "AlbertForMaskedLM", "ernie": "ErnieForMaskedLM",
    "whisper": "WhisperForConditionalGeneration", "vit": "ViTForImageClassification",
    "beit": "BeitForImageClassification", "swin": "SwinForImageClassification",
    "swinv2": "Swinv2ForImageClassification", "sam": "SamModel", "blip-2": "Blip2ForConditionalGeneration",
}  # fmt: skip
"""The main head class of each family."""

LANGUAGE_MODEL: Mapping[str, str] = MappingProxyType(
    {family: DEFAULT_HEAD[family] for family in ("bert", "gpt2", "llama", "t5")}
)
"""One family of each kind: an encoder, two decoders, an encoder-decoder."""

FAMILY_OF: dict[str, str] = {head: family for family, heads in HEAD_CLASSES.items() for head in heads}

_DECODER: dict[str, Any] = {"is_decoder": True}
_WITH_TEXT: dict[str, Any] = {"qformer_config": {**QFORMER, "use_qformer_text_input": True}}
HEAD_CONFIG: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "BertLMHeadModel": _DECODER,
        "RobertaForCausalLM": _DECODER,
        "AlbertForPreTraining": {"num_labels": 2},  # sentence order
        "ErnieForCausalLM": _DECODER,
        "BeitForMaskedImageModeling": {"use_mask_token": True},
        # it reads the inputs of the listed layers, so the output of the last layer is unused
        "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
        "BeitBackbone": {"out_indices": [0, 1, 2]},
        "SwinBackbone": {"out_indices": [1, 2]},
        "Swinv2Backbone": {"out_indices": [1, 2]},
        "Blip2ForImageTextRetrieval": _WITH_TEXT,
        "Blip2QFormerModel": _WITH_TEXT,
        "Blip2TextModelWithProjection": _WITH_TEXT,
    }
)
"""Additional fields of the config that a head needs."""

SUBMODEL_FIELDS: Mapping[str, str] = MappingProxyType(
    {"SamVisionModel": "vision_config", "Blip2VisionModel": "vision_config", "Blip2QFormerModel": "qformer_config"}
)
"""Field of the family's config that contains the config of a head class that is a submodel."""

_VISION_FAMILIES = ("vit", "beit", "swin", "swinv2", "sam")


def is_vision_only(head_class: str) -> bool:
    """Return whether a head class takes images but no text."""
    return FAMILY_OF.get(head_class) in _VISION_FAMILIES or head_class == "Blip2VisionModel"


def get_head_config_fields(
    head_class: str, config_overrides: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the config fields of the small model for a head class, updated with ``config_overrides``."""
    family = SMALL_CONFIGS[FAMILY_OF[head_class]]
    settings = {**family, **HEAD_CONFIG.get(head_class, {})}
    return {
        **(settings[SUBMODEL_FIELDS[head_class]] if head_class in SUBMODEL_FIELDS else settings),
        **config_overrides,
    }


# B batch, C channels, P patches, Q point groups, K points, S sequence, H hidden

IGNORED = 255


def make_image_batch(
    head_class: str, generator: Generator, config_fields: Mapping[str, Any], batch_size: int, num_labels: int
) -> dict[str, Tensor]:
    """Return a batch of random images, with the labels that the head class requires."""
    images_BCss = make_random_images(generator, config_fields, batch_size)
    if head_class.endswith("ForImageClassification"):
        labels_B = torch.randint(num_labels, (batch_size,), generator=generator)
        return {"pixel_values": images_BCss, "labels": labels_B}
    if head_class.endswith("ForSemanticSegmentation"):
        size = config_fields["image_size"]
        labels_Bss = torch.randint(num_labels, (batch_size, size, size), generator=generator)
        labels_Bss[:, :3] = config_fields.get("semantic_loss_ignore_index", IGNORED)
        return {"pixel_values": images_BCss, "labels": labels_Bss}
    if head_class.endswith("ForMaskedImageModeling"):
        return {
            "pixel_values": images_BCss,
            **_make_masked_image_modeling_inputs(head_class, generator, config_fields, batch_size),
        }
    return {"pixel_values": images_BCss}


def make_random_images(generator: Generator, config_fields: Mapping[str, Any], batch_size: int) -> Tensor:
    size = config_fields["image_size"]
    return torch.randn(batch_size, config_fields.get("num_channels", 3), size, size, generator=generator)


def _make_masked_image_modeling_inputs(
    head_class: str, generator: Generator, config_fields: Mapping[str, Any], batch_size: int
) -> dict[str, Tensor]:
    num_patches = (config_fields["image_size"] // config_fields["patch_size"]) ** 2
    order_BP = torch.rand(batch_size, num_patches, generator=generator).argsort(dim=1)
    if head_class != "BeitForMaskedImageModeling":
        return {"bool_masked_pos": order_BP < num_patches // 3}
    # BEiT's labels are those of all masked patches in a row: one masked patch per image gives one label per row
    labels_B = torch.randint(config_fields["vocab_size"], (batch_size,), generator=generator)
    return {"bool_masked_pos": order_BP == 0, "labels": labels_B}


def make_sam_batch(generator: Generator, config_fields: Mapping[str, Any], batch_size: int) -> dict[str, Tensor]:
    """Return a random batch for the Segment Anything Model (SAM), with two prompts per image."""
    vision = config_fields["vision_config"]
    size, grid = vision["image_size"], vision["image_size"] // vision["patch_size"]
    kinds_BQK = torch.tensor([1, 0, -1, -10]).expand(batch_size, 2, 4).clone()
    return {
        "pixel_values": make_random_images(generator, vision, batch_size),
        "input_points": size * torch.rand(batch_size, 2, 4, 2, generator=generator),
        "input_labels": kinds_BQK,
        "input_boxes": size * torch.rand(batch_size, 2, 4, generator=generator),
        "input_masks": torch.randn(batch_size, 1, 4 * grid, 4 * grid, generator=generator),
    }


def make_blip2_batch(
    head_class: str, generator: Generator, config_fields: Mapping[str, Any], text_batch: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a random batch for a BLIP-2 head class, with images and text, or with the inputs of a submodel."""
    if head_class == "Blip2TextModelWithProjection":
        return dict(text_batch)
    ids_BS, mask_BS = text_batch["input_ids"], text_batch["attention_mask"]
    batch = len(ids_BS)
    if head_class == "Blip2QFormerModel":
        states = torch.randn(batch, 17, config_fields["encoder_hidden_size"], generator=generator)
        queries = torch.randn(batch, ids_BS.shape[1], config_fields["hidden_size"], generator=generator)
        # transformers accepts no padding here with a text, which does not attend to these states
        mask = torch.ones(batch, 17, dtype=torch.long)
        return {
            "query_embeds": queries, "attention_mask": mask_BS, "encoder_hidden_states": states,
            "encoder_attention_mask": mask, "query_length": torch.tensor(5),
        }  # fmt: skip
    images = make_random_images(generator, config_fields["vision_config"], batch)
    if head_class.startswith("Blip2Vision"):
        return {"pixel_values": images}
    image_tokens = torch.full((batch, config_fields["num_query_tokens"]), config_fields["image_token_index"])
    out = {
        "pixel_values": images,
        "input_ids": torch.cat([image_tokens, ids_BS], dim=1),
        "attention_mask": torch.cat([torch.ones_like(image_tokens), mask_BS], dim=1),
    }
    if head_class == "Blip2ForImageTextRetrieval":
        # the contrastive head compares each image with each text of the batch, so its loss is no mean over samples
        return {**out, "use_image_text_matching_head": torch.tensor(True)}
    labels_BS = ids_BS.roll(1, dims=0)
    labels_BS[:, :3] = -100
    return {**out, "labels": torch.cat([torch.full_like(image_tokens, -100), labels_BS], dim=1)}


# B batch, M mel bins, F frames, T target tokens, H hidden


def make_audio_batch(
    head_class: str,
    generator: Generator,
    config_fields: Mapping[str, Any],
    text_batch: Mapping[str, Tensor],
    num_labels: int,
) -> dict[str, Tensor]:
    """Return a random batch for a Whisper head class, with spectrograms, and with text or class labels."""
    ids_BT, mask_BT = text_batch["input_ids"], text_batch["attention_mask"]
    batch, frames = len(ids_BT), 2 * config_fields["max_source_positions"]
    labels_BT = ids_BT.roll(-1, dims=1)
    labels_BT[:, :3] = -100
    if head_class == "WhisperForCausalLM":
        encoded_BFH = torch.randn(batch, 7, config_fields["d_model"], generator=generator)
        return {**text_batch, "encoder_outputs": encoded_BFH, "labels": labels_BT}
    sounds = {"input_features": torch.randn(batch, config_fields["num_mel_bins"], frames, generator=generator)}
    if head_class == "WhisperForAudioClassification":
        return {**sounds, "labels": torch.randint(num_labels, (batch,), generator=generator)}
    if head_class == "WhisperModel":
        return {**sounds, "decoder_input_ids": ids_BT, "decoder_attention_mask": mask_BT}
    return {**sounds, "decoder_attention_mask": mask_BT, "labels": labels_BT}


FIRST_TOKEN = 5  # smaller token ids are reserved for padding, start, end and image tokens


@dataclass(frozen=True)
class RandomBatchFactory:
    """Picklable function that returns a random batch for each step, with padding and ignored labels.

    Every row has the same number of labels, so the loss of a batch is the mean of the losses of its shards.

    Args:
        head: a class of transformers. Classes outside ``HEAD_CLASSES`` receive token ids.
        vocab_size, num_labels, eos_token_id: fields of the model's config.
        batch_size, sequence_length: rows, and tokens per row.
        changes: fields of the head's config that differ from the small model, such as the size of images.
    """

    head: str
    vocab_size: int = 127
    batch_size: int = 4
    sequence_length: int = 13
    num_labels: int = 3
    eos_token_id: int = 2
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        family = FAMILY_OF.get(self.head, "")
        if self.head == "SamModel":
            return make_sam_batch(generator, self._config_fields, self.batch_size)
        if is_vision_only(self.head):
            return make_image_batch(self.head, generator, self._config_fields, self.batch_size, self.num_labels)
        ids = self._make_random_token_ids(generator, self.batch_size, self.sequence_length)
        mask = torch.ones_like(ids)
        mask[:, -2:] = 0
        if "T5" in self.head:
            ids[:, -3] = self.eos_token_id
        batch = {"input_ids": ids, "attention_mask": mask}
        if family == "whisper":
            return make_audio_batch(self.head, generator, self._config_fields, batch, self.num_labels)
        if family == "blip-2":
            return make_blip2_batch(self.head, generator, self._config_fields, batch)
        return {**batch, **self._make_labels_and_other_head_inputs(generator, ids)}

    @property
    def _config_fields(self) -> dict[str, Any]:
        return get_head_config_fields(self.head, self.changes)

    def _make_random_token_ids(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randint(FIRST_TOKEN, self.vocab_size, shape, generator=generator)

    def _make_labels_and_other_head_inputs(self, generator: torch.Generator, input_ids: Tensor) -> dict[str, Tensor]:
        classes = torch.randint(self.num_labels, (self.batch_size,), generator=generator)
        per_token = self._make_random_token_ids(generator, self.batch_size, self.sequence_length)
        per_token[:, :3] = -100
        starts = torch.randint(self.sequence_length - 2, (self.batch_size,), generator=generator)
        head = self.head
        if head == "AlbertForPreTraining":
            return {"labels": per_token, "sentence_order_label": classes % 2}
        if head.endswith("ForPreTraining"):
            return {"labels": per_token, "next_sentence_label": classes % 2}
        if head.endswith("ForNextSentencePrediction"):
            return {"labels": classes % 2}
        if head.endswith("ForSequenceClassification"):
            return {"labels": classes}
        if head.endswith("ForTokenClassification"):
            return {"labels": torch.where(per_token == -100, -100, per_token % self.num_labels)}
        if head.endswith("ForQuestionAnswering"):
            return {"start_positions": starts, "end_positions": (starts + 1).clamp(max=self.sequence_length - 1)}
        if head.endswith(("ForMultipleChoice", "DoubleHeadsModel")):
            return self._make_multiple_choice_batch(generator, classes % 2)
        if head == "T5Model":
            return {
                "decoder_input_ids": self._make_random_token_ids(generator, self.batch_size, self.sequence_length - 4)
            }
        if head == "T5ForConditionalGeneration":
            return {"labels": per_token[:, : self.sequence_length - 4].contiguous()}
        return {} if head.endswith(("Model", "EncoderModel")) and "LMHead" not in head else {"labels": per_token}

    def _make_multiple_choice_batch(self, generator: torch.Generator, correct_choices: Tensor) -> dict[str, Tensor]:
        ids = self._make_random_token_ids(generator, self.batch_size, 2, self.sequence_length)
        if self.head.endswith("ForMultipleChoice"):
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": correct_choices}
        labels = ids.clone()
        labels[..., :3] = -100
        ends = torch.full((self.batch_size, 2), self.sequence_length - 1)
        return {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "mc_token_ids": ends,
            "mc_labels": correct_choices,
        }  # fmt: skip


def compute_model_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the loss of a model, or the mean squared error of its outputs if it returns no loss.

    The target is a cosine, the same in every row, so the loss of a batch is the mean of the losses of its shards. It is
    not constant, because the distance of a normalized output from a constant has no gradient.

    Raises:
        ConfigError: the model returns neither a loss nor named tensors.
    """
    output = model(**batch)
    losses = [x for x in (getattr(output, "loss", None), getattr(output, "mc_loss", None)) if x is not None]
    outputs = _iter_float_tensors_in_output(output) if isinstance(output, Mapping) else iter(())
    distances = losses or [_compute_mse_to_cosine(x) for x in _remove_duplicate_tensors(outputs)]
    if not distances:
        raise ConfigError(
            f"{type(model).__name__} returned no loss: its output of type {type(output).__name__} has no field 'loss'.",
            remedy="Pass a function loss_fn(output, batch) that computes the loss.",
        )
    return torch.stack([x.double() for x in distances]).sum()


def is_loss_averaged_over_samples(head_class: str) -> bool:
    """Return whether a head class averages its loss over the samples instead of the labels.

    The losses of micro-batches must then be weighted by ``count_samples``.
    """
    if head_class.endswith(("LMHeadModel", "DoubleHeadsModel")) or head_class in (
        "BeitForMaskedImageModeling",
        "Blip2Model",
    ):
        return False
    return head_class.endswith(("Model", "Backbone", "WithProjection", "TextRetrieval", "MaskedImageModeling"))


def count_samples(batch: Mapping[str, Any]) -> float:
    """Return the number of samples in a batch, by which its mean loss is weighted."""
    return float(next(v.shape[0] for v in batch.values() if isinstance(v, Tensor) and v.dim() > 0))


def _iter_float_tensors_in_output(output: Any) -> Iterator[Tensor]:
    """Yield all floating-point tensors in a nested model output, except key-value caches."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _iter_float_tensors_in_output(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _iter_float_tensors_in_output(value)


def _remove_duplicate_tensors(tensors: Iterator[Tensor]) -> list[Tensor]:
    """Remove tensors that share memory with an earlier tensor, such as the transpose of the logits."""
    found: dict[tuple[int, int], Tensor] = {}
    for tensor in tensors:
        place = tensor.data_ptr() if has_real_data(tensor) else get_storage_id(tensor)
        found.setdefault((place, tensor.numel()), tensor)
    return list(found.values())


def _compute_mse_to_cosine(output: Tensor) -> Tensor:
    row = output.shape[1:]
    wave = torch.arange(row.numel(), dtype=torch.float64, device=output.device).cos().view(row)
    return (output.double() - wave).square().mean()


_DEPTH_FIELD = {"gpt2": "n_layer", "bloom": "n_layer", "gptj": "n_layer"}
"""The field with the number of layers, if it is not ``num_hidden_layers``."""
_SUBMODEL_CONFIGS = ("vision_config", "qformer_config", "text_config")
_TWO_STACKS = (
    "T5Model", "T5ForConditionalGeneration", "T5ForSequenceClassification", "T5ForQuestionAnswering", "WhisperModel",
    "WhisperForConditionalGeneration", "Blip2ForImageTextRetrieval", "Blip2VisionModelWithProjection",
)  # fmt: skip
STACKS: Mapping[str, int] = MappingProxyType(
    {**dict.fromkeys(_TWO_STACKS, 2), "Blip2Model": 3, "Blip2ForConditionalGeneration": 3}
)
"""Number of layer stacks in a head, if it is not one."""


def round_up_to_supported_num_layers(family: str, head_class: str, num_layers: int) -> int:
    """Round a number of layers up to a number that the small model of a family supports."""
    stacks = STACKS.get(head_class, 1)
    least = {"swin": 3, "swinv2": 3}.get(family, 4 if head_class == "BeitForSemanticSegmentation" else 2)
    each = max(least, -(-num_layers // stacks))
    return stacks * (each + each % 2 if family == "gpt_neo" else each)


def get_num_layers_config_fields(family: str, head_class: str, min_layers: int) -> dict[str, Any]:
    """Return the config fields for a small model with at least ``min_layers`` layers in total."""
    each = round_up_to_supported_num_layers(family, head_class, min_layers) // STACKS.get(head_class, 1)
    if family in ("sam", "blip-2"):
        settings = {**SMALL_CONFIGS[family], **HEAD_CONFIG.get(head_class, {})}
        return {part: {**settings[part], "num_hidden_layers": each} for part in _SUBMODEL_CONFIGS if part in settings}
    if family == "t5":
        return {"num_layers": each, "num_decoder_layers": each}
    if family == "whisper":
        return {"encoder_layers": each, "decoder_layers": each}
    if family == "gpt_neo":
        return {"num_layers": each, "attention_types": [[["global", "local"], each // 2]]}
    if family in ("swin", "swinv2"):
        return {"depths": [2, each - 2]}
    return {_DEPTH_FIELD.get(family, "num_hidden_layers"): each}


LIBRARIES: dict[str, str] = {}
"""Family -> the module with its classes and ``config(changes)``, for families that transformers does not have."""


def register_small_model_family(
    family: str, module_name: str, head_classes: tuple[str, ...], *, num_layers_field: str
) -> None:
    """Register a small model of a family outside transformers. Importing ``module_name`` must call this function.

    Args:
        family: the ``model_type`` of its config.
        module_name: the module that defines ``config(changes)`` and the classes in ``head_classes``.
        head_classes: the head classes, the main one first.
        num_layers_field: the field of the config with the number of layers.
    """
    SMALL_CONFIGS[family], HEAD_CLASSES[family], DEFAULT_HEAD[family], LIBRARIES[family] = (
        {},
        head_classes,
        head_classes[0],
        module_name,
    )
    _DEPTH_FIELD[family] = num_layers_field
    FAMILY_OF.update(dict.fromkeys(head_classes, family))


@dataclass(frozen=True)
class SmallModelFactory:
    """Picklable function that builds a small model of a family with random weights.

    Args:
        family: one of ``SMALL_CONFIGS``.
        head: a class of transformers. Empty: the main head of the family.
        changes: fields of the family's config that differ from ``SMALL_CONFIGS``.
    """

    family: str
    head: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    library: str = field(init=False, default="transformers")

    def __post_init__(self) -> None:
        check_choice("SmallModelFactory.family", self.family, SMALL_CONFIGS)
        object.__setattr__(self, "library", LIBRARIES.get(self.family, self.library))

    @property
    def head_class(self) -> str:
        return self.head or DEFAULT_HEAD[self.family]

    def with_min_layers(self, min_layers: int) -> SmallModelFactory:
        """Return a copy of this factory that builds a model with at least ``min_layers`` layers."""
        return replace(
            self, changes={**self.changes, **get_num_layers_config_fields(self.family, self.head_class, min_layers)}
        )

    def get_config(self) -> Any:
        """Return the transformers config for the head class. For a submodel, return the submodel's own config."""
        if self.library != "transformers":
            return import_module(self.library).config(self.changes)
        transformers = import_transformers()
        head = self.head_class
        num_labels = 2 if head.endswith("ForQuestionAnswering") else 3
        settings = {**SMALL_CONFIGS[self.family], "num_labels": num_labels, **HEAD_CONFIG.get(head, {}), **self.changes}
        config = transformers.AutoConfig.for_model(self.family, **settings)
        return getattr(config, SUBMODEL_FIELDS[head]) if head in SUBMODEL_FIELDS else config

    def __call__(self) -> nn.Module:
        with _IMPORT_LOCK:
            config, kind = self.get_config(), getattr(import_module(self.library), self.head_class)
        model: nn.Module = kind(config)
        _randomize_zero_parameters(model)
        return model


_IMPORT_LOCK = threading.Lock()  # serializes transformers' lazy imports when ranks are threads


@torch.no_grad()
def _randomize_zero_parameters(model: nn.Module) -> None:
    """Fill zero-initialized parameters with small random values, because zeros would hide errors."""
    for param in model.parameters():
        if param.dim() > 1 and has_real_data(param) and not param.any():
            param.normal_(std=0.02)
