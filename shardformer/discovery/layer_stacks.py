"""Finds a model's lists of layers, and the settings that they need for pipeline and sequence parallelism.

Pipeline stages and sequence parallelism need hints, such as the modules that run on every stage. Traced forward passes
yield candidates for these hints. The first candidate that passes validation is used.

``base_model_pp_plan`` of transformers is not read, because it adds nothing. Of the 82 model types without a family that
have it, the first candidate passes for the same 78 as the plan does, and the search finds hints for one more.
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

from shardformer.discovery.forward_trace import LayerListTrace, count_layer_outputs
from shardformer.discovery.reduced_model import ReferenceGradients
from shardformer.discovery.validation import (
    ONE_LAYER,
    build_layer_sequence,
    get_layer_stacks,
    instantiate_policy,
    validate_pipeline_stages,
    validate_policy,
)
from shardformer.module_paths import join_path, match_paths
from shardformer.pipeline.layer_sequence import (
    LayerSequence,
    PipelineHints,
    SequenceParallelHints,
    map_tensors_to_layers,
)
from shardformer.policies.module_descriptions import BlockDescription
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import LayerStack
from shardformer.sharding.plan import make_sharding_plan
from shardformer.torch_compat import tree_leaves

LayerStacks = Sequence[LayerStack]


def find_layer_stacks(reference: ReferenceGradients) -> list[LayerStack]:
    """Find the outermost lists of layers that a model calls in order, such as encoder and decoder layers."""
    model = reference.model
    layers = {
        path: [f"{path}.{name}" for name, _ in m.named_children()]
        for path, m in model.named_modules()
        if isinstance(m, nn.ModuleList | nn.Sequential)
        and len(m) > 1
        and all(_has_children_and_parameters(c) for c in m.children())
    }
    outer = [path for path in layers if not any(path.startswith(f"{other}.") for other in layers)]
    calls = list(dict.fromkeys(_record_call_order(reference, [layer for path in outer for layer in layers[path]])))
    in_order = [path for path in outer if [call for call in calls if call in layers[path]] == layers[path]]
    counts = count_layer_outputs(model, reference.forward_fn, in_order)
    in_order.sort(key=lambda path: calls.index(layers[path][0]))
    return [LayerStack(path, [], stages=PipelineHints(num_outputs=counts[path])) for path in in_order]


def _has_children_and_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def find_pipeline_hints(reference: ReferenceGradients, policy_cls: type[RolePolicy]) -> tuple[LayerStacks, str | None]:
    """Assign modules outside the layers, such as norms and heads, to pipeline stages.

    Returns the stacks with these assignments as hints and None, or the unchanged stacks and why validation fails.
    """
    return _PipelineStageAssignmentSearch(reference, policy_cls).assign_modules_to_stages(get_layer_stacks(policy_cls))


class _PipelineStageAssignmentSearch:
    """Searches for an assignment of modules to pipeline stages that works on a small version of the model."""

    def __init__(self, reference: ReferenceGradients, policy_cls: type[RolePolicy]) -> None:
        self._reference, self._policy, self._model = reference, policy_cls, reference.model
        self._last_reference = (reference, *reference.further_batches)[-1]  # the forward pass that calls most modules
        self._base = instantiate_policy(policy_cls, reference.model).base

    def assign_modules_to_stages(self, layer_stacks: LayerStacks) -> tuple[LayerStacks, str | None]:
        """Assign modules to stages, or return the unchanged layer stacks and why no assignment works."""
        if (missing := self._find_uncalled_layer_path(layer_stacks)) is not None:
            return layer_stacks, f"the layer {missing} is not called for every batch"
        failure = self._validate_stages(layer_stacks)
        if failure is None or failure == ONE_LAYER:
            return layer_stacks, failure
        for candidate in self._iter_possible_stage_assignments(layer_stacks):
            if self._validate_stages(candidate) is None:
                return self._remove_unneeded_stage_modules(candidate), None
        return layer_stacks, failure

    def _validate_stages(self, stacks: LayerStacks) -> str | None:
        return validate_pipeline_stages(self._reference, self._policy, stacks)

    def _build_layer_sequence(self, layer_stacks: LayerStacks) -> LayerSequence:
        return build_layer_sequence(self._model, self._policy, layer_stacks)

    def _strip_base_prefix(self, module_path: str) -> str:
        return module_path.removeprefix(f"{self._base}.") if self._base else module_path

    def _find_uncalled_layer_path(self, layer_stacks: LayerStacks) -> str | None:
        units = self._build_layer_sequence(layer_stacks).called_layer_paths
        calls = _record_call_order(self._reference, units)
        return next((unit for unit in units if unit not in calls), None)

    def _iter_possible_stage_assignments(self, layer_stacks: LayerStacks) -> Iterator[LayerStacks]:
        """Yield possible assignments of modules to pipeline stages, starting with the simplest."""
        placed = self._assign_stages_by_call_order(layer_stacks)
        crossed = self._assign_stages_by_call_order(self._add_cross_attention_inputs(layer_stacks))
        from_first = self._share_first_layer_embeddings(placed)
        ways = [
            placed,
            self._add_cross_attention_inputs(placed),
            crossed,
            from_first,
            self._add_cross_attention_inputs(from_first),
            self._share_first_layer_embeddings(crossed),
        ]
        ways = [way for i, way in enumerate(ways) if way not in ways[:i]]
        yield from ways
        for way in ways:
            for with_lists in (False, True) if self._reference.further_batches else (False,):
                if everywhere := self._find_module_paths_before_layers(
                    self._build_layer_sequence(way), include_module_lists=with_lists
                ):
                    yield [_replace_pipeline_hints(stack, on_every_stage=everywhere) for stack in way]

    def _remove_unneeded_stage_modules(self, stacks: LayerStacks) -> LayerStacks:
        """Remove modules from ``on_every_stage`` if validation passes without them."""
        kept = stacks
        for path in stacks[0].stages.on_every_stage:
            paths = tuple(p for p in kept[0].stages.on_every_stage if p != path)
            fewer = [_replace_pipeline_hints(stack, on_every_stage=paths) for stack in kept]
            if self._validate_stages(fewer) is None:
                kept = fewer
        return kept

    def _find_module_paths_outside_layers(self, layer_sequence: LayerSequence) -> list[str]:
        paths = [path for path, module in self._model.named_modules() if path and module._parameters]
        inside = [path for path in paths if path.startswith(f"{self._base}." if self._base else "")]
        return [
            path
            for path in inside
            if not any(f"{path}.".startswith(f"{unit}.") for unit in layer_sequence.called_layer_paths)
        ]

    def _find_module_paths_before_layers(
        self, layer_sequence: LayerSequence, *, include_module_lists: bool
    ) -> tuple[str, ...]:
        """Find modules outside the layers that run on the first layer's stage, such as embeddings."""
        owners = map_tensors_to_layers(self._model, layer_sequence)
        first = {name.rpartition(".")[0] for name, units in owners.items() if units == frozenset({0})}
        paths = [path for path in self._find_module_paths_outside_layers(layer_sequence) if path in first]
        paths = [path for path in paths if include_module_lists or not re.search(r"\.\d", path)]
        return tuple(dict.fromkeys(self._strip_base_prefix(re.split(r"\.\d", path)[0]) for path in paths))

    def _assign_stages_by_call_order(self, layer_stacks: LayerStacks) -> LayerStacks:
        """Assign modules to stages by call order if they were registered in a different order."""
        chain = self._build_layer_sequence(layer_stacks)
        owners, outside = map_tensors_to_layers(self._model, chain), self._find_module_paths_outside_layers(chain)
        readers = [stack.context[0] for stack in chain.stacks if stack.context is not None]
        calls = _record_call_order(self._last_reference, (*outside, *chain.called_layer_paths, *readers))
        out, ranges = list(layer_stacks), chain.get_stack_layer_ranges()
        bounds = [(calls.index(s.layer_calls[0]), calls.index(s.layer_calls[-1])) for s in chain.stacks]
        for path in (path for path in dict.fromkeys(calls) if path in outside):
            at, own = calls.index(path), self._strip_base_prefix(path)
            unit = next(min(units) for name, units in owners.items() if name.rpartition(".")[0] == path)
            if at < bounds[0][0] and unit in (*ranges[0][1:], ranges[-1][-1]):
                out[0] = _add_module_to_first_layer(out[0], own)
            if at > bounds[-1][1] and unit != ranges[-1][-1]:
                out[-1] = _add_module_to_last_layer(out[-1], own)
            for i, (before, after) in enumerate(pairwise(bounds) if len(bounds) == len(out) else []):
                context = chain.stacks[i + 1].context
                # the stage of the first stack sends the hidden states, or the context when the second stack reads it
                sent_at = calls.index(context[0]) if context is not None and context[0] in calls else after[0]
                if before[1] < at < sent_at and unit != ranges[i][-1]:
                    out[i] = _add_module_to_last_layer(out[i], own)
                if sent_at < at < after[0] and unit in ranges[i + 1][1:]:
                    out[i + 1] = _add_module_to_first_layer(out[i + 1], own)
        return out

    def _share_first_layer_embeddings(self, layer_stacks: LayerStacks) -> LayerStacks:
        """Share embeddings that only the first layer has with later layers, such as T5's position bias."""
        names, out = [name for name, _ in self._model.named_modules()], list(layer_stacks)
        for i, stack in enumerate(layer_stacks):
            path = match_paths(join_path(self._base, stack.layers), names)[0]  # the first list, if each stage has one
            first, *others = self._model.get_submodule(path).children()
            if others:
                out[i] = _replace_pipeline_hints(
                    stack, shared_from_first=tuple(_iter_embeddings_only_in_first_layer(first, others[0]))
                )
        return out

    def _add_cross_attention_inputs(self, stacks: LayerStacks) -> LayerStacks:
        """Record which argument passes the encoder's output to the decoder's cross-attention."""
        out = list(stacks)
        full_paths = [join_path(self._base, stack.layers) for stack in stacks]
        for at, (before, layers) in enumerate(pairwise(full_paths), start=1):
            is_open = out[at].cross_states is None and "*" not in before + layers
            if is_open and (found := _find_cross_attention_input(self._reference, before, layers)):
                out[at] = replace(out[at], cross_states=(self._strip_base_prefix(found[0]), found[1]))
        return out


