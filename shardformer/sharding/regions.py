"""What stacks and parameters need beside the replaced layers: sequence regions, contexts, and agreed gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from shardformer.comm.conjugates import enter_block
from shardformer.comm.gradients import BUCKET_BYTES, Entry, GradientAverager
from shardformer.comm.params import param_specs
from shardformer.context import Axis, ParallelContext
from shardformer.layers.arguments import change_argument
from shardformer.layers.block import Block
from shardformer.layers.parallel_module import ParallelModule
from shardformer.layers.random_stream import AgreedDraw
from shardformer.layers.sequence import SequenceRegion
from shardformer.layout import ShardSpec
from shardformer.sharding.config import ShardConfig
from shardformer.sharding.plan import Plan
from shardformer.sharding.policy import StackDescription

READ_LIBRARIES = ("torch", "transformers", "timm", "shardformer")
"""Where dropout is a module, a rate called ``drop_prob`` or a field of the config."""


def register_stack(model: nn.Module, stack: StackDescription, axis: Axis, region: SequenceRegion | None) -> None:
    """Lets another stack's states enter once for all layers, and cuts the sequence from the first layer to the last."""
    if stack.context is not None:
        path, name = stack.context
        change_argument(model.get_submodule(path), name, lambda x: enter_block(x, axis))
    if region is None:
        return
    layers = list(model.get_submodule(stack.layers).children())

    layers[0].register_forward_pre_hook(region.enter_module, with_kwargs=True)
    last = model.get_submodule(stack.final_norm) if stack.final_norm else layers[-1]
    last.register_forward_hook(region.leave_module)


def agree_on_depth(layers: nn.Module, axis: Axis) -> None:
    """Lets all ranks drop the same samples: each has a stretch of every sample between the blocks."""
    for module in layers.modules():
        if type(module).__name__.endswith("DropPath"):  # in timm, and in each of transformers' families that has one
            AgreedDraw(axis, module)


def uses_dropout(model: nn.Module) -> bool:
    """Whether the model may draw random numbers when it trains.

    Of transformers' own classes the dropout modules and the config tell; any other class may call a function for it.
    """
    for module in model.modules():
        if type(module).__module__.partition(".")[0] not in READ_LIBRARIES or getattr(module, "drop_prob", None):
            return True
        if isinstance(module, _DropoutNd) and module.p > 0:
            return True
    configs = [c for m in model.modules() if (c := getattr(m, "config", None)) is not None]
    fields = [item for c in {id(c): c for c in configs}.values() for item in vars(c).items()]
    return any("drop" in name and isinstance(v, float) and v > 0 for name, v in fields)


def average_gradients(
    model: nn.Module,
    plan: Plan,
    blocks: Sequence[tuple[nn.Module, Block]],
    context: ParallelContext,
    config: ShardConfig,
) -> GradientAverager | None:
    """Sees to it that every gradient is the one of the plain model: over data, and where a rank has a summand only.

    Args:
        blocks: the module at the entry of each block, and the block.
    """
    tensor, data = context.tensor, context.data
    partial = partial_parameters(model, plan, config) if tensor.size > 1 else set()
    specs = param_specs(model)
    both = (
        context.merged("data", "tensor") if tensor.size > 1 and data.size > 1 else (tensor if data.size == 1 else data)
    )
    entries, seen = [], set()
    cut = {id(p) for name, p in model.named_parameters() if specs[name].is_sharded}
    for name, param in model.named_parameters():
        if id(param) in seen:
            continue
        seen.add(id(param))
        entry = _entry(param, specs[name], name in partial, tensor, data, both)
        if entry is not None:
            entries.append(entry)
    if not entries:
        return None
    for module, block in blocks:
        if block.sequence is None:
            _watch_side(module, block, {id(e.param): e for e in entries if id(e.param) not in cut})
    averager = GradientAverager(entries, config.extra_kwargs.get("bucket_bytes", BUCKET_BYTES))
    for module in model.modules():  # the user may keep a part of the model alone
        if any(True for _ in module.parameters(recurse=False)):
            averager.live_with(module)
    return averager


@dataclass(eq=False)
class _Side:
    """Before a module's forward: its gradients are summands between a block's entry and exit, and whole behind it."""

    block: Block
    entries: list[Entry]

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for entry in self.entries:
            entry.scale = self.block.axis.size if self.block.is_open else 1


def _watch_side(at: nn.Module, block: Block, entries: dict[int, Entry]) -> None:
    """ALBERT's attention holds its own norm behind the exit, T5's none: which side a module is on shows when it runs.

    Where the sequence is cut it makes no difference: behind the exit a rank sees its stretch of it.
    """
    for module in at.modules():
        mine = [entries[id(p)] for p in module.parameters(recurse=False) if id(p) in entries]
        if mine and not isinstance(module, ParallelModule):
            module.register_forward_pre_hook(_Side(block, mine))


def _entry(param: Tensor, spec: ShardSpec, is_partial: bool, tensor: Axis, data: Axis, both: Axis) -> Entry | None:
    held_by = spec.multiplicity(tensor.rank)
    if isinstance(held_by, Tensor):
        dim, split = next(iter(spec.splits.items()))
        divisor = torch.tensor(split.multiplicity, dtype=torch.float64) * data.size
        shape = [-1 if d == dim else 1 for d in range(len(spec.shape))]
        shared = (dim, split.indices(tensor.rank), tuple(spec.shape))
        return Entry(param, both, held_by.double(), divisor.reshape(shape), shared)
    if is_partial:
        return Entry(param, both, tensor.size, tensor.size * data.size)
    return Entry(param, data, 1, data.size) if data.size > 1 else None


def partial_parameters(model: nn.Module, plan: Plan, config: ShardConfig) -> set[str]:
    """Names of whole parameters of which a rank's backward gives a summand only.

    Inside a block, between entry and exit, they see this rank's heads. With sequence parallelism those between the
    blocks of a stack, and the biases added after an exit, see this rank's stretch of the sequence.
    """
    specs = param_specs(model)
    inside: set[str] = set()
    after: set[str] = set()
    around: set[str] = set()
    for target in plan.targets:
        prefix = f"{target.path}." if target.path else ""
        for block in target.description.blocks or []:
            inside.add(f"{prefix}{block.entry}.")
            after.add(f"{prefix}{block.row}.bias")
            if block.around is not None:
                around.add(f"{prefix}{block.around}.")
    cut = [s for s in plan.stacks if not s.whole_sequence]
    stretched = [f"{s.layers}." for s in cut] + [f"{s.final_norm}." for s in cut if s.final_norm]
    out = set()
    for name in specs:
        if specs[name].is_sharded:
            continue
        if name in after or not name.startswith(tuple(inside)):
            sees_stretch = name.startswith(tuple(stretched)) and not name.startswith(tuple(around))
            if config.enable_sequence_parallelism and sees_stretch:
                out.add(name)
        else:
            out.add(name)
    return out
