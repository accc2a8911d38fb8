"""Sharding policies for ViT and BEiT."""

from __future__ import annotations

from shardformer.pipeline.layer_sequence import PipelineHints
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Q_K_V_O, Attention, LayerStack


class ViTPolicy(RolePolicy):
    """Policy for ViT, a pre-norm image encoder with learned positions."""

    stack = LayerStack(
        "layers", [Attention("attention", Q_K_V_O), MLP("mlp", up="fc1", down="fc2")], final_norm="layernorm"
    )
    keep_replicated = ("embeddings", "pooler?")


class BeitPolicy(RolePolicy):
    """Policy for BEiT, a pre-norm image encoder with relative position biases for each head."""

    stack = LayerStack(
        "layers",
        [
            Attention(
                "attention",
                Q_K_V_O,
                local_attrs={
                    ".relative_position_bias.relative_position_bias_table?": "heads",
                    "attention_mask": ("heads", 1),
                },
            ),
            MLP("mlp", up="fc1", down="fc2"),
        ],
        final_norm="layernorm?",
        stages=PipelineHints(on_every_stage=["shared_position_bias?", "relative_position_bias?"]),
    )
    head = "lm_head"
    keep_replicated = ("embeddings", "pooler?", "relative_position_bias?", ".decode_head", ".auxiliary_head", ".fpn")

    def reads_layer_outputs(self) -> bool:
        return hasattr(self.model, "decode_head")
