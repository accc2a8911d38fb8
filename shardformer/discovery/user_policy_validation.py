"""Validates policies that users write, and registered policies of models that contain user code.

A copy of the model is sharded and trained before the model itself is sharded.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.config import ShardConfig
from shardformer.consistency.initial_weights import compute_model_fingerprint
from shardformer.discovery import reduced_model, validation
from shardformer.discovery.derive_policy import DerivedPolicy
from shardformer.discovery.example_inputs import iter_inputs_for_known_arguments
from shardformer.discovery.forward_trace import TRACE_LOCK, trace_forward
from shardformer.discovery.reduced_model import RELATIVE, ReducedModel, copy_with_shared_weights
from shardformer.discovery.shrink_config import SMALL_NUMEL, get_layer_kind
from shardformer.discovery.validation import TrainingMismatchError, get_layer_stacks, validate_policy
from shardformer.errors import PolicyError, ShardFormerError
from shardformer.layout.sharding_metadata import max_abs_difference
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.module_paths import as_path_list, get_attribute_by_path_or_none, join_path, match_paths
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, Experts, Role
from shardformer.sharding.apply import shard_for_validation
from shardformer.sharding.checks import iter_user_code_modules
from shardformer.sharding.plan import ShardingPlan
from shardformer.torch_compat import TorchDispatchMode, tree_leaves

OF_DESCRIPTIONS = (
    "A row-parallel linear layer reads the sharded output of a column-parallel one, so shard both or neither. Set "
    "attribute_replacement for attributes that the model reads and that differ between ranks, such as head counts."
)
OF_VOCABULARY = (
    "List the token embedding in `embeddings`, the layer that computes the logits in `head`, and other large modules, "
    "such as position embeddings, in `keep_replicated`."
)
OF_MLP = (
    "List the layers that read the input in `up`, the last layer in `down`, and a norm between them in `norm`. An MLP "
    "with a module that mixes features between them cannot be sharded."
)
OF_EXPERTS = "List the weights that read the input in `up` and the last one in `down`, and set `fused` and `dims`."


def suggest_policy_fix(
    policy: Policy, role: Role | str | None, reduced: ReducedModel, failing_module_path: str | None
) -> str:
    """Suggest how to correct a policy whose sharded model computes different results."""
    if isinstance(role, Attention) and isinstance(policy, RolePolicy):
        heads = role.num_heads or policy.num_heads
        unlisted = _describe_missing_local_attrs(policy, role, reduced)
        return (
            "Pass the linear layers that read the input as q, k and v, or as qkv, and the last one as out. Check that "
            f"num_heads={heads!r} is the head count of the forward pass, and list attributes that differ per rank in "
            "local_attrs"
            + (f". The forward pass reads {unlisted}, which local_attrs does not list" if unlisted else "")
            + "."
        )
    if isinstance(role, MLP):
        return OF_MLP
    if isinstance(role, Experts):
        return OF_EXPERTS
    if isinstance(role, str):
        return OF_VOCABULARY
    if isinstance(policy, RolePolicy):
        return "Each role passes validation alone. Look for a module that two roles share."
    return (f"Check {failing_module_path}. " if failing_module_path else "") + OF_DESCRIPTIONS


def _describe_missing_local_attrs(policy: RolePolicy, role: Attention, reduced: ReducedModel) -> str:
    """List attributes that are probably head counts of an attention module but are missing in ``local_attrs``."""
    numbers = trace_forward(reduced.model, reduced.forward_fn).accessed_int_attributes
    names = [name for name, _ in reduced.model.named_modules()]
    policy.set_model(reduced.model)
    heads = role.num_heads or policy.num_heads
    for stack in get_layer_stacks(policy):
        paths = match_paths(join_path(policy.base, stack.layers, "*", role.at), names) if role in stack.blocks else []
        for path in paths[:1]:
            is_attribute = str(heads).startswith(".")
            owner = reduced.model.get_submodule(path) if is_attribute else getattr(reduced.model, "config", None)
            count = get_attribute_by_path_or_none(owner, heads.removeprefix(".")) if isinstance(heads, str) else heads
            read = {n: v for n, v in numbers.get(path, {}).items() if n not in role.local_attrs and n != "layer_idx"}
            return ", ".join(f"{name}={value}" for name, value in read.items() if value == count)
    return ""


TRIAL_RANKS = 2


def check_registered_policy(model: nn.Module, policy: Policy) -> None:
    """Validate a registered policy on a small version of the model if the model's layers contain user code.

    If validation with sequence parallelism fails, this sets ``policy.no_sequence_parallel``. A model that runs only
    library code is not validated. No communication.

    Raises:
        PolicyError: if validation fails.
    """
    copied = copy.copy(policy)
    copied.set_model(model)
    layers = [stack.layers for stack in copied.stacks()]
    user_modules = dict(iter_user_code_modules(model, layers))
    if not user_modules:
        return
    path, module = next(iter(user_modules.items()))
    failure, sequence_failure = _validate_registered_policy(model, type(policy), layers, user_modules)
    if isinstance(policy, RolePolicy) and sequence_failure is not None:
        why = f"with the code of {path} ({type(module).__name__}), {sequence_failure}"
        policy.no_sequence_parallel = policy.no_sequence_parallel or why
    if failure is not None:
        raise PolicyError(
            f"The registered {type(policy).__name__} does not match your code in {path} ({type(module).__name__}): "
            f"{failure}.",
            remedy="Pass policy=shardformer.derive_policy(model), or write a policy for your code (docs/policies.md).",
        )


def _validate_registered_policy(
    model: nn.Module, policy_cls: type[Policy], layer_list_paths: list[str], user_code_modules: dict[str, nn.Module]
) -> tuple[str | None, str | None]:
    """Validate a policy without and with sequence parallelism, and return each failure or None."""
    try:
        reduced = reduced_model.reduce_model(model)
        copy_user_code(reduced.model, user_code_modules)
        lacks = _describe_user_code(user_code_modules) - _describe_user_code(
            dict(iter_user_code_modules(reduced.model, layer_list_paths))
        )
        if lacks:
            return f"no reduced model can be built that contains {', '.join(sorted(lacks))}", None
        reference = reduced.compute_reference_gradients()
    except PolicyError as error:
        return error.what, None
    except Exception as error:
        return f"the reduced model does not run ({type(error).__name__}: {str(error)[:120]})", None
    if (failure := validate_policy(reference, policy_cls, TRIAL_RANKS)) is not None:
        return failure, None
    reference = reduced.add_long_batch(reference)
    return None, validate_policy(reference, policy_cls, TRIAL_RANKS, enable_sequence_parallelism=True)


def copy_user_code(reduced: nn.Module, user_code_modules: dict[str, nn.Module]) -> None:
    """Copy the user's replacements of classes and `forward` methods from a model to its small version."""
    copied = dict(reduced.named_modules())
    for path, module in user_code_modules.items():
        other = copied.get(path)
        if other is None:
            continue
        if type(other) is not type(module) and issubclass(type(module), type(other)):
            other.__class__ = type(module)
        method = vars(module).get("forward")
        if "forward" not in vars(other) and inspect.ismethod(method) and method.__self__ is module:
            other.__dict__["forward"] = MethodType(method.__func__, other)


