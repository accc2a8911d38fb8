"""Sharding policy for ALBERT, an encoder that applies the same layer repeatedly."""

from __future__ import annotations

from shardformer.pipeline.layer_sequence import LayerSequence, StackDescription
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionInputs, AttentionProjections, LayerStack


class AlbertPolicy(RolePolicy):
    attention = Attention(
        "attention",
        AttentionProjections(q="query", k="key", v="value", out="dense"),
        inputs=AttentionInputs(entry="query", full_sequence=True),
    )
    stack = LayerStack(
        "encoder.albert_layer_groups.*.albert_layers", [attention, MLP("ffn", up="", down=".ffn_output")]
    )
    embeddings = "embeddings.word_embeddings"
    head = "predictions.decoder"
    keep_replicated = (
        "embeddings.position_embeddings",
        "embeddings.token_type_embeddings",
        "encoder.embedding_hidden_mapping_in",
        "pooler?",
    )

    def layer_sequence(self) -> LayerSequence:
        """Return all layers, repeated as often as they run. The runs share weights but are separate layers."""
        config, groups = self.model.config, "encoder.albert_layer_groups"
        depth, kinds = config.num_hidden_layers, config.num_hidden_groups
        units = tuple(f"{groups}.{at * kinds // depth}" for at in range(depth))
        return LayerSequence((StackDescription(groups, layer_calls=units).with_path_prefix(self.base),))
