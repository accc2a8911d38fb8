"""Sharding policy for BERT, RoBERTa and ERNIE, which are post-norm encoders or decoders."""

from __future__ import annotations

from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionInputs, AttentionProjections, LayerStack


class BertPolicy(RolePolicy):
    stack = LayerStack(
        "encoder.layer",
        [
            Attention(
                "attention.self", AttentionProjections(q="query", k="key", v="value", out=".attention.output.dense")
            ),
            Attention(
                "crossattention.self",
                AttentionProjections(q="query", k="key", v="value", out=".crossattention.output.dense"),
                inputs=AttentionInputs(cross_attention=True),
                optional=True,
            ),
            MLP("intermediate", up="dense", down=".output.dense"),
        ],
        cross_states=("encoder", "encoder_hidden_states"),
    )
    embeddings = "embeddings.word_embeddings"
    head = ("cls.predictions.decoder", "lm_head.decoder")
    keep_replicated = (
        "embeddings.position_embeddings",
        "embeddings.token_type_embeddings",
        "embeddings.task_type_embeddings?",
        "pooler?",
    )
