"""Fused norms in the place of a model's own, and what is said of those that stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from shardformer.errors import ConfigError
from shardformer.layers.norm import fused_norm
from shardformer.layers.tensor.parallel_module import ParallelModule
from shardformer.layout.state import ShardedState


def check_norms(model: nn.Module) -> None:
    """Raises ConfigError for a model with no norm, or with none that is recognised: the option would have no effect."""
    problem: ConfigError | None = None
    for _, norm in _norms(model):
        try:
            fused_norm(norm)
            return
        except ConfigError as error:
            problem = problem or error
    raise problem or ConfigError(
        f"enable_fused_normalization=True, but {type(model).__name__} has no norm",
        rule="An option without effect is an error",
        remedy="Leave enable_fused_normalization off",
    )


def fuse_norms(model: nn.Module, state: ShardedState) -> None:
    """Replaces and records every norm that is recognised; notes what stays."""
    left: Counter[str] = Counter()
    for path, norm in list(_norms(model)):
        kind = type(norm).__name__
        if isinstance(norm, ParallelModule):
            left[f"{kind} (its statistics are summed over the ranks)"] += 1
            continue
        try:
            new = fused_norm(norm)
        except ConfigError:
            left[f"{kind} (neither a layer norm nor an RMS norm over the last dim)"] += 1
            continue
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, new)
        state.note(path, norm, new, kind="norm")
    if left:
        state.notes.append(f"Norms that stay as they are: {', '.join(f'{n} {kind}' for kind, n in left.items())}.")


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if "norm" in type(module).__name__.lower() and not module._modules:
            yield path, module