def _add_module_to_first_layer(stack: LayerStack, module_path: str) -> LayerStack:
    return _replace_pipeline_hints(stack, with_first_layer=(*stack.stages.with_first_layer, module_path))


def _add_module_to_last_layer(stack: LayerStack, module_path: str) -> LayerStack:
    return _replace_pipeline_hints(stack, with_last_layer=(*stack.stages.with_last_layer, module_path))


def _replace_pipeline_hints(stack: LayerStack, **hints: Any) -> LayerStack:
    return replace(stack, stages=replace(stack.stages, **hints))


def _record_call_order(reference: ReferenceGradients, module_paths: Iterable[str]) -> list[str]:
    """Run one forward pass and return the paths of the called modules, in call order."""
    calls: list[str] = []
    with ExitStack() as stack, torch.no_grad():
        for path in module_paths:
            module = reference.model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(lambda *_, path=path: calls.append(path)).remove)
        reference.forward_fn(reference.model)
    return calls


def _iter_embeddings_only_in_first_layer(first_layer: nn.Module, second_layer: nn.Module) -> Iterator[str]:
    """Yield the paths of embeddings that only the first layer has, and of the flags that mark this layer."""
    others = dict(second_layer.named_modules())
    for path, module in first_layer.named_modules():
        if path not in others:
            continue
        own = dict(others[path].named_children())
        more = [name for name, m in module.named_children() if isinstance(m, nn.Embedding) and name not in own]
        flags = [n for n, v in vars(module).items() if isinstance(v, bool) and vars(others[path]).get(n) is not v]
        yield from (join_path(path, name) for name in (*more, *flags) if more)


