"""Checks before each forward of a sharded model: its structure, and inputs that need a gradient or hold a cache.

A cache that the sharded model filled holds this rank's heads. One that was filled otherwise holds all heads: each rank
takes its own of them, and the gradient of the whole is the sum over the ranks.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm.autograd_collectives import copy_to_tp_region, once_differentiable
from shardformer.comm.collectives import all_gather_objects
from shardformer.comm.deferred_tensor import resolve_deferred
from shardformer.consistency.rank_divergence import check_same_batch, check_step
from shardformer.consistency.usage_checks import check_ddp, install_wrapper_guards
from shardformer.context_parallel.sequence_sharded_tensor import SequenceShardedTensor
from shardformer.errors import ConfigError, InputError
from shardformer.layout.sharding_metadata import ShardingMetadata, metadata_of, sharded_parameters
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.tensor_grid import TensorGrid
from shardformer.pipeline.stage_manager import ALL_LAYER_OUTPUTS, ALL_LAYER_OUTPUTS_REASON
from shardformer.policies.module_descriptions import BlockDescription
from shardformer.sharding.plan import ShardingPlan
from shardformer.tensor_parallel.parallel_module import MODULE_HOOK_TABLES, ParallelModule
from shardformer.torch_compat import current_graph_task_id, keystr, to_list, tree_leaves, tree_map_with_path
from shardformer.transformers_compat import caches_in, holds_tokens, is_cache

OF_THIS_RANK = "_shardformer_heads"
"""Attribute of a cache that holds this rank's heads."""


@dataclass(frozen=True)
class Heads:
    """The key-value heads of one layer.

    Args:
        total: how many there are.
        own: those that this rank's forward sees, in its order.
    """

    total: int
    own: tuple[int, ...]

    def of(self, x_BNSD: Tensor, axis: Axis) -> Tensor:
        """This rank's heads of keys or values that have all of them."""
        whole = copy_to_tp_region(x_BNSD, axis) if x_BNSD.requires_grad and torch.is_grad_enabled() else x_BNSD
        return whole.index_select(1, torch.tensor(self.own, device=whole.device))


class CacheHeads:
    """Looks at the caches that a sharded model is called with.

    Args:
        axis: over which heads are cut.
        layers: number of a layer, as its attention knows it -> its heads.
    """

    def __init__(self, axis: Axis, layers: Mapping[int, Heads]) -> None:
        self._axis, self._layers = axis, layers

    @classmethod
    def of(
        cls, model: nn.Module, blocks: Sequence[tuple[str, BlockDescription]], axis: Axis, grid: TensorGrid | None
    ) -> CacheHeads:
        """For a model whose attentions number themselves, as those of transformers do."""
        layers: dict[int, Heads] = {}
        for _, block in blocks:
            arguments = block.arguments
            number = None if arguments is None else getattr(model.get_submodule(arguments.at), "layer_idx", None)
            if arguments is not None and type(number) is int and arguments.kv_heads[0]:
                # of two attentions with one number nothing is known, and of the parts of a grid
                known = number in layers or grid is not None
                layers[number] = Heads(0, ()) if known else Heads(*arguments.kv_heads)
        return cls(axis, layers)

    def enter(self, model: nn.Module, values: Sequence[Any]) -> None:
        """Before a forward: caches with all heads are left with those of this rank.

        Raises ConfigError for one with other heads, or whose layers are not known.
        """
        for cache in self._plain(values):
            if holds_tokens(cache) and OF_THIS_RANK not in vars(cache):
                self._cut(model, cache)
            vars(cache)[OF_THIS_RANK] = True

    def leave(self, values: Sequence[Any]) -> None:
        """After a forward: what it filled holds this rank's heads."""
        for cache in self._plain(values):
            vars(cache)[OF_THIS_RANK] = True

    def _plain(self, values: Sequence[Any]) -> Iterator[Any]:
        if self._layers:
            yield from (cache for cache in caches_in(values) if hasattr(cache, "__dict__"))

    def _cut(self, model: nn.Module, cache: Any) -> None:
        found = getattr(cache, "layers", None)
        if found is None or hasattr(cache, "self_attention_cache"):
            raise self._unknown(model, f"a {type(cache).__name__}")
        new: list[tuple[Any, str, Tensor]] = []
        for number, layer in enumerate(found):
            heads = self._layers.get(number)
            for name in ("keys", "values"):
                x = getattr(layer, name, None)
                if heads is None or not isinstance(x, Tensor) or not x.numel():
                    continue
                if x.dim() == 4 and x.shape[1] == heads.total:
                    new.append((layer, name, heads.of(x, self._axis)))
                elif x.dim() != 4 or x.shape[1] != len(heads.own):
                    raise self._unknown(model, f"{name} of the shape {tuple(x.shape)} for layer {number}")
        for layer, name, x in new:
            setattr(layer, name, x)

    def _unknown(self, model: nn.Module, what: str) -> ConfigError:
        counts = sorted({heads.total for heads in self._layers.values()} - {0})
        said = f"(batch, {' or '.join(map(str, counts))}, length, features of a head)" if counts else "unknown"
        return ConfigError(
            f"{type(model).__name__}, which is sharded over {self._axis.size} tensor ranks, was given {what}",
            rule=f"Keys and values that the model did not make itself have all heads, {said}: each rank takes its own",
            remedy="Fill a DynamicCache with keys and values of this shape, or let the model read these tokens itself",
        )


