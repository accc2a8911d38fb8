"""What stacks and parameters need beside the replaced layers: sequence regions, contexts, and agreed gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from shardformer.comm.conjugates import enter_block
from shardformer.comm.params import param_specs
from shardformer.config import ShardConfig
from shardformer.layers.random_stream import AgreedDraw
from shardformer.layers.tensor.arguments import change_argument
from shardformer.layers.tensor.block import Block
from shardformer.layers.tensor.parallel_module import ParallelModule
from shardformer.layers.tensor.sequence import SequenceRegion
from shardformer.layout.spec import ShardSpec
from shardformer.mesh.axis import Axis
from shardformer.mesh.context import ParallelContext
from shardformer.pipeline.stage_manager import groups_of
from shardformer.policies.describe import StackDescription
from shardformer.reduce.buckets import BUCKET_BYTES, Entry, GradientAverager
from shardformer.sharding.plan import Plan
from shardformer.sharding.stages import Stages

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
    stages: Stages | None = None,
) -> list[GradientAverager]:
    """Sees to it that every gradient is the one of the plain model: over data, and where a rank has a summand only.

    Args:
        blocks: the module at the entry of each block, and the block.
        stages: of a pipeline. A parameter that several of them hold has a summand of its gradient on each.

    Returns one averager for what is this stage's own, and one for each set of stages that hold something together.
    """
    partial = partial_parameters(model, plan, config) if context.tensor.size > 1 else set()
    specs = param_specs(model)
    shared = stages.shared if stages is not None else {}
    axes: dict[tuple[int, ...], GradientAxes] = {(): GradientAxes.of_stage(context)}
    if stages is not None:
        axes |= {held: GradientAxes.of_stages(context, stages, held) for held in dict.fromkeys(shared.values())}
    order = {name: at for at, name in enumerate(shared)}
    entries: dict[tuple[int, ...], list[tuple[int, Entry]]] = {}
    seen, cut = set(), {id(p) for name, p in model.named_parameters() if specs[name].is_sharded}
    for name, param in model.named_parameters():
        if id(param) in seen:
            continue
        seen.add(id(param))
        held = shared.get(name, ())
        entry = axes[held].entry(param, specs[name], name in partial)
        if entry is not None:
            entries.setdefault(held, []).append((order.get(name, 0), entry))
    every = [entry for found in entries.values() for _, entry in found]
    for module, block in blocks:
        if block.sequence is None:
            _watch_side(module, block, {id(e.param): e for e in every if id(e.param) not in cut})
    size = config.extra_kwargs.get("bucket_bytes", BUCKET_BYTES)
    # the stages that hold something together fill buckets in one order, whatever each calls it
    averagers = [
        GradientAverager([entry for _, entry in sorted(entries[held], key=lambda pair: pair[0])], size)
        for held in sorted(entries)
    ]
    for module in model.modules():  # the user may keep a part of the model alone
        if any(True for _ in module.parameters(recurse=False)):
            for averager in averagers:
                averager.live_with(module)
    return averagers


@dataclass(frozen=True)
class GradientAxes:
    """The axes that gradients are agreed on over.

    Args:
        data: for what every tensor rank knows.
        both: for what each tensor rank has a summand of.
        holders: stages that hold a parameter, each of which has a summand of its gradient.
    """

    context: ParallelContext
    data: Axis
    both: Axis
    holders: int = 1

    @classmethod
    def of_stage(cls, context: ParallelContext) -> GradientAxes:
        tensor, data = context.tensor, context.data
        both = context.merged("data", "tensor") if tensor.size > 1 and data.size > 1 else None
        return cls(context, data, both or (tensor if data.size == 1 else data))

    @classmethod
    def of_stages(cls, context: ParallelContext, stages: Stages, held: tuple[int, ...]) -> GradientAxes:
        """All processes call it, in one order."""
        alone = groups_of(context, held, ("data",))
        both = groups_of(context, held, ("data", "tensor")) if context.tensor.size > 1 else alone
        return cls(context, alone, both, len(held))

    def entry(self, param: Tensor, spec: ShardSpec, is_partial: bool) -> Entry | None:
        tensor, data, holders = self.context.tensor, self.context.data, self.holders
        held_by = spec.multiplicity(tensor.rank)
        if isinstance(held_by, Tensor):
            dim, split = next(iter(spec.splits.items()))
            divisor = torch.tensor(split.multiplicity, dtype=torch.float64) * (data.size * holders)
            shape = [-1 if d == dim else 1 for d in range(len(spec.shape))]
            shared = (dim, split.indices(tensor.rank), tuple(spec.shape))
            return Entry(param, self.both, held_by.double() * holders, divisor.reshape(shape), shared)
        if is_partial:
            return Entry(param, self.both, tensor.size * holders, tensor.size * data.size * holders, holders=holders)
        if data.size * holders == 1:
            return None
        return Entry(param, self.data, holders, data.size * holders, holders=holders)


@dataclass(eq=False)
class _Side:
    """Before a module's forward: its gradients are summands between a block's entry and exit, and whole behind it."""

    block: Block
    entries: list[Entry]

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for entry in self.entries:
            entry.scale = entry.holders * (self.block.axis.size if self.block.is_open else 1)


def _watch_side(at: nn.Module, block: Block, entries: dict[int, Entry]) -> None:
    """ALBERT's attention holds its own norm behind the exit, T5's none: which side a module is on shows when it runs.

    Where the sequence is cut it makes no difference: behind the exit a rank sees its stretch of it.
    """
    for module in at.modules():
        mine = [entries[id(p)] for p in module.parameters(recurse=False) if id(p) in entries]
        if mine and not isinstance(module, ParallelModule):
            module.register_forward_pre_hook(_Side(block, mine))


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
