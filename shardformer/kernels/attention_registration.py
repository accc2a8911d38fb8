"""Switch the attention of a transformers or timm model to fused kernels."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import nn

from shardformer.errors import ConfigError
from shardformer.kernels.attention import (
    KERNELS,
    FusedAttentionMode,
    attention,
    get_flash_attn_func,
)
from shardformer.kernels.model_specific_attention import (
    SDPA,
    apply_attention_overrides,
    calls_attention_interface,
    check_attention_overrides,
    find_attention_override,
    get_class_source,
)
from shardformer.module_paths import find_model_configs
from shardformer.torch_patches import LibraryPatch, Undo, install_patch

# without "flash", because transformers treats such names as the flash-attn package and passes packed sequences
ATTENTION_NAME = "shardformer_sdpa"
BIAS = re.compile(r"relative_(attention|position)_bias")
_IMPORTING = threading.RLock()
"""Lock for transformers' lazy imports, which are not thread-safe."""
DROPOUT_OF_CALL = re.compile(r"dropout(?:_p)?=(?:0\.0 if not self\.training else )?self\.([\w.]+)")
SWITCH = "fused_attn"
"""Attribute of timm's attention modules that makes them call torch's scaled_dot_product_attention."""


def use_flash_attention(
    model: nn.Module, device: torch.device | None = None, on_replace: Callable[[str, str, Any], None] | None = None
) -> str:
    """Switch all attention modules of a model to fused kernels. Returns a description of the kernels.

    Communicates nothing. Values and gradients equal those of the model's own attention.

    Args:
        device: the device on which the model is trained. By default, CUDA if it is available, otherwise the CPU.
        on_replace: called for each method that is replaced, with its path, its name and the new function.

    Raises:
        ConfigError: if an attention module is not supported. The model is then unchanged.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_flash_attention_is_supported(model, device)
    configs = find_attention_configs(model)
    if configs:
        register_attention(ATTENTION_NAME, attention, None)
    for config in configs:
        config._attn_implementation = ATTENTION_NAME
    for module in model.modules():
        if type(module).__name__ in SDPA:
            sdpa_config: Any = module.config
            sdpa_config._attn_implementation = "sdpa"
    for path, name, function in (*apply_attention_overrides(model), *_enable_timm_fused_attention(model)):
        if on_replace is not None:
            on_replace(path, name, function)
    return _describe_attention_kernels(model, device)


def check_flash_attention_is_supported(model: nn.Module, device: torch.device) -> None:
    """Raise ConfigError if the device's fused kernels do not support the model's attention."""
    _check_attention_is_supported(model)
    check_attention_overrides(model)
    for config in find_attention_configs(model):
        for name, off in (("output_attentions", False), ("attn_logit_softcapping", None)):
            if value := getattr(config, name, off):
                raise ConfigError(
                    f"enable_flash_attention=True does not support {name}={value} in {type(config).__name__}.",
                    remedy=f"Set {name}={off}, or set enable_flash_attention=False.",
                )
    if device.type == "cpu":
        _check_no_attention_dropout(model)
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if device.type == "cuda" and torch.float64 in dtypes:
        raise ConfigError(
            "enable_flash_attention=True does not support float64 weights on CUDA.",
            remedy="Use float16, bfloat16 or float32 weights, or set enable_flash_attention=False.",
        )


def _enable_timm_fused_attention(model: nn.Module) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Switch timm's attention modules to fused kernels with ``fused_attn=True``.

    Yields the path, the name and the new function of each method that is replaced.
    """
    for path, module in model.named_modules():
        if hasattr(module, SWITCH):
            setattr(module, SWITCH, True)
            if "forward" not in vars(module):  # not installed before
                vars(module)["forward"] = MethodType(forward_with_fused_kernels, module)
                yield f"{path}.forward", "forward", forward_with_fused_kernels


