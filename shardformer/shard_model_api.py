"""Shard a model in place with ``shard_model``, ``ShardFormer`` or ``ModelSharder``."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn

from shardformer.comm.collective_call import run_and_compare_across_ranks
from shardformer.config import ShardConfig, ShardOptions
from shardformer.consistency.initial_weights import check_ranks_read_same_weight_files
from shardformer.context_parallel.method import choose_context_parallel_sizes, is_context_parallel_method_set
from shardformer.discovery.derive_policy import (
    DerivedPolicy,
    NoShardableLayerError,
    derive_pipeline_only_policy,
    derive_policy,
    make_no_policy_error,
)
from shardformer.discovery.example_inputs import UnknownInputsError, guess_only_argument
from shardformer.discovery.user_policy_validation import check_registered_policy, validate_user_policy
from shardformer.discovery.validation import validate_context_parallel, validate_tensor_grid
from shardformer.errors import ConfigError, PolicyError, get_first_message_line
from shardformer.integrations.peft import PEFT_ENTRY_POINTS, has_adapters, shard_model_with_adapters
from shardformer.layout.packed_weights import find_quantized_weights
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.pipeline.layer_sequence import make_no_pipeline_layers_error, measure_layer_costs
from shardformer.policies.policy import (
    NoShardingPolicy,
    Policy,
    get_registered_policy_and_origin,
    has_user_registered_policy,
)
from shardformer.policies.role_policy import RolePolicy
from shardformer.public_names import deprecate_renamed_function_arguments
from shardformer.random_state import fork_rng
from shardformer.sharding.apply import ResolvedPolicy, Sharder, create_resolved_policy
from shardformer.sharding.checks import check_can_be_sharded, check_no_integer_weights_to_shard, has_user_code_layers
from shardformer.sharding.compiled_layers import compile_model
from shardformer.sharding.describe import sharded_extra_repr
from shardformer.sharding.plan import ShardingPlan
from shardformer.tensor_parallel.quantized_linear import temporarily_replace_quantized_linears
from shardformer.torch_compat import unwrap_compiled_module, without_fake_tensors
from shardformer.torch_patches import call_after_import
from shardformer.weights.save_pretrained import (
    num_parameters,
    raise_load_adapter_error,
    raise_resize_error,
    raise_submodule_save_error,
    save_pretrained,
)
from shardformer.weights.state_dict import load_state_dict

M = TypeVar("M", bound=nn.Module)

Example = Callable[[], Mapping[str, Any] | None]
"""Function that returns a small batch, identical on all ranks, or None."""


def shard_model_in_place(
    model: nn.Module,
    config: ShardConfig,
    policy: Policy | type[Policy] | None = None,
    on_sharded: Callable[[nn.Module], object] = lambda _: None,
    get_example_batch: Example = lambda: None,
) -> tuple[nn.Module, list[dict[int, Tensor]]]:
    """Validate the policy of a model, and shard the model in place.

    Some methods of the model are replaced. Adapters that PEFT added to the model are sharded too. The wrapper of
    ``torch.compile(model)`` is removed, and the layers of the sharded model are compiled with its arguments.

    Args:
        model: the plain model, identical on every rank. If weights differ, rank 0's are used.
        policy: your policy, as an instance or a class. None uses the registered or derived policy.
        on_sharded: called with the sharded model. If it raises, the model is restored.
        get_example_batch: returns a small batch, to derive a policy for a model whose inputs cannot be generated.

    Returns:
        The sharded model, and the parameters that several pipeline stages share (see ``Sharder.shard``).

    Raises:
        ShardFormerError: on every rank, if the model cannot be sharded. The model is unchanged.
    """
    model, compiler = unwrap_compiled_module(model)
    shard = partial(_shard_without_adapters, config=config, policy=policy, example=get_example_batch, compiler=compiler)
    if "peft" in sys.modules and has_adapters(model):
        return shard_model_with_adapters(model, shard, on_sharded)
    return shard(model, finish=on_sharded)


def _shard_without_adapters(
    model: nn.Module,
    *,
    config: ShardConfig,
    policy: Policy | type[Policy] | None,
    example: Example,
    finish: Callable[[nn.Module], object],
    compiler: Mapping[str, Any],
) -> tuple[nn.Module, list[dict[int, Tensor]]]:
    sharder = Sharder(model, config, wrapper_options=compiler)

    def make_plan() -> ShardingPlan:
        check_can_be_sharded(model)
        check_no_integer_weights_to_shard(model, sharder.context.sizes)
        with temporarily_replace_quantized_linears(model) if find_quantized_weights(model) else nullcontext():
            resolved = _resolve_and_bind_policy(sharder, policy, example)
            if resolved.source != NO_POLICY:
                _validate_policy_for_layout(
                    sharder, resolved, is_user_policy=policy is not None or has_user_registered_policy(model)
                )
        return sharder.finalize_sharding_plan(resolved)

    with sharder.restore_model_on_error():
        explain = partial(check_ranks_read_same_weight_files, model, sharder.context)
        shared_params = sharder.shard_in_place(
            run_and_compare_across_ranks(
                sharder.context, make_plan, sharder.get_lines_to_compare_across_ranks, on_mismatch=explain
            )
        )
        _install_method_overrides(sharder.model)
        call_after_import(*PEFT_ENTRY_POINTS)
        if hasattr(sharder.model, "save_pretrained"):
            sharder.state.notes.append("save_pretrained writes full weights. resize_token_embeddings is not supported.")
        finish(sharder.model)
    return sharder.model, shared_params


METHODS: Mapping[str, Callable[..., Any]] = {
    "load_state_dict": load_state_dict,
    "save_pretrained": save_pretrained,
    "num_parameters": num_parameters,
    "extra_repr": sharded_extra_repr,
    "compile": compile_model,
}
"""Methods of a sharded model that replace those of its class. They read and write full weights."""
METHODS_OF_MODULES: Mapping[str, Callable[..., Any]] = {
    "save_pretrained": raise_submodule_save_error,
    "resize_token_embeddings": raise_resize_error,
    "load_adapter": raise_load_adapter_error,
}
"""Methods that raise ConfigError, on every module that has them."""


def _install_method_overrides(model: nn.Module) -> None:
    for module in model.modules():
        methods = {**METHODS_OF_MODULES, **METHODS} if module is model else METHODS_OF_MODULES
        for name, method in methods.items():
            if hasattr(module, name):
                module.__dict__[name] = method.__get__(module)


NO_POLICY, DERIVED = "no policy", "a derived and validated policy"


def _resolve_and_bind_policy(
    sharder: Sharder, policy: Policy | type[Policy] | None, get_example_batch: Example
) -> ResolvedPolicy:
    """Find the policy of a model, and create the sharding plan.

    Returns a policy without rules if none is found and only data parallelism is used.
    """
    applies_rules = sharder.is_tensor_parallel or policy is not None
    is_needed = sharder.needs_policy or policy is not None
    try:
        size = sharder.context.tensor.size
        batch = get_example_batch if is_needed else lambda: None
        found = resolve_policy_and_origin(
            sharder.model, policy, tp_size=size, allow_model_copy=is_needed, get_example_batch=batch
        )
        return create_resolved_policy(sharder, *found, apply_sharding_rules=applies_rules)
    except Exception as error:  # a family's policy can fail in any way on a model that the user changed
        if is_needed:
            raise
        notes = [f"The model has no policy. Data parallelism needs none. {get_first_message_line(error)}"]
        return create_resolved_policy(sharder, NoShardingPolicy(), NO_POLICY, notes=notes)


def _validate_policy_for_layout(sharder: Sharder, resolved_policy: ResolvedPolicy, *, is_user_policy: bool) -> None:
    """Check on a small copy of the model that the policy works with the parallel layout.

    Raises PolicyError if the user's policy is wrong, ConfigError if the model does not support the layout.
    """
    model, config, context, policy = sharder.model, sharder.config, sharder.context, resolved_policy.policy
    if sharder.is_tensor_parallel and sharder.grid is None and is_user_policy:
        why_not = validate_user_policy(resolved_policy.plan, policy, context.tensor.size)
        resolved_policy.notes = [why_not] if why_not else []
    if sharder.grid is not None:
        found = validate_tensor_grid(model, policy, sharder.grid)
        if found.failure is not None:
            raise ConfigError(
                f"{type(model).__name__} does not support tensor_parallel_mode={sharder.grid.mode!r}: {found.failure}.",
                remedy="Use tensor_parallel_mode='1d' or another mode for this model.",
            )
        resolved_policy.samples, resolved_policy.unvalidated = found.sample_dims, found.unvalidated_inputs
    if config.has_context_parallel:
        way = config.context_parallel
        sizes, allow_full_attention = (
            choose_context_parallel_sizes(model, context, way),
            not is_context_parallel_method_set(context, way),
        )
        with without_fake_tensors():
            learned = validate_context_parallel(model, policy, sizes, allow_full_attention=allow_full_attention)
        if learned.failure is not None:
            raise ConfigError(
                f"{type(model).__name__} does not support context parallelism with sequence={context.sequence.size}: "
                f"{learned.failure}.",
                remedy="Remove the sequence axis, or use tensor parallelism with enable_sequence_parallelism=True.",
            )
        resolved_policy.context = learned.findings


class ModelSharder:
    """Legacy interface for sharding one model in place. Use ``shard_model`` in new code.

    Args:
        model: the plain model, identical on every rank. If weights differ, rank 0's are used.
        shard_config: the configuration, or a policy, as in the legacy signature ``ModelSharder(model, policy)``.
        policy: your policy, as an instance or a class. None uses the registered or derived policy.
    """

    def __init__(
        self,
        model: nn.Module,
        shard_config: ShardConfig | Policy | type[Policy] | None = None,
        policy: Policy | type[Policy] | None = None,
    ) -> None:
        if policy is None and _is_policy_or_policy_class(shard_config):
            shard_config, policy = None, shard_config  # legacy signature: ModelSharder(model, policy)
        self.model, self.shard_config, self._policy = model, _resolve_shard_config(shard_config), policy

    def shard(self) -> list[dict[int, Tensor]]:
        """Shard the model in place, and return the parameters shared by several pipeline stages."""
        self.model, shared_params = shard_model_in_place(self.model, self.shard_config, self._policy)
        return shared_params


def _is_policy_or_policy_class(candidate: Any) -> bool:
    return issubclass(candidate, Policy) if isinstance(candidate, type) else isinstance(candidate, Policy)


def _resolve_shard_config(config: Any) -> ShardConfig:
    if config is not None and not isinstance(config, ShardConfig):
        raise ConfigError(
            f"config must be a ShardConfig, but got {config!r:.80}.",
            remedy="Pass an instance, such as ShardConfig(enable_sequence_parallelism=True), or omit the argument.",
        )
    return config or ShardConfig()


class ShardedModelAndSharedParams(tuple[nn.Module, list[dict[int, Tensor]]]):
    """Result of ``ShardFormer.optimize``: the tuple (model, shared_params)."""

    def to(self, *args: Any, **kwargs: Any) -> ShardedModelAndSharedParams:
        """Move the model to another device or dtype, like ``nn.Module.to``."""
        return ShardedModelAndSharedParams((self[0].to(*args, **kwargs), self[1]))


class ShardFormer:
    """Shards models in place. By default, all processes are tensor parallel ranks.

    Pass a ``ShardConfig`` for another layout.

    >>> shard_former = ShardFormer(ShardConfig(enable_sequence_parallelism=True))          # doctest: +SKIP
    >>> model, shared_params = shard_former.optimize(model)                                # doctest: +SKIP
    """

    def __init__(self, shard_config: ShardConfig | None = None) -> None:
        self.shard_config = _resolve_shard_config(shard_config)

    def optimize(self, model: nn.Module, policy: Policy | type[Policy] | None = None) -> ShardedModelAndSharedParams:
        """Shard ``model`` in place with a policy, by default the policy registered for its model family.

        Returns:
            (model, shared_params).

        Raises:
            ShardFormerError: on every rank, if the model cannot be sharded. The model is unchanged.
            LaunchError: if no launcher started this process.
        """
        return ShardedModelAndSharedParams(shard_model_in_place(model, self.shard_config, policy))


def shard_model(
    model: M,
    policy: Policy | type[Policy] | None = None,
    *,
    context: ParallelContext | None = None,
    config: ShardConfig | None = None,
    **options: Unpack[ShardOptions],
) -> M:
    """Shard a model in place. By default, all processes are tensor parallel ranks.

    ``loss.backward()`` averages the gradients over the data parallel ranks, because only your loop knows how many
    labels its loss counts. If their number differs between ranks, call ``Pipeline(model, 1).step(batch)`` instead,
    which averages over labels.

    Args:
        model: the plain model. For ``torch.compile(model)``, the layers of the sharded model are compiled.
        policy: your policy. None uses the policy registered for the model's family, or derives one.
        context: the process grid from ``launch_from_torch``.
        config: a full ``ShardConfig``. Alternatively pass its fields by name, such as
            ``enable_sequence_parallelism=True``.

    Returns:
        The same model object, sharded, without a wrapper of ``torch.compile``.

    Raises:
        ShardFormerError: on every rank, before training starts, if the model cannot be sharded.
        LaunchError: if no launcher started this process.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module, but got {model!r:.80}.",
            remedy="Build the model first, for example with from_pretrained() of transformers.",
        )
    if config is not None and (options or context is not None):
        names = ", ".join(options) or "context"
        raise ConfigError(
            f"shard_model received both config and {names}.", remedy=f"Pass {names} in the ShardConfig, or omit config."
        )
    config = config or ShardConfig.from_options({"context": context, **options})
    return cast(M, shard_model_in_place(model, _resolve_shard_config(config), policy)[0])


