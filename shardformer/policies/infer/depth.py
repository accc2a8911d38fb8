"""Where a model can be cut into stages: the stacks of its layers, and what of them several stages need.

As with blocks, what one forward shows is a draft. The small model is cut between every two of its layers, the second
stage continues with what the first hands on, and outputs and gradients must be those of the whole model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardformer.context import Axis, ParallelContext
from shardformer.errors import ShardFormerError
from shardformer.pipeline.absent import Ghosts, is_ghost
from shardformer.pipeline.chain import Chain, Span, holders, homes
from shardformer.pipeline.passage import Passage
from shardformer.pipeline.passage import Run as Pass
from shardformer.policies.blocks import Stack
from shardformer.policies.infer.flow import given_by_layers
from shardformer.policies.infer.prove import RELATIVE, Differs, Truth, allowed, copied, fields_of, weighted
from shardformer.policies.paths import join, matching
from shardformer.policies.roles import RolePolicy
from shardformer.sharding.config import ShardConfig
from shardformer.sharding.stages import lend

NOT_RUN = "is not run for every batch"
ONE_LAYER = "no two layers of it run one behind the other"


def found_stacks(truth: Truth) -> list[Stack]:
    """The outermost lists of layers, each of which one forward calls in order; in the order of their calls."""
    model = truth.model
    lists = {
        path: list(m.children())
        for path, m in model.named_modules()
        if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1 and all(_is_layer(c) for c in m.children())
    }
    outer = [p for p in lists if not any(p.startswith(f"{other}.") for other in lists)]
    layers = {path: [f"{path}.{name}" for name, _ in model.get_submodule(path).named_children()] for path in outer}
    calls = _calls(truth, [layer for path in outer for layer in layers[path]])
    order = {path: [calls.index(layer) for layer in layers[path] if layer in calls] for path in outer}
    in_order = [p for p in outer if order[p] == sorted(order[p]) and len(order[p]) == len(lists[p])]
    given = given_by_layers(model, truth.run, in_order)
    return [Stack(path, [], returns=given[path]) for path in sorted(in_order, key=lambda path: order[path])]


def _is_layer(module: nn.Module) -> bool:
    """Whether it is made of other modules, of which some train; a list of linears and activations is no stack."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def along_depth(truth: Truth, policy: type[RolePolicy]) -> tuple[Sequence[Stack], str | None]:
    """The stacks of a policy with what a pipeline must know of them, and why the model cannot be cut, if so."""
    stacks = [policy.stack] if isinstance(policy.stack, Stack) else list(policy.stack)
    against = _not_run(truth, policy, stacks) or fault_of_cuts(truth, policy, stacks)
    if against is None or against == ONE_LAYER or against.endswith(NOT_RUN):
        return stacks, against
    for draft in _drafts(truth, policy, stacks):
        if fault_of_cuts(truth, policy, draft) is None:
            return _only_needed(truth, policy, draft), None
    return stacks, against


def _not_run(truth: Truth, policy: type[RolePolicy], stacks: Sequence[Stack]) -> str | None:
    units = _chain(truth.model, policy, stacks).units
    calls = _calls(truth, units)
    return next((f"{unit} {NOT_RUN}" for unit in units if unit not in calls), None)


def _calls(truth: Truth, paths: Iterable[str]) -> list[str]:
    """Those of the modules at ``paths`` that one forward calls, in its order."""
    calls: list[str] = []
    with ExitStack() as stack, torch.no_grad():
        for path in paths:
            module = truth.model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(lambda *_, path=path: calls.append(path)).remove)
        truth.run(truth.model)
    return calls


def _drafts(truth: Truth, policy: type[RolePolicy], stacks: Sequence[Stack]) -> Iterator[list[Stack]]:
    """Other ways to see them: by the order of calls, with states that a later one reads, with what all stages have."""
    placed = _with_sides(truth, policy, stacks)
    lent = _with_lent(truth.model, policy, placed)
    ways = [placed, _with_contexts(truth, policy, placed), lent, _with_contexts(truth, policy, lent)]
    ways = [way for i, way in enumerate(ways) if way not in ways[:i]]
    yield from ways
    for way in ways:
        chain = _chain(truth.model, policy, way)
        everywhere = _beside(truth.model, policy, chain) if chain.segments else ()
        if everywhere:
            yield [replace(stack, everywhere=everywhere) for stack in way]


def _only_needed(truth: Truth, policy: type[RolePolicy], stacks: Sequence[Stack]) -> list[Stack]:
    """Without those of ``everywhere`` that are not needed."""
    kept = list(stacks)
    for path in kept[0].everywhere:
        fewer = [replace(s, everywhere=tuple(p for p in s.everywhere if p != path)) for s in kept]
        if fault_of_cuts(truth, policy, fewer) is None:
            kept = fewer
    return kept


