"""Validates a policy on a reduced model: ranks as threads train it like the plain model, or the policy is not used."""

from __future__ import annotations

import copy
import linecache
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.config import ShardConfig
from shardformer.discovery.example_inputs import Forward, forward_call
from shardformer.discovery.forward_trace import TokenUse
from shardformer.discovery.reduced_model import (
    LIBRARIES,
    ONE_AT_A_TIME,
    RELATIVE,
    ReducedModel,
    ReferenceGradients,
    copy_sharing_values,
    gradient_tolerances,
    known_by,
    output_fields,
    probe_loss,
    reduce_model,
    twin_or_copy_of,
    weighted,
)
from shardformer.errors import PolicyError, ShardFormerError, first_line
from shardformer.kernels.attention_registration import attention_classes
from shardformer.layout.shard_spec import Coords
from shardformer.layout.sharding_metadata import metadata_of, shard_specs
from shardformer.layout.tensor_relations import max_difference
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.mesh.tensor_grid import GRID_AXIS_NAMES, TensorGrid
from shardformer.pipeline.layer_sequence import LayerRange, LayerSequence, owner_layers, owner_stages
from shardformer.pipeline.stage_forward import MissingParams, StageForward, StagePass, is_placeholder
from shardformer.pipeline.stage_manager import copy_shared_attributes
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import LayerStack
from shardformer.sharding.apply import shard_with
from shardformer.sharding.apply_context_parallel import ContextFindings, RingSizes, attention_not_on_interface
from shardformer.sharding.apply_tensor_grid import ArgumentSamples, argument_key, full_input_modules, named_arguments
from shardformer.torch_compat import tree_leaves

MOST = 160
"""Characters of what somebody else's code says."""


def error_in_sentence(error: BaseException) -> str:
    """The error in the middle of a sentence, with the line of the model's own code that raised it, where that is known.

    Of a library's code nothing is told: its user cannot change it.
    """
    said = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].rstrip(": ")[:MOST]
    return f"{said}{user_code_location(error)}"


def user_code_location(error: BaseException) -> str:
    """``, in mine.py, line 14: `return x.view(b, s, 4, 8)` ``: the innermost line that is no library's."""
    own = [(frame, line) for frame, line in _frames(error) if not _is_library(frame)]
    if not own:
        return ""
    frame, number = own[-1]
    code = linecache.getline(frame.f_code.co_filename, number, frame.f_globals).strip()[:MOST]
    return f", in {_relative_path(frame.f_code.co_filename)}, line {number}" + (f": `{code}`" if code else "")


def failing_module(error: BaseException, model: nn.Module) -> str | None:
    """The path of the innermost module in whose forward an error was raised."""
    paths = {id(module): path for path, module in model.named_modules()}
    seen: list[Any] = [frame.f_locals.get("self") for frame, _ in _frames(error)]
    return next((paths[id(module)] for module in reversed(seen) if paths.get(id(module))), None)


def error_summary(error: BaseException) -> str:
    """Its kind and its first line."""
    return f"{type(error).__name__}: {first_line(error)[:MOST]}"


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """From the outermost to that which raised it."""
    yield from walk_tb(error.__traceback__)


