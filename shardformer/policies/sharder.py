"""ModelSharder: carries out a policy on a model. The one place that changes a model, and it records each change."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardformer.context import ParallelContext, launch_from_torch
from shardformer.errors import ConfigError, PolicyError, nearest
from shardformer.layers.block import Block, SequenceRegion, align_random, register_entry
from shardformer.layers.linear import Linear1D_Col, Linear1D_Row
from shardformer.layers.parallel_module import ParallelModule
from shardformer.policies import first_form
from shardformer.policies.config import ShardConfig
from shardformer.policies.guards import guard_model
from shardformer.policies.optimize import apply_optimizations, check_optimizations
from shardformer.policies.plan import Plan, Target, agree, agree_on_weights, make_plan
from shardformer.policies.policy import BlockDescription, Policy
from shardformer.policies.record import ATTRIBUTE, ShardRecord
from shardformer.policies.regions import average_gradients, register_stack, uses_dropout
from shardformer.policies.registry import resolve_policy


class ModelSharder:
    """Shards one model in place.

    Args:
        model: the plain model, the same on every rank (where weights differ, rank 0's are taken).
        shard_config: what is asked for.
        policy: the user's own, as an instance or a class; None takes the registered one.

    Raises ShardFormerError, on every rank and before the model is changed, when something cannot be.
    """

    def __init__(
        self, model: nn.Module, shard_config: ShardConfig | None = None, policy: Policy | type[Policy] | None = None
    ) -> None:
        self.model = model
        self.shard_config = shard_config or ShardConfig()
        self._given = policy

    def shard(self) -> list[dict[int, Tensor]]:
        """Shards the model. Returns the parameters that several pipeline stages hold: none without a pipeline."""
        self._refuse_twice()
        config, model = self.shard_config, self.model
        context = config.resolve_context()
        source = type(self._given).__name__ if self._given else "registry"

        def make() -> tuple[Policy, str, Plan]:
            policy, source = resolve_policy(model, self._given)
            policy.set_model(model)
            policy.set_shard_config(config)
            check_optimizations(model, config, policy)
            self.model = policy.preprocess() or model
            policy.set_model(self.model)
            return policy, source, make_plan(self.model, policy)

        made: list[tuple[Policy, str, Plan]] = []

        def make_once() -> Plan:
            made.append(make())
            return made[0][2]

        plan = agree(context, config, model, source, make_once)
        policy, source, _ = made[0]
        self._policy, self._record = policy, ShardRecord(context, source, config.options())
        self._context = context
        self._record.notes += agree_on_weights(self.model, [context.tensor, context.data])
        self._apply(plan)
        return policy.get_shared_params()

    def _apply(self, plan: Plan) -> None:
        config, policy, record = self.shard_config, self._policy, self._record
        injected = first_form.inject(policy, self.model)
        if injected:
            record.add("", injected[0], injected[1], kind="class")
        cut = config.enable_tensor_parallelism and self._context.tensor.size > 1
        if cut:
            self.replace_module(plan)
        for target, source in first_form.bind(policy, self.model):
            record.add(target, "own parameter", f"tied to {source}", kind="tie")
        apply_optimizations(self.model, config, plan, record)
        if cut:
            self._open_regions(plan)  # last: its hooks stand on the modules that stay
        self.model = policy.postprocess() or self.model
        record.averager = average_gradients(self.model, plan, self._context, config)
        self.model.__dict__[ATTRIBUTE] = record
        guard_model(self.model, record, config)

    def replace_module(self, plan: Plan) -> None:
        """Carries out the descriptions: submodules, attributes, parameters and methods."""
        shared: dict[int, nn.Parameter] = {}
        kept_alive: list[nn.Module] = []  # so that no identity in `shared` is used twice
        for path, module, sub in list(plan.replacements()):
            kwargs = dict(sub.kwargs or {})
            if isinstance(sub.target_module, type) and issubclass(sub.target_module, ParallelModule):
                kwargs["shared"] = shared
            new = sub.target_module.from_native_module(module, self._context.tensor, **kwargs)
            kept_alive.append(module)
            owner, _, name = path.rpartition(".")
            setattr(self.model.get_submodule(owner), name, new)
            self._record.add(path, module, new)
        self._rebind(shared)
        for target in plan.targets:
            self._change(target)

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
            owner = target.module.get_submodule(owner_path)
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
        if random:
            align_random(axis, self._context.device)
        regions: dict[str, SequenceRegion] = {}
        for stack in plan.stacks:
            region = None
            if config.enable_sequence_parallelism:
                region = SequenceRegion(axis, overlap=config.enable_sequence_overlap, random=random)
                regions[f"{stack.layers}."] = region
            register_stack(self.model, stack, axis, region)
        for target in plan.targets:
            region = next((r for prefix, r in regions.items() if target.path.startswith(prefix)), None)
            for description in target.description.blocks or []:
                self._open_block(target, description, Block(axis, region, random))

    def _open_block(self, target: Target, description: BlockDescription, block: Block) -> None:
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
        register_entry(target.module.get_submodule(description.entry), block)

    def _refuse_twice(self) -> None:
        done = ATTRIBUTE in self.model.__dict__
        if done or any(isinstance(m, ParallelModule) for m in self.model.modules()):
            raise ConfigError(
                f"This {type(self.model).__name__} is sharded already",
                rule="A model is sharded once",
                remedy="Build the model again, or go on with the one that the first call returned",
            )


class Optimized(tuple[nn.Module, list[dict[int, Tensor]]]):
    """(model, shared_params), which can be moved to a device as one."""

    def to(self, *args: Any, **kwargs: Any) -> Optimized:
        """Moves the model as ``nn.Module.to`` does."""
        return Optimized((self[0].to(*args, **kwargs), self[1]))


class ShardFormer:
    """Parallelizes models as one config says.

    >>> shard_former = ShardFormer(ShardConfig(enable_sequence_parallelism=True))          # doctest: +SKIP
    >>> model, shared_params = shard_former.optimize(model)                                # doctest: +SKIP
    """

    def __init__(self, shard_config: ShardConfig | None = None) -> None:
        self.shard_config = shard_config or ShardConfig()

    def optimize(self, model: nn.Module, policy: Policy | type[Policy] | None = None) -> Optimized:
        """Shards ``model`` in place, by ``policy`` or by the one registered for its family.

        Returns (model, shared_params). Raises ShardFormerError on every rank when something cannot be.
        """
        sharder = ModelSharder(model, self.shard_config, policy)
        shared_params = sharder.shard()
        return Optimized((sharder.model, shared_params))


def shard_model(
    model: nn.Module,
    policy: Policy | type[Policy] | None = None,
    *,
    context: ParallelContext | None = None,
    config: ShardConfig | None = None,
    **options: Any,
) -> nn.Module:
    """Shards a model over the processes that were launched: one line in a training script.

    Args:
        model: the plain model.
        policy: the user's own policy; None takes the registered one.
        context: the grid from ``launch_from_torch``; None lets all processes form the tensor axis.
        config: a whole ``ShardConfig``; or give its fields here by name, such as ``enable_sequence_parallelism=True``.

    Returns the same model, sharded. Raises ShardFormerError on every rank, before any training, when something cannot
    be; LaunchError when no launcher started this process.
    """
    if config is not None and (options or context is not None):
        raise ConfigError(
            "Both config and single options were given",
            rule="The options are fields of the config",
            remedy="Put them all into ShardConfig(...), or leave config out",
        )
    if config is None:
        unknown = [name for name in options if name not in ShardConfig.__dataclass_fields__]
        if unknown:
            raise ConfigError(
                f"There is no option {unknown[0]!r}",
                rule="Options are the fields of ShardConfig",
                remedy=nearest(unknown[0], ShardConfig.__dataclass_fields__),
            )
        config = ShardConfig(context=context, **options)
    if config.context is None and config.tensor_parallel_process_group is None:
        _join_launcher()
    return ShardFormer(config).optimize(model, policy)[0]


def _join_launcher() -> None:
    if not dist.is_initialized():
        launch_from_torch()
