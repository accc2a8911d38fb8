"""Sharding policies for BLIP-2: the image encoder, the Q-Former, and the full model with its language model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardformer.pipeline.layer_sequence import LayerSequence, PipelineHints
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionInputs, AttentionProjections, LayerStack, Role

VISION: list[Role] = [
    Attention(
        "self_attn",
        AttentionProjections(qkv="qkv", out="projection"),
        local_attrs={"num_heads": "heads"},
        inputs=AttentionInputs(reads_width=True),
        num_heads=".num_heads",
    ),
    MLP("mlp", up="fc1", down="fc2"),
]


def _make_attention_role(at: str, **kwargs: Any) -> Attention:
    return Attention(
        f"{at}.attention",
        AttentionProjections(q="query", k="key", v="value", out=f".{at}.output.dense"),
        local_attrs={"num_attention_heads": "heads", "all_head_size": "width"},
        **kwargs,
    )


QFORMER: list[Role] = [
    _make_attention_role("attention"),
    _make_attention_role("crossattention", inputs=AttentionInputs(arguments=["encoder_hidden_states"]), optional=True),
    MLP("intermediate_query", up="dense", down=".output_query.dense"),
    MLP("intermediate", up="dense", down=".output.dense", optional=True),
]
QUERY_TOKENS = PipelineHints(with_first_layer=["query_tokens"])
NO_SEQUENCE_PARALLEL = "the Q-Former sends its queries and its text through different layers"


class Blip2VisionPolicy(RolePolicy):
    stack = LayerStack("encoder.layers", VISION)
    keep_replicated = ("embeddings",)
    num_heads = ".num_heads"


class Blip2QFormerPolicy(RolePolicy):
    stack = LayerStack("encoder.layer", QFORMER, no_sequence_parallel=NO_SEQUENCE_PARALLEL)
    num_heads = ".num_attention_heads"


class Blip2Policy(RolePolicy):
    stack = (
        LayerStack("vision_model.encoder.layers", VISION, optional=True),
        LayerStack(
            "qformer.encoder.layer",
            QFORMER,
            no_sequence_parallel=NO_SEQUENCE_PARALLEL,
            optional=True,
            stages=QUERY_TOKENS,
        ),
    )
    submodels = ("language_model?",)
    embeddings = "embeddings.word_embeddings?"
    keep_replicated = (
        "vision_model.embeddings?", "query_tokens?", "language_projection?", "embeddings?", "itm_head?",
        "vision_projection?", "text_projection?",
    )  # fmt: skip
    num_heads = ".num_attention_heads"

    def layer_sequence(self) -> LayerSequence:
        """Return the layers of the image encoder, the Q-Former and the language model, in execution order."""
        entries = {
            "qformer.encoder.layer": ("qformer", "encoder_hidden_states"),
            "language_model": ("language_projection", "input"),
        }
        found, entered = list(super().layer_sequence().stacks), set()
        for at, stack in enumerate(found):
            entry = next((d for d in entries if f"{stack.layers}.".startswith(f"{d}.")), None)
            if at and entry is not None and entry not in entered:
                entered.add(entry)
                found[at] = replace(stack, context=entries[entry])
        return LayerSequence(tuple(found))