def _describe_user_code(user_code_modules: dict[str, nn.Module]) -> set[str]:
    """Describe each module with user code by its class and the function that replaced `forward`."""
    return {
        f"the {type(m).__name__}" + (f" with {vars(m)['forward'].__qualname__}" if "forward" in vars(m) else "")
        for m in user_code_modules.values()
        if "forward" not in vars(m) or hasattr(vars(m)["forward"], "__qualname__")
    }


POLICY_HOOKS = ("preprocess", "postprocess", "inject_policy", "binding_policy")
"""Methods of a policy that may change the model intentionally."""
RULE = "With a correct policy, a sharded copy of the model computes the same outputs and gradients"
MAX_TRIAL_RANKS = 4  # largest number of ranks for a reduced model, which has six heads
MAX_TRIAL_NUMEL = 100_000_000
"""Largest number of parameters over all ranks. Validation of more would take longer than a few seconds."""


@dataclass(frozen=True)
class PolicyValidationFailure:
    """Reason why a policy failed validation, with the failing module and a remedy if they are known."""

    problem: str
    module_path: str | None = None
    remedy: str | None = None


class _ValidationImpossibleError(Exception):
    """Raised if a user's policy cannot be validated. The policy is then used without validation."""


_RESULTS: dict[Hashable, PolicyError | str | None] = {}
_ONE_AT_A_TIME = threading.RLock()


