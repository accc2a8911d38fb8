"""How the small models are made deeper: which field of a family's config says how many layers it has."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shardformer.testing.zoo.heads import NEEDS
from shardformer.testing.zoo.settings import SMALL

_FIELD = MappingProxyType({"gpt2": "n_layer", "bloom": "n_layer", "gptj": "n_layer", "chatglm": "num_layers"})
"""Where it is not ``num_hidden_layers``."""
_PARTS = ("vision_config", "qformer_config", "text_config")
STACKS: Mapping[str, int] = MappingProxyType(
    {
        "T5Model": 2,
        "T5ForConditionalGeneration": 2,
        "T5ForSequenceClassification": 2,
        "T5ForQuestionAnswering": 2,
        "WhisperModel": 2,
        "WhisperForConditionalGeneration": 2,
        "Blip2Model": 3,
        "Blip2ForConditionalGeneration": 3,
        "Blip2ForImageTextRetrieval": 2,
        "Blip2VisionModelWithProjection": 2,
    }
)
"""How many stacks of layers a head runs through, where that is not one."""


def depth_of(family: str, head: str, layers: int) -> int:
    """``layers``, or a few more: where each of its stacks gets as many, or its layers come in pairs; never fewer than
    the small model has."""
    stacks = STACKS.get(head, 1)
    least = {"swin": 3, "swinv2": 3}.get(family, 4 if head == "BeitForSemanticSegmentation" else 2)
    each = max(least, -(-layers // stacks))
    return stacks * (each + each % 2 if family == "gpt_neo" else each)


def deepened(family: str, head: str, layers: int) -> dict[str, Any]:
    """The fields of the family's config with which a head has ``depth_of(family, head, layers)`` layers in all."""
    each = depth_of(family, head, layers) // STACKS.get(head, 1)
    if family in ("sam", "blip-2"):
        settings = {**SMALL[family], **NEEDS.get(head, {})}
        return {part: {**settings[part], "num_hidden_layers": each} for part in _PARTS if part in settings}
    if family == "t5":
        return {"num_layers": each, "num_decoder_layers": each}
    if family == "whisper":
        return {"encoder_layers": each, "decoder_layers": each}
    if family == "gpt_neo":
        return {"num_layers": each, "attention_types": [[["global", "local"], each // 2]]}
    if family in ("swin", "swinv2"):
        return {"depths": [2, each - 2]}
    return {_FIELD.get(family, "num_hidden_layers"): each}
