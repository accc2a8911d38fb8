"""Finds the stacks of layers of a model, and what pipeline stages and sequence parallelism need of them.

As with blocks, what one forward shows is a draft, and the draft that is proven is taken.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.discovery.forward_trace import TokenUse, outputs_per_layer
from shardformer.discovery.reduced_model import ReferenceGradients
from shardformer.discovery.validation import (
    ONE_LAYER,
    bound_policy,
    layer_sequence_of,
    validate_policy,
    validate_stages,
)
from shardformer.module_paths import join_path, match_paths
from shardformer.pipeline.layer_sequence import LayerSequence, PipelineHints, SequenceParallelHints, owner_layers
from shardformer.policies.module_descriptions import BlockDescription
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import LayerStack
from shardformer.sharding.plan import make_plan
from shardformer.torch_compat import tree_leaves

LayerStacks = Sequence[LayerStack]


def find_layer_stacks(reference: ReferenceGradients) -> list[LayerStack]:
    """The outermost lists of layers, each of which one forward calls in order; in the order of their calls."""
    model = reference.model
    layers = {
        path: [f"{path}.{name}" for name, _ in m.named_children()]
        for path, m in model.named_modules()
        if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1 and all(_is_layer(c) for c in m.children())
    }
    outer = [path for path in layers if not any(path.startswith(f"{other}.") for other in layers)]
    calls = list(dict.fromkeys(_calls(reference, [layer for path in outer for layer in layers[path]])))
    in_order = [path for path in outer if [call for call in calls if call in layers[path]] == layers[path]]
    given = outputs_per_layer(model, reference.run, in_order)
    in_order.sort(key=lambda path: calls.index(layers[path][0]))
    return [LayerStack(path, [], stages=PipelineHints(num_outputs=given[path])) for path in in_order]


def _is_layer(module: nn.Module) -> bool:
    """Whether it is made of other modules, of which some train; a list of linears and activations is no stack."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def find_pipeline_hints(reference: ReferenceGradients, policy: type[RolePolicy]) -> tuple[LayerStacks, str | None]:
    """The stacks of a policy with what a pipeline must know of them, and why the model cannot be cut, if so."""
    stacks = [policy.stack] if isinstance(policy.stack, LayerStack) else list(policy.stack)
    return _PipelineHintSearch(reference, policy).of(stacks)


