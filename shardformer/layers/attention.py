"""Attention on fused kernels for every model on transformers' interface; the model's forwards stay as they are.

One attention function (``attention_kernels``) and one mask function are registered with transformers. Which model can
have them is decided here, before it is touched.
"""

from __future__ import annotations

import inspect
import re
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from shardformer.errors import ConfigError
from shardformer.layers.attention_kernels import REMEDY_OFF, attention, dropout_refused, flash_attn

# No "flash" in the name: transformers' models take any such name for the flash-attn package, and pass packed sequences.
ATTENTION_NAME = "shardformer_sdpa"
DROPOUT_OF_CALL = re.compile(r"dropout=(?:0\.0 if not self\.training else )?self\.([\w.]+)")


def use_flash_attention(model: nn.Module, device: torch.device | None = None) -> str:
    """Makes all attention of a transformers model run on fused kernels. Returns which, for a description.

    Communicates nothing. Values and gradients are those of the model's own attention.

    Args:
        device: where the model will train; by default CUDA where there is one, else the CPU.

    Raises ConfigError, before the model is touched, when some of its attention cannot.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_flash_attention(model, device)
    _register()
    for config in _configs(model):
        config._attn_implementation = ATTENTION_NAME
    return _describe(model, device)


def check_flash_attention(model: nn.Module, device: torch.device) -> None:
    """Raises ConfigError when some attention of ``model`` cannot run on the fused kernels of ``device``."""
    _check_interface(model)
    for config in _configs(model):
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


# -- what a model must be ---------------------------------------------------------------------------------------------


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration that a module of the model reads its attention implementation from, each once."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return list({id(c): c for c in configs if hasattr(c, "_attn_implementation")}.values())


def _source(cls: type[nn.Module]) -> str:
    """The code of a class and of those it inherits from; empty where there is none to read."""
    parts = []
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        try:
            parts.append(inspect.getsource(base))
        except (OSError, TypeError):
            continue
    return "\n".join(parts)


def _attention_classes(model: nn.Module) -> dict[type[nn.Module], str]:
    """The classes called attention that compute one, with their code; wrappers around them do not count."""
    classes = {type(m) for m in model.modules() if "attention" in type(m).__name__.lower()}
    sources = {cls: _source(cls) for cls in sorted(classes, key=lambda c: c.__name__)}
    computes = re.compile(r"get_interface\(|softmax\(|scaled_dot_product_attention\(")
    return {cls: source for cls, source in sources.items() if computes.search(source)}


def _check_interface(model: nn.Module) -> None:
    classes = _attention_classes(model)
    own = [cls.__name__ for cls, source in classes.items() if "get_interface(" not in source]
    without = sorted({type(m).__name__ for m in model.modules() if getattr(m, "_supports_sdpa", True) is False})
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
        rule="A kernel is put in through transformers' AttentionInterface, as plain softmax attention",
        remedy=f"{REMEDY_OFF} for this model",
    )


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
    sources = _attention_classes(model)
    for name, module in model.named_modules():
        for attribute in DROPOUT_OF_CALL.findall(sources.get(type(module), "")):
            try:
                rate = attrgetter(attribute)(module)
            except AttributeError:
                continue  # the check at the call stands behind this one
            rate = getattr(rate, "p", rate)
            if isinstance(rate, float | int) and rate > 0:
                raise dropout_refused(f"{name}.{attribute}={rate}", _dropout_settings(module, rate))


def _dropout_settings(module: nn.Module, rate: float) -> str:
    settings = vars(getattr(module, "config", module))
    names = [k for k, v in settings.items() if v == rate and ("drop" in k) and ("att" in k or k == "dropout_rate")]
    return " and ".join(f"{n}=0.0" for n in names) or "the attention dropout to 0"


def _describe(model: nn.Module, device: torch.device) -> str:
    if device.type == "cuda":
        own = "torch flash / memory-efficient attention"
        return own if flash_attn() is None else f"flash-attn, {own} where there is a mask"
    bias = re.compile(r"relative_(attention|position)_bias")
    trains = any(p.requires_grad and bias.search(name) for name, p in model.named_parameters())
    how = ", gradients one sequence at a time for the position bias" if trains else ""
    return f"torch flash attention for the CPU{how}"


def _register() -> None:
    """Idempotent: the same two functions under the same name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
