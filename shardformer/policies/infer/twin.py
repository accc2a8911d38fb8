"""The twin of a model: the same classes with a small config, on which a policy is found and proven in seconds."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import PolicyError
from shardformer.layers.dropout import silence_dropout
from shardformer.policies.infer.inputs import batches_for, labelled, runner
from shardformer.policies.infer.prove import Forward, Reference, loss_of

HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS, VOCAB, POSITIONS = 6, 2, 8, 70, 2, 127, 64
MOST_LAYERS = 8
SMALL_NUMEL = 20_000_000
"""A model up to this size is its own twin where its config cannot be shrunk."""

EXPERTS = {
    r"(num|n)_(local_|routed_)?experts|moe_num_experts|num_experts": 4,
    r"num_experts_per_tok(en)?|moe_(topk|k|top_k)|top_k_experts": 2,
    r"zero_expert_num": 2,
    r"n_group|topk_group|num_expert_group": 1,
    r"first_k_dense_replace|num_dense_layers|moe_layer_start_index": 1,
}
LATENT = {
    r"q_lora_rank": 20, r"(kv|o)_lora_rank": 16, r"qk_(nope|rope)_head_dim|v_head_dim": HEAD_DIM,
    r"qk_head_dim": 2 * HEAD_DIM,
}  # fmt: skip
FIELDS: Mapping[str, int] = {
    r"(hidden_size|hidden_dim|mamba_d_ssm|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim|model_dim|emb_dim|output_hidden_size"
    r"|encoder_hidden_size|cross_attention_hidden_size|prediction_head_size|d_latents"
    r"|hidden_size_global)": HEADS * HEAD_DIM,
    r"((num|n|encoder|decoder|swa_num|linear_num)_(attention_)?heads?|(num|n)_(encoder|decoder|self|cross)_(attention_)?heads?"
    r"|attention_heads|mamba_(n|num)_heads|n_mamba_heads)": HEADS,
    r"(head_dim|d_kv|d_head|attention_head_size|kv_channels|rotary_dim|(swa|linear)_head_dim|dim_head"
    r"|mamba_(d_head|head_dim|headdim))": HEAD_DIM,
    r"(\w*intermediate_size(_mlp)?|ffn_dim|d_ff|dff|ffn_hidden_size|(encoder|decoder)_ffn_dim|n_inner|d_inner|ffn_size"
    r"|dim_ff|mlp_dim|expert_ffn_hidden_size|feed_forward_size)": WIDTH,
    r"(\w+_)?vocab_size(_per_layer_input)?|\w+_group_vocab": VOCAB,
    r"(max_(encoder_|decoder_)?position_embeddings|n_positions|max_target_positions|n_ctx|seq_length|max_seq_len"
    r"|max_source_positions)": POSITIONS,
    r"num_mel_bins|feature_size": 16,
    r"attention_window": 8,
    r"(mamba_)?(expand|n_groups)": 1,
    r"index_n_heads": 3,
    r"linear_num_value_heads": HEADS,
    r"linear_num_key_heads": KV_HEADS,
    r"linear_(key|value)_head_dim": HEAD_DIM,
    r"index_head_dim": 2 * HEAD_DIM,
    r"num_filters|mm_tokens_per_image": 4,
    **EXPERTS,
    **LATENT,
}  # fmt: skip
NUM_LAYERS = (
    r"num_hidden_layers|n_layers?|num_layers(_per_stack)?|(num_)?(encoder|decoder)_layers|num_(encoder|decoder)_blocks"
    r"|num_self_attends_per_block"
)
KV_FIELDS = (
    r"(num_key_value_heads|num_kv_heads|n_head_kv|n_kv_heads|num_attention_kv_heads|multi_query_group_num"
    r"|swa_num_key_value_heads)"
)
KV_SHARED = "num_kv_shared_layers"
"""How many of the last layers have no keys and values of their own."""
EVEN = {HEADS: 16, HEAD_DIM: 32, HEADS * HEAD_DIM: 512, WIDTH: 128, 16: 64, 20: 64}
"""For configs that ask for powers of two, or turn only a quarter of a head: so many heads that four ranks have some of
each of four partitions."""
MANY_WORDS = 2**14
"""For classes that name a token by a number of their own."""
STAGES: Mapping[str, int] = {"image_size": 64, "window_size": 2}
"""Of a model of stages, which halve the image."""
WITH: Mapping[str, Mapping[str, int]] = {
    "depths": STAGES,
    "depth": STAGES,
    "hidden_sizes": STAGES,
    "num_random_blocks": {"num_random_blocks": 1, "block_size": 1},  # a short batch would be attended to without blocks
    "stagger_local_blocks": {"block_size": 8},
    "trigram_input": {"embedding_size": 16},  # three of them become a state
}
"""Field -> sizes of others in a config that has it."""


@dataclass(frozen=True)
class Twin:
    """A small model, what calls it with a batch, and that batch."""

    model: nn.Module
    run: Forward
    batch: Mapping[str, Tensor]


def twin_of(model: nn.Module, batch: Mapping[str, Tensor] | None = None) -> Twin:
    """A small model of the class of ``model`` that trains on the CPU, in fp64 or else in fp32: see ``_runs``.

    Raises PolicyError where neither a twin can be built and run nor the model is small enough to be its own.
    """
    problems = []
    makes = list(_shrunk_twins(model))
    if sum(p.numel() for p in model.parameters()) <= SMALL_NUMEL:
        makes.append(lambda: copy.deepcopy(model))
    for make, dtype in product(makes, (torch.float64, torch.float32)):
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                twin = make().to(device="cpu", dtype=dtype).eval().requires_grad_(True)
            if twin is not model and (lacks := kinds_of_layers(model) - kinds_of_layers(twin)):
                raise ValueError(f"it lacks {len(lacks)} of the kinds of layers")
            return Twin(twin, *_runs(twin, batch))
        except PolicyError as error:
            problems.append(error.what)
        except Exception as error:  # relations between the fields that their names do not tell
            problems.append(f"{type(error).__name__}: {str(error).strip()[:160]}")
    raise PolicyError(
        f"No small twin of {type(model).__name__} can be built and run: {'; '.join(dict.fromkeys(problems))}",
        rule=f"A policy is found and proven on a small model of the same classes, of up to {SMALL_NUMEL:,} parameters",
        remedy="Write the roles down (docs/policies.md), or infer them from a small config of yours; where the inputs "
        "are special, give an example of a batch that fits it: infer(model, batch={...})",
    )


def _shrunk_twins(model: nn.Module) -> Iterator[Callable[[], nn.Module]]:
    if hasattr(getattr(model, "config", None), "to_dict"):
        # with few layers, or as many as it takes to have one of each kind
        for anew, even, layers in product((False, True), (False, True), dict.fromkeys((0, _layers_needed(model)))):
            yield partial(_shrunk_twin, model, even=even, layers=layers, anew=anew)


def _shrunk_twin(model: nn.Module, **how: Any) -> nn.Module:
    small = shrunk(model.config, **how)
    with torch.device("meta"):
        numel = sum(p.numel() for p in type(model)(copy.deepcopy(small)).parameters())
    if numel > SMALL_NUMEL:
        raise ValueError(f"with its config shrunk it still has {numel:,} parameters")
    return type(model)(small)


Kind = frozenset[tuple[str, str]]
"""What a layer is made of: paths, with ``*`` for each number, and classes of its modules."""


def kind_of(layer: nn.Module) -> Kind:
    return frozenset((re.sub(r"\d+", "*", path), type(module).__name__) for path, module in layer.named_modules())


def kinds_of_layers(model: nn.Module) -> frozenset[Kind]:
    """The kinds of layers in all lists of layers."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return frozenset(kind_of(layer) for layers in lists for layer in layers.children())