class _PipelineHintSearch:
    """What stages of a small model need: drafts of its stacks."""

    def __init__(self, reference: ReferenceGradients, policy: type[RolePolicy]) -> None:
        self._truth, self._policy, self._model = reference, policy, reference.model
        self._fullest = (reference, *reference.also)[-1]  # a forward of all modules
        self._base = bound_policy(policy, reference.model).base

    def of(self, stacks: LayerStacks) -> tuple[LayerStacks, str | None]:
        """The stacks as they are proven, and None; or as they came, and what is wrong."""
        if (missing := self._not_run(stacks)) is not None:
            return stacks, f"{missing} is not run for every batch"
        against = self._mismatch(stacks)
        if against is None or against == ONE_LAYER:
            return stacks, against
        for draft in self._drafts(stacks):
            if self._mismatch(draft) is None:
                return self._only_needed(draft), None
        return stacks, against

    def _mismatch(self, stacks: LayerStacks) -> str | None:
        return validate_stages(self._truth, self._policy, stacks)

    def _chain(self, stacks: LayerStacks) -> LayerSequence:
        return layer_sequence_of(self._model, self._policy, stacks)

    def _own(self, path: str) -> str:
        """Relative to the base model, as a table says it."""
        return path.removeprefix(f"{self._base}.") if self._base else path

    def _not_run(self, stacks: LayerStacks) -> str | None:
        units = self._chain(stacks).layer_calls
        calls = _calls(self._truth, units)
        return next((unit for unit in units if unit not in calls), None)

    def _drafts(self, stacks: LayerStacks) -> Iterator[LayerStacks]:
        """By the order of calls; with states that a later stack reads; with tables of the first layer; with what all
        stages have."""
        placed = self._with_sides(stacks)
        from_first = self._with_lent(placed)
        ways = [placed, self._with_contexts(placed), from_first, self._with_contexts(from_first)]
        ways = [way for i, way in enumerate(ways) if way not in ways[:i]]
        yield from ways
        for way in ways:
            for with_lists in (False, True) if self._truth.also else (False,):
                if everywhere := self._in_front(self._chain(way), with_lists=with_lists):
                    yield [_with(stack, on_every_stage=everywhere) for stack in way]

    def _only_needed(self, stacks: LayerStacks) -> LayerStacks:
        """Without those of ``everywhere`` that are not needed."""
        kept = stacks
        for path in stacks[0].stages.on_every_stage:
            fewer = [_with(s, on_every_stage=tuple(p for p in s.stages.on_every_stage if p != path)) for s in kept]
            if self._mismatch(fewer) is None:
                kept = fewer
        return kept

    def _beside(self, chain: LayerSequence) -> list[str]:
        """The modules of the base model outside of the layers that have parameters of their own."""
        paths = [path for path, module in self._model.named_modules() if path and module._parameters]
        inside = [path for path in paths if path.startswith(f"{self._base}." if self._base else "")]
        return [path for path in inside if not any(f"{path}.".startswith(f"{unit}.") for unit in chain.layer_calls)]

    def _in_front(self, chain: LayerSequence, *, with_lists: bool) -> tuple[str, ...]:
        """Those that go with the first layer of all, and other lists of layers (a vision tower's) only if asked for."""
        home = owner_layers(self._model, chain)
        first = {name.rpartition(".")[0] for name, units in home.items() if units == frozenset({0})}
        paths = [path for path in self._beside(chain) if path in first]
        paths = [path for path in paths if with_lists or not re.search(r"\.\d", path)]
        return tuple(dict.fromkeys(self._own(re.split(r"\.\d", path)[0]) for path in paths))

    def _with_sides(self, stacks: LayerStacks) -> LayerStacks:
        """With what is called before the first and behind the last, where its place in the model says otherwise.

        (BART registers the norm of its embeddings behind the layers.)
        """
        chain = self._chain(stacks)
        home, beside = owner_layers(self._model, chain), self._beside(chain)
        calls = _calls(self._fullest, (*beside, *chain.layer_calls))
        out, end = list(stacks), len(chain.layer_calls) - 1
        bounds = [(calls.index(s.layer_calls[0]), calls.index(s.layer_calls[-1])) for s in chain.stacks]
        for path in (path for path in dict.fromkeys(calls) if path in beside):
            at, own = calls.index(path), self._own(path)
            unit = next(min(units) for name, units in home.items() if name.rpartition(".")[0] == path)
            if at < bounds[0][0] and unit == end:
                out[0] = _with(out[0], with_first_layer=(*out[0].stages.with_first_layer, own))
            if at > bounds[-1][1] and unit != end:
                out[-1] = _with(out[-1], with_last_layer=(*out[-1].stages.with_last_layer, own))
            for i, (before, after) in enumerate(pairwise(bounds) if len(bounds) == len(out) else []):
                # what a stack hands to the next directly is made before it is handed on
                if before[1] < at < after[0] and out[i + 1].cross_states is None and unit != chain.starts[i + 1] - 1:
                    out[i] = _with(out[i], with_last_layer=(*out[i].stages.with_last_layer, own))
        return out

    def _with_lent(self, stacks: LayerStacks) -> LayerStacks:
        """With what only the first layer has: it makes something that the others are handed (T5's biases)."""
        names = [name for name, _ in self._model.named_modules()]
        out = []
        for stack in stacks:
            path = match_paths(join_path(self._base, stack.layers), names)[
                0
            ]  # of a list of layers for each stage the first
            layers = list(self._model.get_submodule(path).children())
            out.append(_with(stack, shared_from_first=tuple(_only_in_first(*layers[:2]))) if len(layers) > 1 else stack)
        return out

    def _with_contexts(self, stacks: LayerStacks) -> LayerStacks:
        """With the argument of a module around each stack in which the states of the one before it come."""
        out = list(stacks)
        whole = [join_path(self._base, stack.layers) for stack in stacks]
        for at, (before, layers) in enumerate(pairwise(whole), start=1):
            if out[at].cross_states is not None or "*" in before + layers:
                continue
            if found := _entry(self._truth, before, layers):
                out[at] = replace(out[at], cross_states=(self._own(found[0]), found[1]))
        return out


def _with(stack: LayerStack, **needs: Any) -> LayerStack:
    return replace(stack, stages=replace(stack.stages, **needs))


def _calls(reference: ReferenceGradients, paths: Iterable[str]) -> list[str]:
    """Those of the modules at ``paths`` that one forward calls, in its order."""
    calls: list[str] = []
    with ExitStack() as stack, torch.no_grad():
        for path in paths:
            module = reference.model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(lambda *_, path=path: calls.append(path)).remove)
        reference.run(reference.model)
    return calls


def _only_in_first(first: nn.Module, second: nn.Module) -> Iterator[str]:
    """The tables that the second lacks, and the flags of the modules around them that say so."""
    others = dict(second.named_modules())
    for path, module in first.named_modules():
        if path not in others:
            continue
        own = dict(others[path].named_children())
        more = [name for name, m in module.named_children() if isinstance(m, nn.Embedding) and name not in own]
        flags = [n for n, v in vars(module).items() if isinstance(v, bool) and vars(others[path]).get(n) is not v]
        yield from (join_path(path, name) for name in (*more, *flags) if more)


