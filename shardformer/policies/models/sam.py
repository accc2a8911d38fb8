"""Sharding policies for SAM: its image encoder with windowed attention, and the full model with mask decoder."""

from __future__ import annotations

from shardformer.pipeline.layer_sequence import LayerSequence, PipelineHints
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import (
    MLP,
    Q_K_V_OUT,
    Attention,
    AttentionInputs,
    AttentionProjections,
    LayerStack,
    Role,
)


def _make_attention_role(at: str) -> Attention:
    return Attention(
        at,
        Q_K_V_OUT,
        local_attrs={"num_attention_heads": "heads"},
        inputs=AttentionInputs(arguments=["key", "value"]),
    )


LAYERS: list[Role] = [
    Attention(
        "attn",
        AttentionProjections(qkv="qkv", out="proj"),
        local_attrs={"num_attention_heads": "heads", "rel_pos_h?": "inside", "rel_pos_w?": "inside"},
    ),
    MLP("mlp", up="lin1", down="lin2"),
]


class SamVisionPolicy(RolePolicy):
    stack = LayerStack("vision_encoder.layers", LAYERS)
    keep_replicated = ("vision_encoder.patch_embed", "vision_encoder.neck", "vision_encoder.pos_embed?")
    num_heads = ".num_attention_heads"
    no_sequence_parallel = "its windows reorder the image between the blocks"


class SamPolicy(RolePolicy):
    stack = (
        LayerStack("vision_encoder.layers", LAYERS, stages=PipelineHints(with_last_layer=["shared_image_embedding"])),
        LayerStack(
            "mask_decoder.transformer.layers",
            [
                _make_attention_role("self_attn"),
                _make_attention_role("cross_attn_token_to_image"),
                MLP("mlp", up="lin1", down="lin2"),
                _make_attention_role("cross_attn_image_to_token"),
            ],
        ),
    )
    unstacked_blocks = (_make_attention_role("mask_decoder.transformer.final_attn_token_to_image"),)
    keep_replicated = (
        "vision_encoder.patch_embed", "vision_encoder.neck", "vision_encoder.pos_embed?", "shared_image_embedding",
        "prompt_encoder", "mask_decoder.iou_token", "mask_decoder.mask_tokens", "mask_decoder.upscale_conv1",
        "mask_decoder.upscale_conv2", "mask_decoder.output_hypernetworks_mlps", "mask_decoder.iou_prediction_head",
    )  # fmt: skip
    num_heads = ".num_attention_heads"
    no_sequence_parallel = SamVisionPolicy.no_sequence_parallel

    def layer_sequence(self) -> LayerSequence:
        """Return the layers of the image encoder in execution order. The layers of the mask decoder stay on one stage.

        The mask decoder passes two tensors between its layers.
        """
        return LayerSequence(super().layer_sequence().stacks[:1])