def _layers_needed(model: nn.Module) -> int:
    """With how many layers each list of a model has one of each of its kinds; 0 where a few will do."""
    needed = 0
    for layers in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
        kinds = [kind_of(layer) for layer in layers.children()]
        needed = max([needed, *(i + 1 for i, kind in enumerate(kinds) if kind not in kinds[:i])])
    return needed if LAYERS < needed <= MOST_LAYERS else 0


def _runs(twin: nn.Module, batch: Mapping[str, Tensor] | None) -> tuple[Forward, Mapping[str, Tensor]]:
    """The call that training makes, with the first of the batches that the twin takes, and that batch.

    The twin comes to make its own loss, and to be in training mode, where it can.
    """
    problem: Exception | None = None
    for given in [batch] if batch is not None else batches_for(twin):
        for candidate in (*labelled(twin, given), given):
            run = runner(twin, candidate)
            try:
                native = copy.deepcopy(twin)  # some modules keep what a forward made
                if candidate is not given and getattr(run(native), "loss", None) is None:
                    continue
                Reference.of(native, run).check_finite()
                _train(twin, run)
                return run, candidate
            except Exception as error:
                problem = error if problem is None or candidate is given else problem
    assert problem is not None
    raise problem


def _train(twin: nn.Module, run: Forward) -> None:
    """Puts the twin in training mode without dropout; or in eval mode, where it is random even so, or fails."""
    silence_dropout(twin.train())
    try:
        first, again = copy.deepcopy(twin), copy.deepcopy(twin)
        reference = Reference.of(first, run)
        reference.check_finite()
        is_random = loss_of(run(again)).item() != reference.loss
    except Exception:
        is_random = True
    twin.train(not is_random)