def validate_user_policy(plan: ShardingPlan, policy: Policy, tensor_parallel_size: int) -> str | None:
    """Validate a user's policy by training a sharded copy of the model.

    Results are cached. No communication.

    Args:
        plan: the plan that the policy made for the model.
        policy: the policy, whose model and config are set.

    Returns:
        A note that explains why the policy could not be validated, or None if it passed.

    Raises:
        PolicyError: if the sharded copy does not run, or its outputs or gradients differ.
    """
    if not policy.validate or isinstance(policy, DerivedPolicy) or _is_builtin_policy(plan, policy):
        return None
    model = plan.model
    excluded = ("model", "axis", "shard_config", "find_submodel_policy")
    options = repr({name: value for name, value in vars(policy).items() if name not in excluded})
    key = (
        type(model),
        type(policy),
        options,
        tensor_parallel_size,
        policy.shard_config.enable_sequence_parallelism,
        hash((*compute_model_fingerprint(model), *plan.get_lines_to_compare_across_ranks())),
    )
    with _ONE_AT_A_TIME:
        if key not in _RESULTS:
            try:
                _RESULTS[key] = _validate_on_model_copy(plan, policy, tensor_parallel_size)
            except _ValidationImpossibleError as error:
                reason = str(error).rstrip(".")
                _RESULTS[key] = f"{type(policy).__name__} was not validated on a copy of the model: {reason}."
        result = _RESULTS[key]
    if isinstance(result, PolicyError):
        raise PolicyError(result.what, rule=result.rule, remedy=result.remedy)
    return result


def _is_builtin_policy(plan: ShardingPlan, policy: Policy) -> bool:
    user_modules = iter_user_code_modules(plan.model, [stack.layers for stack in plan.stacks])
    return type(policy).__module__.startswith("shardformer.") and next(user_modules, None) is None


def _validate_on_model_copy(plan: ShardingPlan, policy: Policy, tensor_parallel_size: int) -> PolicyError | None:
    if code := next(_iter_user_code_in_policy(plan, policy), None):
        raise _ValidationImpossibleError(f"The policy contains user code, which may change the results: {code}.")
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
        ):
            reduced, num_ranks = _build_trial_model(plan.model, policy, tensor_parallel_size)
            return _PolicyValidator(reduced, policy, num_ranks).find_policy_error()
    except PolicyError as error:  # no copy can be built or called
        raise _ValidationImpossibleError(error.what) from error


def _build_trial_model(model: nn.Module, policy: Policy, tensor_parallel_size: int) -> tuple[ReducedModel, int]:
    """Copy a model or build a small version of it, and choose the number of ranks for validation."""
    numel = reduced_model.count_parameters(model)
    if numel <= SMALL_NUMEL:
        if numel * tensor_parallel_size > MAX_TRIAL_NUMEL:
            raise _ValidationImpossibleError(
                f"The model has {numel:,} parameters, too many to train a copy on {tensor_parallel_size} ranks."
            )
        return reduced_model.copy_as_reduced_model(model), tensor_parallel_size
    if not _has_named_head_counts(policy):
        raise _ValidationImpossibleError(
            f"The model has more than {SMALL_NUMEL:,} parameters, and the head counts in the policy are numbers that "
            "do not match a small version of the model. Use the names of config fields or attributes instead."
        )
    reduced = reduced_model.reduce_model(model)
    if get_layer_kind(reduced.model) != get_layer_kind(model) or any("forward" in vars(m) for m in model.modules()):
        raise _ValidationImpossibleError("A small version of the model does not contain the same modules as the model.")
    return reduced, min(tensor_parallel_size, MAX_TRIAL_RANKS)