def _find_cross_attention_input(
    reference: ReferenceGradients, previous_layer_list_path: str, layer_list_path: str
) -> tuple[str, str] | None:
    """Find the module and the argument that pass the encoder's output to the decoder layers."""
    made: list[Tensor] = []
    found: list[tuple[str, str]] = []
    model = reference.model
    last = list(model.get_submodule(previous_layer_list_path).children())[-1]
    enclosing_paths = [".".join(layer_list_path.split(".")[:i]) for i in range(1, layer_list_path.count(".") + 1)]

    def make_forward_pre_hook(module_path: str) -> Callable[..., None]:
        def forward_pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            names = inspect.signature(module.forward).parameters
            for name, value in [*list(zip(names, args, strict=False))[1:], *kwargs.items()]:
                if not made or not isinstance(value, Tensor) or not value.requires_grad:
                    continue
                if torch.autograd.grad(value.sum(), made[0], retain_graph=True, allow_unused=True)[0] is not None:
                    found.append((module_path, name))

        return forward_pre_hook

    with ExitStack() as stack:
        handle = last.register_forward_hook(
            lambda _, __, out: made.append(next(x for x in tree_leaves(out) if isinstance(x, Tensor)))
        )
        stack.callback(handle.remove)
        for path in enclosing_paths:
            if not f"{previous_layer_list_path}.".startswith(f"{path}."):
                module = model.get_submodule(path)
                stack.callback(module.register_forward_pre_hook(make_forward_pre_hook(path), with_kwargs=True).remove)
        reference.forward_fn(model)
    return found[0] if found else None


HINT_CANDIDATES = (
    frozenset[str](),
    frozenset({"between"}),
    frozenset({"mixing"}),
    frozenset({"mixing", "attentions"}),
    frozenset({"mixing", "containers"}),
    frozenset({"mixing", "attentions", "containers"}),
    frozenset({"mixing", "attentions", "containers", "between"}),
)
"""Groups of modules that may need the full sequence, in the order of validation (see
``_SequenceParallelHintCandidates``)."""