OF_LIBRARIES = ("shardformer", "torch", "transformers", "timm", "accelerate")
"""Whose hooks do not look at the values, or are refused by themselves where they do."""
INPUT_HOOK_TABLES = ("_forward_pre_hooks", "_backward_hooks")
"""The tables of hooks that are shown what goes into a module, and its gradient."""
OUTSIDE = "hook the model, or a module after the final norm"
ModuleMarks = list[tuple[Any, ...]]
_hook_tables_of = attrgetter(*MODULE_HOOK_TABLES)


class ModuleFingerprint:
    """What a model was made of when it was sharded.

    Args:
        parts: of the modules that see a part of what they see in the plain model.
    """

    def __init__(self, model: nn.Module, parts: Sequence[LocalInputModule]) -> None:
        self._parts = {part.path: part for part in parts}
        self._modules = list(model.modules())
        self._params = _params_of(model)
        self._marks = self._seen()
        self._check_hooks(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleFingerprint:
        return _CopiedModuleFingerprint(self._parts)  # what it is made of is seen when it is called

    def check(self, model: nn.Module) -> None:
        """Raises ConfigError where something came that the sharded model would do wrong."""
        if self._seen() == self._marks:
            return
        self._check_params(model)
        _check_shapes(model)
        self._check_hooks(model)
        self._check_forwards(model)
        self._modules = list(model.modules())
        self._marks = self._seen()

    def _seen(self) -> ModuleMarks:
        return [
            (
                *map(id, module._modules.values()),
                *map(id, module._parameters.values()),
                *[p.shape for p in module._parameters.values() if p is not None],
                *map(len, _hook_tables_of(module)),
                id(type(module)),
                _own_forward(module) if "forward" in vars(module) else 0,
            )
            for module in self._modules
        ]

    def _check_params(self, model: nn.Module) -> None:
        now = _params_of(model)
        if _in_modules(now) == _in_modules(self._params):
            self._params = now  # under other paths, as in a wrapper
            return
        new = [name for name, p in now.items() if p not in self._params.values()]
        moved = [name for name, p in now.items() if name not in new and self._params.get(name) != p]
        gone = [name for name in self._params if name not in now]
        what = f"{(new or moved or gone)[0]} of this {type(model).__name__} "
        what += "came after it was sharded" if new else "is another parameter since" if moved else "is gone since"
        raise ConfigError(
            what,
            rule="Weights are compared, cut and their gradients agreed on between ranks when a model is sharded",
            remedy="Build the whole model first, with its new head, its adapters and what is tied, and shard it then",
        )

    def _check_hooks(self, model: nn.Module) -> None:
        for path, part in self._parts.items():
            module = _at(model, path)
            if module is None:
                continue
            for hook in _hooks_of(module, part.hooks):
                if not is_of_library(hook) and not getattr(hook, "sees_parts", False):
                    raise ConfigError(
                        f"A hook on {path} ({type(module).__name__}): {_name_of(hook)}",
                        rule=f"It would see a part: {part.why}",
                        remedy=f"Remove it before the model is called; {part.instead}, or run the plain model for it. "
                        "Where a part is what it may see, write hook.sees_parts = True",
                    )

    def _check_forwards(self, model: nn.Module) -> None:
        before = {id(m): marks[-2:] for m, marks in zip(self._modules, self._marks, strict=False)}
        for path, module in model.named_modules():
            if path not in self._parts and not isinstance(module, ParallelModule):
                continue
            now = (id(type(module)), _own_forward(module))
            if before.get(id(module), now) != now:
                raise ConfigError(
                    f"{path} ({type(module).__name__}) has another forward since it was sharded",
                    rule="A block's code is known, or proven on a small twin, when the model is sharded",
                    remedy="Give the plain model its code, and shard it then",
                )


@dataclass(frozen=True)
class LocalInputModule:
    """A module that sees a part of what it sees in the plain model.

    Args:
        hooks: the tables of those hooks that would be shown it.
        instead: what to do in place of hooking it.
    """

    path: str
    why: str
    hooks: tuple[str, ...] = MODULE_HOOK_TABLES
    instead: str = "hook the whole attention or MLP"


class _CopiedModuleFingerprint(ModuleFingerprint):
    """Of a copied model."""

    def __init__(self, parts: dict[str, LocalInputModule]) -> None:
        self._parts, self._params, self._modules = parts, {}, []
        self._marks = [()]

    def _check_params(self, model: nn.Module) -> None:
        if self._params:
            super()._check_params(model)
        self._params = _params_of(model)


def _params_of(model: nn.Module) -> dict[str, int]:
    """The identity of each parameter by its names, without what stands for the parameters of other stages."""
    return {name: id(p) for name, p in nn.Module.named_parameters(model, remove_duplicate=False)}


def local_input_modules(plan: ShardingPlan, state: ShardingMetadata, *, is_cut: bool) -> Iterator[LocalInputModule]:
    """The modules that see a part of what they see in the plain model."""
    cuts = [cut for cut in state.activations.shards if state.context.sizes.get(cut.axis, 1) > 1]
    if cuts:
        why = f"between the blocks each rank holds a part of the {' and '.join(cut.dim for cut in cuts)}"
        for stack in plan.stacks:
            for path, _ in plan.model.get_submodule(stack.layers).named_modules(prefix=stack.layers):
                if path != stack.layers:
                    yield LocalInputModule(path, why, instead=OUTSIDE)
            if stack.final_norm is not None:
                yield LocalInputModule(stack.final_norm, why, INPUT_HOOK_TABLES, OUTSIDE)
    if is_cut:
        for _, block in plan.blocks:
            yield from _in_block(plan.model, block)


def show_whole_behind(model: nn.Module, plan: ShardingPlan) -> None:
    """Hooks that were on a final norm see what it gives when the stack has ended, which is whole."""
    for path in (stack.final_norm for stack in plan.stacks if stack.final_norm is not None):
        hooks = model.get_submodule(path)._forward_hooks
        for key in [key for key, hook in hooks.items() if not is_of_library(hook)]:
            hooks[key] = hooks.pop(key)


def _in_block(model: nn.Module, block: BlockDescription) -> Iterator[LocalInputModule]:
    why = "inside of a block each tensor rank has its own heads or features"
    if not block.holds_exit:  # the entry gives a part, and what holds the exit beside it is given one
        yield LocalInputModule(
            block.entry, why, tuple(table for table in MODULE_HOOK_TABLES if table not in INPUT_HOOK_TABLES)
        )
        ends = block.row.split(".")
        for path in (".".join(ends[:n]) for n in range(1, len(ends) + 1)):
            if not f"{block.entry}.".startswith(f"{path}."):
                yield LocalInputModule(path, why, INPUT_HOOK_TABLES)
    for path, _ in model.get_submodule(block.entry).named_modules(prefix=block.entry):
        if path != block.entry:
            yield LocalInputModule(path, why)


def _check_shapes(model: nn.Module) -> None:
    """``param.data = whole`` is what no optimizer and no ``copy_`` would do: torch takes any shape there."""
    coords = metadata_of(model).coords
    for name, param, spec in sharded_parameters(model):
        part = spec.local_shape(coords)
        if tuple(param.shape) != part:
            raise ConfigError(
                f"{name} of this {type(model).__name__} is {list(param.shape)} since it was sharded",
                rule=f"This rank holds the part {list(part)} of {list(spec.shape)}",
                remedy="Give weights to the plain model before it is sharded, or all of them by load_state_dict, which "
                "takes the plain model's",
            )


def _in_modules(params: dict[str, int]) -> Counter[tuple[str, int]]:
    """By their names in their modules."""
    return Counter((name.rpartition(".")[2], p) for name, p in params.items())


def _at(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _own_forward(module: nn.Module) -> int:
    """A number of the forward that somebody put in the module's place; 0 for that of its class, and for a stage's."""
    forward = vars(module).get("forward")
    is_ours = type(forward).__module__.partition(".")[0] == "shardformer"
    is_of_class = getattr(forward, "__func__", None) is type(module).forward
    return 0 if forward is None or is_ours or is_of_class else id(forward)


def _hooks_of(module: nn.Module, tables: Sequence[str]) -> Iterator[Callable[..., Any]]:
    for table in tables:
        yield from getattr(module, table).values()


def is_of_library(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    named = hook if hasattr(hook, "__module__") and owner is None else type(owner if owner is not None else hook)
    return str(getattr(named, "__module__", "")).partition(".")[0] in OF_LIBRARIES


def _name_of(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


NEAR = 1e-3
"""By how much the sums of one gradient may differ between ranks, of its absolute values."""


class _Compared(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, axis: Axis) -> Tensor:
        ctx.name, ctx.axis = name, axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sums = torch.stack([grad.double().sum(), grad.double().abs().sum()])
        every = all_gather_objects(to_list(sums), ctx.axis)
        if any(abs(a - b) > NEAR * every[0][1] for theirs in every for a, b in zip(theirs, every[0], strict=True)):
            raise InputError(
                f"The {ctx.axis.size} tensor ranks found different gradients of {ctx.name}",
                rule="Each rank computes its own heads: of what only these read it finds a part of the gradient",
                remedy=f"Detach {ctx.name}, or leave the tensor axis out for a model whose {ctx.name} trains",
            )
        return grad, None, None


def compared(
    args: tuple[Any, ...], kwargs: dict[str, Any], axis: Axis
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The inputs, whose gradients are compared over the ranks when they are found; None where no input needs one.

    Communicates two numbers in the backward for each input that needs a gradient. There, raises InputError on all ranks
    where they differ.
    """

    def trains(x: Any) -> bool:
        return isinstance(x, Tensor) and x.requires_grad and not isinstance(x, SequenceShardedTensor)

    if axis.size == 1 or not torch.is_grad_enabled() or not any(map(trains, tree_leaves((args, kwargs)))):
        return None

    def marked(path: Any, x: Any) -> Any:
        name = keystr(path[1:]).strip("[]'")
        out: Any = _Compared.apply(x, name, axis) if trains(x) else x
        return out

    changed: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_with_path(marked, (args, kwargs))
    return changed


class ForwardChecks:
    """Before a forward: what an error broke off is forgotten, gradients are hooked; once, inputs are compared.
    What the model is made of is looked at.

    In training the ranks that are given the same batch draw the same random numbers outside of blocks, whatever a
    script seeded them with. What the model gives are plain tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        state: ShardingMetadata,
        structure: ModuleFingerprint,
        caches: CacheHeads,
        *,
        is_cut: bool,
    ) -> None:
        self._state, self._structure, self._is_cut = state, structure, is_cut  # first: pickle meets the state's refusal
        # torch.compile leaves it alone: what is done there is once, or with other processes. Of this model alone:
        # a model that is sharded later must not change what this one was compiled with
        self._eager: Callable[..., None] = torch.compiler.disable(ForwardChecks._look)
        self._caches = caches
        self._compared = not state.request.extra.get("check_inputs", True) or state.same_batch_axis.size == 1
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._behind, with_kwargs=True)
        if any(axis.size > 1 for axis in state.context.axes.values()):
            install_wrapper_guards(model, state.context)
        state.check_call = self._check_call

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._eager(self, model, args, kwargs)
        if not self._is_cut or torch.compiler.is_compiling():
            return None
        return compared(args, kwargs, self._state.context.tensor)

    def _look(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if current_graph_task_id() < 0:  # not a recomputation in a backward
            for edge in self._state.region_hooks:
                edge.reset_after_error()
        for reducer in self._state.reducers:
            reducer.refresh()
        self._check_called_by_pipeline(model)
        check_ddp(model, self._state.context)
        self._check_call(model, kwargs)
        if current_graph_task_id() < 0:
            self._caches.enter(model, [*args, *kwargs.values()])
        self._structure.check(model)
        if not self._compared:
            self._compared = True
            check_same_batch([*args, *kwargs.values()], self._state.same_batch_axis)
        if self._state.monitor is not None:
            self._state.monitor.training = model.training
        if self._aligns(model, kwargs):
            check_step(self._state, [*args, *kwargs.values()])

    def _behind(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if isinstance(output, Mapping) and not torch.compiler.is_compiling():
            self._caches.leave(list(output.values()))
        return resolve_deferred(output)

    def _aligns(self, model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
        """In a pipeline each micro-batch has its seed, and a recomputation has the random state of its forward.

        A token that follows others in generation is not worth a message: what came first was compared.
        """
        in_pipeline = self._state.stages is not None and self._state.stages.is_running
        if in_pipeline or current_graph_task_id() >= 0:
            return False
        if not model.training and any(map(holds_tokens, caches_in(kwargs.values()))):
            return False
        return self._is_cut and (model.training or self._state.monitor is not None)

    def _check_called_by_pipeline(self, model: nn.Module) -> None:
        """A stage is no model by itself: only a pipeline hands it what the stage before made."""
        stages = self._state.stages
        if stages is None or stages.manager.num_stages == 1:
            return
        if stages.stage_forward is None or stages.is_running:
            return
        raise ConfigError(
            f"This {type(model).__name__} was called on stage {stages.manager.stage} of {stages.manager.num_stages}",
            rule="A stage has a part of the layers: all stages run a batch together, and generate() they cannot",
            remedy="Write pipeline = shardformer.Pipeline(model, micro_batches=...), then pipeline.step(batch), "
            "pipeline.evaluate(batch) or pipeline.forward(batch)",
        )

    def _check_call(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        for name, why in self._state.unproven.items():
            if kwargs.get(name) is not None:
                raise ConfigError(
                    f"{name} for a {type(model).__name__} that is sharded over {self._state.context}: with it, {why}",
                    rule="A layout is used for inputs with which a small model of the same classes trains right in it",
                    remedy=f"Leave {name} out of the batches, or use another layout, such as data or ZeRO ranks",
                )
        if self._state.context.pipe.size > 1:
            self._refuse_for_stages(model, kwargs)
        self._refuse_outputs(model, kwargs)

    def _refuse_for_stages(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        for name, value in kwargs.items():
            if is_cache(value) and holds_tokens(value):
                raise ConfigError(
                    f"{name} for a {type(model).__name__} in a pipeline: a {type(value).__name__} that holds tokens",
                    rule="Each stage has the keys and values of its own layers, and a batch is cut into micro-batches",
                    remedy="Leave pipe out for a model that is called with keys and values",
                )
            trains = any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(value))
            if trains and torch.is_grad_enabled():
                raise ConfigError(
                    f"{name} for a {type(model).__name__} in a pipeline: a tensor that needs a gradient",
                    rule="A stage finds the gradients of its own parameters, and only the first reads most inputs",
                    remedy=f"Detach {name}, or leave pipe out; a prompt that trains can be a parameter of the model",
                )

    def _refuse_outputs(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        cuts = [cut.dim for cut in self._state.activations.shards]
        settings, in_stages = getattr(model, "config", None), self._state.context.pipe.size > 1
        for name, when, why in (
            ("output_attentions", self._is_cut, "Between the blocks each tensor rank holds its own heads only"),
            (
                "output_hidden_states",
                bool(cuts),
                f"Between the blocks each rank holds a part of the {' and '.join(cuts)}",
            ),
            (
                "output_router_logits",
                bool(cuts),
                "The loss of routers is one of all tokens, which no rank has",
            ),
            *((name, in_stages, ALL_LAYER_OUTPUTS_REASON) for name in ALL_LAYER_OUTPUTS),
            ("use_cache", in_stages, "Keys and values would be kept by the stage that has the layer"),
        ):
            asked = kwargs.get(name, False if name == "use_cache" else None)
            if when and (getattr(settings, name, False) if asked is None else asked):
                raise ConfigError(
                    f"{name}=True on a model that is sharded over {self._state.context}",
                    rule=why,
                    remedy=f"Leave {name} off, or run the plain model for it",
                )
