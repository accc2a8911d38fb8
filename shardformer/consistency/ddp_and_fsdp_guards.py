"""Guards that raise an error when a sharded model is wrapped in DDP, DataParallel or FSDP.

Another check detects parameters that were added to the model after it was sharded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NoReturn

from torch import nn

from shardformer.errors import ConfigError
from shardformer.layout.sharding_metadata import METADATA_ATTRIBUTE, ShardingMetadata
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.torch_compat import COMPOSABLE_REGISTRY, get_active_ddp_module
from shardformer.torch_patches import LibraryPatch, install_patch, replace_attribute


@dataclass(frozen=True)
class DDPGuard:
    """Guard that raises ConfigError when a sharded model is wrapped in DistributedDataParallel.

    The guard is a module attribute that DDP reads to get the names of parameters to ignore, before it broadcasts the
    parameters of rank 0.
    """

    context: ParallelContext

    def __iter__(self) -> Iterator[str]:
        raise _make_forbidden_wrapper_error("DistributedDataParallel", self.context)


class FSDPGuard(dict[str, Any]):
    """Guard that raises ConfigError when a sharded model is passed to FSDP, ``fully_shard`` or ``replicate``."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self.context = context

    def __contains__(self, name: object) -> bool:
        if name in ("fully_shard", "replicate"):
            wrappers = "FullyShardedDataParallel, fully_shard or replicate"
            raise _make_forbidden_wrapper_error(wrappers, self.context)
        return super().__contains__(name)


def forbid_data_parallel_wrappers(model: nn.Module, context: ParallelContext) -> None:
    """Make DDP, DataParallel and FSDP raise ConfigError for this sharded model."""
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = DDPGuard(context)
    model.__dict__["_replicate_for_data_parallel"] = partial(_raise_data_parallel_wrapper_error, context)
    for module in model.modules():
        module.__dict__[COMPOSABLE_REGISTRY] = FSDPGuard(context)
    if (library := sys.modules.get("accelerate")) is not None:  # transformers' Trainer uses it, too
        kind, name = library.Accelerator, "prepare_model"
        install_patch(
            ACCELERATE_PATCH, lambda: replace_attribute(kind, name, _wrap_accelerate_prepare_model(getattr(kind, name)))
        )


ACCELERATE_PATCH = LibraryPatch(
    "accelerate.Accelerator.prepare_model",
    "shardformer.consistency.ddp_and_fsdp_guards",
    "raises an error for a sharded model, because accelerate passes different batches to all processes",
)
SHARDS_MODELS = "shards_models"
"""Attribute of subclasses of accelerate's Accelerator that support sharded models."""


def _wrap_accelerate_prepare_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def prepare_model(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tables = (module.__dict__.get(METADATA_ATTRIBUTE) for module in model.modules())
        table = next((table for table in tables if table is not None), None)
        if table is not None and not hasattr(self, SHARDS_MODELS) and math.prod(table.context.sizes.values()) > 1:
            raise ConfigError(
                f"accelerate's {type(self).__name__} does not support this model, because it is sharded over "
                f"{table.context}.",
                remedy="Use shardformer.integrations.accelerate.Accelerator or "
                "shardformer.integrations.transformers.Trainer instead.",
            )
        return original(self, model, *args, **kwargs)

    return prepare_model


def _raise_data_parallel_wrapper_error(context: ParallelContext) -> NoReturn:
    raise _make_forbidden_wrapper_error("DataParallel", context)


def check_not_in_ddp(model: nn.Module, context: ParallelContext) -> None:
    """Raise ConfigError if the sharded model is called inside a DistributedDataParallel wrapper."""
    outer = get_active_ddp_module()
    if outer is None or all(axis.size == 1 for axis in context.axes.values()):
        return
    if any(module is model for module in outer.modules()):
        raise _make_forbidden_wrapper_error("DistributedDataParallel", context)


def check_no_parameters_added_after_sharding(model: nn.Module, metadata: ShardingMetadata) -> None:
    """Raise ConfigError if the model has parameters that were added after sharding."""
    known = metadata.get_entries_by_param_id()
    new = [name for name, p in model.named_parameters() if id(p) not in known]
    if new:
        name = new[0]
        raise ConfigError(
            f"The parameter {name} was added to {type(model).__name__} after the model was sharded.",
            remedy="Add heads and adapters before you shard the model.",
        )


def _make_forbidden_wrapper_error(wrapper_name: str, context: ParallelContext) -> ConfigError:
    return ConfigError(
        f"The model is sharded over {context} and cannot be wrapped in {wrapper_name}.",
        remedy="Remove the wrapper. For data parallelism, use launch_from_torch(data=...).",
    )
