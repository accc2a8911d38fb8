"""GPT-Neo: pre-norm decoder, learned positions, every other attention local."""

from shardformer.policies.role_policy import MLP, Attention, RolePolicy, Stack


class GPTNeoPolicy(RolePolicy):
    stack = Stack(
        "h",
        [
            Attention(
                "attn.attention",
                q="q_proj",
                k="k_proj",
                v="v_proj",
                out="out_proj",
                attributes={"num_heads": "heads"},
            ),
            MLP("mlp", up="c_fc", down="c_proj"),
        ],
        final_norm="ln_f",
        returns=1,
    )
    embeddings = "wte"
    head = "lm_head"
    whole = ("wpe",)
