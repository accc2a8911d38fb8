"""Tensor parallelism on a grid, of one model: what becomes of what stands between its blocks."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, PolicyError
from shardformer.kernels.fused_ops import is_elementwise, norm_kind
from shardformer.layout.shard_spec import Split
from shardformer.layout.sharding_metadata import ShardingMetadata
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.mesh.tensor_grid import TensorGrid, with_tensor_grid
from shardformer.module_paths import find_module, is_transposed, join_path
from shardformer.policies.module_descriptions import BlockArguments, BlockDescription, SubModuleReplacementDescription
from shardformer.sharding.plan import ShardingPlan
from shardformer.tensor_parallel.block import change_argument
from shardformer.tensor_parallel.grid.layers import GridModule, GridNorm
from shardformer.tensor_parallel.grid.region import GridStackActivations
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row
from shardformer.tensor_parallel.sequence_parallel import first_tensor
from shardformer.torch_compat import keystr, tree_flatten_with_path, tree_map_with_path
from shardformer.transformers_compat import arguments_of, without_caches

HIDDEN_STATES = "what flows through the stack"
ArgumentSamples = dict[tuple[str, str], int | None]
"""(path of an attention with * for indices, path of an argument) -> its dim that counts samples, or a multiple."""


def with_grid_context(config: ShardConfig, context: ParallelContext) -> tuple[ShardConfig, TensorGrid]:
    """The config whose tensor axis is seen as the grid of its mode, and that grid. All processes call it.

    Raises ConfigError where the sizes do not fit the mode.
    """
    view = with_tensor_grid(context, config.tensor_parallel_mode)
    if view is not config.context:
        manager = copy.copy(config.pipeline_stage_manager)
        if manager is not None:
            manager.context = view
        config = replace(config, context=view, pipeline_stage_manager=manager, tensor_parallel_process_group=None)
    return config, TensorGrid.of(view, config.tensor_parallel_mode)


def plan_for_grid(plan: ShardingPlan, grid: TensorGrid) -> ShardingPlan:
    """The plan with what is to be done between the blocks, where ranks have parts of the hidden features.

    Norms over them, and numbers for each of them, are cut. What else has parameters is given all features: the module
    of the layer that it stands in. Raises PolicyError where a rule or a layer knows of one tensor axis only.
    """
    if not plan.stacks:
        raise PolicyError(
            f"tensor_parallel_mode={grid.mode!r} for {type(plan.model).__name__}, whose policy names no stack",
            rule="On a grid the stream is cut from the first layer of a stack to its last",
            remedy="Write the policy as roles (RolePolicy with a Stack), or use tensor_parallel_mode='1d'",
        )
    plan = replace(
        plan, replacements=dict(plan.replacements), parameters=dict(plan.parameters), full_sequence_modules=[]
    )
    for stack in plan.stacks:
        prefix = f"{stack.layers}."
        blocks = [block for _, block in plan.blocks if block.entry.startswith(prefix)]
        _check_classes(plan, prefix)
        width = _width(plan, blocks)
        if width is None:
            continue
        inside = _BlockInterior(blocks)
        for path, module in plan.model.get_submodule(stack.layers).named_modules(prefix=stack.layers):
            own = dict(module.named_parameters(recurse=False))
            is_known = path in plan.replacements or (own and all(join_path(path, n) in plan.parameters for n in own))
            if _has_numbers(module, width) and not is_known and not inside.holds(path):
                _add(plan, grid, prefix, path, module, width)
        norm = plan.model.get_submodule(stack.final_norm) if stack.final_norm else None
        if stack.final_norm and norm is not None and _has_numbers(norm, width):
            _add(plan, grid, prefix, stack.final_norm, norm, width)
    around = [block.gather_module for _, block in plan.blocks if block.gather_module is not None]
    gathered = [path for path in dict.fromkeys(plan.full_sequence_modules) if path not in around]
    if (gathered or around) and grid.mode == "3d":
        raise ConfigError(
            f"tensor_parallel_mode='3d' for {type(plan.model).__name__}, whose {[*gathered, *around][0]!r} reads all "
            "hidden features of a token",
            rule="In 3D the ranks of a row of the grid have other samples of what flows between the blocks",
            remedy="Use tensor_parallel_mode='2d' or '2.5d', which serve such a model, or '1d'",
        )
    kept = {n: s for n, s in plan.replacements.items() if not (_is_norm(s) and _within(n, [*gathered, *around]))}
    return replace(plan, replacements=kept, full_sequence_modules=gathered)


def _has_numbers(module: nn.Module, width: int) -> bool:
    """Whether a module has parameters itself, or is a norm without any."""
    own = next(module.parameters(recurse=False), None)
    return own is not None or (not module._modules and getattr(module, "normalized_shape", None) == (width,))


class _BlockInterior:
    """What stands between the entry and the exit of a block, where a rank has all features of its samples."""

    def __init__(self, blocks: list[BlockDescription]) -> None:
        self._entries = tuple(f"{block.entry}." for block in blocks)

    def holds(self, path: str) -> bool:
        return f"{path}.".startswith(self._entries)


def _within(path: str, outer: list[str]) -> bool:
    return path.startswith(tuple(f"{name}." for name in outer))


def _contains(outer: str, path: str) -> bool:
    return f"{path}.".startswith(f"{outer}.")


def _is_norm(sub: SubModuleReplacementDescription) -> bool:
    return sub.target_module is GridNorm


def _check_classes(plan: ShardingPlan, prefix: str) -> None:
    for path, sub in plan.replacements.items():
        target = sub.target_module
        if not path.startswith(prefix) or not isinstance(target, type) or issubclass(target, GridModule):
            continue
        if issubclass(target, Linear1D_Col | Linear1D_Row) or not target.__module__.startswith("shardformer."):
            raise PolicyError(
                f"{path!r} is to become a {target.__name__}, which knows one tensor axis",
                rule="On a grid the linears of blocks are named by roles, which know each mode",
                remedy="Write the policy as a RolePolicy, or use tensor_parallel_mode='1d'",
            )


def _width(plan: ShardingPlan, blocks: list[BlockDescription]) -> int | None:
    """The hidden features of a stack: what the exits of its blocks give."""
    rows = (find_module(plan.model, block.row) for block in blocks if block.replicated_terms is None)
    found: list[Any] = [row for row in rows if row is not None]
    return next((row.nf if is_transposed(row) else row.out_features for row in found), None)


def _add(plan: ShardingPlan, grid: TensorGrid, prefix: str, path: str, module: nn.Module, width: int) -> None:
    """What becomes of a module between the blocks that has parameters of its own."""
    own = dict(module.named_parameters(recurse=False))
    shapes = {tuple(p.shape) for p in own.values()}
    if shapes <= {(width,)} and not module._modules and norm_kind(module) is not None:
        kwargs = {"split": Split.even(width, grid.hidden.size)}
        plan.replacements[path] = SubModuleReplacementDescription(path, GridNorm, kwargs)
    elif shapes == {(width,)} and (module._modules or is_elementwise(module)):
        for name in own:
            plan.parameters[join_path(path, name)] = {0: Split.even(width, grid.hidden.size, axes=(grid.hidden.name,))}
    elif path.startswith(prefix) and path.count(".") > prefix.count("."):
        layer, child = path.removeprefix(prefix).split(".")[:2]
        holder = f"{prefix}{layer}.{child}"
        holds_one_end = any(_contains(holder, block.entry) != _contains(holder, block.row) for _, block in plan.blocks)
        plan.full_sequence_modules.append(path if holds_one_end else holder)
    else:
        raise ConfigError(
            f"tensor_parallel_mode={grid.mode!r} for {type(plan.model).__name__}, whose {path!r} has parameters "
            "or statistics of all features itself",
            rule="Between the blocks each rank has some hidden features of a token",
            remedy="Use tensor_parallel_mode='1d' for this model",
        )


# --- what attentions are given for each sample


def full_input_modules(policy: Any) -> list[str]:
    """The paths of modules that may be given more than the stream: with a block of an attention, and all of layers."""
    model, out = policy.model, []
    for stack in policy.stacks():
        layers = model.get_submodule(stack.layers)
        out += [
            path
            for path, _ in layers.named_modules(prefix=stack.layers)
            if path.count(".") > stack.layers.count(".") + 1
        ]
    for key, description in policy.module_policy().items():
        for block in description.blocks or []:
            if block.arguments is None or not isinstance(key, str):
                continue
            out.append(join_path(key, block.arguments.at) if block.arguments.at else key)
    return [path for path in dict.fromkeys(out) if find_module(model, path) is not None]


def argument_key(path: str, argument: str) -> tuple[str, str]:
    """What is known of an argument of the modules at this path, in whichever layer."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), argument