def _entry(reference: ReferenceGradients, before: str, layers: str) -> tuple[str, str] | None:
    """The outermost module around ``layers`` that is given what the last layer at ``before`` made, and how."""
    made: list[Tensor] = []
    found: list[tuple[str, str]] = []
    model = reference.model
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
        reference.run(model)
    return found[0] if found else None


def _depends(value: Tensor, on: Tensor) -> bool:
    return torch.autograd.grad(value.sum(), on, retain_graph=True, allow_unused=True)[0] is not None


HINT_CANDIDATES = (
    frozenset[str](),
    frozenset({"between"}),
    frozenset({"mixing"}),
    frozenset({"mixing", "attentions"}),
    frozenset({"mixing", "holders"}),
    frozenset({"mixing", "attentions", "holders"}),
    frozenset({"mixing", "attentions", "holders", "between"}),
)
"""What is given the whole sequence, in the order in which it is tried: see ``_SequenceHintSearch`` and
``SequenceParallelHints``."""


@dataclass(frozen=True)
class _SequenceHintSearch:
    """What the layers of a stack may need, by what their modules did with its tokens.

    Args:
        mixing: children of layers that carry something from token to token, and hold no block.
        attentions: what holds the block of an attention from its entry to its exit.
        holders: what holds blocks that are given other things than the tokens of the stack, and gives these back; and
            what is given a number for each token beside them, as a router that reads which token it is.
        apart: modules that are given no tokens.
        beside: arguments that are given for each token beside the hidden states.
    """

    mixing: tuple[str, ...]
    attentions: tuple[str, ...]
    holders: tuple[str, ...]
    apart: tuple[str, ...]
    beside: tuple[str, ...]

    def needs(self, way: frozenset[str]) -> SequenceParallelHints:
        gathers = self.mixing if "mixing" in way else ()
        around = _each(name for part in ("attentions", "holders") if part in way for name in getattr(self, part))
        given = {"", *gathers, *around}
        beside = tuple(name for name in self.beside if name.rpartition(".")[0] in given)
        return SequenceParallelHints(gathers, around, beside, self.apart, "between" in way)


def find_sequence_hints(
    reference: ReferenceGradients, policy: type[RolePolicy], layers: Sequence[str], ranks: int
) -> tuple[LayerStacks, str | None]:
    """The stacks with what sequence parallelism has to know of them, and why it cannot be, if so.

    Args:
        layers: the path of each stack, of the whole model.
    """
    proven = [policy.stack] if isinstance(policy.stack, LayerStack) else list(policy.stack)
    first = _sequence_fault(reference, policy, proven, ranks)
    if first is None:
        return proven, None
    blocks, tried = _blocks(reference.model, policy), [proven]
    found = [_found(TokenUse(reference, path), blocks) for path in layers]
    for way in HINT_CANDIDATES:
        stacks = [replace(stack, sequence=x.needs(way)) for stack, x in zip(proven, found, strict=True)]
        if stacks not in tried:
            tried.append(stacks)
            if _sequence_fault(reference, policy, stacks, ranks) is None:
                return stacks, None
    return proven, first


def _sequence_fault(
    reference: ReferenceGradients, policy: type[RolePolicy], stacks: LayerStacks, ranks: int
) -> str | None:
    tried = type(policy.__name__, (policy,), {"stack": stacks})
    return validate_policy(reference, tried, ranks, enable_sequence_parallelism=True)


def _blocks(model: nn.Module, policy: type[RolePolicy]) -> list[BlockDescription]:
    found = policy()
    found.set_model(model)
    return [block for _, block in make_plan(model, found).blocks]


def _found(tokens: TokenUse, blocks: Sequence[BlockDescription]) -> _SequenceHintSearch:
    mixing, holders, attentions, apart = [], [], [], []
    for outer, name in tokens.mixing():
        inside = [block for block in blocks if f"{block.entry}.".startswith(f"{outer}.{name}.")]
        if not inside:
            mixing.append(name)
        elif all(block.arguments is None for block in inside):  # an attention gathers what it is given
            holders.append(name)
    for block in blocks:
        above = tokens.above(block.entry)
        fed = [name for name, path in above.items() if tokens.is_fed(path)]
        if block.arguments is not None:
            exits = tokens.above(block.row)
            attentions += [name for name in fed if name in exits][-1:]
        elif above and not tokens.is_given_tokens(block.entry):
            holders += fed[-1:]
            apart += [] if fed else [next(iter(above))]
        else:
            holders += [name for name in fed if tokens.is_given_numbers(above[name])]
    return _SequenceHintSearch(*map(_each, (mixing, attentions, holders, apart, tokens.beside())))


def _each(names: Iterable[str]) -> tuple[str, ...]:
    """Each once, in order."""
    return tuple(dict.fromkeys(names))
