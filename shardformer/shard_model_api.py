"""The way in: a model and a config, and the model is sharded in place, by the policy that the chain finds for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collective_call import collective_call
from shardformer.config import ShardConfig
from shardformer.consistency.initial_weights import check_same_files
from shardformer.discovery.derive_policy import derive_layer_stacks, derive_policy, no_policy_error
from shardformer.discovery.user_policy_validation import check_registered_policy, validate_user_policy
from shardformer.discovery.validation import validate_context_parallel, validate_tensor_grid
from shardformer.errors import ConfigError, PolicyError, first_line
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.pipeline.layer_sequence import measure_layer_costs, no_layers_error
from shardformer.policies.policy import Policy, WithoutRules
from shardformer.policies.registry import is_user_registered, registered_policy
from shardformer.public_names import renamed_parameters
from shardformer.random_state import fork_random_state
from shardformer.sharding.apply import ResolvedPolicy, Sharder, resolve_as
from shardformer.sharding.apply_context_parallel import choose_ring_sizes, is_explicit
from shardformer.sharding.checks import check_unsharded
from shardformer.sharding.plan import ShardingPlan
from shardformer.torch_compat import without_fake_tensors
from shardformer.weights.save_pretrained import install_saving
from shardformer.weights.state_dict import install_loading


def shard_in_place(
    model: nn.Module,
    config: ShardConfig,
    policy: Policy | type[Policy] | None = None,
    then: Callable[[nn.Module], object] = lambda _: None,
) -> tuple[nn.Module, list[dict[int, Tensor]]]:
    """Shards a model: resolve its policy, validate it, apply it on all ranks, and install saving and loading.

    Args:
        model: the plain model, the same on every rank (where weights differ, rank 0's are taken).
        policy: the user's own, as an instance or a class; None takes the one that is registered or derived.
        then: called with the sharded model. Where it raises, the model is restored, too.

    Returns (the sharded model, the parameters that several pipeline stages hold: see ``Sharder.shard``). Raises
    ShardFormerError on every rank, with the model as it was, if the model cannot be sharded so.
    """
    sharder = Sharder(model, config)

    def plan() -> ShardingPlan:
        check_unsharded(model)
        resolved = _resolve(sharder, policy)
        if resolved.source != NO_POLICY:
            _validate(sharder, resolved, is_users=policy is not None or is_user_registered(model))
        return sharder.plan(resolved)

    with sharder.restoring_on_error():
        explain = partial(check_same_files, model, sharder.context)
        shared_params = sharder.shard(collective_call(sharder.context, plan, sharder.lines, explain=explain))
        install_saving(sharder.model, sharder.state)
        install_loading(sharder.model)
        then(sharder.model)
    return sharder.model, shared_params


NO_POLICY = "no policy"


def _resolve(sharder: Sharder, policy: Policy | type[Policy] | None) -> ResolvedPolicy:
    """The policy of a model and what it does; a policy without rules where none is found and none is needed."""
    cuts = sharder.is_cut or policy is not None
    is_needed = sharder.needs_policy or policy is not None
    try:
        tensor = sharder.context.tensor.size
        return resolve_as(sharder, *resolve_policy(sharder.model, policy, tensor=tensor, copies=is_needed), cuts=cuts)
    except Exception as error:  # the policy of a family, and a model that its user changed: anything can fail
        if is_needed:
            raise
        note = f"The model has no policy, and needs none over data ranks: {first_line(error)}"
        return resolve_as(sharder, WithoutRules(), NO_POLICY, notes=[note])


def _validate(sharder: Sharder, resolved: ResolvedPolicy, *, is_users: bool) -> None:
    """Validates the policy and the layout on a reduced model, and notes what is learned.

    Raises PolicyError for a policy of the user's that is wrong, ConfigError for a layout that the model cannot have.
    """
    model, config, context, policy = sharder.model, sharder.config, sharder.context, resolved.policy
    if sharder.is_cut and sharder.grid is None and is_users:
        why_not = validate_user_policy(resolved.plan, policy, context.tensor.size)
        resolved.notes = [why_not] if why_not else []
    if sharder.grid is not None:
        found = validate_tensor_grid(model, policy, sharder.grid)
        if found.against is not None:
            raise ConfigError(
                f"tensor_parallel_mode={sharder.grid.mode!r} for {type(model).__name__}: {found.against}",
                rule="A small copy of the model has to give the same results over the grid as in one process",
                remedy="Use tensor_parallel_mode='1d' for this model, or another of the modes",
            )
        resolved.samples, resolved.unvalidated = found.samples, found.unproven
    if config.uses_context_parallel:
        way = config.context_parallel
        sizes, may_be_whole = choose_ring_sizes(model, context, way), not is_explicit(context, way)
        with without_fake_tensors():
            learned = validate_context_parallel(model, policy, sizes, may_be_whole=may_be_whole)
        if learned.against is not None:
            raise ConfigError(
                f"sequence={context.sequence.size} for {type(model).__name__}: {learned.against}",
                rule="A small copy of the model has to give the same results with a sharded sequence as in one process",
                remedy="Leave the sequence axis out for this model: enable_sequence_parallelism shards the sequence "
                "between the blocks of tensor parallelism",
            )
        resolved.context = learned.learned


class ModelSharder:
    """Shards one model in place: the class of the first API for ``shard_model``.

    Args:
        model: the plain model, the same on every rank (where weights differ, rank 0's are taken).
        shard_config: the configuration. (A policy in its place is taken as the policy.)
        policy: the user's own, as an instance or a class; None takes the one that is registered or derived.
    """

    def __init__(
        self,
        model: nn.Module,
        shard_config: ShardConfig | Policy | type[Policy] | None = None,
        policy: Policy | type[Policy] | None = None,
    ) -> None:
        if policy is None and _is_policy(shard_config):
            shard_config, policy = None, shard_config  # the first form: ModelSharder(model, policy)
        self.model, self.shard_config, self._policy = model, _checked(shard_config), policy

    def shard(self) -> list[dict[int, Tensor]]:
        """Shards the model, and returns the parameters that several pipeline stages hold: see ``Sharder.shard``."""
        self.model, shared_params = shard_in_place(self.model, self.shard_config, self._policy)
        return shared_params


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
        return ShardedModel(shard_in_place(model, self.shard_config, policy))


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
    config = config or ShardConfig.of({"context": context, **options})
    return shard_in_place(model, _checked(config), policy)[0]


@renamed_parameters({"rounds": "repeats"})
def measure_pipeline_costs(
    model: nn.Module,
    batch: Mapping[str, Any],
    policy: Policy | type[Policy] | None = None,
    *,
    repeats: int = 3,
) -> list[float]:
    """What each layer of a plain model costs, in seconds of a forward: for ``PipelineStageManager(layer_costs=...)``.

    In one process, before the model is sharded, with a batch like those it will train on; give what it returns to all
    processes. What stands before and behind the layers counts with the first and the last. The model runs in the mode
    that it is in; its buffers and the random states are as before afterwards.
    """
    chosen, _ = resolve_policy(model, policy, tensor=1)
    chosen.set_model(model)
    chosen.set_shard_config(ShardConfig(context=ParallelContext.from_group(Axis("tensor"))))
    chain = chosen.layer_sequence()
    if not chain.stacks:
        raise no_layers_error(model, "...")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.no_grad(), fork_random_state(device):
        try:
            return measure_layer_costs(model, chain, lambda: model(**batch), repeats, device)
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
        chosen.find_submodel_policy = _policy_of_part
        return chosen, f"the user's policy {type(chosen).__name__}"
    if (known := registered_policy(model)) is not None and not _is_about_a_part(model, known[0]):
        known[0].find_submodel_policy = _policy_of_part
        if tensor not in (None, 1) and not is_user_registered(model):
            check_registered_policy(model, known[0])
        return known
    try:
        with without_fake_tensors():  # a policy is found on a small model
            inferred = derive_policy(model)
        if tensor == 1 and inferred.no_pipeline:
            uncut = derive_layer_stacks(model)
            inferred = uncut if uncut.stack and not uncut.no_pipeline else inferred
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
        own.find_submodel_policy = _policy_of_part
        own.set_model(model)
        own.stacks()
    except PolicyError:
        return True
    return False


def _policy_of_part(model: nn.Module) -> Policy:
    return resolve_policy(model, None)[0]
