"""Install optional fused kernels: norms, and activations fused with the bias of the linear before them."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from shardformer.errors import ConfigError
from shardformer.kernels.fused_ops import defer_bias, fused_norm
from shardformer.layout.sharding_metadata import ShardingMetadata
from shardformer.module_paths import parent_of
from shardformer.sharding.plan import ShardingPlan
from shardformer.tensor_parallel.layers import Linear1D_Col
from shardformer.tensor_parallel.parallel_module import ParallelModule, move_hooks

# class names: WRITTEN_OUT use several operations where torch has one kernel; the other activations use one kernel
WRITTEN_OUT = ("NewGELUActivation", "AccurateGELUActivation", "FastGELUActivation", "BloomGelu")
ACTIVATIONS = (*WRITTEN_OUT, "GELU", "GELUActivation", "GELUTanh", "PytorchGELUTanh", "SiLU", "SiLUActivation", "ReLU")


def check_activations(model: nn.Module, device: torch.device) -> None:
    """Raise ConfigError if ``enable_jit_fused`` has no effect on the model, or torch.compile cannot build kernels."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        problem = "enable_jit_fused=True needs triton on a GPU, which is not installed"
    elif not any(type(module).__name__ in ACTIVATIONS for module in model.modules()):
        problem = f"enable_jit_fused=True has no effect: {type(model).__name__} has no GELU, SiLU or ReLU module"
    else:
        return
    raise ConfigError(problem, remedy="Set enable_jit_fused=False")


def fuse_activations(model: nn.Module, plan: ShardingPlan, state: ShardingMetadata) -> None:
    """Replace activations by fused kernels that also add the bias of the linear before the activation."""
    for path, native in list(model.named_modules(remove_duplicate=False)):
        if type(native).__name__ in WRITTEN_OUT:
            _replace_and_record(model, path, native, nn.GELU("tanh").train(native.training), "activation", state)
    found: Counter[str] = Counter()
    for path, block in plan.blocks:
        acts = sorted({type(m).__name__ for m in model.get_submodule(path).modules()} & {*ACTIVATIONS})
        modules = [model.get_submodule(name) for name in block.columns if block.fuse_activation and acts]
        columns = [m for m in modules if isinstance(m, Linear1D_Col) and not m.skip_bias_add]
        for column in columns:
            column.finish = defer_bias
        if columns:
            terms = ("bias", " or ".join(acts), "gate")
            found[" and ".join(terms[columns[0].bias is None : 1 + len(columns)])] += 1
    fused = ", ".join(f"{count} {what}" for what, count in found.items())
    state.notes.append(f"Fused into one kernel: {fused or 'activations only'}.")


def check_norms(model: nn.Module) -> None:
    """Raise ConfigError if ``enable_fused_normalization`` has no effect, because no norm of the model is supported."""
    problem: ConfigError | None = None
    for _, norm in _iterate_norms(model):
        try:
            fused_norm(norm)
            return
        except ConfigError as error:
            problem = problem or error
    raise problem or ConfigError(
        f"enable_fused_normalization=True has no effect: {type(model).__name__} has no norm",
        remedy="Set enable_fused_normalization=False",
    )


def fuse_norms(model: nn.Module, state: ShardingMetadata) -> None:
    """Replace every supported norm of the model by a fused kernel, and record which norms were replaced."""
    left: Counter[str] = Counter()
    for path, norm in list(_iterate_norms(model)):
        kind = type(norm).__name__
        if isinstance(norm, ParallelModule):
            left[f"{kind} (its statistics are summed over ranks)"] += 1
            continue
        try:
            _replace_and_record(model, path, norm, fused_norm(norm), "norm", state)
        except ConfigError:
            left[f"{kind} (not a layer norm or RMS norm over the last dim)"] += 1
    if left:
        state.notes.append(f"Norms that are not fused: {', '.join(f'{n} {kind}' for kind, n in left.items())}.")


def _iterate_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if "norm" in type(module).__name__.lower() and not module._modules:
            yield path, module


def _replace_and_record(
    model: nn.Module, path: str, native: nn.Module, new: nn.Module, kind: str, state: ShardingMetadata
) -> None:
    move_hooks(new, native)
    setattr(*parent_of(model, path), new)
    state.note(path, native, new, kind=kind)