@deprecate_renamed_function_arguments({"rounds": "repeats"})
def measure_pipeline_costs(
    model: nn.Module,
    batch: Mapping[str, Any],
    policy: Policy | type[Policy] | None = None,
    *,
    repeats: int = 3,
) -> list[float]:
    """Measure the forward time of each layer in seconds, to balance pipeline stages.

    Pass the result as ``PipelineStageManager(layer_costs=...)``.
    Run this in one process before sharding, and pass the result to all processes. The first and last entries include
    the modules before and after the layers. The model keeps its training mode, buffers and random state.

    Args:
        model: the plain model.
        batch: keyword arguments of `forward`, with the shapes used in training.
        policy: your policy. None uses the registered or derived policy.
        repeats: number of timed forward passes.
    """
    chosen, _ = resolve_policy_and_origin(model, policy, tp_size=1)
    chosen.set_model(model)
    chosen.set_shard_config(ShardConfig(context=ParallelContext.from_group(Axis("tensor"))))
    chain = chosen.layer_sequence()
    if not chain.stacks:
        raise make_no_pipeline_layers_error(model, "...")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.no_grad(), fork_rng(device):
        try:
            return measure_layer_costs(model, chain, lambda: model(**batch), repeats, device)
        finally:  # a forward pass in training mode updates buffers, such as the averages of a BatchNorm
            for buffer, before in buffers:
                buffer.copy_(before)


