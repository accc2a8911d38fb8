"""Validates a policy by training a small model with and without sharding, with threads as ranks."""

from __future__ import annotations

import copy
import linecache
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from traceback import walk_tb
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardformer.config import ShardConfig
from shardformer.context_parallel.method import ContextParallelSizes
from shardformer.discovery import reduced_model
from shardformer.discovery.example_inputs import Forward, draw_like, make_forward_fn
from shardformer.discovery.forward_trace import LayerListTrace
from shardformer.discovery.reduced_model import (
    RELATIVE,
    ReducedModel,
    ReferenceGradients,
    compute_loss_from_all_outputs,
    copy_with_shared_weights,
)
from shardformer.errors import PolicyError, ShardFormerError, get_first_message_line
from shardformer.kernels.attention_registration import find_attention_classes
from shardformer.layout.sharding_metadata import get_shard_specs, get_sharding_metadata, max_abs_difference
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.mesh.tensor_grid import GRID_AXIS_NAMES, TensorGrid
from shardformer.module_paths import LIBRARIES
from shardformer.pipeline.layer_sequence import (
    LayerRange,
    LayerSequence,
    map_tensor_names_to_stages,
    map_tensors_to_layers,
)
from shardformer.pipeline.stage_forward import ParameterPlaceholders, StageForward, StageForwardState, is_all_nan
from shardformer.pipeline.stage_manager import copy_first_layer_attributes
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import LayerStack
from shardformer.sharding.apply import shard_for_validation
from shardformer.sharding.apply_context_parallel import ContextParallelTrialResult, get_unsupported_attention_reason
from shardformer.sharding.apply_tensor_grid import (
    ArgumentSamples,
    find_modules_with_extra_inputs,
    make_argument_key,
    named_tensor_arguments,
)
from shardformer.torch_compat import tree_leaves

MAX_ERROR_CHARS = 160  # largest number of characters to quote from the errors of other code


def format_error_with_location(error: BaseException) -> str:
    """Format an error and its location in user code as one line."""
    text = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].rstrip(": ")[:MAX_ERROR_CHARS]
    return f"{text}{format_user_code_location(error)}"


def format_user_code_location(error: BaseException) -> str:
    """Format the line of user code that raised an error, such as ``, in my_model.py, line 14: `return x` ``."""
    frames = [(frame, line) for frame, line in walk_tb(error.__traceback__) if not _is_library_frame(frame)]
    if not frames:
        return ""
    frame, number = frames[-1]
    path = frame.f_code.co_filename
    code = linecache.getline(path, number, frame.f_globals).strip()[:MAX_ERROR_CHARS]
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    shown = path if relative.startswith(os.pardir) else relative
    return f", in {shown}, line {number}" + (f": `{code}`" if code else "")


def find_failing_module_path(error: BaseException, model: nn.Module) -> str | None:
    """Return the path of the innermost module whose forward pass raised an error, or None."""
    paths = {id(module): path for path, module in model.named_modules()}
    seen: list[Any] = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    return next((paths[id(module)] for module in reversed(seen) if paths.get(id(module))), None)


def summarize_error(error: BaseException) -> str:
    """Return the class name and the first line of an error."""
    return f"{type(error).__name__}: {get_first_message_line(error)[:MAX_ERROR_CHARS]}"


def format_error_as_clause(error: Exception) -> str:
    """Format the message of a failed validation as a clause, without a full stop."""
    text = get_first_message_line(error)
    return error.what if isinstance(error, ShardFormerError) else text[:1].lower() + text[1:]


