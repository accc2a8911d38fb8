"""ModelSharder: carries out a policy on a model. The one place that changes a model, and it records each change."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardformer.context import ParallelContext, launch_from_torch
from shardformer.errors import ConfigError, PolicyError, nearest
from shardformer.layers.block import Block, register_entry
from shardformer.layers.linear import Linear1D_Col, Linear1D_Row
from shardformer.layers.parallel_module import ParallelModule
from shardformer.layers.random_stream import align_random
from shardformer.layers.sequence import SequenceRegion
from shardformer.policies import first_form
from shardformer.policies.agree import agree, agree_on_group, agree_on_weights, model_lines
from shardformer.policies.config import ShardConfig
from shardformer.policies.guards import guard_model
from shardformer.policies.intact import check_layouts, check_plain, check_unheld, unchanged_on_error
from shardformer.policies.optimize import apply_optimizations, check_optimizations
from shardformer.policies.plan import Plan, Target, make_plan, name_of
from shardformer.policies.policy import BlockDescription, Policy, SubModuleReplacementDescription
from shardformer.policies.record import ATTRIBUTE, ShardRecord
from shardformer.policies.regions import average_gradients, register_stack, uses_dropout
from shardformer.policies.registry import resolve_policy


class ModelSharder:
    """Shards one model in place.

    Args:
        model: the plain model, the same on every rank (where weights differ, rank 0's are taken).
        shard_config: what is asked for. (A policy in its place is taken as the policy.)
        policy: the user's own, as an instance or a class; None takes the registered one.

    Raises ShardFormerError, on every rank and with the model as it was, when something cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        shard_config: ShardConfig | Policy | type[Policy] | None = None,
        policy: Policy | type[Policy] | None = None,
    ) -> None:
        self.model = model
        if policy is None and _is_policy(shard_config):
            shard_config, policy = None, shard_config  # the first form: ModelSharder(model, policy)
        self.shard_config = _checked(shard_config)
        self._given = policy
        self._blocks: list[tuple[nn.Module, Block]] = []

    def shard(self) -> list[dict[int, Tensor]]:
        """Shards the model. Returns the parameters that several pipeline stages hold: none without a pipeline."""
        config = self.shard_config
        if config.context is None and config.tensor_parallel_process_group is None and not dist.is_initialized():
            launch_from_torch()
        self._context = context = agree_on_group(config)
        with unchanged_on_error(self.model):
            plan = agree(context, self._plan, self._lines)
            self._record.notes += agree_on_weights(self.model, [context.tensor, context.data])
            agree(context, lambda: self._apply(plan))
            align_random(context.tensor, context.device)
            cut = plan if self._is_cut else Plan([])
            self._record.num_parameters = len(list(self.model.parameters()))
            self._record.averager = average_gradients(self.model, cut, self._blocks, context, config)
        return self._policy.get_shared_params()

    @property
    def _is_cut(self) -> bool:
        return self.shard_config.enable_tensor_parallelism and self._context.tensor.size > 1

    def _plan(self) -> Plan:
        """What is to be done, checked; the model is as it was, but for what the policy's ``preprocess`` does."""
        config, model = self.shard_config, self.model
        check_plain(model)
        self._policy, source = resolve_policy(model, self._given)
        self._record = ShardRecord(self._context, source, config.options(), notes=list(self._policy.notes))
        self._policy.set_model(model)
        self._policy.set_shard_config(config)
        check_optimizations(model, config, self._policy)
        self.model = self._policy.preprocess() or model
        self._policy.set_model(self.model)
        plan = make_plan(self.model, self._policy)
        check_unheld(self.model, plan)
        first_form.check(self._policy, self.model)
        return plan

    def _lines(self, plan: Plan) -> list[str]:
        config = self.shard_config
        asked = [self._record.source, str(config.options()), str(sorted(config.extra_kwargs.items()))]
        return [*asked, *model_lines(self.model), *plan.lines()]

    def _apply(self, plan: Plan) -> None:
        """Changes the model. Communicates nothing, so a rank on which it fails keeps no other waiting."""
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
        self.model.__dict__[ATTRIBUTE] = record
        guard_model(self.model, record, config)

    def replace_module(self, plan: Plan) -> None:
        """Carries out the descriptions: submodules, attributes, parameters and methods."""
        shared: dict[int, nn.Parameter] = {}
        kept_alive: list[nn.Module] = []  # so that no identity in `shared` is used twice
        for path, module, sub in list(plan.replacements()):
            new = self._replacement(path, module, sub, shared)
            kept_alive.append(module)
            owner, _, name = path.rpartition(".")
            setattr(self.model.get_submodule(owner), name, new)
            self._record.add(path, module, new)
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
            if config.enable_sequence_parallelism:
                region = SequenceRegion(axis, overlap=config.enable_sequence_overlap, random=random)
                regions[f"{stack.layers}."] = region
            register_stack(self.model, stack, axis, region)
        for target in plan.targets:
            region = next((r for prefix, r in regions.items() if target.path.startswith(prefix)), None)
            for description in target.description.blocks or []:
                self._open_block(target, description, Block(axis, region, random))
        self._record.edges += regions.values()  # behind the blocks: what was entered last is left first

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
        entry = target.module.get_submodule(description.entry)
        holds_exit = f"{description.row}.".startswith(f"{description.entry}." if description.entry else "")
        register_entry(entry, block, holds_exit=holds_exit)
        self._record.edges.append(block)
        self._blocks.append((entry, block))


def _is_policy(thing: Any) -> bool:
    return issubclass(thing, Policy) if isinstance(thing, type) else isinstance(thing, Policy)


def _checked(config: Any) -> ShardConfig:
    if config is not None and not isinstance(config, ShardConfig):
        raise ConfigError(
            f"The config is {config!r:.80}",
            rule="What is asked of the sharder is a ShardConfig",
            remedy="Write ShardConfig(enable_sequence_parallelism=True) and the like, or leave it out",
        )
    return config or ShardConfig()


def _own(target: Target, path: str) -> Any:
    """What stands at ``path``. A module's config, which others read too, becomes a copy of its own first."""
    owner: Any = target.owner(path)
    if not isinstance(owner, nn.Module):
        holder_path, _, name = path.rpartition(".")
        owner = copy.copy(owner)
        setattr(target.owner(holder_path), name, owner)
    return owner


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
        self.shard_config = _checked(shard_config)

    def optimize(self, model: nn.Module, policy: Policy | type[Policy] | None = None) -> Optimized:
        """Shards ``model`` in place, by ``policy`` or by the one registered for its family.

        Returns (model, shared_params). Raises ShardFormerError on every rank, with the model as it was, when something
        cannot be; LaunchError when no launcher started this process.
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
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"The model is {model!r:.80}",
            rule="A model that is built, a torch.nn.Module, is sharded in place",
            remedy="Build it first, for example with transformers' from_pretrained",
        )
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
    return ShardFormer(config).optimize(model, policy)[0]