def _beside(model: nn.Module, policy: type[RolePolicy], chain: Chain) -> tuple[str, ...]:
    """The modules with parameters of their own that go with the first layer of all, relative to the base model."""
    home, base = homes(model, chain), _of(policy, model).base
    first = {name.rpartition(".")[0] for name, units in home.items() if units == frozenset({0})}
    inside = [path for path in _owners(model, chain) if path in first and path.startswith(f"{base}." if base else "")]
    inside = [path for path in inside if not any(part.isdigit() for part in path.split("."))]  # of another stack
    return tuple(path.removeprefix(f"{base}.") if base else path for path in inside)


def _with_sides(truth: Truth, policy: type[RolePolicy], stacks: Sequence[Stack]) -> list[Stack]:
    """The stacks with what is called before the first and behind the last, where its place in the model says otherwise.

    (BART registers the norm of its embeddings behind the layers.)
    """
    model, chain, base = truth.model, _chain(truth.model, policy, stacks), _of(policy, truth.model).base
    home = homes(model, chain)
    beside = [path for path in _owners(model, chain) if path.startswith(f"{base}." if base else "")]
    calls = _calls(truth, (*beside, *chain.units))
    out, end = list(stacks), len(chain.units) - 1
    bounds = [(calls.index(s.units[0]), calls.index(s.units[-1])) for s in chain.segments]
    for path in (path for path in dict.fromkeys(calls) if path in beside):
        at, own = calls.index(path), path.removeprefix(f"{base}.") if base else path
        unit = next(min(units) for name, units in home.items() if name.rpartition(".")[0] == path)
        if at < bounds[0][0] and unit == end:
            out[0] = replace(out[0], front=(*out[0].front, own))
        if at > bounds[-1][1] and unit != end:
            out[-1] = replace(out[-1], behind=(*out[-1].behind, own))
        for i, (before, after) in enumerate(pairwise(bounds) if len(bounds) == len(out) else []):
            # what a stack hands to the next directly is made before it is handed on
            if before[1] < at < after[0] and out[i + 1].context is None and unit != chain.starts[i + 1] - 1:
                out[i] = replace(out[i], behind=(*out[i].behind, own))
    return out


def _with_lent(model: nn.Module, policy: type[RolePolicy], stacks: Sequence[Stack]) -> list[Stack]:
    """The stacks with what only their first layer has: it makes something that the others are handed (T5's biases)."""
    base, names = _of(policy, model).base, [name for name, _ in model.named_modules()]
    out = []
    for stack in stacks:
        first = matching(join(base, stack.layers), names)[0]  # of a stack with a list of layers for each stage
        layers = list(model.get_submodule(first).children())
        out.append(replace(stack, lent=tuple(_only_in_first(layers[0], layers[1]))) if len(layers) > 1 else stack)
    return out


def _only_in_first(first: nn.Module, second: nn.Module) -> Iterator[str]:
    """The tables that the second lacks, and the flags of the modules around them that say so."""
    others = dict(second.named_modules())
    for path, module in first.named_modules():
        if path not in others:
            continue
        own = dict(others[path].named_children())
        more = [name for name, m in module.named_children() if isinstance(m, nn.Embedding) and name not in own]
        flags = [n for n, v in vars(module).items() if isinstance(v, bool) and vars(others[path]).get(n) is not v]
        yield from (join(path, name) for name in (*more, *flags) if more)


def _owners(model: nn.Module, chain: Chain) -> list[str]:
    """The modules outside of the layers that have parameters of their own."""
    paths = [path for path, module in model.named_modules() if path and module._parameters]
    return [path for path in paths if not any(f"{path}.".startswith(f"{unit}.") for unit in chain.units)]


def _with_contexts(truth: Truth, policy: type[RolePolicy], stacks: Sequence[Stack]) -> list[Stack]:
    """The stacks with the argument of a module around each in which the states of the one before it come."""
    out, base = list(stacks), _of(policy, truth.model).base
    whole = [join(base, stack.layers) for stack in stacks]
    for at in range(1, len(out)):
        if (
            out[at].context is None
            and "*" not in whole[at - 1] + whole[at]
            and (found := _entry(truth, whole[at - 1], whole[at]))
        ):
            path = found[0].removeprefix(f"{base}.") if base else found[0]
            out[at] = replace(out[at], context=(path, found[1]))
    return out