def named_arguments(module: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """(argument, tensor) of all tensors that a module is given; what flows through the stack is called
    ``HIDDEN_STATES``."""
    if not any(isinstance(x, Tensor) for x in (*args[:1], *kwargs.values())):
        return
    hidden, names = first_tensor(args, kwargs), _names_of(module)
    for path, leaf in tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(leaf, Tensor):
            yield HIDDEN_STATES if leaf is hidden else _argument_path(path, names), leaf


def _names_of(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def _argument_path(path: Any, names: list[str]) -> str:
    """The argument, by its name however it is given, and the way to a tensor in it."""
    kind, key, *inner = path
    if kind.idx == 1:
        return f"{key.key}{keystr(tuple(inner))}"
    return f"{names[key.idx] if key.idx < len(names) else key.idx}{keystr(tuple(inner))}"


def install_argument_hooks(
    model: nn.Module, plan: ShardingPlan, state: ShardingMetadata, samples: ArgumentSamples
) -> None:
    """Each attention of a stack is given this rank's samples of its other arguments."""
    streams = [edge for edge in state.region_hooks if isinstance(edge, GridStackActivations)]
    stacks = [(f"{stack.layers}.", stream) for stack, stream in zip(plan.stacks, streams, strict=True)]
    entering: dict[nn.Module, tuple[BlockArguments, GridStackActivations]] = {}
    for _, block in plan.blocks:
        stream = next((stream for prefix, stream in stacks if block.entry.startswith(prefix)), None)
        if stream is not None and block.arguments is not None:
            entering[model.get_submodule(block.arguments.at)] = block.arguments, stream
    for path in plan.full_sequence_modules:
        stream = next((stream for prefix, stream in stacks if path.startswith(prefix)), None)
        if stream is not None:
            entering.setdefault(model.get_submodule(path), (BlockArguments(path), stream))
    model.register_forward_hook(partial(_without_cache, streams, arguments_of(model)))
    for module, (arguments, stream) in entering.items():
        _LocalSamplesHook(module, arguments, stream, samples)
    for stack, (_, stream) in zip(plan.stacks, stacks, strict=True):
        stream.batch_dim = samples.get(argument_key(stack.layers, HIDDEN_STATES)) or 0


def _without_cache(
    streams: Sequence[GridStackActivations], arguments: frozenset[str], model: nn.Module, args: Any, output: Any
) -> Any:
    """Keys and values that a forward kept are of this rank's samples: nobody may go on with them."""
    return without_caches(output, arguments) if any(stream.is_cut for stream in streams[-1:]) else None


class _LocalSamplesHook:
    """Before the forward of an attention: what its block does not let enter is cut first, what enters behind that."""

    def __init__(
        self, module: nn.Module, arguments: BlockArguments, stream: GridStackActivations, samples: ArgumentSamples
    ) -> None:
        self._arguments, self._stream, self._samples = arguments, stream, samples
        self._rows, self._names = 0, _names_of(module)
        module.register_forward_pre_hook(self._before_entry, with_kwargs=True, prepend=True)
        for name in arguments.region_inputs:
            change_argument(module, name, partial(self._own, name))

    def _before_entry(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._stream.is_cut:
            return None
        hidden = first_tensor(args, kwargs)
        self._rows = hidden.shape[self._stream.batch_dim]

        def own(path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf is hidden or not leaf.dim():
                return leaf
            name = _argument_path(path, self._names)
            return leaf if name in self._arguments.region_inputs else self._own(name, leaf)

        return tree_map_with_path(own, (args, kwargs))

    def _own(self, argument: str, x: Tensor) -> Tensor:
        by_chance = 0 if x.dim() > 1 and x.shape[0] == self._stream.samples else None
        dim = self._samples.get(argument_key(self._arguments.at, argument), by_chance)
        return x if dim is None or not self._stream.is_cut else self._stream.cut_argument(x, dim, self._rows)
