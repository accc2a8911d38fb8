"""Attention on fused kernels: for every model on transformers' interface, and for classes that are not on it.

One attention function (``attention_kernels``) and one mask function are registered with transformers; forwards stay as
they are. Classes with attention of their own are named in ``own_attention``. timm's have a switch for torch's own, and
that call is led to ours. Which model can have them is decided here, before it is touched.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import nn

from shardformer.errors import ConfigError
from shardformer.layers.attention.kernels import (
    KERNELS,
    REMEDY_OFF,
    OnKernels,
    attention,
    dropout_refused,
    flash_attn,
)
from shardformer.layers.attention.own import OWN, SDPA, check_own, is_on_interface, own_of, replace_own, source_of

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
    found = configs(model)
    if found:
        _register()
    for config in found:
        config._attn_implementation = ATTENTION_NAME
    for module in model.modules():
        if type(module).__name__ in SDPA:
            own: Any = module.config
            own._attn_implementation = "sdpa"
    for path, name, function in (*replace_own(model), *_turn_switches(model)):
        if replaced is not None:
            replaced(path, name, function)
    return _describe(model, device)


def check_flash_attention(model: nn.Module, device: torch.device) -> None:
    """Raises ConfigError when some attention of ``model`` cannot run on the fused kernels of ``device``."""
    _check_interface(model)
    check_own(model)
    for config in configs(model):
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


def _turn_switches(model: nn.Module) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Has the modules with a switch call torch's attention, and that call ours. Gives what was replaced, as a path."""
    for path, module in model.named_modules():
        if hasattr(module, SWITCH):
            setattr(module, SWITCH, True)
            if "forward" not in vars(module):  # otherwise in place already
                vars(module)["forward"] = MethodType(forward_on_kernels, module)
                yield f"{path}.forward", "forward", forward_on_kernels


def forward_on_kernels(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of its class, with ``attention`` where it calls torch's."""
    with OnKernels(self):
        return type(self).forward(self, *args, **kwargs)


# -- what a model must be ---------------------------------------------------------------------------------------------


def configs(model: nn.Module) -> list[Any]:
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
    known = {cls for cls in classes if own_of(cls) is not None or cls.__name__ in SDPA} | switched
    own = [cls.__name__ for cls, source in classes.items() if not is_on_interface(source) and cls not in known]
    without = sorted({type(m).__name__ for m in model.modules() if _declines(m)})
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
        f"of {', '.join([*OWN, *SDPA])}",
        remedy=f"{REMEDY_OFF} for this model",
    )


def _declines(module: nn.Module) -> bool:
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
                raise dropout_refused(f"{name}.{attribute}={rate}", _dropout_settings(holder, rate))


def _dropouts(module: nn.Module, source: str) -> list[str]:
    """The attributes that hold the rate of the dropout of attention weights."""
    if type(module).__name__ in SDPA:
        return ["attention_dropout"] if attrgetter("config.alibi")(module) else []
    if (own := own_of(type(module))) is not None:
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
    own = own_of(cls)
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


def importing() -> AbstractContextManager[Any]:
    """In here this thread alone imports of transformers."""
    return _IMPORTING


def _register() -> None:
    """Idempotent: the same two functions under the same name."""
    with importing():
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