def _entry(truth: Truth, before: str, layers: str) -> tuple[str, str] | None:
    """The outermost module around ``layers`` that is given what the last layer at ``before`` made, and how."""
    made: list[Tensor] = []
    found: list[tuple[str, str]] = []
    model = truth.model
    last = list(model.get_submodule(before).children())[-1]
    around = [".".join(layers.split(".")[:i]) for i in range(1, layers.count(".") + 1)]

    def note(path: str) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            names = inspect.signature(module.forward).parameters
            for name, value in [*list(zip(names, args, strict=False))[1:], *kwargs.items()]:
                if made and isinstance(value, Tensor) and value.requires_grad and _depends(value, made[0]):
                    found.append((path, name))

        return look

    with ExitStack() as stack:
        hook = last.register_forward_hook(
            lambda _, __, out: made.append(next(x for x in tree_leaves(out) if isinstance(x, Tensor)))
        )
        stack.callback(hook.remove)
        for path in around:
            if not f"{before}.".startswith(f"{path}."):
                module = model.get_submodule(path)
                stack.callback(module.register_forward_pre_hook(note(path), with_kwargs=True).remove)
        truth.run(model)
    return found[0] if found else None


def _depends(value: Tensor, on: Tensor) -> bool:
    return torch.autograd.grad(value.sum(), on, retain_graph=True, allow_unused=True)[0] is not None


# --- the proof


def fault_of_cuts(truth: Truth, policy: type[RolePolicy], stacks: Sequence[Stack]) -> str | None:
    """What is wrong with two stages, wherever between two layers they are cut; None when nobody could tell."""
    try:
        chain = _chain(truth.model, policy, stacks)
        count = len(chain.units)
        if count < 2:
            return ONE_LAYER
        ends = {1, count // 2, count - 1, *(at for start in chain.starts for at in (start - 1, start))}
        for bound in sorted(ends & set(range(1, count))):
            _compare(truth, chain, chain.spans([0, bound, count]))
    except Differs as difference:
        return str(difference)
    except ShardFormerError as error:
        return error.what
    except Exception as error:  # a forward that the cut breaks can raise anything
        return f"cut into stages it does not run ({type(error).__name__}: {' '.join(str(error).split())[:160]})"
    return None


def _of(policy: type[RolePolicy], model: nn.Module) -> RolePolicy:
    described = policy()
    described.set_model(model)
    described.set_shard_config(ShardConfig(context=ParallelContext.from_group(Axis("tensor"))))
    return described


def _chain(model: nn.Module, policy: type[RolePolicy], stacks: Sequence[Stack]) -> Chain:
    with_stacks: Any = type(policy.__name__, (policy,), {"stack": tuple(stacks)})
    return Chain(tuple(s for s in _of(with_stacks, model).segments() if s.units))


def _compare(truth: Truth, chain: Chain, spans: Sequence[Span]) -> None:
    home = homes(truth.model, chain)
    held = holders(home, spans)
    stages: list[tuple[nn.Module, Passage]] = []
    for stage in range(len(spans)):
        model, ghosts = copied(truth.model), Ghosts()
        ghosts.remove(model, {name: stage in stages_of for name, stages_of in held.items()})
        lend(model, chain, [spans[stage]])
        stages.append((model, Passage(model, chain, ghosts, home)))
    (first, first_passage), (second, second_passage) = stages
    _, payload = first_passage.run(first, Pass(spans[0], {}), lambda: truth.run(first))
    if payload is None:
        raise Differs("its layers are not all run")
    received = {name: x.detach().requires_grad_(x.requires_grad) for name, x in payload.items()}
    output, _ = second_passage.run(second, Pass(spans[1], received), lambda: truth.run(second))
    _compare_outputs(truth, output)
    pairs = [(x, received[name].grad) for name, x in payload.items() if received[name].grad is not None]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
    _compare_gradients(truth.model, _sums(truth.model, [first, second]))


def _compare_outputs(truth: Truth, output: Any) -> None:
    """Compares what the last stage has of the output, and leaves the gradients of that in all models."""
    whole, given = _floats(truth.run(truth.model)), _floats(output)
    here = [at for at, x in enumerate(given) if not is_ghost(x)]
    if len(whole) != len(given) or 0 not in here:
        raise Differs("what it gives reads what an earlier stage holds")
    for at in here:
        a, b = whole[at], given[at]
        if a.shape != b.shape or not (a - b).abs().max() <= RELATIVE * a.abs().max():
            raise Differs("what it gives differs")
    truth.model.zero_grad()
    for outputs in (whole, given):
        torch.stack([weighted(outputs[at], outputs[at].shape).double() for at in here]).sum().backward()


def _compare_gradients(model: nn.Module, found: Mapping[str, Tensor]) -> None:
    expected = _sums(model, [model])
    model.zero_grad()
    if expected.keys() != found.keys():
        raise Differs(f"{sorted(expected.keys() ^ found.keys())[0]} has a gradient in one of the two only")
    bounds = allowed(expected)
    for name, gradient in expected.items():
        if gradient.numel() and not (gradient - found[name]).abs().max() <= bounds[name]:
            raise Differs(f"the gradient of {name} differs")


def _floats(output: Any) -> list[Tensor]:
    leaves = tree_leaves(fields_of(output))
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