def _has_named_head_counts(policy: Policy) -> bool:
    if not isinstance(policy, RolePolicy) or type(policy).module_policy is not RolePolicy.module_policy:
        return False
    roles = [*policy.unstacked_blocks, *(role for stack in get_layer_stacks(policy) for role in stack.blocks)]
    attentions: list[Any] = [policy, *(role for role in roles if isinstance(role, Attention))]
    return not any(isinstance(n, int) for each in attentions for n in (each.num_heads, each.num_kv_heads))


def _iter_user_code_in_policy(plan: ShardingPlan, policy: Policy) -> Iterator[str]:
    """Yield descriptions of user code in a policy that may change a model's results intentionally."""
    yield from (f"{name}()" for name in POLICY_HOOKS if getattr(type(policy), name) is not getattr(Policy, name))
    yield from (f"the method {path!r}" for path in plan.methods)
    yield from (f"param_replacement of {path!r}" for path, _ in plan.functions)
    for sub in plan.replacements.values():
        if not getattr(sub.target_module.from_native_module, "__module__", "").startswith("shardformer."):
            yield f"the class {sub.target_module.__name__}"


class _LowPrecisionDetector(TorchDispatchMode):
    """Detects low-precision operations, whose rounding errors would hide sharding errors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no types
        self.seen: torch.dtype | None = None
        for module in model.modules():
            module.register_forward_pre_hook(self._record_autocast_dtype)

    def _record_autocast_dtype(self, *_: Any) -> None:
        if torch.is_autocast_enabled("cpu"):
            self.seen = torch.get_autocast_dtype("cpu")

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.is_floating_point() and x.element_size() < 4:
                self.seen = x.dtype
        return out


class _PolicyValidator:
    """Compares sharded copies of a model with an unsharded copy.

    Raises _ValidationImpossibleError if the copy is not deterministic.
    """

    def __init__(self, reduced: ReducedModel, policy: Policy, tp_size: int) -> None:
        self._reduced, self._policy, self._tensor = reduced, policy, tp_size
        self._enable_sequence_parallelism = False
        try:
            native = copy.deepcopy(reduced.model)  # some modules store results of a forward pass
            first = reduced_model.ReferenceGradients.from_model(native, reduced.forward_fn)
            with TRACE_LOCK, _LowPrecisionDetector(native) as low_precision, torch.no_grad():
                again = reduced_model.compute_loss_from_all_outputs(reduced.forward_fn(native)).item()
            copy_with_shared_weights(reduced.model)
        except Exception as error:
            raise _ValidationImpossibleError(validation.summarize_error(error)) from error
        if not abs(first.loss - again) <= 0.01 * RELATIVE * abs(first.loss):
            raise _ValidationImpossibleError(
                "The model is not deterministic: two forward passes with the same batch differ."
            )
        self._draws_random_numbers = _is_forward_random(native, reduced)
        if low_precision.seen is not None:
            dtype = low_precision.seen
            raise _ValidationImpossibleError(
                f"The model computes in {dtype} internally, so rounding errors would hide errors of the policy."
            )
        self._reference = replace(first, model=reduced.model)
        self._parts: dict[type[nn.Module], Policy] = {}

    def find_policy_error(self) -> PolicyError | None:
        """Return an error if the sharded copy computes different results than the model, and otherwise None.

        The error names the role of the policy that causes the difference, if it is known.
        """
        fault = self._find_training_failure(self._policy)
        if fault is None:
            return self._find_sequence_parallel_error()
        if self._draws_random_numbers:
            raise _ValidationImpossibleError(
                "The model draws random numbers, so the results of a sharded copy differ even if the policy is correct."
            )
        role, fault = next(self._iter_failing_roles(), (None, fault))
        name, model = type(self._policy).__name__, type(self._reduced.model).__name__
        text = role if isinstance(role, str | None) else f"{type(role).__name__} {role.at!r}"
        by = f"{name} over {self._tensor} ranks" if text is None else f"the {text} of {name} alone"
        return PolicyError(
            f"The policy does not match the model: when it is sharded by {by}, {model} {fault.problem}.",
            rule=RULE,
            remedy=(fault.remedy or suggest_policy_fix(self._policy, role, self._reduced, fault.module_path)).rstrip(
                "."
            )
            + ". If the difference is intended, set validate = False in the policy.",
        )

    def _find_sequence_parallel_error(self) -> PolicyError | None:
        """Return an error if the policy causes different results only with sequence parallelism."""
        if not self._policy.shard_config.enable_sequence_parallelism or self._draws_random_numbers:
            return None
        known_inputs = dict(iter_inputs_for_known_arguments(self._reduced.model))
        if len(self._reduced.batch.keys() - known_inputs) > 1:  # of several guessed inputs, one may have no tokens
            return None
        self._enable_sequence_parallelism = True
        self._reference = self._reduced.add_long_batch(self._reference)
        if (fault := self._find_training_failure(self._policy)) is None:
            return None
        name, model = type(self._policy).__name__, type(self._reduced.model).__name__
        return PolicyError(
            f"The policy does not support sequence parallelism: when it is sharded by {name} over {self._tensor} ranks "
            f"with enable_sequence_parallelism=True, {model} {fault.problem}.",
            rule=RULE,
            remedy="Describe the linear layers of each attention module and MLP as a block, and modules that need all "
            "tokens in SequenceParallelHints (docs/policies.md). Or set enable_sequence_parallelism=False.",
        )

    def _iter_failing_roles(self) -> Iterator[tuple[Role | str, PolicyValidationFailure]]:
        """Shard one attention module, MLP or embedding at a time, and yield those that change the results."""
        if not isinstance(self._policy, RolePolicy):
            return
        for role, policy in _iter_single_role_policies(self._policy):
            try:
                if (fault := self._find_training_failure(policy)) is not None:
                    yield role, fault
            except _ValidationImpossibleError:
                continue

    def _find_training_failure(
        self, policy: Policy, expected_outputs: dict[str, Tensor] | None = None
    ) -> PolicyValidationFailure | None:
        """Train a sharded copy of the model, and return the first error or None.

        A second run with ``expected_outputs`` finds the module at which a difference appears.
        """
        models = [copy_with_shared_weights(self._reduced.model) for _ in range(self._tensor)]
        first: list[str] = []
        untested: set[str] = set()

        def train_on_rank(context: ParallelContext) -> None:
            model = models[context.tensor.rank]
            self._shard_with_policy_copy(policy, model, context)
            if expected_outputs is not None and context.tensor.rank == 0:
                _add_comparison_hooks(model, expected_outputs, first)
            untested_by_batch = []
            for expected in (self._reference, *self._reference.long_batches):
                model.zero_grad()
                untested_by_batch.append(validation.compare_training(expected, model))
            untested.update(set.intersection(*untested_by_batch))

        try:
            run_as_threads(train_on_rank, tensor=self._tensor, one_at_a_time=True)
            if untested:
                raise _ValidationImpossibleError(validation.format_zero_gradient(min(untested)))
            return None
        except _ValidationImpossibleError:
            raise
        except TrainingMismatchError as difference:
            if expected_outputs is None:
                return self._find_training_failure(policy, _record_module_outputs(self._reduced))
            at = next(iter(first), None)
            if not (problem := validation.format_error_as_clause(difference)).startswith("the output"):
                return PolicyValidationFailure(
                    f"trains differently: {problem}" + (f", as does {at!r}" if at else ""), at
                )
            return PolicyValidationFailure("computes a different output" + (f", first in {at!r}" if at else ""), at)
        except PolicyError as error:
            return PolicyValidationFailure(f"does not run: {error.what}", remedy=error.remedy)
        except ShardFormerError as error:  # an option or input error, which the real forward pass will raise again
            raise _ValidationImpossibleError(error.what) from error
        except Exception as error:  # a forward pass with wrong shards may raise anything
            at = next((found for model in models if (found := validation.find_failing_module_path(error, model))), None)
            where = (f" in {at!r}" if at else "") + validation.format_user_code_location(error)
            return PolicyValidationFailure(f"does not run: {validation.summarize_error(error)}{where}", at)

    def _shard_with_policy_copy(self, policy: Policy, model: nn.Module, context: ParallelContext) -> None:
        """Shard a model with a copy of the policy, and raise _ValidationImpossibleError if that fails.

        Sharding the real model will raise the same error again.
        """
        copied = copy.copy(policy)
        if (find_policy := policy.find_submodel_policy) is not None:
            copied.find_submodel_policy = lambda part: copy.copy(self._parts.setdefault(type(part), find_policy(part)))
        try:
            config = ShardConfig(
                context=context,
                enable_sequence_parallelism=self._enable_sequence_parallelism,
                extra_kwargs=dict(policy.shard_config.extra_kwargs),
            )
            shard_for_validation(model, config, copied)
        except Exception as error:
            raise _ValidationImpossibleError(validation.summarize_error(error)) from error


def _is_forward_random(model: nn.Module, reduced: ReducedModel) -> bool:
    """Return whether a model's forward pass draws random numbers."""
    states: list[Tensor] = []
    model.register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state()))
    model.register_forward_hook(lambda *_: states.append(torch.get_rng_state()))
    with torch.no_grad():
        reduced.forward_fn(model)
    return not torch.equal(states[0], states[-1])


