"""Runs attention on fused kernels: models that use transformers' interface, and classes with their own attention.

A class is named here that computes softmax attention in its own forward. The function computes what its method does
and calls ``attention``; all around it stays the model's own. What the class says for sharding (its number of heads) is
read where the class reads it.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.kernels.attention import (
    KERNELS,
    REMEDY_OFF,
    FusedAttentionMode,
    attention,
    check_attention_arguments,
    dropout_error,
    flash_attn,
)
from shardformer.torch_patches import Patch, Undo, install

# B batch, N heads of this rank, Q and S lengths of queries and keys, D head dim, H hidden, L tokens of a window

Output = tuple[Tensor, Tensor | None]


def bloom(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> Output:
    """ALiBi adds to a score what depends on the head and the key: one more feature of the key, times one.

    So it needs no bias, which the flash kernel of CUDA would not take.
    """
    q_BNQD, k_BNSD, v_BNSD = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        k_BNSD, v_BNSD = layer_past.update(k_BNSD, v_BNSD, self.layer_idx)
    slopes_BNS1 = alibi.view(*k_BNSD.shape[:-1], 1).to(k_BNSD.dtype)
    q_BNQE = torch.cat([q_BNQD * self.inv_norm_factor, torch.ones_like(q_BNQD[..., :1])], -1)
    k_BNSE = torch.cat([k_BNSD, slopes_BNS1], -1)
    p = _rate(self, self.attention_dropout)
    out_BQND, _ = attention(self, q_BNQE, k_BNSE, v_BNSD, attention_mask, p, scaling=1.0)
    out: Tensor = F.dropout(self.dense(out_BQND.flatten(2)), p=self.hidden_dropout, training=self.training)
    return residual + out, None


def gpt_neo(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Output:
    """Scores without a scale; a local layer sees a window."""
    q_length, length = query.shape[2], key.shape[2]
    mask = attention_mask
    if self.attention_type == "local" or mask is not None:
        seen = self.bias[:, :, length - q_length : length, :length]
        if mask is None or mask.dtype == torch.bool:
            mask = seen if mask is None else seen & mask
        else:
            mask = torch.where(seen, mask, torch.finfo(mask.dtype).min)
    p = _rate(self, self.attn_dropout)
    out_BQND, _ = attention(self, query.to(value.dtype), key.to(value.dtype), value, mask, p, scaling=1.0)
    return out_BQND.transpose(1, 2), None


def gptj(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Output:
    p, scale = _rate(self, self.attn_dropout), 1.0 / float(self.scale_attn)
    query, key = query.to(value.dtype), key.to(value.dtype)
    out_BQND, _ = attention(self, query, key, value, attention_mask, p, scaling=scale)
    return out_BQND.transpose(1, 2), None


def sam_vision(self: Any, hidden_states: Tensor, output_attentions: bool | None = None) -> Output:
    """Positions along height and width are added to the scores, each a product with the query."""
    batch, height, width, _ = hidden_states.shape
    tokens, heads = height * width, self.num_attention_heads
    qkv_3BNSD = self.qkv(hidden_states).reshape(batch, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
    query, key, value = qkv_3BNSD.unbind(0)
    bias = None
    if self.use_rel_pos:
        flat, size = query.reshape(batch * heads, tokens, -1), (height, width)
        bias = self.get_decomposed_rel_pos(flat, self.rel_pos_h, self.rel_pos_w, size, size)
        bias = bias.reshape(batch, heads, tokens, tokens)
    # the class on torch's own attention leaves the dropout out
    p = 0.0 if "Sdpa" in type(self).__name__ or not self.training else float(self.dropout)
    out_BQND, _ = attention(self, query, key, value, None, p, self.scale, is_causal=False, position_bias=bias)
    return self.proj(out_BQND.reshape(batch, height, width, -1)), None


def swinv2(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool | None = False
) -> tuple[Tensor]:
    """The cosine of query and key, times a scale of each head; relative positions come from an MLP."""
    projections = (self.query, self.key, self.value)
    heads = (-1, self.num_attention_heads, self.attention_head_size)
    q, k, v = (project(hidden_states).unflatten(-1, heads[1:]).transpose(1, 2) for project in projections)
    table = self.continuous_position_bias_mlp(self.relative_coords_table).view(-1, self.num_attention_heads)
    mask = None if attention_mask is None else 2 * attention_mask  # the class adds it twice
    return (_cosine_attention(self, q, k, v, mask, table, self.dropout),)


def timm_swinv2(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """timm's, with one linear for q, k and v, whose biases stand beside it."""
    if self.q_bias is None:
        qkv = self.qkv(x)
    else:
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        qkv = self.qkv(x) + bias if self.qkv_bias_separate else F.linear(x, self.qkv.weight, bias)
    q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
    out: Tensor = self.proj_drop(self.proj(_cosine_attention(self, q, k, v, mask, table, self.attn_drop)))
    return out


