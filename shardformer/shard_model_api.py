"""The way in: a model and a config, and the model is sharded in place, by the policy that the chain finds for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.config import ShardConfig
from shardformer.discovery.derive_policy import derive_layer_stacks, derive_policy, no_policy_error
from shardformer.discovery.user_policy_validation import check_registered_policy, validate_user_policy
from shardformer.discovery.validation import validate_context_parallel, validate_tensor_grid
from shardformer.errors import ConfigError, PolicyError
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.pipeline.layer_sequence import measure_layer_costs, no_layers_error
from shardformer.policies.policy import Policy
from shardformer.policies.registry import is_user_registered, registered_policy
from shardformer.random_state import fork_random_state
from shardformer.sharding.apply import Sharder
from shardformer.torch_compat import without_fake_tensors
from shardformer.weights.save_pretrained import install_saving
from shardformer.weights.state_dict import install_loading


class ModelSharder(Sharder):
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

        def find(model: nn.Module, tensor: int) -> tuple[Policy, str]:
            return resolve_policy(model, policy, tensor=tensor, copies=self.needs_policy)

        given = validate_user_policy if policy is not None or is_user_registered(model) else None
        super().__init__(
            model, _checked(shard_config), find,
            prove=validate_context_parallel, prove_policy=given, prove_grid=validate_tensor_grid,
            optional=policy is None,
        )  # fmt: skip

    def shard(self, then: Callable[[nn.Module], object] = lambda _: None) -> list[dict[int, Tensor]]:
        """Shards the model, and installs the saving and loading of its whole weights. Arguments: see ``Sharder``."""

        def finish(model: nn.Module) -> None:
            install_saving(model, self._state)
            install_loading(model)
            then(model)

        return super().shard(finish)


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


class ShardedModel(tuple[nn.Module, list[dict[int, Tensor]]]):
    """(model, shared_params), which can be moved to a device as one."""

    def to(self, *args: Any, **kwargs: Any) -> ShardedModel:
        """Moves the model as ``nn.Module.to`` does."""
        return ShardedModel((self[0].to(*args, **kwargs), self[1]))


class ShardFormer:
    """Shards models as a ``ShardConfig`` says; without a context in it, all processes are tensor parallel ranks.

    >>> shard_former = ShardFormer(ShardConfig(enable_sequence_parallelism=True))          # doctest: +SKIP
    >>> model, shared_params = shard_former.optimize(model)                                # doctest: +SKIP
    """

    def __init__(self, shard_config: ShardConfig | None = None) -> None:
        self.shard_config = _checked(shard_config)

    def optimize(self, model: nn.Module, policy: Policy | type[Policy] | None = None) -> ShardedModel:
        """Shards ``model`` in place, by ``policy`` or by the one registered for its family.

        Returns (model, shared_params). Raises ShardFormerError on every rank, with the model as it was, when something
        cannot be; LaunchError when no launcher started this process.
        """
        sharder = ModelSharder(model, self.shard_config, policy)
        shared_params = sharder.shard()
        return ShardedModel((sharder.model, shared_params))


def shard_model(
    model: nn.Module,
    policy: Policy | type[Policy] | None = None,
    *,
    context: ParallelContext | None = None,
    config: ShardConfig | None = None,
    **options: Any,
) -> nn.Module:
    """Shards a model over the processes that were launched; without a context, all are tensor parallel ranks.

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
    return ShardFormer(config or ShardConfig.of({"context": context, **options})).optimize(model, policy)[0]


def measure_pipeline_costs(
    model: nn.Module,
    batch: Mapping[str, Any],
    policy: Policy | type[Policy] | None = None,
    *,
    rounds: int = 3,
) -> list[float]:
    """What each layer of a plain model costs, in seconds of a forward: for ``PipelineStageManager(layer_costs=...)``.

    In one process, before the model is sharded, with a batch like those it will train on; give what it returns to all
    processes. What stands before and behind the layers counts with the first and the last. The model runs in the mode
    that it is in; its buffers and the random states are as before afterwards.
    """
    chosen, _ = resolve_policy(model, policy, tensor=1)
    chosen.set_model(model)
    chosen.set_shard_config(ShardConfig(context=ParallelContext.from_group(Axis("tensor"))))
    chain = chosen.chain()
    if not chain.stacks:
        raise no_layers_error(model, "...")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.no_grad(), fork_random_state(device):
        try:
            return measure_layer_costs(model, chain, lambda: model(**batch), rounds, device)
        finally:  # what a forward in train mode wrote, such as the averages of a BatchNorm
            for buffer, before in buffers:
                buffer.copy_(before)


def resolve_policy(
    model: nn.Module, policy: Policy | type[Policy] | None, *, tensor: int | None = None, copies: bool = False
) -> tuple[Policy, str]:
    """The policy for ``model`` and the link of the chain that gave it.

    Args:
        tensor: over how many ranks matrices will be cut, where that is known. Over one every model has a policy.
        copies: whether the layers of a module of the user's own may be found on a copy of it.

    Raises PolicyError for a model of an unknown family, with what to write.
    """
    if policy is not None:
        if not (issubclass(policy, Policy) if isinstance(policy, type) else isinstance(policy, Policy)):
            raise PolicyError(
                f"policy={policy!r:.80}",
                rule="A policy is an instance or a subclass of shardformer.policies.Policy",
                remedy="Write config=... for a ShardConfig"
                if isinstance(policy, ShardConfig)
                else "Derive the class from shardformer.policies.Policy or shardformer.policies.RolePolicy",
            )
        chosen = policy() if isinstance(policy, type) else policy
        chosen.find_part = _policy_of_part
        return chosen, f"the user's policy {type(chosen).__name__}"
    if (known := registered_policy(model)) is not None and not _is_about_a_part(model, known[0]):
        known[0].find_part = _policy_of_part
        if tensor not in (None, 1) and not is_user_registered(model):
            check_registered_policy(model, known[0])
        return known
    try:
        with without_fake_tensors():  # a policy is found on a small model
            inferred = derive_policy(model)
        if tensor == 1 and inferred.against_pipeline:
            uncut = derive_layer_stacks(model)
            inferred = uncut if uncut.stack and not uncut.against_pipeline else inferred
        return inferred, "a policy that was inferred and proven"
    except PolicyError as error:
        if tensor == 1:
            return derive_layer_stacks(model, copies=copies), "the order of its layers"
        problem = error
    raise no_policy_error(model, problem, tensor)


def _is_about_a_part(model: nn.Module, policy: Policy) -> bool:
    """Whether a module of the user's own has the config of a model that it holds, under a name that is not known."""
    config = getattr(model, "config", None)
    holds = any(module is not model and getattr(module, "config", None) is config for module in model.modules())
    if is_user_registered(model) or not holds or type(model).__module__.partition(".")[0] in ("transformers", "timm"):
        return False
    try:
        own = copy.copy(policy)
        own.find_part = _policy_of_part
        own.set_model(model)
        own.stacks()
    except PolicyError:
        return True
    return False


def _policy_of_part(model: nn.Module) -> Policy:
    return resolve_policy(model, None)[0]
