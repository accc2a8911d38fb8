"""Small models of timm's own classes, with odd sizes: 17 tokens, five or six heads, stages of 3 and 6."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.timm.process import timm

CLASSES = 10
SIX = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 6, "num_classes": CLASSES}
FIVE = {**SIX, "embed_dim": 40, "num_heads": 5}
STAGES = {
    "img_size": 32,
    "patch_size": 2,
    "embed_dim": 24,
    "depths": (2, 2),
    "num_heads": (3, 6),
    "window_size": 4,
    "num_classes": CLASSES,
    "drop_path_rate": 0.0,
}
ROPE = {"use_rot_pos_emb": True, "ref_feat_shape": (4, 4)}
EVA02 = {**SIX, **ROPE, "mlp_ratio": 4 * 2 / 3, "swiglu_mlp": True}

# name: (module of timm.models, class, arguments)
MODELS: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "vit": ("vision_transformer", "VisionTransformer", SIX),
    "vit with all between": (
        "vision_transformer",
        "VisionTransformer",
        {**FIVE, "init_values": 0.1, "qk_norm": True, "class_token": False, "reg_tokens": 1, "global_pool": "avg"},
    ),
    "vit with norms inside": (
        "vision_transformer",
        "VisionTransformer",
        {**SIX, "scale_attn_norm": True, "scale_mlp_norm": True},
    ),
    "vit pooled by attention": ("vision_transformer", "VisionTransformer", {**SIX, "global_pool": "map"}),
    "deit distilled": ("deit", "VisionTransformerDistilled", FIVE),
    "beit": ("beit", "Beit", {**SIX, "use_rel_pos_bias": True, "init_values": 0.1, "use_abs_pos_emb": False}),
    "beit with one bias for all": ("beit", "Beit", {**FIVE, "use_shared_rel_pos_bias": True, "swiglu_mlp": True}),
    "eva02": ("eva", "Eva", EVA02),
    "eva02 with a norm in the mlp": ("eva", "Eva", {**EVA02, "qkv_fused": False, "scale_mlp": True}),
    "eva02 with norms in both": ("eva", "Eva", {**EVA02, "scale_mlp": True, "scale_attn_inner": True}),
    "eva post-norm": ("eva", "Eva", {**FIVE, "use_post_norm": True}),
    "eva with shared kv heads": (
        "eva",
        "Eva",
        {**SIX, **ROPE, "attn_type": "rope", "num_kv_heads": 2, "qkv_fused": False},
    ),
    "eva with mixed rope": ("eva", "Eva", {**FIVE, **ROPE, "attn_type": "rope", "rope_type": "mixed"}),
    "swin": ("swin_transformer", "SwinTransformer", STAGES),
    "swin v2": ("swin_transformer_v2", "SwinTransformerV2", STAGES),
}
STAGED = ["swin", "swin v2"]


@dataclass(frozen=True)
class Small:
    """Build a model with random biases and norm weights, so that an error in them changes the result."""

    name: str
    changes: Mapping[str, Any] | None = None

    def __call__(self) -> nn.Module:
        module, cls, arguments = MODELS[self.name]
        model: nn.Module = getattr(timm(f"models.{module}"), cls)(**{**arguments, **(self.changes or {})})
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() < 3:
                    parameter.add_(torch.randn_like(parameter) / 8)
        return model


def images(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(4, 3, 32, 32, generator=generator),
        "labels": torch.randint(CLASSES, (4,), generator=generator),
    }


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])
