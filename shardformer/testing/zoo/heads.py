"""The head classes of the families: all that transformers has, and what a head asks of the config."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shardformer.testing.zoo.settings import QFORMER, SMALL


def _classes(prefix: str, *suffixes: str) -> tuple[str, ...]:
    return tuple(prefix + suffix for suffix in suffixes)


_CLASSIFY, _TAG, _ANSWER = "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"
_IMAGES = ("Model", "ForImageClassification", "ForMaskedImageModeling")

HEADS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bert": _classes(
            "Bert", "Model", "ForPreTraining", "LMHeadModel", "ForMaskedLM", "ForNextSentencePrediction", _CLASSIFY,
            "ForMultipleChoice", _TAG, _ANSWER,
        ),
        "gpt2": _classes("GPT2", "Model", "LMHeadModel", "DoubleHeadsModel", _CLASSIFY, _TAG, _ANSWER),
        "llama": _classes("Llama", "Model", "ForCausalLM", _CLASSIFY, _ANSWER, _TAG),
        "t5": _classes("T5", "Model", "ForConditionalGeneration", "EncoderModel", _CLASSIFY, _TAG, _ANSWER),
        "opt": _classes("OPT", "Model", "ForCausalLM", _CLASSIFY, _ANSWER),
        "chatglm": _classes("ChatGLM", "ForConditionalGeneration", _CLASSIFY),
        "bloom": _classes("Bloom", "Model", "ForCausalLM", _CLASSIFY, _TAG, _ANSWER),
        "falcon": _classes("Falcon", "Model", "ForCausalLM", _CLASSIFY, _TAG, _ANSWER),
        "gpt_neo": _classes("GPTNeo", "Model", "ForCausalLM", _CLASSIFY, _TAG, _ANSWER),
        "gptj": _classes("GPTJ", "Model", "ForCausalLM", _CLASSIFY, _ANSWER),
        "qwen2": _classes("Qwen2", "Model", "ForCausalLM", _CLASSIFY, _TAG, _ANSWER),
        "qwen3": _classes("Qwen3", "Model", "ForCausalLM", _CLASSIFY, _TAG, _ANSWER),
        "mistral": _classes("Mistral", "Model", "ForCausalLM", _CLASSIFY, _TAG, _ANSWER),
        "roberta": _classes(
            "Roberta", "Model", "ForCausalLM", "ForMaskedLM", _CLASSIFY, "ForMultipleChoice", _TAG, _ANSWER
        ),
        "albert": _classes(
            "Albert", "Model", "ForPreTraining", "ForMaskedLM", _CLASSIFY, _TAG, _ANSWER, "ForMultipleChoice"
        ),
        "ernie": _classes(
            "Ernie", "Model", "ForPreTraining", "ForCausalLM", "ForMaskedLM", "ForNextSentencePrediction", _CLASSIFY,
            "ForMultipleChoice", _TAG, _ANSWER,
        ),
        "whisper": _classes("Whisper", "Model", "ForConditionalGeneration", "ForCausalLM", "ForAudioClassification"),
        "vit": _classes("ViT", *_IMAGES),
        "beit": _classes("Beit", *_IMAGES, "ForSemanticSegmentation", "Backbone"),
        "swin": _classes("Swin", *_IMAGES, "Backbone"),
        "swinv2": _classes("Swinv2", *_IMAGES, "Backbone"),
        "sam": _classes("Sam", "Model", "VisionModel"),
        "blip-2": _classes(
            "Blip2", "Model", "ForConditionalGeneration", "ForImageTextRetrieval", "VisionModel", "QFormerModel",
            "TextModelWithProjection", "VisionModelWithProjection",
        ),
    }
)  # fmt: skip

MAIN: Mapping[str, str] = MappingProxyType(
    {
        "bert": "BertForMaskedLM",
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "t5": "T5ForConditionalGeneration",
        "opt": "OPTForCausalLM",
        "chatglm": "ChatGLMForConditionalGeneration",
        "bloom": "BloomForCausalLM",
        "falcon": "FalconForCausalLM",
        "gpt_neo": "GPTNeoForCausalLM",
        "gptj": "GPTJForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "mistral": "MistralForCausalLM",
        "roberta": "RobertaForMaskedLM",
        "albert": "AlbertForMaskedLM",
        "ernie": "ErnieForMaskedLM",
        "whisper": "WhisperForConditionalGeneration",
        "vit": "ViTForImageClassification",
        "beit": "BeitForImageClassification",
        "swin": "SwinForImageClassification",
        "swinv2": "Swinv2ForImageClassification",
        "sam": "SamModel",
        "blip-2": "Blip2ForConditionalGeneration",
    }
)
"""The head that a family is known by."""

LANGUAGE_MODEL: Mapping[str, str] = MappingProxyType(
    {family: MAIN[family] for family in ("bert", "gpt2", "llama", "t5")}
)
"""One family of each kind: an encoder, two decoders, an encoder with a decoder."""

FAMILY_OF: Mapping[str, str] = MappingProxyType({head: family for family, heads in HEADS.items() for head in heads})

_DECODER: dict[str, Any] = {"is_decoder": True}
_WITH_TEXT: dict[str, Any] = {"qformer_config": {**QFORMER, "use_qformer_text_input": True}}
NEEDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "BertLMHeadModel": _DECODER,
        "RobertaForCausalLM": _DECODER,
        "AlbertForPreTraining": {"num_labels": 2},  # in order, or not
        "ErnieForCausalLM": _DECODER,
        "BeitForMaskedImageModeling": {"use_mask_token": True},
        # it reads what goes into the layers that it names, so of the last it reads nothing
        "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
        "BeitBackbone": {"out_indices": [0, 1, 2]},
        "SwinBackbone": {"out_indices": [1, 2]},
        "Swinv2Backbone": {"out_indices": [1, 2]},
        "Blip2ForImageTextRetrieval": _WITH_TEXT,
        "Blip2QFormerModel": _WITH_TEXT,
        "Blip2TextModelWithProjection": _WITH_TEXT,
    }
)
"""Fields of the config that a head needs and its family's small model does not have."""

PART: Mapping[str, str] = MappingProxyType(
    {
        "SamVisionModel": "vision_config",
        "Blip2VisionModel": "vision_config",
        "Blip2QFormerModel": "qformer_config",
    }
)
"""The field of the family's config that holds the whole config of a head which is only a part of the model."""

_IMAGES_ALONE = ("vit", "beit", "swin", "swinv2", "sam")


def sees_alone(head: str) -> bool:
    """Whether a head takes images and no tokens."""
    return FAMILY_OF.get(head) in _IMAGES_ALONE or head == "Blip2VisionModel"


def settings_of(head: str, changes: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """What the small model of a head says in its own config: of the part alone where the head is a part."""
    family = SMALL[FAMILY_OF[head]]
    settings = {**family, **NEEDS.get(head, {})}
    return {**(settings[PART[head]] if head in PART else settings), **changes}