def resolve_policy_and_origin(
    model: nn.Module,
    policy: Policy | type[Policy] | None,
    *,
    tp_size: int | None = None,
    allow_model_copy: bool = False,
    get_example_batch: Example = lambda: None,
) -> tuple[Policy, str]:
    """Find the policy for sharding a model, and describe its origin for messages.

    Args:
        tp_size: the tensor parallel size, if known. With size 1 every model has a policy.
        allow_model_copy: whether the layers of a user-defined module may be found by running a copy of it.
        get_example_batch: returns a small batch, which is used if the model cannot be run with generated inputs.

    Raises PolicyError for a model of an unknown family.
    """
    if policy is not None:
        if not _is_policy_or_policy_class(policy):
            raise PolicyError(
                f"policy must be an instance or subclass of shardformer.policies.Policy, but got {policy!r:.80}.",
                remedy="Pass the ShardConfig in the argument config"
                if isinstance(policy, ShardConfig)
                else "Derive your class from shardformer.policies.Policy or shardformer.policies.RolePolicy",
            )
        chosen = policy() if isinstance(policy, type) else policy
        chosen.find_submodel_policy = _find_submodel_policy
        is_derived = isinstance(chosen, DerivedPolicy)
        return chosen, DERIVED if is_derived else f"the user's policy {type(chosen).__name__}"
    if (known := get_registered_policy_and_origin(model)) is not None and not _is_submodel_policy(model, known[0]):
        known[0].find_submodel_policy = _find_submodel_policy
        if tp_size not in (None, 1) and not has_user_registered_policy(model) and has_user_code_layers(model, known[0]):
            check_registered_policy(model, known[0])
        return known
    try:
        with without_fake_tensors():  # the policy is derived on a reduced model
            derived = _derive_policy(model, get_example_batch, allow_guessed_inputs=tp_size != 1)
        if tp_size == 1 and derived.no_pipeline:
            stacks_only = derive_pipeline_only_policy(model)
            derived = stacks_only if stacks_only.stack and not stacks_only.no_pipeline else derived
        return derived, DERIVED
    except PolicyError as error:
        if tp_size == 1:
            return derive_pipeline_only_policy(model, allow_model_copy=allow_model_copy), "the order of its layers"
        problem = error
    raise make_no_policy_error(model, problem, tp_size)