def _cosine_attention(
    self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor, dropout: Any
) -> Tensor:
    """q, k, v (B, N, L, D) of the windows of all images, a mask (windows of one, L, L) -> (B, L, N * D)."""
    scale_N11 = torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()
    q, k = F.normalize(q, dim=-1) * scale_N11, F.normalize(k, dim=-1)
    area = self.window_size[0] * self.window_size[1]
    bias_LLN = table[self.relative_position_index.view(-1)].view(area, area, -1)
    bias_1NLL = 16 * torch.sigmoid(bias_LLN.permute(2, 0, 1).contiguous())[None]
    if mask is not None:
        mask = mask[:, None].repeat(len(q) // len(mask), 1, 1, 1)
    p = _rate(self, dropout)
    out, _ = attention(self, q, k, v, mask, p, scaling=1.0, is_causal=False, position_bias=bias_1NLL)
    return out.flatten(2)


def _rate(module: nn.Module, dropout: Any) -> float:
    return float(dropout.p) if module.training else 0.0


# -- which ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionOverride:
    """How a class of attention comes to the kernels.

    Args:
        method: what is replaced, by ``function``.
        dropout: the attribute that holds the rate of the dropout of its weights.
        bias: the parameters of it whose values are added to the scores, if any.
    """

    method: str
    function: Callable[..., Any]
    dropout: str
    bias: str = ""


def chatglm(self: Any, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Any) -> Tensor:
    """ChatGLM2's core, of states that lie (length, batch, heads, head dim); its mask is True where nothing is seen."""
    q_BNQD, k_BNSD, v_BNSD = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
    mask = None if attention_mask is None else ~attention_mask
    out_BQND, _ = attention(self, q_BNQD, k_BNSD, v_BNSD, mask)
    return out_BQND.transpose(0, 1).flatten(2)


OVERRIDES = {
    "CoreAttention": AttentionOverride("forward", chatglm, ""),
    "BloomAttention": AttentionOverride("forward", bloom, "attention_dropout"),
    "GPTNeoSelfAttention": AttentionOverride("_attn", gpt_neo, "attn_dropout"),
    "GPTJAttention": AttentionOverride("_attn", gptj, "attn_dropout"),
    "SamVisionAttention": AttentionOverride("forward", sam_vision, "dropout", "rel_pos"),
    "SamVisionSdpaAttention": AttentionOverride("forward", sam_vision, "", "rel_pos"),
    "Swinv2SelfAttention": AttentionOverride("forward", swinv2, "dropout", "continuous_position_bias_mlp"),
    "timm.models.swin_transformer_v2.WindowAttention": AttentionOverride(
        "forward", timm_swinv2, "attn_drop", "cpb_mlp"
    ),
}
"""By the name of the class, and of its module where others have that name too."""
SDPA = ("FalconAttention",)
"""Classes that call torch's scaled_dot_product_attention themselves where their config says "sdpa"."""


def override_for(cls: type[nn.Module]) -> AttentionOverride | None:
    """None also for a class that dispatches its attention in this version of transformers (GPT-J from 5.24 on)."""
    own = OVERRIDES.get(cls.__name__) or OVERRIDES.get(f"{cls.__module__}.{cls.__name__}")
    if own is None:
        return None
    source = source_of(cls)  # type: ignore[arg-type]  # mypy reads __hash__ as the instances'
    return None if is_on_interface(source) else own


@functools.cache
def source_of(cls: Any) -> str:
    """The code of the methods of a class and of those it inherits from; empty where there is none to read."""
    parts = []
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        # not of the class at once: Python parses a file for that, which two threads cannot do at the same time
        for method in filter(inspect.isfunction, vars(base).values()):
            try:
                parts.append(inspect.getsource(method))
            except (OSError, TypeError):
                continue
    return "\n".join(parts)


def is_on_interface(source: str) -> bool:
    return "get_interface(" in source


def overridden_modules(model: nn.Module) -> Iterator[tuple[str, Any, AttentionOverride]]:
    for path, module in model.named_modules():
        if (own := override_for(type(module))) is not None:
            yield path, module, own


def check_overrides(model: nn.Module) -> None:
    """Raises ConfigError for a module that would compute something else than its function here."""
    for path, module, own in overridden_modules(model):
        theirs: Any = getattr(type(module), own.method, None)
        takes, ours = ([] if f is None else list(inspect.signature(f).parameters) for f in (theirs, own.function))
        if takes != ours:
            raise ConfigError(
                f"enable_flash_attention for {path} ({type(module).__name__}), whose {own.method} takes {takes[1:]}",
                rule=f"What takes its place takes {ours[1:]}: this version of transformers computes something else",
                remedy=f"{REMEDY_OFF} for this model, or use the transformers that pyproject.toml names",
            )
        if getattr(module, "slow_but_exact", False) and module.pretraining_tp > 1:
            raise ConfigError(
                f"enable_flash_attention for {path}, slow_but_exact=True and pretraining_tp={module.pretraining_tp}",
                rule="These compute the output projection in slices, to reproduce the rounding of a training run",
                remedy=f"Set slow_but_exact=False in the config. Or {REMEDY_OFF.lower()}",
            )
    for path, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if type(module).__name__ in SDPA and config._attn_implementation == "eager" and config.alibi:
            raise ConfigError(
                f"enable_flash_attention for {path} ({type(module).__name__}) with eager attention and alibi=True",
                rule="The eager attention of this class adds ALiBi twice, its fused one once",
                remedy=f'Load the model with attn_implementation="sdpa". Or {REMEDY_OFF.lower()}',
            )


def apply_overrides(model: nn.Module) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Puts the functions in place. Gives what was replaced: (path of the method, its name, the function)."""
    for path, module, own in list(overridden_modules(model)):
        if own.method in vars(module):
            continue  # in place already
        setattr(module, own.method, own.function.__get__(module))
        module.register_forward_pre_hook(_refuse_attention_weights, with_kwargs=True)
        yield f"{path}.{own.method}", own.method, own.function


def _refuse_attention_weights(module: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
    check_attention_arguments(type(module).__name__, kwargs, ["output_attentions"])


# No "flash" in the name: transformers' models take any such name for the flash-attn package, and pass packed sequences.
ATTENTION_NAME = "shardformer_sdpa"
BIAS = re.compile(r"relative_(attention|position)_bias")
_IMPORTING = threading.RLock()
"""transformers loads its names where they are first used, which two ranks that are threads cannot do at once."""
DROPOUT_OF_CALL = re.compile(r"dropout(?:_p)?=(?:0\.0 if not self\.training else )?self\.([\w.]+)")
SWITCH = "fused_attn"
"""What timm's attentions read: whether they call torch's own, or compute the scores."""


def use_flash_attention(
    model: nn.Module, device: torch.device | None = None, replaced: Callable[[str, str, Any], None] | None = None
) -> str:
    """Makes all attention of a model run on fused kernels. Returns which, for a description.

    Communicates nothing. Values and gradients are those of the model's own attention.

    Args:
        device: where the model will train; by default CUDA where there is one, else the CPU.
        replaced: is told of each method that is replaced: its path, its name, and the function that takes its place.

    Raises ConfigError, before the model is touched, when some of its attention cannot.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_flash_attention(model, device)
    found = attention_configs(model)
    if found:
        register_attention(ATTENTION_NAME, attention, None)
    for config in found:
        config._attn_implementation = ATTENTION_NAME
    for module in model.modules():
        if type(module).__name__ in SDPA:
            own: Any = module.config
            own._attn_implementation = "sdpa"
    for path, name, function in (*apply_overrides(model), *_enable_sdpa_switches(model)):
        if replaced is not None:
            replaced(path, name, function)
    return _describe(model, device)


def check_flash_attention(model: nn.Module, device: torch.device) -> None:
    """Raises ConfigError when some attention of ``model`` cannot run on the fused kernels of ``device``."""
    _check_interface(model)
    check_overrides(model)
    for config in attention_configs(model):
        _check_config(config)
    if device.type == "cpu":
        _check_no_dropout(model)
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if device.type == "cuda" and torch.float64 in dtypes:
        raise ConfigError(
            "enable_flash_attention with weights in float64 on CUDA",
            rule="The fused attention kernels of CUDA compute in float16, bfloat16 or float32",
            remedy=f"Use one of these dtypes, or a CPU. Or {REMEDY_OFF.lower()}",
        )


def _enable_sdpa_switches(model: nn.Module) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Has the modules with a switch call torch's attention, and that call ours. Gives what was replaced, as a path."""
    for path, module in model.named_modules():
        if hasattr(module, SWITCH):
            setattr(module, SWITCH, True)
            if "forward" not in vars(module):  # otherwise in place already
                vars(module)["forward"] = MethodType(forward_on_kernels, module)
                yield f"{path}.forward", "forward", forward_on_kernels


def forward_on_kernels(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of its class, with ``attention`` where it calls torch's."""
    with FusedAttentionMode(self):
        return type(self).forward(self, *args, **kwargs)


# -- what a model must be ---------------------------------------------------------------------------------------------


def attention_configs(model: nn.Module) -> list[Any]:
    """Every configuration that a module of the model reads its attention implementation from, each once."""
    found = [getattr(module, "config", None) for module in model.modules()]
    return list({id(c): c for c in found if hasattr(c, "_attn_implementation")}.values())


def attention_classes(model: nn.Module) -> dict[type[nn.Module], str]:
    """The classes that compute an attention, with their code: those on the interface, and of those called attention
    what computes one; wrappers around them do not count.
    """
    classes = {type(m) for m in model.modules()}
    sources = {cls: source_of(cls) for cls in sorted(classes, key=lambda c: c.__name__)}  # type: ignore[arg-type]  # mypy reads __hash__ as the instances'
    computes = re.compile(r"softmax\(|scaled_dot_product_attention\(")
    return {
        cls: source
        for cls, source in sources.items()
        if is_on_interface(source) or ("attention" in cls.__name__.lower() and computes.search(source))
    }


def _check_interface(model: nn.Module) -> None:
    classes = attention_classes(model)
    switched = {type(module) for module in model.modules() if hasattr(module, SWITCH)}
    known = {cls for cls in classes if override_for(cls) is not None or cls.__name__ in SDPA} | switched
    own = [cls.__name__ for cls, source in classes.items() if not is_on_interface(source) and cls not in known]
    without = sorted({type(m).__name__ for m in model.modules() if _opts_out(m)})
    if own:
        what = f"has attention of its own in {', '.join(own)}"
    elif not classes:
        what = "has no attention that transformers dispatches"
    elif without:
        what = f"says of {', '.join(without)} that torch's attention does not give its numbers (_supports_sdpa=False)"
    else:
        return
    raise ConfigError(
        f"enable_flash_attention for {type(model).__name__}, which {what}",
        rule="A kernel is put in through transformers' AttentionInterface, as plain softmax attention, or in the place "
        f"of {', '.join([*OVERRIDES, *SDPA])}",
        remedy=f"{REMEDY_OFF} for this model",
    )


def _opts_out(module: nn.Module) -> bool:
    """Whether a model says that torch's attention is not its own, of attention that is on the interface."""
    if getattr(module, "_supports_sdpa", True) is not False:
        return False
    return any(is_on_interface(source) for source in attention_classes(module).values())


def _check_config(config: Any) -> None:
    for name, off in (("output_attentions", False), ("attn_logit_softcapping", None)):
        if value := getattr(config, name, off):
            raise ConfigError(
                f"enable_flash_attention with {name}={value} in {type(config).__name__}",
                rule="A fused kernel never holds the scores, so they cannot be returned or capped",
                remedy=f"Set {name}={off}, or leave enable_flash_attention off",
            )


def _check_no_dropout(model: nn.Module) -> None:
    """torch's flash attention for the CPU has no dropout; what a module will ask for stands in its own call."""
    sources = attention_classes(model)
    for name, module in model.named_modules():
        for attribute in _dropouts(module, sources.get(type(module), "")):
            try:
                rate = attrgetter(attribute)(module)
            except AttributeError:
                continue  # the check at the call stands behind this one
            rate = getattr(rate, "p", rate)
            if isinstance(rate, float | int) and rate > 0:
                holder = getattr(module, "config", getattr(model, "config", module))
                raise dropout_error(f"{name}.{attribute}={rate}", _dropout_settings(holder, rate))


def _dropouts(module: nn.Module, source: str) -> list[str]:
    """The attributes that hold the rate of the dropout of attention weights."""
    if type(module).__name__ in SDPA:
        return ["attention_dropout"] if attrgetter("config.alibi")(module) else []
    if (own := override_for(type(module))) is not None:
        return [own.dropout] if own.dropout else []
    return DROPOUT_OF_CALL.findall(source)


def _dropout_settings(holder: Any, rate: float) -> str:
    settings = vars(holder)
    names = [k for k, v in settings.items() if v == rate and ("drop" in k) and ("att" in k or k == "dropout_rate")]
    return " and ".join(f"{n}=0.0" for n in names) or "the attention dropout to 0"


def _describe(model: nn.Module, device: torch.device) -> str:
    """Each class of attention, and what it runs on; those that run on the same together."""
    on: dict[str, list[str]] = {}
    for cls in attention_classes(model):
        on.setdefault(_kernel_of(model, cls, device), []).append(cls.__name__)
    return "; ".join(f"{', '.join(names)} on {kernel}" for kernel, names in on.items())


def _kernel_of(model: nn.Module, cls: type[nn.Module], device: torch.device) -> str:
    if device.type not in KERNELS:
        return "torch's attention, which picks a kernel by itself"
    own = override_for(cls)
    biases = BIAS if own is None else re.compile(own.bias or "^$")
    trains = any(p.requires_grad and biases.search(name) for name, p in model.named_parameters())
    if cls.__name__ in SDPA:
        kernel = "torch flash attention for the CPU" if device.type == "cpu" else "the kernel that torch picks"
        return f"{kernel}, by its own call of torch's attention"
    if device.type == "cpu":
        how = ", gradients a few sequences at a time for the position bias" if trains else ""
        return f"torch flash attention for the CPU{how}"
    if trains:
        return "torch memory-efficient attention, as the flash kernel takes no position bias"
    fused = "torch flash attention, and its memory-efficient one where there is a mask"
    return fused if flash_attn() is None else f"flash-attn, or {fused}"


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any] | None) -> None:
    """Adds an attention to those of transformers, and the mask that it takes; None for that of torch's attention."""
    with _IMPORTING:  # transformers is imported by one thread at a time
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

    def register() -> Undo:
        tables: tuple[Any, ...] = AttentionInterface, AttentionMaskInterface
        for table, function in zip(tables, (attention, mask or sdpa_mask), strict=True):
            table.register(name, function)

        def undo() -> None:
            for table in tables:
                del table._global_mapping[name]

        return undo

    patch = Patch(
        f"transformers.AttentionInterface and AttentionMaskInterface: {name}",
        attention.__module__,
        "adds the attention that a sharded model names in its configuration",
    )
    install(patch, register)