@dataclass(frozen=True)
class _SequenceParallelHintCandidates:
    """Modules that may need special settings under sequence parallelism, such as the full sequence as input."""

    mixing: tuple[str, ...]  # children of layers that mix tokens and contain no sharded block
    attentions: tuple[str, ...]  # modules that contain an attention block from its entry to its exit
    containers: tuple[str, ...]  # modules around blocks with inputs other than tokens, or with a number per token
    without_tokens: tuple[str, ...]  # modules that receive no tokens
    per_token_args: tuple[str, ...]  # arguments per token in addition to the hidden states

    def make_sequence_hints(self, selected_groups: frozenset[str]) -> SequenceParallelHints:
        """Create the sequence parallelism settings for the selected groups of modules."""
        gathers = self.mixing if "mixing" in selected_groups else ()
        around = _remove_duplicates(
            name for part in ("attentions", "containers") if part in selected_groups for name in getattr(self, part)
        )
        gathered = {"", *gathers, *around}
        per_token_args = tuple(name for name in self.per_token_args if name.rpartition(".")[0] in gathered)
        return SequenceParallelHints(gathers, around, per_token_args, self.without_tokens, "between" in selected_groups)


def find_sequence_parallel_hints(
    reference: ReferenceGradients, policy_cls: type[RolePolicy], stack_paths: Sequence[str], num_ranks: int
) -> tuple[LayerStacks, str | None]:
    """Find modules that need special settings under sequence parallelism, such as the full sequence as input.

    Returns the stacks with these modules as hints and None, or the unchanged stacks and why validation fails.

    Args:
        stack_paths: the path of each stack in the full model.
    """
    stacks_of_policy = get_layer_stacks(policy_cls)
    first = _validate_sequence_parallelism(reference, policy_cls, stacks_of_policy, num_ranks)
    if first is None:
        return stacks_of_policy, None
    blocks, tried = _get_block_descriptions(reference.model, policy_cls), [stacks_of_policy]
    found = [_find_sequence_parallel_hint_candidates(LayerListTrace(reference, path), blocks) for path in stack_paths]
    for groups in HINT_CANDIDATES:
        stacks = [
            replace(stack, sequence=x.make_sequence_hints(groups))
            for stack, x in zip(stacks_of_policy, found, strict=True)
        ]
        if stacks not in tried:
            tried.append(stacks)
            if _validate_sequence_parallelism(reference, policy_cls, stacks, num_ranks) is None:
                return stacks, None
    return stacks_of_policy, first


def _validate_sequence_parallelism(
    reference: ReferenceGradients, policy_cls: type[RolePolicy], layer_stacks: LayerStacks, num_ranks: int
) -> str | None:
    tried = type(policy_cls.__name__, (policy_cls,), {"stack": layer_stacks})
    return validate_policy(reference, tried, num_ranks, enable_sequence_parallelism=True)


def _get_block_descriptions(model: nn.Module, policy_cls: type[RolePolicy]) -> list[BlockDescription]:
    found = policy_cls()
    found.set_model(model)
    return [block for _, block in make_sharding_plan(model, found).blocks]


def _find_sequence_parallel_hint_candidates(
    layer_list_trace: LayerListTrace, blocks: Sequence[BlockDescription]
) -> _SequenceParallelHintCandidates:
    mixing, containers, attentions, without_tokens = [], [], [], []
    for outer, name in layer_list_trace.find_token_mixing_modules():
        inside = [block for block in blocks if f"{block.entry}.".startswith(f"{outer}.{name}.")]
        if not inside:
            mixing.append(name)
        elif all(block.arguments is None for block in inside):  # an attention module gathers its own inputs
            containers.append(name)
    for block in blocks:
        above = layer_list_trace.get_enclosing_module_paths(block.entry)
        fed = [name for name, path in above.items() if layer_list_trace.is_token_dim_preserved(path)]
        if block.arguments is not None:
            exits = layer_list_trace.get_enclosing_module_paths(block.row)
            attentions += [name for name in fed if name in exits][-1:]
        elif above and not layer_list_trace.receives_all_tokens(block.entry):
            containers += fed[-1:]
            without_tokens += [] if fed else [next(iter(above))]
        else:
            containers += [name for name in fed if layer_list_trace.has_per_token_scalar_input(above[name])]
    return _SequenceParallelHintCandidates(
        *map(
            _remove_duplicates,
            (mixing, attentions, containers, without_tokens, layer_list_trace.iter_per_token_arg_paths()),
        )
    )


def _remove_duplicates(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