def model_of(config: Any) -> nn.Module:
    """A model of a transformers config, without memory: of its first architecture, or the base model.

    Raises PolicyError for what is no config, or one whose model cannot be built.
    """
    import transformers

    if not hasattr(config, "model_type"):
        raise PolicyError(
            f"infer was given {config!r:.80}",
            rule="It takes a model, or a config of transformers",
            remedy="Build the model first",
        )
    name = next(iter(getattr(config, "architectures", None) or []), "")
    make: Any = getattr(transformers, name, None) or transformers.AutoModel.from_config
    try:
        with torch.device("meta"):
            model: nn.Module = make(copy.deepcopy(config))
    except Exception as error:
        raise PolicyError(
            f"No {name or config.model_type} can be built: {type(error).__name__}: {error!s:.200}",
            rule="A policy is found on a model of these classes",
            remedy="Give the model itself",
        ) from error
    return model


def shrunk(config: Any, *, even: bool = False, layers: int = 0, anew: bool = False) -> Any:
    """A copy of a transformers config with few and small layers, and the relations of its head counts.

    ``even`` asks for sizes that are powers of two, ``layers`` for the first so many layers, in place of one of each
    kind that the config's lists tell apart. ``anew`` keeps two of each kind, for weights that layers share, and has
    the config's class derive again from the small fields what it derived from the large ones.
    """
    small = copy.deepcopy(config)
    fields = {name: value for name, value in vars(small).items() if not name.startswith("_")}
    heads = next((v for n, v in fields.items() if _size_of(n) == HEADS and type(v) is int), 0)
    count, kept = _layers(fields, layers, each=1 + anew)
    for name, value in fields.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            new: Any = shrunk(value, even=even, layers=layers, anew=anew)
        elif type(value) is int and value > 0:
            new = _kv_heads(value, heads) if re.fullmatch(KV_FIELDS, name) else _size_of(name)
            new = EVEN.get(new, new) if even and new is not None else new
            if anew and name == "vocab_size":
                new = min(value, MANY_WORDS)
            if re.fullmatch(NUM_LAYERS, name):
                new = len(kept) if value == count else LAYERS
            if name == KV_SHARED:
                new = sum(i >= count - value for i in kept)
            new = next((sizes[name] for field, sizes in WITH.items() if field in fields and name in sizes), new)
            if name.endswith(("token_id", "token_index")) and value >= VOCAB:
                new = 3 if name.startswith(("bos", "eos", "pad", "decoder")) else VOCAB - 1
        elif name == "image_size" and "depths" in fields:
            new = type(value)(STAGES[name] for _ in value)
        elif name in ("depths", "depth", "block_sizes") and isinstance(value, list | tuple):
            new = type(value)(min(LAYERS + 1 if name == "depth" else LAYERS, depth) for depth in value)
        elif isinstance(value, list | tuple) and count and len(value) == count:
            new = type(value)(value[i] for i in (range(len(kept)) if _numbered(value) else kept))
            if (size := _size_of(name)) is not None and len(set(value)) == 1:  # one and the same number for each layer
                new = type(value)([size] * len(kept))
        else:
            continue
        if new is not None:
            setattr(small, name, new)
    if anew:
        small = _derived_anew(small, fields)
    if hasattr(small, "_experts_implementation"):
        small._experts_implementation = "eager"  # the other implementations do not compute in fp64
    return small


def _derived_anew(small: Any, was: Mapping[str, Any]) -> Any:
    """The config as its class makes it of the fields of ``small``, without the sizes that the class itself can tell."""
    default, now, given = vars(type(small)()), vars(small), {}
    for field in (field for field in dataclasses.fields(small) if field.init):
        name = small.attribute_map.get(field.name, field.name)
        derived = field.default is None and default.get(name) is not None and type(now[name]) is int
        if name in now and not (derived and now[name] == was.get(name)):
            given[field.name] = now[name]
    return type(small)(**given)


def _layers(fields: Mapping[str, Any], first: int, each: int) -> tuple[int, Sequence[int]]:
    """How many layers a config has, and which of them the twin: so many of each kind that its lists tell apart."""
    count = next((v for n, v in fields.items() if type(v) is int and re.fullmatch(NUM_LAYERS, n)), 0)
    if first:
        return count, range(min(first, count))
    lists = [v for v in fields.values() if isinstance(v, list | tuple) and len(v) == count > 2 and not _numbered(v)]
    lists.append([i < count - (fields.get(KV_SHARED) or 0) for i in range(count)])
    kinds = list(zip(*lists, strict=True))
    firsts = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < each]
    rest = [i for i in range(count) if i not in firsts]
    return count, sorted([*firsts, *rest[: max(0, LAYERS - len(firsts))]])


def _numbered(values: Sequence[Any]) -> bool:
    """Whether a list counts the layers, and so tells no kinds apart."""
    return all(type(v) is int for v in values) and list(values) == list(range(values[0], values[0] + len(values)))


def _size_of(name: str) -> int | None:
    return next((size for pattern, size in FIELDS.items() if re.fullmatch(pattern, name)), None)


def _kv_heads(value: int, heads: int) -> int:
    return HEADS if value == heads else 1 if value == 1 else KV_HEADS