def _derive_policy(model: nn.Module, get_example_batch: Example, *, allow_guessed_inputs: bool) -> RolePolicy:
    try:
        return derive_policy(model)
    except NoShardableLayerError:
        raise
    except PolicyError as error:
        if (batch := get_example_batch()) is not None:
            return derive_policy(model, batch)
        is_guessed = allow_guessed_inputs and isinstance(error, UnknownInputsError)
        for guess in guess_only_argument(model) if is_guessed else []:
            try:
                return derive_policy(model, guess)
            except NoShardableLayerError:  # the model accepts the guess, so it is not the reason
                raise
            except PolicyError:
                continue
        raise


def _is_submodel_policy(model: nn.Module, policy: Policy) -> bool:
    """Return whether a policy fits a transformers model inside ``model`` but not ``model`` itself."""
    config, library = getattr(model, "config", None), type(model).__module__.partition(".")[0]
    has_submodel = any(module is not model and getattr(module, "config", None) is config for module in model.modules())
    if not has_submodel or has_user_registered_policy(model) or library in ("transformers", "timm"):
        return False
    try:
        own = copy.copy(policy)
        own.find_submodel_policy = _find_submodel_policy
        own.set_model(model)
        own.stacks()
    except PolicyError:
        return True
    return False


def _find_submodel_policy(submodel: nn.Module) -> Policy:
    return resolve_policy_and_origin(submodel, None)[0]