def _is_library(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in LIBRARIES or frame.f_code.co_filename.startswith("<")


def _relative_path(path: str) -> str:
    """As it is read from the folder in which the program runs, where it is inside of that."""
    inside = os.path.relpath(path) if os.path.isabs(path) else path
    return path if inside.startswith(os.pardir) else inside


def validate_policy(reference: ReferenceGradients, policy: type[Policy], ranks: int, **options: bool) -> str | None:
    """What is wrong with ``policy`` over ``ranks`` tensor ranks; None when nobody could tell."""

    def shard(model: nn.Module, context: ParallelContext) -> None:
        config = ShardConfig(context=context, **options)  # type: ignore[arg-type]  # of switches alone
        shard_with(model, config, policy())

    return validate_sharding(reference, shard, tensor=ranks)


def validate_sharding(
    reference: ReferenceGradients, shard: Callable[[nn.Module, ParallelContext], None], **sizes: int
) -> str | None:
    """By what a model that ``shard`` shards, over ranks that are threads, can be told; None when nobody could tell."""

    def train(context: ParallelContext) -> None:
        model = copy_sharing_values(reference.model)
        shard(model, context)
        for truth in (reference, *reference.also):
            model.zero_grad()
            loss = probe_loss(truth.run(model))
            if not abs(loss.item() - truth.loss) <= RELATIVE * abs(truth.loss):
                raise MismatchError(f"the output differs: {loss.item():.6g} instead of {truth.loss:.6g}")
            loss.backward()
            compare_gradients(truth, model, metadata_of(model).coords)

    try:
        run_as_threads(train, **sizes, in_turn=True)
        return None
    except MismatchError as difference:
        return str(difference)
    except ShardFormerError as error:
        return error.what
    except Exception as error:  # a forward that the cut breaks can raise anything
        return f"cut so, it does not run ({error_in_sentence(error)})"


class MismatchError(Exception):
    """What is not as in the plain model; a rank raises it, so that the others wait for it no longer."""


def compare_gradients(reference: ReferenceGradients, model: nn.Module, coords: Coords) -> None:
    """Raises Differs where the gradients of a rank's model are not its parts of the reference's."""
    specs = shard_specs(model)
    for name, param in model.named_parameters():
        expected = reference.gradients[name]
        if (expected is None) != (param.grad is None):
            raise MismatchError(f"{name} has {'a' if expected is None else 'no'} gradient")
        if expected is None or param.grad is None or not expected.numel():
            continue
        own = specs[name].slice(expected, coords)
        if not reference.is_near(name, max_difference(own, param.grad)):
            raise MismatchError(f"the gradient of {name} differs")


ONE_LAYER = "no two layers of it run one behind the other"


def bound_policy(policy: type[RolePolicy], model: nn.Module) -> RolePolicy:
    """The policy of one rank for ``model``."""
    out = policy()
    out.set_model(model)
    out.set_shard_config(ShardConfig(context=ParallelContext.from_group(Axis("tensor"))))
    return out


def layer_sequence_of(model: nn.Module, policy: type[RolePolicy], stacks: Sequence[LayerStack]) -> LayerSequence:
    """The layers of these stacks in a row."""
    with_stacks: Any = type(policy.__name__, (policy,), {"stack": tuple(stacks)})
    return bound_policy(with_stacks, model).layer_sequence()


def validate_stages(
    reference: ReferenceGradients, policy: type[RolePolicy], stacks: Sequence[LayerStack]
) -> str | None:
    """What is wrong with two stages, with the cut behind the first layer, before the last, halfway, and where
    two stacks meet; None when nobody could tell."""
    try:
        chain = layer_sequence_of(reference.model, policy, stacks)
        count = len(chain.layer_calls)
        if count < 2:
            return ONE_LAYER
        ends = {1, count // 2, count - 1, *(at for start in chain.starts for at in (start - 1, start))}
        for bound in sorted(ends & set(range(1, count))):
            for truth in (reference, *reference.also):
                _compare_stages(truth, chain, chain.stage_ranges([0, bound, count]))
    except MismatchError as difference:
        return str(difference)
    except ShardFormerError as error:
        return error.what
    except Exception as error:  # a forward that the cut breaks can raise anything
        return f"cut into stages it does not run ({type(error).__name__}: {' '.join(str(error).split())[:160]})"
    return None


def _compare_stages(reference: ReferenceGradients, chain: LayerSequence, spans: Sequence[LayerRange]) -> None:
    home = owner_layers(reference.model, chain)
    held = owner_stages(home, spans)
    stages: list[tuple[nn.Module, StageForward]] = []
    for stage in range(len(spans)):
        model, placeholders = copy_sharing_values(reference.model), MissingParams()
        placeholders.remove(model, {name: stage in stages_of for name, stages_of in held.items()})
        copy_shared_attributes(model, chain, [spans[stage]])
        stages.append((model, StageForward(model, chain, placeholders, home)))
    (first, first_passage), (second, second_passage) = stages
    _, payload = first_passage.run(first, StagePass(spans[0], {}), lambda: reference.run(first))
    if payload is None:
        raise MismatchError("its layers are not all run")
    received = {name: x.detach().requires_grad_(x.requires_grad) for name, x in payload.items()}
    output, _ = second_passage.run(second, StagePass(spans[1], received), lambda: reference.run(second))
    _compare_outputs(reference, output)
    trains = [name for name, x in payload.items() if x.requires_grad]
    if any(received[name].grad is None for name in trains):
        raise MismatchError("nothing is learned through the states that one stage hands to the next")
    if trains:
        torch.autograd.backward([payload[name] for name in trains], [received[name].grad for name in trains])
    _compare_gradients(reference.model, _sums(reference.model, [first, second]))


def _compare_outputs(reference: ReferenceGradients, output: Any) -> None:
    """Compares what the last stage has of the output, and leaves the gradients of that in all models."""
    whole, given = _floats(reference.run(reference.model)), _floats(output)
    here = [at for at, x in enumerate(given) if not is_placeholder(x)]
    if len(whole) != len(given) or 0 not in here:
        raise MismatchError("what it gives reads what an earlier stage holds")
    for at in here:
        a, b = whole[at], given[at]
        if not max_difference(a, b) <= RELATIVE * a.abs().max():
            raise MismatchError("what it gives differs")
    reference.model.zero_grad()
    for outputs in (whole, given):
        torch.stack([weighted(outputs[at], outputs[at].shape).double() for at in here]).sum().backward()


def _compare_gradients(model: nn.Module, found: Mapping[str, Tensor]) -> None:
    expected = _sums(model, [model])
    model.zero_grad()
    if expected.keys() != found.keys():
        raise MismatchError(f"{sorted(expected.keys() ^ found.keys())[0]} has a gradient in one of the two only")
    bounds = gradient_tolerances(expected)
    for name, gradient in expected.items():
        if gradient.numel() and not max_difference(gradient, found[name]) <= bounds[name]:
            raise MismatchError(f"the gradient of {name} differs")


def _floats(output: Any) -> list[Tensor]:
    leaves = tree_leaves(output_fields(output))
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]


def _sums(whole: nn.Module, models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The gradients by name, summed over the stages that hold a parameter; by the first of its names, where tied."""
    first = {id(p): name for name, p in whole.named_parameters()}
    names = {name: first[id(p)] for name, p in whole.named_parameters(remove_duplicate=False)}
    out: dict[str, Tensor] = {}
    for model in models:
        for name, p in model.named_parameters():
            if p.grad is not None:
                out[names[name]] = out[names[name]] + p.grad if names[name] in out else p.grad.clone()
    return out


@dataclass(frozen=True)
class ContextValidation:
    """What was found on the twin.

    Args:
        against: why the sequence cannot be cut; None where nobody could tell.
        learned: which dim of an argument is the sequence's, and what is given the whole sequence.
    """

    against: str | None
    learned: ContextFindings = field(default_factory=ContextFindings)


_CONTEXT_RESULTS: dict[Hashable, ContextValidation] = {}


def validate_context_parallel(
    model: nn.Module, policy: Policy, sizes: RingSizes, *, may_be_whole: bool = True
) -> ContextValidation:
    """The proof for a model, made once for models of a library's classes with one config. Communicates nothing.

    Args:
        policy: that of the model, which a small twin shares.
        sizes: how the ranks of the sequence axis are laid out.
        may_be_whole: whether attentions may stay as they are, each computed for all positions on every rank.
    """
    ring, group, kind = min(sizes.ring, 2), min(sizes.group, 2), known_by(model)
    key = (kind, ring, group, sizes.gathers, may_be_whole)
    with ONE_AT_A_TIME:
        if key in _CONTEXT_RESULTS:
            return _CONTEXT_RESULTS[key]
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            proof = _validate_context(model, policy, RingSizes(ring, group, sizes.gathers), may_be_whole)
        if kind is not None:
            _CONTEXT_RESULTS[key] = proof
        return proof


def _validate_context(model: nn.Module, policy: Policy, sizes: RingSizes, may_be_whole: bool) -> ContextValidation:
    try:
        twin = twin_or_copy_of(model)
    except PolicyError as error:
        return ContextValidation(error.what)
    reference = twin.reference()
    own = copy.copy(policy)
    own.set_model(twin.model)
    stacks = [TokenUse(reference, stack.layers) for stack in own.stacks()]
    if any(tokens.shape[0] != twin.samples == tokens.shape[1] for tokens in stacks):
        return ContextValidation("its layers are given (sequence, batch, hidden)")

    def tried(learned: ContextFindings, reference: ReferenceGradients) -> ContextValidation:
        runs: list[Any] = []

        def shard(model: nn.Module, context: ParallelContext) -> None:
            if not learned.is_whole:
                context = context.reshape_axis("sequence", ring=sizes.ring, ulysses=sizes.group)
            config = ShardConfig(context=context, context_parallel="gather" if sizes.gathers else "auto")
            shard_with(model, config, copy.copy(policy), cuts=False, context=learned)
            if context.rank == 0:
                runs.append(metadata_of(model).context_run)

        against = validate_sharding(reference, shard, sequence=sizes.ring * sizes.group)
        return (
            ContextValidation(against)
            if runs == []
            else ContextValidation(against, replace(learned, dims=runs[0].dims))
        )

    why = attention_not_on_interface(twin.model)
    against = ""
    ways = list(_gather_candidates(twin.model, stacks, is_dispatched=why is None, may_be_whole=may_be_whole))
    ways += [replace(way, reads_between=True) for way in ways]
    for learned in ways:
        proof = tried(learned, reference)
        if proof.against is None:
            return replace(proof, learned=replace(proof.learned, unproven=twin.unproven(None)))
        against = against or proof.against
    for learned in ways if reference.also else ():
        proof = tried(learned, replace(reference, also=()))
        if proof.against is None:
            return replace(proof, learned=replace(proof.learned, unproven=twin.unproven(against)))
    if why is not None:
        against = f"it {why}, and {against or 'nothing was seen to mix tokens'}"
    return ContextValidation(against)


def _gather_candidates(
    model: nn.Module, stacks: Sequence[TokenUse], *, is_dispatched: bool, may_be_whole: bool
) -> Iterator[ContextFindings]:
    """What is given the whole sequence, in the order in which it is tried."""
    if is_dispatched:
        yield ContextFindings()
    classes = attention_classes(model)

    def attends(layer: str, name: str) -> bool:
        return any(type(inner) in classes for inner in model.get_submodule(f"{layer}.{name}").modules())

    attending = _each((t.layers, name) for t in stacks for layer, name in t.children() if attends(layer, name))
    apart = _each((t.layers, name) for t in stacks for layer, name in t.mixing() if not attends(layer, name))
    if is_dispatched and apart:
        yield ContextFindings(gathers=apart)
    if may_be_whole:
        yield from (
            ContextFindings(gathers=_each(names), is_whole=True) for names in (attending, attending + apart) if names
        )


def _each(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each once, in order."""
    return list(dict.fromkeys(pairs))


ArgumentShapes = dict[tuple[str, str], tuple[int, ...]]


@dataclass(frozen=True)
class GridValidation:
    """What was found on the twin.

    Args:
        against: why the model cannot be cut so; None where nobody could tell.
        samples: which dim of an attention's argument counts samples; None for one that is of no sample.
        unproven: the inputs with which it cannot be, and why.
    """

    against: str | None
    samples: ArgumentSamples = field(default_factory=dict)
    unproven: Mapping[str, str] = field(default_factory=dict)


_GRID_RESULTS: dict[Hashable, GridValidation] = {}


def validate_tensor_grid(model: nn.Module, policy: Policy, grid: TensorGrid) -> GridValidation:
    """The proof for a model, made once for models of a library's classes with one config. Communicates nothing.

    It is made on two ranks along each axis that has more than one.

    Args:
        policy: that of the model, which a small twin shares.
    """
    kind = known_by(model)
    sizes = tuple(min(axis.size, 2) for axis in (grid.row, grid.column, grid.depth))
    key = (kind, grid.mode, sizes)
    with ONE_AT_A_TIME:
        if key in _GRID_RESULTS:
            return _GRID_RESULTS[key]
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            proof = _validate_grid(model, policy, grid.mode, dict(zip(GRID_AXIS_NAMES, sizes, strict=True)))
        if kind is not None:
            _GRID_RESULTS[key] = proof
        return proof


def _validate_grid(model: nn.Module, policy: Policy, mode: str, sizes: dict[str, int]) -> GridValidation:
    try:
        twin = reduce_model(model)
    except PolicyError as error:
        return GridValidation(error.what)
    wider = _wider(twin)
    reference = twin.reference(wider)
    total = sizes["row"] * sizes["column"] * sizes["depth"]

    own = copy.copy(policy)
    own.set_model(twin.model)
    own.set_shard_config(ShardConfig(context=ParallelContext.of({})))
    samples = _samples_in(twin, wider, full_input_modules(own), [s.layers for s in own.stacks()])
    proof = GridValidation(None, samples)

    def shard(model: nn.Module, context: ParallelContext) -> None:
        config = ShardConfig(context=context.reshape_axis("tensor", **sizes), tensor_parallel_mode=mode)
        shard_with(model, config, copy.copy(policy), samples=samples)

    against = validate_sharding(reference, shard, tensor=total)
    if (
        against is not None
        and reference.also
        and validate_sharding(replace(reference, also=()), shard, tensor=total) is None
    ):
        return replace(proof, unproven=twin.unproven(against))
    proof = replace(proof, unproven=twin.unproven(None))
    return proof if against is None else GridValidation(against)


def _wider(twin: ReducedModel) -> Forward:
    """A call with one sample more, so that no grid divides the batch."""
    count = twin.samples
    more = {n: torch.cat((x, x[:1])) if x.dim() and len(x) == count else x for n, x in twin.batch.items()}
    return forward_call(twin.model, more)


def _samples_in(twin: ReducedModel, wider: Forward, attentions: list[str], stacks: list[str]) -> ArgumentSamples:
    """Which dim of each argument grows as the batch does."""
    count = twin.samples
    narrow, wide = (_shapes(twin.model, run, attentions, stacks) for run in (twin.run, wider))
    samples: ArgumentSamples = {}
    for key, shape in narrow.items():
        other = wide.get(key, shape)
        grown = [
            d for d, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b and a * (count + 1) == b * count
        ]
        if grown or shape[:1] != (1,):  # one for all samples here may be one for each elsewhere: position_ids
            samples[key] = grown[0] if grown else None
    return samples


def _shapes(
    model: nn.Module, run: Forward, attentions: list[str], stacks: list[str]
) -> dict[tuple[str, str], tuple[int, ...]]:
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    hooks = []
    layers = {path: next(model.get_submodule(path).children()) for path in stacks}
    for path, module in {**layers, **{path: model.get_submodule(path) for path in attentions}}.items():

        def note(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            found.update(
                {argument_key(path, name): tuple(x.shape) for name, x in named_arguments(module, args, kwargs)}
            )

        hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    with torch.no_grad():
        run(model)
    for hook in hooks:
        hook.remove()
    return found
