"""What can be told before any process starts: that a model cannot be split, or a batch be cut, as asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, ShardFormerError
from shardformer.mesh.context import ParallelContext, with_tensor
from shardformer.mesh.sizes import total_of
from shardformer.mesh.tensor_grid import GRID_MODES, with_grid
from shardformer.pipeline.schedule import default_chunks, make_schedule
from shardformer.policies.policy import Policy
from shardformer.sharder import resolve_policy
from shardformer.sharding.checks import check_plain, checked_plan
from shardformer.sharding.stages import cut_into


@dataclass(frozen=True)
class AskedStages:
    """What ``PipelineStageManager`` is asked for, without the processes that it stands on.

    Raises ConfigError for a schedule that there is not, or not for these numbers.
    """

    num_stages: int
    micro_batches: int | None = None
    schedule: str = "1f1b"
    num_model_chunks: int | None = None
    cut: str | Sequence[int] = "cost"
    costs: Sequence[float] | None = None
    checkpoint_layers: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        micro_batches = self.num_stages if self.micro_batches is None else self.micro_batches
        make_schedule(self.schedule, self.num_stages, micro_batches, self.num_model_chunks)

    @property
    def num_virtual_stages(self) -> int:
        chunks = default_chunks(self.schedule) if self.num_model_chunks is None else self.num_model_chunks
        return self.num_stages * chunks


def check_split(
    model_fn: Callable[[], nn.Module],
    tensor: int | tuple[int, ...],
    policy: Policy | type[Policy] | None = None,
    options: Mapping[str, Any] | None = None,
    stages: AskedStages | None = None,
) -> Any:
    """Makes the plan of the first of ``tensor`` ranks for a model that is built here once and thrown away.

    And cuts it into ``stages``, where a pipeline is asked for. Returns the model's config, None without one.

    Raises what sharding raises in every process, in the seconds that the model takes to build. A ``model_fn`` that
    itself fails here is left to the processes: it may need one.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            model = model_fn()
        except ShardFormerError:
            raise
        except Exception:  # told by the workers, with the rank that it happened on
            return None
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model_fn gave a {type(model).__name__}",
            rule="It builds the plain model, a torch.nn.Module, in every process",
            remedy="Return the model",
        )
    check_plain(model)
    ranks = total_of(tensor, "tensor")
    if ranks == 1 and stages is None and policy is None and not options:
        return getattr(model, "config", None)  # nothing is sharded that a policy has to know, or a rank finds it
    # a copy: the one that was given is sent to the workers, without this model in it
    own = policy if isinstance(policy, type) else deepcopy(policy)
    chosen, _ = resolve_policy(model, own, tensor=ranks, copies=stages is not None)
    context, mode = ParallelContext.of({"tensor": ranks}), (options or {}).get("tensor_parallel_mode", "1d")
    context = with_tensor(context, tensor)
    config = ShardConfig(context=with_grid(context, mode) if mode in GRID_MODES else context, **(options or {}))
    plan = checked_plan(model, chosen, config)
    if stages is not None:
        cut_into(plan.model, chosen, stages)
    return getattr(model, "config", None)
