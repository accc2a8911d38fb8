"""ALBERT: an encoder that runs the same layer many times; the attention adds its residual itself."""

from shardformer.policies.roles import MLP, Attention, RolePolicy, Stack


class AlbertPolicy(RolePolicy):
    stack = Stack(
        "encoder.albert_layer_groups.*.albert_layers",
        [
            Attention("attention", q="query", k="key", v="value", out="dense", entry="query", whole_sequence=True),
            MLP("ffn", up="", down=".ffn_output"),
        ],
    )
    embeddings = "embeddings.word_embeddings"
    head = "predictions.decoder"
    whole = (
        "embeddings.position_embeddings",
        "embeddings.token_type_embeddings",
        "encoder.embedding_hidden_mapping_in",
        "pooler?",
    )
