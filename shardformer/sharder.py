"""The way in: a model and a config, and the model is sharded in place, by the policy that the chain finds for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.context import Axis, ParallelContext
from shardformer.errors import ConfigError, nearest
from shardformer.pipeline.chain import Chain, no_chain
from shardformer.policies.registry import resolve_policy
from shardformer.sharding.config import ShardConfig
from shardformer.sharding.costs import measured_costs
from shardformer.sharding.policy import Policy
from shardformer.sharding.sharder import Sharding


class ModelSharder(Sharding):
    """Shards one model in place.

    Args:
        model: the plain model, the same on every rank (where weights differ, rank 0's are taken).
        shard_config: what is asked for. (A policy in its place is taken as the policy.)
        policy: the user's own, as an instance or a class; None takes the one that the chain finds.

    Raises ShardFormerError, on every rank and with the model as it was, when something cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        shard_config: ShardConfig | Policy | type[Policy] | None = None,
        policy: Policy | type[Policy] | None = None,
    ) -> None:
        if policy is None and _is_policy(shard_config):
            shard_config, policy = None, shard_config  # the first form: ModelSharder(model, policy)
        super().__init__(
            model, _checked(shard_config), lambda model, ranks: resolve_policy(model, policy, tensor=ranks)
        )


def _is_policy(thing: Any) -> bool:
    return issubclass(thing, Policy) if isinstance(thing, type) else isinstance(thing, Policy)


def _checked(config: Any) -> ShardConfig:
    if config is not None and not isinstance(config, ShardConfig):
        raise ConfigError(
            f"The config is {config!r:.80}",
            rule="What is asked of the sharder is a ShardConfig",
            remedy="Write ShardConfig(enable_sequence_parallelism=True) and the like, or leave it out",
        )
    return config or ShardConfig()


class Optimized(tuple[nn.Module, list[dict[int, Tensor]]]):
    """(model, shared_params), which can be moved to a device as one."""

    def to(self, *args: Any, **kwargs: Any) -> Optimized:
        """Moves the model as ``nn.Module.to`` does."""
        return Optimized((self[0].to(*args, **kwargs), self[1]))


class ShardFormer:
    """Parallelizes models as one config says.

    >>> shard_former = ShardFormer(ShardConfig(enable_sequence_parallelism=True))          # doctest: +SKIP
    >>> model, shared_params = shard_former.optimize(model)                                # doctest: +SKIP
    """

    def __init__(self, shard_config: ShardConfig | None = None) -> None:
        self.shard_config = _checked(shard_config)

    def optimize(self, model: nn.Module, policy: Policy | type[Policy] | None = None) -> Optimized:
        """Shards ``model`` in place, by ``policy`` or by the one registered for its family.

        Returns (model, shared_params). Raises ShardFormerError on every rank, with the model as it was, when something
        cannot be; LaunchError when no launcher started this process.
        """
        sharder = ModelSharder(model, self.shard_config, policy)
        shared_params = sharder.shard()
        return Optimized((sharder.model, shared_params))


def shard_model(
    model: nn.Module,
    policy: Policy | type[Policy] | None = None,
    *,
    context: ParallelContext | None = None,
    config: ShardConfig | None = None,
    **options: Any,
) -> nn.Module:
    """Shards a model over the processes that were launched: one line in a training script.

    Args:
        model: the plain model.
        policy: the user's own policy; None takes the registered one.
        context: the grid from ``launch_from_torch``; None lets all processes form the tensor axis.
        config: a whole ``ShardConfig``; or give its fields here by name, such as ``enable_sequence_parallelism=True``.

    Returns the same model, sharded. Raises ShardFormerError on every rank, before any training, when something cannot
    be; LaunchError when no launcher started this process.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"The model is {model!r:.80}",
            rule="A model that is built, a torch.nn.Module, is sharded in place",
            remedy="Build it first, for example with transformers' from_pretrained",
        )
    if config is not None and (options or context is not None):
        raise ConfigError(
            "Both config and single options were given",
            rule="The options are fields of the config",
            remedy="Put them all into ShardConfig(...), or leave config out",
        )
    if config is None:
        unknown = [name for name in options if name not in ShardConfig.__dataclass_fields__]
        if unknown:
            raise ConfigError(
                f"There is no option {unknown[0]!r}",
                rule="Options are the fields of ShardConfig",
                remedy=nearest(unknown[0], ShardConfig.__dataclass_fields__),
            )
        config = ShardConfig(context=context, **options)
    return ShardFormer(config).optimize(model, policy)[0]


def measure_costs(
    model: nn.Module,
    batch: Mapping[str, Any],
    policy: Policy | type[Policy] | None = None,
    *,
    rounds: int = 3,
) -> list[float]:
    """What each layer of a plain model costs, in seconds of a forward: for ``PipelineStageManager(costs=...)``.

    In one process, before the model is sharded, with a batch like those it will train on; give what it returns to all
    processes. What stands before and behind the layers counts with the first and the last.
    """
    chosen, _ = resolve_policy(model, policy, tensor=1)
    chosen.set_model(model)
    chosen.set_shard_config(ShardConfig(context=ParallelContext.from_group(Axis("tensor"))))
    chain = Chain(tuple(s for s in chosen.segments() if s.units))
    if not chain.segments:
        raise no_chain(model, "...")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with torch.no_grad():
        return measured_costs(model, chain, lambda: model(**batch), rounds, device)
