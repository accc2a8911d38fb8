"""Sharding: carries out a policy on a model. The one place that changes a model, and it records each change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardformer.comm.conjugates import enter_block
from shardformer.config import ShardConfig
from shardformer.errors import PolicyError
from shardformer.layers.random_stream import align_random
from shardformer.layers.tensor.arguments import change_argument, enclose, of_local_heads
from shardformer.layers.tensor.block import Block, register_entry
from shardformer.layers.tensor.linear import Linear1D_Col, Linear1D_Row
from shardformer.layers.tensor.parallel_module import ParallelModule
from shardformer.layers.tensor.parameters import shard_parameter
from shardformer.layers.tensor.sequence import SequenceRegion, WholeSequence
from shardformer.lazy.materialize import copy_with_values, fill, is_lazy, notes_of, recording
from shardformer.mesh.launch import launch_from_torch
from shardformer.pipeline.stage_manager import PipelineStageManager
from shardformer.policies import first_form
from shardformer.policies.describe import BlockDescription, SubModuleReplacementDescription
from shardformer.policies.policy import Policy
from shardformer.sharding.agree import agree, agree_on_group, agree_on_weights, model_lines
from shardformer.sharding.checks import check_layouts, check_plain, check_unheld, unchanged_on_error
from shardformer.sharding.describe import ATTRIBUTE, ShardRecord
from shardformer.sharding.guards import guard_model
from shardformer.sharding.optimize import apply_optimizations, check_optimizations
from shardformer.sharding.plan import Plan, Target, make_plan, name_of
from shardformer.sharding.regions import agree_on_depth, average_gradients, register_stack, uses_dropout
from shardformer.sharding.stages import make_stages


class Sharding:
    """Shards one model in place.

    Args:
        model: the plain model, the same on every rank (where weights differ, rank 0's are taken).
        config: what is asked for.
        find: (model, number of tensor ranks) -> its policy, and where that comes from.
        fresh: whether the model was made for this, so that no optimizer can hold its parameters: looking for one goes
            through everything that the process holds.

    Raises ShardFormerError, on every rank and with the model as it was, when something cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ShardConfig,
        find: Callable[[nn.Module, int], tuple[Policy, str]],
        *,
        fresh: bool = False,
    ) -> None:
        self.model = model
        self._fresh = fresh
        self.shard_config = config
        self._find = find
        self._blocks: list[tuple[nn.Module, Block]] = []

    def shard(self) -> list[dict[int, Tensor]]:
        """Shards the model. Returns the parameters that several pipeline stages hold: none without a pipeline.

        Each as a dict: the ranks of the pipe axis that hold it -> this rank's own.
        """
        config = self.shard_config
        if config.context is None and config.tensor_parallel_process_group is None and not dist.is_initialized():
            launch_from_torch()
        self._context = context = agree_on_group(config)
        with unchanged_on_error(self.model):
            plan = agree(context, self._plan, self._lines)
            self._record.notes += agree_on_weights(self.model, [context.tensor, context.pipe, context.data])
            stages = self._record.stages
            if stages is not None:
                stages.take_out(self.model)
                plan = stages.restricted(plan)
            agree(context, lambda: self._carry_out(plan))
            for axis in (context.tensor, context.pipe):
                align_random(axis, context.device)
            cut = plan if self._is_cut else Plan([])
            self._record.num_parameters = len(list(self.model.parameters()))
            self._record.averagers = average_gradients(self.model, cut, self._blocks, context, config, stages)
            if stages is None:
                return []
            stages.note_shared(self.model)
            return stages.shared_params

    @property
    def _is_cut(self) -> bool:
        return self.shard_config.enable_tensor_parallelism and self._context.tensor.size > 1

    def _plan(self) -> Plan:
        """What is to be done, checked; the model is as it was, but for what the policy's ``preprocess`` does."""
        config, model = self.shard_config, self.model
        check_plain(model)
        self._policy, source = self._found(model)
        self._record = ShardRecord(
            self._context, source, config.options(), policy=self._policy, extra_kwargs=config.extra_kwargs
        )
        self._policy.set_model(model)
        self._policy.set_shard_config(config)
        check_optimizations(model, config, self._policy)
        with recording(model):
            self.model = self._policy.preprocess() or model
        self._policy.set_model(self.model)
        plan = make_plan(self.model, self._policy)
        self._record.notes += self._policy.notes
        if config.pipeline_stage_manager is not None or self._context.pipe.size > 1:
            manager = config.pipeline_stage_manager or PipelineStageManager(self._context)
            self._record.stages = make_stages(self.model, self._policy, manager)
            self._record.stages.draws = uses_dropout(self.model)
        if not self._fresh:
            check_unheld(self.model, plan, self._record.stages)
        first_form.check(self._policy, self.model)
        return plan

    def _found(self, model: nn.Module) -> tuple[Policy, str]:
        try:
            return self._find(model, self._context.tensor.size)
        except RuntimeError:  # a policy is inferred on a small model itself where its config gives no smaller one
            if not is_lazy(model):
                raise
        return self._find(copy_with_values(model), self._context.tensor.size)

    def _lines(self, plan: Plan) -> list[str]:
        config = self.shard_config
        asked = [self._record.source, str(config.options()), str(sorted(config.extra_kwargs.items()))]
        stages = self._record.stages.lines() if self._record.stages is not None else []
        return [*asked, *model_lines(self.model), *plan.lines(), *stages]

    def _carry_out(self, plan: Plan) -> None:
        """Changes the model, and makes this rank's part of the values that it waits for.

        Communicates nothing, so a rank on which it fails keeps no other waiting.
        """
        waits = is_lazy(self.model)
        self._record.notes += notes_of(self.model)
        with recording(self.model):
            self._apply(plan)
        if waits:
            fill(self.model, self._context.device)

    def _apply(self, plan: Plan) -> None:
        config, policy, record = self.shard_config, self._policy, self._record
        injected = first_form.inject(policy, self.model)
        if injected:
            record.add("", injected[0], injected[1], kind="class")
        if self._is_cut:
            self.replace_module(plan)
        for target, source in first_form.bind(policy, self.model):
            record.add(target, "own parameter", f"tied to {source}", kind="tie")
        apply_optimizations(self.model, config, plan, record)
        if self._is_cut:
            self._open_regions(plan)  # last: its hooks stand on the modules that stay
        self.model = policy.postprocess() or self.model
        if record.stages is not None:
            record.stages.open(self.model)
        self.model.__dict__[ATTRIBUTE] = record
        guard_model(self.model, record, config)

    def replace_module(self, plan: Plan) -> None:
        """Carries out the descriptions: submodules, attributes, parameters and methods."""
        shared: dict[int, nn.Parameter] = {}
        kept_alive: list[nn.Module | Tensor] = []  # so that no identity in `shared` is used twice
        for path, module, sub in list(plan.replacements()):
            new = self._replacement(path, module, sub, shared)
            kept_alive.append(module)
            owner, _, name = path.rpartition(".")
            setattr(self.model.get_submodule(owner), name, new)
            self._record.add(path, module, new)
        for path, module, name, splits in list(plan.parameters()):
            if splits:
                kept_alive.append(shard_parameter(module, name, splits, self._context.tensor, shared))
                kind = "buffer" if name in module._buffers else "parameter"
                self._record.add(f"{path}.{name}".lstrip("."), kind, "a part")
        self._rebind(shared)
        check_layouts(self.model, self._context.tensor.rank)
        for target in plan.targets:
            self._change(target)

    def _replacement(
        self,
        path: str,
        module: nn.Module,
        sub: SubModuleReplacementDescription,
        shared: dict[int, nn.Parameter],
    ) -> nn.Module:
        axis, kwargs, make = self._context.tensor, dict(sub.kwargs or {}), sub.target_module.from_native_module
        if getattr(make, "__module__", "").startswith("shardformer."):
            if isinstance(sub.target_module, type) and issubclass(sub.target_module, ParallelModule):
                kwargs["shared"] = shared
            group: Any = axis
        else:
            group = axis.group  # a class of the user's own knows torch's groups
        try:
            new: nn.Module = make(module, group, **kwargs)
        except TypeError as error:
            if "argument" not in str(error):
                raise
            raise PolicyError(
                f"{name_of(sub.target_module)} for {path!r} with kwargs={sub.kwargs or {}}: {error}",
                rule="The kwargs of a replacement are arguments that its from_native_module takes",
                remedy="Correct the name in the policy",
            ) from error
        if not isinstance(new, nn.Module):
            raise PolicyError(
                f"{name_of(sub.target_module)}.from_native_module gave {new!r:.80} for {path!r}",
                rule="It returns the module that takes the native one's place",
                remedy="Return it",
            )
        return new

    def _rebind(self, shared: dict[int, nn.Parameter]) -> None:
        """Other owners of a parameter that was cut (BERT's head keeps the decoder's bias) own the part too."""
        for module in self.model.modules():
            for name, param in list(module._parameters.items()):
                if param is not None and id(param) in shared:
                    module._parameters[name] = shared[id(param)]

    def _change(self, target: Target) -> None:
        description, prefix = target.description, f"{target.path}." if target.path else ""
        for name, value in (description.attribute_replacement or {}).items():
            owner_path, _, attribute = name.rpartition(".")
            owner = _own(target, owner_path)
            before = getattr(owner, attribute)
            setattr(owner, attribute, value)
            if before != value:
                self._record.add(f"{prefix}{name}", str(before), str(value), kind="attribute")
        for function in description.param_replacement or []:
            function(target.module)
            self._record.add(target.path, "parameters", function, kind="parameters")
        for name, method in (description.method_replacement or {}).items():
            before = getattr(target.module, name)
            setattr(target.module, name, method.__get__(target.module))
            self._record.add(f"{prefix}{name}", before, method, kind="method")

    def _open_regions(self, plan: Plan) -> None:
        config, axis = self.shard_config, self._context.tensor
        random = uses_dropout(self.model)
        regions: dict[str, SequenceRegion] = {}
        for stack in plan.stacks:
            region = None
            if config.enable_sequence_parallelism and stack.whole_sequence:
                self._record.notes.append(f"The sequence stays whole in {stack.layers}: {stack.whole_sequence}.")
            elif config.enable_sequence_parallelism:
                region = SequenceRegion(axis, overlap=config.enable_sequence_overlap, random=random)
                regions[f"{stack.layers}."] = region
                if random:
                    agree_on_depth(self.model.get_submodule(stack.layers), axis)
            register_stack(self.model, stack, axis, region)
        for target in plan.targets:
            region = next((r for prefix, r in regions.items() if target.path.startswith(prefix)), None)
            for description in target.description.blocks or []:
                around = None if region is None else description.around
                if around is not None and region is not None:
                    whole = WholeSequence(region, random=random)
                    whole.register(target.module.get_submodule(around))
                    self._record.edges.append(whole)
                block = Block(axis, None if around is not None else region, random, description.width)
                self._open_block(target, description, block)
        self._record.edges += regions.values()  # behind the blocks: what was entered last is left first

    def _open_block(self, target: Target, description: BlockDescription, block: Block) -> None:
        axis = block.axis
        for path, name in description.inputs:
            change_argument(target.module.get_submodule(path), name, partial(enter_block, axis=axis))
        for name, (path, dim, bounds) in description.arguments.items():
            change_argument(
                target.module.get_submodule(path), name, partial(of_local_heads, dim=dim, bounds=bounds, axis=axis)
            )
        if description.encloses:
            enclose(target.module.get_submodule(description.entry), axis, description.summands)
            return
        for name in [*description.columns, *description.others]:
            column = target.module.get_submodule(name)
            if not isinstance(column, Linear1D_Col):
                raise PolicyError(
                    f"{target.path}.{name} is a {type(column).__name__}",
                    rule="The columns of a block are replaced by Linear1D_Col",
                    remedy="Name the same path in sub_module_replacement",
                )
            column.block = block
            if name in description.columns:
                block.columns.append(column)
        row = target.module.get_submodule(description.row)
        if not isinstance(row, Linear1D_Row):
            raise PolicyError(
                f"{target.path}.{description.row} is a {type(row).__name__}",
                rule="The row of a block is replaced by Linear1D_Row",
                remedy="Name the same path in sub_module_replacement",
            )
        row.block = block
        if description.joins is not None:
            earlier = target.module.get_submodule(description.joins)
            assert isinstance(earlier, Linear1D_Row)
            earlier.later = (row,)
        entry = target.module.get_submodule(description.entry)
        holds_exit = f"{description.row}.".startswith(f"{description.entry}." if description.entry else "")
        register_entry(entry, block, holds_exit=holds_exit)
        self._record.edges.append(block)
        self._blocks.append((entry, block))


def _own(target: Target, path: str) -> Any:
    """What stands at ``path``. A module's config, which others read too, becomes a copy of its own first."""
    owner: Any = target.owner(path)
    if not isinstance(owner, nn.Module):
        holder_path, _, name = path.rpartition(".")
        owner = copy.copy(owner)
        setattr(target.owner(holder_path), name, owner)
    return owner
