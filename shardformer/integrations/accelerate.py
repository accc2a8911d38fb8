"""A replacement for accelerate's ``Accelerator`` that trains models sharded by ShardFormer.

accelerate counts processes. With tensor, sequence or context parallelism, several processes receive the same batch, so
this class counts data-parallel ranks instead wherever accelerate splits batches, gathers metrics or steps schedulers.
Rank 0 of all processes still prints and writes files.

>>> accelerator = Accelerator(parallel=ParallelConfig(tensor=2))                          # doctest: +SKIP
>>> model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)  # doctest: +SKIP
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import PartialState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin, recursively_apply
from accelerate.utils.constants import OPTIMIZER_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from shardformer.checkpoint.load import load_checkpoint
from shardformer.checkpoint.plain_state import load_full_optimizer_state_dict
from shardformer.checkpoint.save import save_checkpoint
from shardformer.comm.collectives import all_gather, all_gather_objects, all_reduce, broadcast_object
from shardformer.comm.sharded_tensor import to_full_tensors
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, check_choice, check_minimum_library_version
from shardformer.filesystem import release_folder_lock
from shardformer.gradients.clipping import clip_grad_norm_
from shardformer.gradients.reducer import no_sync
from shardformer.layout.sharding_metadata import METADATA_ATTRIBUTE, get_local_metadata, get_sharding_metadata
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.mesh.rank_grid import AXES
from shardformer.policies.policy import Policy
from shardformer.torch_compat import is_torch_compile_wrapper
from shardformer.torch_patches import LibraryPatch, install_patch, replace_attribute
from shardformer.training.data_loader import make_example_forward_kwargs
from shardformer.training.initialize import get_or_create_parallel_context, make_engine_without_data
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.shard_optimizer import must_shard_optimizers, shard_optimizer
from shardformer.zero.zero_optimizer import ZeroOptimizer

check_minimum_library_version("accelerate", accelerate.__version__)

OTHER_BACKENDS = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "torch_tp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
)
CHECKPOINT_FOLDER = "shardformer"
"""Prefix of the folders of a saved state that contain the checkpoints of sharded models."""
PLAIN_WEIGHTS = re.compile(r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)")
"""Files in which accelerate saves the weights of a model."""


def unwrap_sharded_model(model: Any) -> nn.Module | None:
    """Return the sharded model inside a wrapper such as ``torch.compile``, or None if the model is not sharded."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((module for module in modules if METADATA_ATTRIBUTE in module.__dict__), None)


def get_world_axis(context: ParallelContext) -> Axis:
    """Return a mesh axis that contains all ranks of a parallel context."""
    return context.flatten(*AXES) if context.world is not None else Axis("world")


class DataParallelState:
    """A view of accelerate's process state that counts data-parallel ranks instead of processes."""

    def __init__(self, partial_state: PartialState, num_processes: int, process_index: int) -> None:
        self._state, self.num_processes, self.process_index = partial_state, num_processes, process_index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