def forward_with_fused_kernels(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module's `forward` with fused kernels instead of torch's scaled_dot_product_attention."""
    with FusedAttentionMode(module):
        return type(module).forward(module, *args, **kwargs)


# --- requirements


def find_attention_configs(model: nn.Module) -> list[Any]:
    """Find the configs in a model that select an attention implementation."""
    return [config for config in find_model_configs(model) if hasattr(config, "_attn_implementation")]


def find_attention_classes(model: nn.Module) -> dict[type[nn.Module], str]:
    """Find the attention classes in a model, and return a dict from each class to its source code.

    These are the classes that use transformers' interface, and those with "attention" in their name that compute a
    softmax or call torch's attention. Modules that only contain an attention module are not included.
    """
    classes = {type(m) for m in model.modules()}
    sources = {cls: get_class_source(cls) for cls in sorted(classes, key=lambda c: c.__name__)}  # type: ignore[arg-type]  # mypy reads __hash__ as the instances'
    computes = re.compile(r"softmax\(|scaled_dot_product_attention\(")
    return {
        cls: source
        for cls, source in sources.items()
        if calls_attention_interface(source) or ("attention" in cls.__name__.lower() and computes.search(source))
    }


def _check_attention_is_supported(model: nn.Module) -> None:
    classes = find_attention_classes(model)
    switched = {type(module) for module in model.modules() if hasattr(module, SWITCH)}
    known = {cls for cls in classes if find_attention_override(cls) is not None or cls.__name__ in SDPA} | switched
    unknown = [
        cls.__name__ for cls, source in classes.items() if not calls_attention_interface(source) and cls not in known
    ]
    opting_out = [m for m in model.modules() if getattr(m, "_supports_sdpa", True) is False]
    without = sorted(
        {
            type(m).__name__
            for m in opting_out
            if any(map(calls_attention_interface, find_attention_classes(m).values()))
        }
    )
    if unknown:
        reason = f"computes attention in {', '.join(unknown)} without transformers' AttentionInterface"
    elif not classes:
        reason = "has no attention module that uses transformers' AttentionInterface"
    elif without:
        reason = f"declares that {', '.join(without)} differs from torch's attention (_supports_sdpa=False)"
    else:
        return
    raise ConfigError(
        f"enable_flash_attention=True does not support {type(model).__name__}, which {reason}.",
        remedy="Set enable_flash_attention=False for this model.",
    )


def _check_no_attention_dropout(model: nn.Module) -> None:
    """Raise ConfigError for attention dropout, which torch's CPU flash kernel does not support."""
    sources = find_attention_classes(model)
    for name, module in model.named_modules():
        for attribute in _find_dropout_attributes(module, sources.get(type(module), "")):
            try:
                rate = attrgetter(attribute)(module)
            except AttributeError:
                continue  # _check_attention_call checks the rate at run time
            rate = getattr(rate, "p", rate)
            if isinstance(rate, float | int) and rate > 0:
                owner = getattr(module, "config", getattr(model, "config", module))
                settings = _format_dropout_settings(owner, rate)
                raise ConfigError(
                    f"{name}.{attribute} is {rate}, but the fused kernels do not support attention dropout on the CPU.",
                    remedy=f"Build the model with {settings} in its config, or set enable_flash_attention=False.",
                )


def _find_dropout_attributes(module: nn.Module, source_code: str) -> list[str]:
    if type(module).__name__ in SDPA:
        return ["attention_dropout"] if attrgetter("config.alibi")(module) else []
    if (override := find_attention_override(type(module))) is not None:
        return [override.dropout] if override.dropout else []
    return DROPOUT_OF_CALL.findall(source_code)


def _format_dropout_settings(config_or_module: Any, rate: float) -> str:
    settings = vars(config_or_module)
    names = [k for k, v in settings.items() if v == rate and ("drop" in k) and ("att" in k or k == "dropout_rate")]
    return " and ".join(f"{n}=0.0" for n in names) or "an attention dropout of 0"


def _describe_attention_kernels(model: nn.Module, device: torch.device) -> str:
    classes_by_kernel: dict[str, list[str]] = {}
    for cls in find_attention_classes(model):
        classes_by_kernel.setdefault(_describe_attention_kernel(model, cls, device), []).append(cls.__name__)
    return "; ".join(f"{', '.join(names)} on {kernel}" for kernel, names in classes_by_kernel.items())


def _describe_attention_kernel(model: nn.Module, attention_cls: type[nn.Module], device: torch.device) -> str:
    if device.type not in KERNELS:
        return "torch's attention, which selects a kernel"
    override = find_attention_override(attention_cls)
    biases = BIAS if override is None else re.compile(override.bias or "^$")
    is_bias_trained = any(p.requires_grad and biases.search(name) for name, p in model.named_parameters())
    if attention_cls.__name__ in SDPA:
        kernel = "torch flash attention for the CPU" if device.type == "cpu" else "the kernel that torch selects"
        return f"{kernel}, through its own call of torch's attention"
    if device.type == "cpu":
        backward = ", with a chunked backward for the position bias" if is_bias_trained else ""
        return f"torch flash attention for the CPU{backward}"
    if is_bias_trained:
        return "torch memory-efficient attention, because the flash kernel supports no position bias"
    fused = "torch flash attention, or its memory-efficient kernel with a mask"
    return fused if get_flash_attn_func() is None else f"flash-attn, or {fused}"


def register_attention(
    attention_name: str, attention_fn: Callable[..., Any], mask_fn: Callable[..., Any] | None
) -> None:
    """Register an attention function and a mask function, by default that of SDPA, with transformers."""
    with _IMPORTING:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

    def register() -> Undo:
        tables: tuple[Any, ...] = AttentionInterface, AttentionMaskInterface
        for table, function in zip(tables, (attention_fn, mask_fn or sdpa_mask), strict=True):
            table.register(attention_name, function)

        def undo() -> None:
            for table in tables:
                del table._global_mapping[attention_name]

        return undo

    patch = LibraryPatch(
        f"transformers.AttentionInterface and AttentionMaskInterface: {attention_name}",
        attention_fn.__module__,
        "adds the attention function that a sharded model's config names",
    )
    install_patch(patch, register)