def _is_library_frame(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in LIBRARIES or frame.f_code.co_filename.startswith("<")


def validate_policy(
    reference: ReferenceGradients, policy_cls: type[Policy], num_ranks: int, **shard_config_options: bool
) -> str | None:
    """Train a model that a policy shards, and return the first difference from unsharded training or None.

    Args:
        shard_config_options: boolean options of ``ShardConfig``.
    """

    def shard_on_rank(model: nn.Module, context: ParallelContext) -> None:
        config = ShardConfig(context=context, **shard_config_options)  # type: ignore[arg-type]  # boolean options only
        shard_for_validation(model, config, policy_cls())

    return validate_sharding(reference, shard_on_rank, tensor=num_ranks)


def validate_sharding(
    reference: ReferenceGradients, shard_fn: Callable[[nn.Module, ParallelContext], None], **axis_sizes: int
) -> str | None:
    """Train a sharded model with threads as ranks, and return its first difference from unsharded training or None.

    Args:
        shard_fn: shards the model on one rank.
        axis_sizes: sizes of the axes of the device mesh.
    """
    untested_by_rank: list[set[str]] = []

    def train_on_rank(context: ParallelContext) -> None:
        model = copy_with_shared_weights(reference.model)
        shard_fn(model, context)
        untested = []
        for expected in (reference, *reference.long_batches, *reference.further_batches):
            model.zero_grad()
            untested.append(compare_training(expected, model))
        untested_by_rank.append(set.intersection(*untested))

    try:
        run_as_threads(train_on_rank, **axis_sizes, one_at_a_time=True)
    except (TrainingMismatchError, ShardFormerError) as error:
        return format_error_as_clause(error)
    except Exception as error:  # a forward pass with wrong shards may raise anything
        return f"the sharded model does not run ({format_error_with_location(error)})"
    untested = sorted(set().union(*untested_by_rank))
    return format_zero_gradient(untested[0]) if untested else None


class TrainingMismatchError(Exception):
    """Raised if an output or a gradient of a sharded model differs from unsharded training."""


def compare_training(reference: ReferenceGradients, sharded_model: nn.Module) -> set[str]:
    """Run a forward and a backward pass of a sharded model, and compare the loss and gradients with a reference.

    Returns:
        The names of sharded parameters whose gradients are exactly 0, so that the comparison would find no error.

    Raises:
        TrainingMismatchError: if the loss or a gradient differs.
    """
    loss = compute_loss_from_all_outputs(reference.forward_fn(sharded_model))
    if not abs(loss.item() - reference.loss) <= RELATIVE * abs(reference.loss):
        raise TrainingMismatchError(
            f"The output differs from that of the unsharded model: a test loss is {loss.item():.6g} with sharding and "
            f"{reference.loss:.6g} without."
        )
    loss.backward()
    specs, coords = get_shard_specs(sharded_model), get_sharding_metadata(sharded_model).coords
    for name, param in sharded_model.named_parameters():
        expected = reference.gradients[name]
        if (expected is None) != (param.grad is None):
            found, other = ("sharded", "unsharded") if expected is None else ("unsharded", "sharded")
            raise TrainingMismatchError(
                f"The parameter {name} has a gradient in the {found} model, but not in the {other} model."
            )
        if expected is None or param.grad is None or not expected.numel():
            continue
        shard = specs[name].slice_full_tensor(expected, coords)
        if not reference.is_within_tolerance(name, max_abs_difference(shard, param.grad)):
            raise TrainingMismatchError(f"The gradient of {name} differs from that of the unsharded model.")
    return {name for name in reference.gradients if specs[name].is_sharded and reference.is_gradient_always_zero(name)}


def format_zero_gradient(param_name: str) -> str:
    """Explain as a clause why the sharding of a parameter was not validated."""
    return f"the gradient of {param_name} is exactly 0, so a wrong sharding would not be found"


ONE_LAYER = "it does not have two layers that run in sequence"


def get_layer_stacks(policy: RolePolicy | type[RolePolicy]) -> list[LayerStack]:
    """Return the ``LayerStack`` objects of a policy as a list."""
    return [policy.stack] if isinstance(policy.stack, LayerStack) else [*policy.stack]


def instantiate_policy(policy_cls: type[RolePolicy], model: nn.Module) -> RolePolicy:
    """Instantiate a policy for ``model`` on a single rank."""
    out = policy_cls()
    out.set_model(model)
    out.set_shard_config(ShardConfig(context=ParallelContext.from_group(Axis("tensor"))))
    return out


def build_layer_sequence(model: nn.Module, policy_cls: type[RolePolicy], stacks: Sequence[LayerStack]) -> LayerSequence:
    """Combine several ``LayerStack`` objects, such as encoder and decoder, in execution order."""
    with_stacks: Any = type(policy_cls.__name__, (policy_cls,), {"stack": tuple(stacks)})
    return instantiate_policy(with_stacks, model).layer_sequence()


def validate_pipeline_stages(
    reference: ReferenceGradients, policy_cls: type[RolePolicy], layer_stacks: Sequence[LayerStack]
) -> str | None:
    """Run a model as two pipeline stages, and return the first difference from the full model or None.

    The stage boundary is placed after the first layer, before the last, halfway, and around the start of each stack.
    """
    try:
        chain = build_layer_sequence(reference.model, policy_cls, layer_stacks)
        count = len(chain.called_layer_paths)
        if count < 2:
            return ONE_LAYER
        ends = {1, count // 2, count - 1, *(at for start in chain.stack_start_indices for at in (start - 1, start))}
        for bound in sorted(ends & set(range(1, count))):
            for expected in (reference, *reference.further_batches):
                _check_stages_match_full_model(expected, chain, chain.get_stage_layer_ranges([0, bound, count]))
    except (TrainingMismatchError, ShardFormerError) as error:
        return format_error_as_clause(error)
    except Exception as error:  # a forward pass of a partial model may raise anything
        return f"in two stages it does not run ({type(error).__name__}: {' '.join(str(error).split())[:160]})"
    return None


def _check_stages_match_full_model(
    reference: ReferenceGradients, layer_sequence: LayerSequence, layer_ranges: Sequence[LayerRange]
) -> None:
    owners = map_tensors_to_layers(reference.model, layer_sequence)
    stages_of_param = map_tensor_names_to_stages(owners, layer_ranges)
    stages: list[tuple[nn.Module, StageForward]] = []
    for stage in range(len(layer_ranges)):
        model, placeholders = copy_with_shared_weights(reference.model), ParameterPlaceholders()
        placeholders.replace_nonlocal_params(
            model, {name: stage in stages_of for name, stages_of in stages_of_param.items()}
        )
        copy_first_layer_attributes(model, layer_sequence, [layer_ranges[stage]])
        stages.append((model, StageForward(model, layer_sequence, placeholders, owners)))
    (first, first_forward), (second, second_forward) = stages
    _, payload = first_forward.run_stage_forward(
        first, StageForwardState(layer_ranges[0], {}), lambda: reference.forward_fn(first)
    )
    if payload is None:
        raise TrainingMismatchError("The forward pass did not call all layers of the first pipeline stage.")
    received = {name: x.detach().requires_grad_(x.requires_grad) for name, x in payload.items()}
    output, _ = second_forward.run_stage_forward(
        second, StageForwardState(layer_ranges[1], received), lambda: reference.forward_fn(second)
    )
    _check_outputs_match_and_run_backward(reference, output)
    trains = [name for name, x in payload.items() if x.requires_grad]
    if any(received[name].grad is None for name in trains):
        raise TrainingMismatchError("A tensor that the first stage sends to the second stage receives no gradient.")
    if trains:
        torch.autograd.backward([payload[name] for name in trains], [received[name].grad for name in trains])
    _check_gradients_match(reference.model, _sum_grads_over_stages(reference.model, [first, second]))


def _check_outputs_match_and_run_backward(reference: ReferenceGradients, last_stage_output: Any) -> None:
    """Compare the outputs of the last stage and the full model, and run both backward passes."""
    expected, stage_outputs = (
        _get_float_outputs(reference.forward_fn(reference.model)),
        _get_float_outputs(last_stage_output),
    )
    here = [at for at, x in enumerate(stage_outputs) if not is_all_nan(x)]
    if len(expected) != len(stage_outputs) or 0 not in here:
        raise TrainingMismatchError("The output of the last stage depends on parameters of an earlier stage.")
    for at in here:
        a, b = expected[at], stage_outputs[at]
        if not max_abs_difference(a, b) <= RELATIVE * a.abs().max():
            raise TrainingMismatchError("The output of the pipeline stages differs from that of the full model.")
    reference.model.zero_grad()
    for outputs in (expected, stage_outputs):
        losses = [reduced_model.compute_weighted_mean_square(outputs[at], outputs[at].shape).double() for at in here]
        torch.stack(losses).sum().backward()


def _check_gradients_match(model: nn.Module, stage_gradients: Mapping[str, Tensor]) -> None:
    expected = _sum_grads_over_stages(model, [model])
    model.zero_grad()
    if expected.keys() != stage_gradients.keys():
        name = sorted(expected.keys() ^ stage_gradients.keys())[0]
        found, other = ("pipeline stages", "full model")[:: 1 if name in stage_gradients else -1]
        raise TrainingMismatchError(f"The parameter {name} has a gradient in the {found}, but not in the {other}.")
    bounds = reduced_model.compute_gradient_tolerances(expected)
    for name, gradient in expected.items():
        if gradient.numel() and not max_abs_difference(gradient, stage_gradients[name]) <= bounds[name]:
            raise TrainingMismatchError(
                f"The gradient of {name} differs between the pipeline stages and the full model."
            )


def _get_float_outputs(model_output: Any) -> list[Tensor]:
    leaves = tree_leaves(reduced_model.unwrap_model_output(model_output))
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]


def _sum_grads_over_stages(full_model: nn.Module, stage_models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Sum the gradients of each parameter over the pipeline stages that share the parameter."""
    first = {id(p): name for name, p in full_model.named_parameters()}
    names = {name: first[id(p)] for name, p in full_model.named_parameters(remove_duplicate=False)}
    sums: dict[str, Tensor] = {}
    for model in stage_models:
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[names[name]] = sums[names[name]] + p.grad if names[name] in sums else p.grad.clone()
    return sums


@dataclass(frozen=True)
class ContextParallelValidationResult:
    """Result of validating context parallelism on a small version of a model."""

    failure: str | None  # why the sequence cannot be sharded, or None if validation passed
    findings: ContextParallelTrialResult = field(
        default_factory=ContextParallelTrialResult
    )  # sequence dims, modules with full sequences


Result = TypeVar("Result")
_CONTEXT_RESULTS: dict[Hashable, ContextParallelValidationResult] = {}


def validate_context_parallel(
    model: nn.Module, policy: Policy, context_parallel_sizes: ContextParallelSizes, *, allow_full_attention: bool = True
) -> ContextParallelValidationResult:
    """Validate context parallelism on a small version of a model.

    Results are cached by config. No communication.

    Args:
        policy: the policy of the model, which is also used for the reduced model.
        context_parallel_sizes: the ring and Ulysses sizes of the sequence axis.
        allow_full_attention: whether attention modules may be computed for the full sequence on every rank.
    """
    context_parallel_sizes = ContextParallelSizes(
        min(context_parallel_sizes.ring, 2), min(context_parallel_sizes.group, 2), context_parallel_sizes.all_gather_kv
    )
    key = (
        reduced_model.make_validation_cache_key(model),
        context_parallel_sizes.ring,
        context_parallel_sizes.group,
        context_parallel_sizes.all_gather_kv,
        allow_full_attention,
    )
    return _get_cached_or_validate(
        _CONTEXT_RESULTS,
        key,
        lambda: _validate_context_parallel_uncached(model, policy, context_parallel_sizes, allow_full_attention),
    )


def _get_cached_or_validate(
    result_cache: dict[Hashable, Result], cache_key: tuple[Hashable, ...], validate_fn: Callable[[], Result]
) -> Result:
    """Return the cached result of a validation, or run the validation if no result is cached."""
    with reduced_model.ONE_AT_A_TIME:
        if cache_key not in result_cache:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                result = validate_fn()
            if cache_key[0] is None:
                return result
            result_cache[cache_key] = result
        return result_cache[cache_key]


def _validate_context_parallel_uncached(
    model: nn.Module, policy: Policy, sizes: ContextParallelSizes, allow_full_attention: bool
) -> ContextParallelValidationResult:
    try:
        reduced = reduced_model.reduce_or_copy_model(model)
    except PolicyError as error:
        return ContextParallelValidationResult(error.what)
    reference = reduced.add_long_batch(reduced.compute_reference_gradients())
    bound = copy.copy(policy)
    bound.set_model(reduced.model)
    stacks = [LayerListTrace(reference, stack.layers) for stack in bound.stacks()]
    if any(tokens.shape[0] != reduced.num_samples == tokens.shape[1] for tokens in stacks):
        return ContextParallelValidationResult("its layers take inputs of shape (sequence, batch, hidden)")

    def validate_trial(
        trial_result: ContextParallelTrialResult, reference: ReferenceGradients
    ) -> ContextParallelValidationResult:
        runs: list[Any] = []

        def shard_on_rank(model: nn.Module, context: ParallelContext) -> None:
            if not trial_result.is_whole:
                context = context.reshape_axis("sequence", ring=sizes.ring, ulysses=sizes.group)
            config = ShardConfig(context=context, context_parallel="gather" if sizes.all_gather_kv else "auto")
            shard_for_validation(model, config, copy.copy(policy), apply_rules=False, context=trial_result)
            if context.rank == 0:
                runs.append(get_sharding_metadata(model).context_run)

        failure = validate_sharding(reference, shard_on_rank, sequence=sizes.ring * sizes.group)
        return ContextParallelValidationResult(
            failure, replace(trial_result, dims=runs[0].dims) if runs else ContextParallelTrialResult()
        )

    not_dispatched = get_unsupported_attention_reason(reduced.model)
    failure = ""
    candidates = list(
        _iter_full_sequence_candidates(
            reduced.model,
            stacks,
            is_attention_dispatched=not_dispatched is None,
            allow_full_attention=allow_full_attention,
        )
    )
    candidates += [replace(candidate, reads_between=True) for candidate in candidates]
    for findings in candidates:
        result = validate_trial(findings, reference)
        if result.failure is None:
            return replace(
                result, findings=replace(result.findings, unproven=reduced.get_unvalidated_input_reasons(None))
            )
        failure = failure or result.failure
    for findings in candidates if reference.further_batches else ():
        result = validate_trial(findings, replace(reference, further_batches=()))
        if result.failure is None:
            return replace(
                result, findings=replace(result.findings, unproven=reduced.get_unvalidated_input_reasons(failure))
            )
    if not_dispatched is not None:
        failure = f"it {not_dispatched}, and {failure or 'no module was found that mixes tokens'}"
    return ContextParallelValidationResult(failure)


def _iter_full_sequence_candidates(
    model: nn.Module,
    layer_list_traces: Sequence[LayerListTrace],
    *,
    is_attention_dispatched: bool,
    allow_full_attention: bool,
) -> Iterator[ContextParallelTrialResult]:
    """Yield sets of modules that may need the full sequence under context parallelism, cheapest first."""
    if is_attention_dispatched:
        yield ContextParallelTrialResult()
    classes = find_attention_classes(model)

    def is_attention(layer_path: str, child_name: str) -> bool:
        return any(type(inner) in classes for inner in model.get_submodule(f"{layer_path}.{child_name}").modules())

    children = [(t.layers, layer, name) for t in layer_list_traces for layer, name in t.iter_layer_and_child_paths()]
    attending = _remove_duplicates((layers, name) for layers, layer, name in children if is_attention(layer, name))
    mixing = _remove_duplicates(
        (t.layers, name)
        for t in layer_list_traces
        for layer, name in t.find_token_mixing_modules()
        if not is_attention(layer, name)
    )
    if is_attention_dispatched and mixing:
        yield ContextParallelTrialResult(gathers=mixing)
    if allow_full_attention:
        yield from (
            ContextParallelTrialResult(gathers=_remove_duplicates(names), is_whole=True)
            for names in (attending, attending + mixing)
            if names
        )


def _remove_duplicates(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys(pairs))


@dataclass(frozen=True)
class TensorGridValidationResult:
    """Result of validating 2D, 2.5D or 3D tensor parallelism on a small version of a model."""

    failure: str | None  # why the model cannot be sharded over the grid, or None if validation passed
    sample_dims: ArgumentSamples = field(default_factory=dict)  # the batch dim of each attention argument, or None
    unvalidated_inputs: Mapping[str, str] = field(
        default_factory=dict
    )  # why the layout was not validated with an input


_GRID_RESULTS: dict[Hashable, TensorGridValidationResult] = {}


def validate_tensor_grid(model: nn.Module, policy: Policy, grid: TensorGrid) -> TensorGridValidationResult:
    """Validate 2D, 2.5D or 3D tensor parallelism on a small version of a model.

    Axes with more than one rank are validated with two ranks. Results are cached by config. No communication.

    Args:
        policy: the policy of the model, which is also used for the reduced model.
    """
    sizes = tuple(min(axis.size, 2) for axis in (grid.row, grid.column, grid.depth))
    axes = dict(zip(GRID_AXIS_NAMES, sizes, strict=True))
    key = (reduced_model.make_validation_cache_key(model), grid.mode, sizes)
    return _get_cached_or_validate(_GRID_RESULTS, key, lambda: _validate_grid_uncached(model, policy, grid.mode, axes))


def _validate_grid_uncached(
    model: nn.Module, policy: Policy, grid_mode: str, axis_sizes: dict[str, int]
) -> TensorGridValidationResult:
    try:
        reduced = reduced_model.reduce_model(model)
    except PolicyError as error:
        return TensorGridValidationResult(error.what)
    larger_batch_run = _make_larger_batch_forward_fn(reduced)
    reference = reduced.compute_reference_gradients(larger_batch_run)
    total = axis_sizes["row"] * axis_sizes["column"] * axis_sizes["depth"]

    bound = copy.copy(policy)
    bound.set_model(reduced.model)
    bound.set_shard_config(ShardConfig(context=ParallelContext.from_sizes({})))
    samples = _find_argument_batch_dims(
        reduced, larger_batch_run, find_modules_with_extra_inputs(bound), [s.layers for s in bound.stacks()]
    )

    def shard_on_rank(model: nn.Module, context: ParallelContext) -> None:
        config = ShardConfig(context=context.reshape_axis("tensor", **axis_sizes), tensor_parallel_mode=grid_mode)
        shard_for_validation(model, config, copy.copy(policy), samples=samples)

    failure = validate_sharding(reference, shard_on_rank, tensor=total)
    if failure is None:
        return TensorGridValidationResult(None, samples, reduced.get_unvalidated_input_reasons(None))
    if (
        reference.further_batches
        and validate_sharding(replace(reference, further_batches=()), shard_on_rank, tensor=total) is None
    ):
        return TensorGridValidationResult(None, samples, reduced.get_unvalidated_input_reasons(failure))
    return TensorGridValidationResult(failure)


def _make_larger_batch_forward_fn(reduced: ReducedModel) -> Forward:
    """Return a function that runs the model on the example batch plus one sample."""
    count = reduced.num_samples
    more = {n: torch.cat((x, x[:1])) if x.dim() and len(x) == count else x for n, x in reduced.batch.items()}
    return draw_like(reduced.forward_fn, make_forward_fn(reduced.model, more))


def _find_argument_batch_dims(
    reduced: ReducedModel, larger_batch_forward_fn: Forward, attention_paths: list[str], layer_list_paths: list[str]
) -> ArgumentSamples:
    """Find the batch dimension of each module argument, by comparing two batch sizes."""
    count = reduced.num_samples
    narrow, wide = (
        _record_argument_shapes(reduced.model, run, attention_paths, layer_list_paths)
        for run in (reduced.forward_fn, larger_batch_forward_fn)
    )
    samples: ArgumentSamples = {}
    for key, shape in narrow.items():
        other = wide.get(key, shape)
        sizes = zip(shape, other, strict=False)
        grown = [d for d, (a, b) in enumerate(sizes) if a != b and a * (count + 1) == b * count]
        if grown or shape[:1] != (1,):  # a dim of size 1 may be a batch dim in other models: position_ids
            samples[key] = grown[0] if grown else None
    return samples


def _record_argument_shapes(
    model: nn.Module, forward_fn: Forward, attention_paths: list[str], layer_list_paths: list[str]
) -> dict[Any, tuple[int, ...]]:
    """Record the shapes of the tensors that attention modules and first layers receive in a forward pass."""
    found: dict[Any, tuple[int, ...]] = {}
    layers = {path: next(model.get_submodule(path).children()) for path in layer_list_paths}
    modules = {**layers, **{path: model.get_submodule(path) for path in attention_paths}}
    with ExitStack() as hooks, torch.no_grad():
        for path, module in modules.items():

            def record_shapes(module: nn.Module, args: Any, kwargs: Any, module_path: str = path) -> None:
                shapes = {
                    make_argument_key(module_path, n): tuple(x.shape)
                    for n, x in named_tensor_arguments(module, args, kwargs)
                }
                found.update(shapes)

            hooks.callback(module.register_forward_pre_hook(record_shapes, with_kwargs=True).remove)
        forward_fn(model)
    return found