class RankSynchronizedSampler(Sampler[Any]):
    """A sampler that draws the samples in the same order on all ranks, with the random state of rank 0.

    Communicates this state, 5 KB, once per epoch.
    """

    def __init__(self, sampler: Sampler[Any], world_axis: Axis) -> None:
        self.sampler, self._world = sampler, world_axis

    def __iter__(self) -> Iterator[Any]:
        own = torch.get_rng_state()
        torch.set_rng_state(state := broadcast_object(own, self._world))
        order = list(self.sampler)  # as in one process
        if not torch.equal(own, state):
            torch.set_rng_state(own)
        return iter(order)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class DataParallelScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """A learning rate scheduler that steps once per data-parallel rank, instead of once per process."""

    data_ranks = 1
    split_batches: bool

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the wrapped learning rate scheduler if the optimizers have taken a step."""
        if self.split_batches or not self.step_with_optimizer or not self.gradient_state.sync_gradients:
            super().step(*args, **kwargs)
            return
        self.split_batches = True  # one call then steps the wrapped scheduler once
        try:
            for _ in range(self.data_ranks):
                if getattr(self.scheduler, "_step_count", 0) <= getattr(self.scheduler, "total_steps", float("inf")):
                    super().step(*args, **kwargs)
        finally:
            self.split_batches = False


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """A subclass of accelerate's ``Accelerator`` that shards models with ShardFormer.

    ``prepare`` shards plain models together with their optimizers. ``num_processes`` and ``process_index`` count
    data-parallel ranks; ``is_main_process`` is true on one of all processes.

    Args:
        parallel: Layout and options. None uses the layout of a model that is already sharded, or else data parallelism.
        context: Existing process grid. None creates one over the launched processes.
        policy: Your own sharding policy for the models passed to ``prepare``.
        args, kwargs: Arguments of accelerate's class.

    Raises:
        ConfigError: Another library is configured to shard the model, or the layout has pipeline stages.
    """

    shards_models = True
    _models: list[nn.Module]
    _optimizers: list[Optimizer]
    context: ParallelContext
    config: ParallelConfig
    policy: Any

    def __init__(
        self,
        *args: Any,
        parallel: ParallelConfig | Mapping[str, Any] | None = None,
        context: ParallelContext | None = None,
        policy: Policy | type[Policy] | None = None,
        **kwargs: Any,
    ) -> None:
        for name in OTHER_BACKENDS:
            if kwargs.get(name) is not None:
                raise _make_unsupported_backend_error(name)
        if context is None and parallel is None:
            contexts = {id(table.context): table.context for table in get_local_metadata()}
            context = next(iter(contexts.values())) if len(contexts) == 1 else None
        config = ParallelConfig.from_value(parallel)
        if config.pipe > 1:
            raise ConfigError(
                f"Accelerator does not support pipeline stages (pipe={config.pipe}).",
                remedy="Use shardformer.initialize and engine.train_step(batch), or set pipe=1.",
            )
        context = get_or_create_parallel_context(context, config)  # joins the process group before accelerate does
        super().__init__(*args, **kwargs)
        self.set_parallel_context(context, config, policy)

    def set_parallel_context(
        self, context: ParallelContext, parallel_config: ParallelConfig, policy: Policy | type[Policy] | None = None
    ) -> None:
        """Set the process grid and the parallel options for the models that ``prepare`` shards.

        Raises ConfigError if accelerate is configured to shard the model.
        """
        setting = "parallelism_config" if getattr(self, "parallelism_config", None) is not None else None
        if self.distributed_type in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            setting = f"distributed_type={str(self.distributed_type).rpartition('.')[2]}"
        if setting is not None:
            raise _make_unsupported_backend_error(setting)
        if self.dataloader_config.dispatch_batches:
            raise ConfigError(
                "dispatch_batches=True is not supported, because rank 0 would send different samples to ranks that "
                "must process the same batch.",
                remedy="Set dispatch_batches=False, so that every rank loads its own data.",
            )
        self.context, self.config, self.policy = context, parallel_config, policy
        _CURRENT.context = context

    # --- a process is a data-parallel rank

    @property
    def num_processes(self) -> int:
        """The number of data-parallel ranks."""
        return self.context.data.size if "context" in self.__dict__ else int(self.state.num_processes)

    @property
    def process_index(self) -> int:
        """The data-parallel rank of this process."""
        return self.context.data.rank if "context" in self.__dict__ else int(self.state.process_index)

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the highest rank of all processes."""
        return bool(self.state.process_index == self.state.num_processes - 1)

    @property
    def dispatch_batches(self) -> bool:
        """Always False, because every rank loads its own data instead of receiving batches from rank 0."""
        return False

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Split ``inputs`` between the data-parallel ranks, and yield the slice of this rank."""
        state = DataParallelState(PartialState(), self.num_processes, self.process_index)
        split: AbstractContextManager[Any] = PartialState.split_between_processes(state, inputs, apply_padding)
        return split

    # --- prepare

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Shard the models together with their optimizers, then prepare all objects as accelerate does.

        Without ZeRO, an optimizer may have the parameters of several models.

        Returns:
            The objects in the order in which they were passed. With ZeRO, the optimizer is a new object.
        """
        objects = list(args)
        loaders = [each for each in args if isinstance(each, DataLoader)]
        models = [*(each for each in args if isinstance(each, nn.Module)), *self.sharded_models]
        for model in models:
            own = [each for each in objects if _is_unprepared_optimizer(each) and _is_optimizer_of_model(each, model)]
            joint = _find_joint_optimizers(own, _find_foreign_params(model, models))
            if joint and self.config.effective_zero_stage is not None:
                raise _make_joint_optimizer_error(joint[0], f"zero_stage={self.config.effective_zero_stage}")
            with _hide_params_of_other_models(own, model, models):
                replaced = self._shard_model_and_optimizers(model, own, loaders)
            if replaced is not None and joint:
                raise _make_joint_optimizer_error(joint[0], "An optimizer that needs full weight matrices")
            if replaced is not None:
                objects = [replaced if any(each is o for o in own) else each for each in objects]
        return super().prepare(*objects, **kwargs)

    def _shard_model_and_optimizers(
        self, model: nn.Module, optimizers: Sequence[Optimizer], data_loaders: Sequence[DataLoader[Any]]
    ) -> Optimizer | None:
        """Shard a model and its optimizers. Returns the ZeRO optimizer that replaces the optimizers, or None."""
        sharded = unwrap_sharded_model(model)
        if len(optimizers) > 1 and self.config.effective_zero_stage is not None:
            count, stage = len(optimizers), self.config.effective_zero_stage
            raise ConfigError(
                f"zero_stage={stage} supports only one optimizer per model in an accelerate loop, but got {count}.",
                remedy="Use one optimizer with several parameter groups, or use shardformer.initialize.",
            )
        if sharded is None:
            engine = make_engine_without_data(
                model,
                list(optimizers) or None,
                self.config,
                self.context,
                self.policy,
                lambda: _get_example_inputs(model, data_loaders),
            )
            zero = next((each for each in engine.optimizers if isinstance(each, ZeroOptimizer)), None)
            if zero is not None and len(optimizers) > 1:
                raise ConfigError(
                    "An accelerate loop supports only one optimizer per model if the optimizer needs full weight "
                    f"matrices, but got {' and '.join(type(each).__name__ for each in optimizers)}.",
                    remedy="Use one optimizer with several parameter groups, or use shardformer.initialize.",
                )
            return zero
        if get_sharding_metadata(sharded).context.sizes != self.context.sizes:
            layout = get_sharding_metadata(sharded).context
            raise ConfigError(
                f"The model is sharded over {layout}, but the Accelerator uses {self.context}.",
                remedy="Pass the context of the model: Accelerator(context=context).",
            )
        if must_shard_optimizers(sharded, optimizers, self.config.effective_zero_stage):
            return shard_optimizer(sharded, list(optimizers), **self.config.get_zero_kwargs())
        return None

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """Prepare a model for training with autocast and torch.compile.

        A sharded model stays on its device and is not wrapped in DDP. torch.compile compiles each of its layers instead
        of the full model (``TorchDynamoPlugin``, ``torch_compile`` of ``TrainingArguments``).
        """
        sharded = unwrap_sharded_model(model)
        if sharded is None:
            return super().prepare_model(model, device_placement, evaluation_mode)
        _patch_reduce_in_transformers_modules()
        state, plugin = self.state, self.state.dynamo_plugin
        state.dynamo_plugin = TorchDynamoPlugin(backend="no")
        try:
            prepared = super().prepare_model(model, False, True)
        finally:
            state.dynamo_plugin = plugin
        if plugin.backend != DynamoBackend.NO and not plugin.disable and not is_torch_compile_wrapper(model):
            options = {name: value for name, value in plugin.to_kwargs().items() if name not in ("disable", "backend")}
            sharded.compile(backend=plugin.backend.value.lower(), **options)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer, but do not move the state of a sharded model's optimizer, which may be offloaded."""
        return super().prepare_optimizer(optimizer, False if self._models else device_placement)

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """Split the batches of a data loader over the data-parallel ranks.

        If a sampler shuffles with the global random state, all ranks use the order of rank 0.
        """
        sampler = getattr(data_loader.batch_sampler, "sampler", None)
        is_seeded = isinstance(sampler, RandomSampler) and self.use_seedable_sampler  # by accelerate
        if getattr(sampler, "generator", self) is None and not is_seeded and self.context.world is not None:
            data_loader.batch_sampler.sampler = RankSynchronizedSampler(sampler, get_world_axis(self.context))  # type: ignore
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Wrap a scheduler so that it steps once per data-parallel rank, unless ``split_batches`` is set."""
        prepared = super().prepare_scheduler(scheduler)
        if type(prepared) is AcceleratedScheduler:
            prepared.__class__, prepared.data_ranks = DataParallelScheduler, self.num_processes
        return prepared

    # --- one step

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients without reducing them over the data-parallel ranks."""
        sharded = unwrap_sharded_model(model)
        with super().no_sync(model) if sharded is None else no_sync(sharded):
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass, after scaling the loss if a ZeRO optimizer trains in fp16."""
        owners = [get_sharding_metadata(model).gradient_owner for model in self.sharded_models]
        with ExitStack() as stack:
            for scale in [stack.enter_context(owner.scale_loss()) for owner in owners if owner is not None]:
                loss = loss if scale == 1 else loss.float() * scale
            super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip gradients by their total norm, computed over all shards of the model."""
        parameters = list(parameters) if not isinstance(parameters, Tensor) else [parameters]
        clipped = {id(p) for p in parameters}
        for model in self.sharded_models:
            if {id(p) for p in model.parameters()} == clipped:
                self.unscale_gradients()
                return clip_grad_norm_(model, max_norm, norm_type)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    # --- communication over the data axis

    def gather(self, tensor: Any) -> Any:
        """Gather tensors from all data-parallel ranks along dimension 0. Communicates one all-gather per tensor."""

        def all_gather_tensor(local_tensor: Tensor) -> Tensor:
            return all_gather(
                local_tensor.reshape(1) if local_tensor.dim() == 0 else local_tensor.contiguous(),
                self.context.data,
                0,
                purpose="metrics",
            )

        return recursively_apply(all_gather_tensor, to_full_tensors(tensor), error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather tensors or objects from all data-parallel ranks, and drop the samples that pad the last batch."""
        if not use_gather_object:
            try:
                recursively_apply(lambda x: x, input_data, error_on_other_type=True)
            except TypeError:
                use_gather_object = True
        if not use_gather_object:
            return super().gather_for_metrics(input_data)
        parts = all_gather_objects(to_full_tensors(input_data), self.context.data)
        data = [each for part in parts for each in part]
        is_last, remainder = self.gradient_state.end_of_dataloader, self.gradient_state.remainder
        return data[:remainder] if is_last and remainder > 0 else data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors over the data-parallel ranks. Communicates one all-reduce per tensor.

        Args:
            reduction: "sum", "mean", "max" or "none".
        """
        check_choice("reduction", reduction, ("sum", "mean", "max", "none"))

        def reduce_tensor(local_tensor: Tensor) -> Tensor:
            if reduction == "none":
                return local_tensor
            total = all_reduce(
                local_tensor.clone(), self.context.data, op="max" if reduction == "max" else "sum", purpose="metrics"
            )
            return total / self.context.data.size if reduction == "mean" else total

        return recursively_apply(reduce_tensor, to_full_tensors(tensor), error_on_other_type=True)

    def check_trigger(self) -> bool:
        """Return whether any process called ``set_trigger``. All-reduces one number over all processes."""
        found: Tensor | None = getattr(self, "flag_tensor", None)
        flag = torch.zeros((), device=self.device) if found is None else found.float()
        self.flag_tensor = None
        return bool(all_reduce(flag, get_world_axis(self.context), op="max", purpose="metrics") > 0)

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Pad tensors to the largest size on any rank, so that they can be gathered. Gathers sharded logits first."""
        return super().pad_across_processes(to_full_tensors(tensor), *args, **kwargs)

    # --- saving and loading: all ranks must call these methods

    @property
    def sharded_models(self) -> list[nn.Module]:
        """The sharded models that were passed to ``prepare``."""
        return [sharded for model in self._models if (sharded := unwrap_sharded_model(model)) is not None]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the unsharded state dict of a model, on the CPU of every rank. All ranks must call it."""
        sharded = unwrap_sharded_model(model)
        return super().get_state_dict(model, unwrap) if sharded is None else full_state_dict(sharded)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Save a checkpoint of the training run that you can load under any parallel layout. All ranks must call it.

        accelerate writes the schedulers, random states and registered objects. ``save_checkpoint`` writes each sharded
        model and its optimizers to a folder of its own: ``shardformer_0``, ``shardformer_1`` and so on.
        """
        with self._hide_sharded_models() as models:
            folder = str(super().save_state(output_dir, safe_serialization, **kwargs))
        for number, (model, optimizers) in enumerate(models):
            place = _get_model_checkpoint_folder(folder, number)
            with _hide_params_of_other_models(optimizers, model, [other for other, _ in models]):
                save_checkpoint(model, place, optimizers)  # replaces an older one
            release_folder_lock(Path(place), model)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load a checkpoint that this class saved under any parallel layout, or that accelerate itself saved.

        All ranks must call it.
        """
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            folders = os.listdir(checkpoints := os.path.join(self.project_dir, "checkpoints"))
            input_dir = os.path.join(checkpoints, max(folders, key=lambda name: int(name.rpartition("_")[2])))
        with self._hide_sharded_models() as models:
            num_saved, is_plain = _count_models_and_detect_accelerate_save(input_dir)
            if input_dir is not None and num_saved != len(models):
                raise ConfigError(
                    f"{input_dir} contains {num_saved} models, but prepare received {len(models)} sharded models.",
                    remedy="Pass the same models to prepare as when the checkpoint was saved.",
                )
            super().load_state(input_dir, load_kwargs, **kwargs)
        assert input_dir is not None
        if not is_plain:
            for number, (model, optimizers) in enumerate(models):
                with _hide_params_of_other_models(optimizers, model, [other for other, _ in models]):
                    load_checkpoint(model, _get_model_checkpoint_folder(input_dir, number), optimizers)
            return
        folder, (model, optimizers) = Path(input_dir), models[0]
        if len(optimizers) != 1:
            raise ConfigError(
                f"{input_dir} was saved by accelerate's own Accelerator and can be loaded only with one optimizer, but "
                f"the model has {len(optimizers)} optimizers.",
                remedy="Save the checkpoint with shardformer.integrations.accelerate.Accelerator.",
            )
        weights = _load_first_existing_file(folder, SAFE_WEIGHTS_NAME, WEIGHTS_NAME)
        weights = {name.removeprefix("module."): value for name, value in weights.items()}  # saved by DDP
        model.load_state_dict(_add_tied_weights(weights, model))
        load_full_optimizer_state_dict(model, optimizers[0], _load_first_existing_file(folder, f"{OPTIMIZER_NAME}.bin"))

    @contextmanager
    def _hide_sharded_models(self) -> Iterator[list[tuple[nn.Module, list[Optimizer]]]]:
        """Temporarily hide the sharded models and their optimizers from accelerate, and yield them."""
        models, optimizers = self._models, self._optimizers
        sharded = self.sharded_models
        raw = [getattr(each, "optimizer", each) for each in optimizers]
        owned = [[each for each in raw if _is_optimizer_of_model(each, model)] for model in sharded]
        hidden = {id(each) for of_model in owned for each in of_model}
        self._models = [model for model in models if unwrap_sharded_model(model) is None]
        self._optimizers = [each for each in optimizers if id(getattr(each, "optimizer", each)) not in hidden]
        try:
            yield list(zip(sharded, owned, strict=True))
        finally:
            self._models, self._optimizers = models, optimizers


def is_replicated_data_loader(data_loader: Any) -> bool:
    """Return whether a data loader yields the same samples on all ranks, because ``prepare`` did not split it."""
    is_plain = isinstance(data_loader, DataLoader) and not isinstance(data_loader, DataLoaderStateMixin)
    is_torch = type(getattr(data_loader, "sampler", None)).__module__ == Sampler.__module__
    return is_plain and is_torch and not isinstance(data_loader.dataset, IterableDataset)


_CURRENT = threading.local()
"""``context`` of the latest Accelerator of this thread, as accelerate has one state for all accelerators."""
_REDUCE = accelerate.utils.reduce


def _patch_reduce_in_transformers_modules() -> None:
    """Replace accelerate's ``reduce`` in every module of transformers that has imported it.

    Detection losses divide by the mean number of targets, such as boxes or masks. transformers computes this mean over
    all processes, and then divides it by the number of processes once more.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and vars(module).get("reduce") is _REDUCE:
            patch = LibraryPatch(
                f"{name}.reduce", f"{__name__}.Accelerator", "counts the targets of data-parallel ranks"
            )
            install_patch(patch, partial(replace_attribute, module, "reduce", _reduce_over_data_parallel_ranks))


def _reduce_over_data_parallel_ranks(tensor: Tensor, reduction: str = "mean", scale: float = 1.0) -> Any:
    context: ParallelContext | None = getattr(_CURRENT, "context", None)
    if context is None or reduction != "mean":
        return _REDUCE(tensor, reduction, scale)
    mean = all_reduce(tensor.clone(), context.data, purpose="loss") / context.data.size
    return mean * PartialState().num_processes  # by which the loss divides


def _get_model_checkpoint_folder(checkpoint_folder: str | os.PathLike[str], model_index: int) -> str:
    return os.path.join(checkpoint_folder, f"{CHECKPOINT_FOLDER}_{model_index}")


def _count_models_and_detect_accelerate_save(checkpoint_folder: str | os.PathLike[str] | None) -> tuple[int, bool]:
    """Return the number of models in a checkpoint, and whether accelerate's own ``Accelerator`` saved it."""
    names = os.listdir(checkpoint_folder) if checkpoint_folder is not None and os.path.isdir(checkpoint_folder) else []
    sharded = sum(name.startswith(f"{CHECKPOINT_FOLDER}_") for name in names)
    plain = sum(bool(PLAIN_WEIGHTS.fullmatch(name)) for name in names)
    return sharded or plain, not sharded and plain > 0


def _load_first_existing_file(checkpoint_folder: Path, *file_names: str) -> Any:
    path = next(
        (checkpoint_folder / name for name in file_names if (checkpoint_folder / name).is_file()),
        checkpoint_folder / file_names[0],
    )
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def _add_tied_weights(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Add each shared weight under all of its names, because accelerate saves only one of them."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    saved = {name: group for group in names.values() for name in group if name in state_dict}
    return state_dict | {
        other: state_dict[name] for name, group in saved.items() for other in group if other not in state_dict
    }


def _get_example_inputs(model: nn.Module, data_loaders: Sequence[DataLoader[Any]]) -> dict[str, Any] | None:
    """Return example inputs for ``forward`` from the first data loader that provides any, or None."""
    return next(
        (found for each in data_loaders if (found := make_example_forward_kwargs(each, model)) is not None), None
    )


def _is_unprepared_optimizer(candidate: Any) -> bool:
    return isinstance(candidate, Optimizer) and not getattr(candidate, "_is_accelerate_prepared", False)


def _is_optimizer_of_model(optimizer: Optimizer, model: nn.Module) -> bool:
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.table is model.__dict__.get(METADATA_ATTRIBUTE)
    held = {id(p) for p in model.parameters()}
    return any(id(p) in held for group in optimizer.param_groups for p in group["params"])


@contextmanager
def _hide_params_of_other_models(
    optimizers: Sequence[Optimizer], model: nn.Module, models: Sequence[nn.Module]
) -> Iterator[None]:
    """Temporarily remove the parameters of other models, and their state, from optimizers of several models.

    Keeps the order of the parameters, even if sharding replaces those of ``model``.
    """
    others = _find_foreign_params(model, models)
    joint = _find_joint_optimizers(optimizers, others)
    lists = [[list(group["params"]) for group in each.param_groups] for each in joint]
    states = [{p: each.state.pop(p) for p in list(each.state) if id(p) in others} for each in joint]
    for group in (group for each in joint for group in each.param_groups):
        group["params"][:] = [p for p in group["params"] if id(p) not in others]
    try:
        yield
    finally:
        for optimizer, params_of_groups, state in zip(joint, lists, states, strict=True):
            optimizer.state.update(state)
            for group, before in zip(optimizer.param_groups, params_of_groups, strict=True):
                current = iter(list(group["params"]))
                group["params"][:] = [p if id(p) in others else next(current) for p in before]


def _find_foreign_params(model: nn.Module, models: Sequence[nn.Module]) -> set[int]:
    """Return the ids of the parameters that only other models have."""
    return {id(p) for other in models for p in other.parameters()} - {id(p) for p in model.parameters()}


def _find_joint_optimizers(optimizers: Sequence[Optimizer], foreign_params: set[int]) -> list[Optimizer]:
    """Return the optimizers that also have parameters of other models."""
    plain = [each for each in optimizers if not isinstance(each, ZeroOptimizer)]
    return [
        each for each in plain if any(id(p) in foreign_params for group in each.param_groups for p in group["params"])
    ]


def _make_joint_optimizer_error(optimizer: Optimizer, setting: str) -> ConfigError:
    return ConfigError(
        f"{setting} supports only optimizers of a single model in an accelerate loop, but the "
        f"{type(optimizer).__name__} optimizer has parameters of several models.",
        remedy="Create one optimizer for each model, or use AdamW without zero_stage.",
    )


def _make_unsupported_backend_error(setting_name: str) -> ConfigError:
    return ConfigError(
        f"accelerate is configured to shard the model with {setting_name}.",
        rule="Only one library can shard the model.",
        remedy="Remove this setting, and set the layout and zero_stage in parallel=ParallelConfig(...).",
    )