def _iter_single_role_policies(policy: RolePolicy) -> Iterator[tuple[Role | str, RolePolicy]]:
    """Yield each attention module, MLP or embedding of a policy, with a policy for this module alone."""

    def make_single_role_policy(**policy_fields: Any) -> RolePolicy:
        single: Any = copy.copy(policy)
        names = ("stack", "embeddings", "head", "unstacked_blocks", "submodels", "keep_replicated")
        vars(single).update({**dict.fromkeys(names, ()), **policy_fields, "replicated_paths": lambda: None})
        return single  # type: ignore[no-any-return]  # instance attributes override those of the class

    for stack in get_layer_stacks(policy):
        for role in stack.blocks:
            yield role, make_single_role_policy(stack=replace(stack, blocks=[role]))
    for role in policy.unstacked_blocks:
        yield role, make_single_role_policy(unstacked_blocks=[role])
    for kind, paths in {"embeddings": policy.embeddings, "head": policy.head}.items():
        if paths:
            yield f"{kind} {', '.join(map(repr, as_path_list(paths)))}", make_single_role_policy(**{kind: paths})


def _record_module_outputs(reduced: ReducedModel) -> dict[str, Tensor]:
    """Run one forward pass, and return the first tensor in the output of each module."""
    model = copy_with_shared_weights(reduced.model)
    outputs: dict[str, Tensor] = {}

    def record_output(module_path: str, module_output: Any) -> None:
        if module_path not in outputs and (first := _get_first_tensor(module_output)) is not None:
            outputs[module_path] = first.detach().clone()

    for path, module in model.named_modules():
        module.register_forward_hook(lambda _, __, out, path=path: record_output(path, out))
    with torch.no_grad():
        reduced.forward_fn(model)
    return outputs


def _get_first_tensor(model_output: Any) -> Tensor | None:
    return next((x for x in tree_leaves(model_output) if isinstance(x, Tensor)), None)


def _add_comparison_hooks(model: nn.Module, expected_outputs: dict[str, Tensor], mismatched_paths: list[str]) -> None:
    """Add hooks that append the paths of modules with unexpected outputs to ``mismatched_paths``."""

    def compare_output(module_path: str, module_output: Any) -> None:
        x, y = _get_first_tensor(module_output), expected_outputs.get(module_path)
        if type(x) is not Tensor or y is None or x.shape != y.shape or not x.is_floating_point():
            return  # sharded logits would be gathered, but the other ranks would not take part
        if max_abs_difference(x.detach(), y) > RELATIVE * y.abs().max():
            mismatched_paths.append(module_path)

    for path, module in model.named_modules():
        if path:
            module.register_forward_hook(lambda _, __, out, path=path: compare_output(path, out))
