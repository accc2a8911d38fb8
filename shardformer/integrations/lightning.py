"""A strategy for Lightning's Trainer that shards models with ShardFormer.

>>> from shardformer.integrations.lightning import ShardFormerStrategy                       # doctest: +SKIP
>>> strategy = ShardFormerStrategy(parallel=ParallelConfig(tensor=2))                        # doctest: +SKIP
>>> lightning.pytorch.Trainer(strategy=strategy, devices=2).fit(module, train_dataloader)    # doctest: +SKIP

The loop, the hooks, the callbacks and the loggers are those of Lightning. Ranks that share a model receive the same
batches, so this strategy counts data-parallel ranks where Lightning splits data and reduces metrics.
"""

from __future__ import annotations

import base64
import importlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.checkpoint.load import load_checkpoint
from shardformer.checkpoint.plain_state import load_full_optimizer_state_dict
from shardformer.checkpoint.save import save_checkpoint
from shardformer.comm.collective_call import run_and_compare_across_ranks
from shardformer.comm.collectives import all_gather_ints
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, check_minimum_library_version
from shardformer.filesystem import release_folder_lock
from shardformer.gradient_accumulation.label_tracing import LabelTransform
from shardformer.gradient_accumulation.micro_batch_loss import MicroBatchLossScaler
from shardformer.gradients.reducer import no_sync
from shardformer.layout.sharding_metadata import METADATA_ATTRIBUTE, get_sharding_metadata
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.mesh.rank_grid import AXES
from shardformer.random_state import preserve_cpu_rng_states
from shardformer.training.data_loader import make_example_forward_kwargs
from shardformer.training.initialize import get_or_create_parallel_context, make_engine_without_data

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer

is_standalone = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
pl: Any = importlib.import_module("pytorch_lightning" if is_standalone else "lightning.pytorch")
"""The package that the script uses. Lightning is published under two names, whose classes do not mix."""
check_minimum_library_version("lightning", pl.__version__)

STATE_KEY = "lightning"
"""Key of Lightning's own state in ``extra`` of a checkpoint."""
UNSUPPORTED_FIELDS = {
    "pipe": "Use shardformer.initialize and engine.train_step(batch)",
    "micro_batches": "Use Trainer(accumulate_grad_batches=...)",
    "micro_batch_size": "Use Trainer(accumulate_grad_batches=...)",
    "max_grad_norm": "Use Trainer(gradient_clip_val=...)",
}
"""Fields of ParallelConfig that have no effect here -> remedy."""
UNSUPPORTED_CALLBACKS = ("StochasticWeightAveraging", "WeightAveraging")
"""Callbacks that copy the module and average the copies."""


class ShardFormerStrategy(pl.strategies.DDPStrategy):  # type: ignore[misc]
    """A Lightning strategy that shards the model of a LightningModule together with its optimizer.

    All parameters of the LightningModule must belong to one of its attributes, such as ``self.model``. That model is
    sharded when ``fit``, ``validate``, ``test`` or ``predict`` starts. Checkpoints are directories in ShardFormer's
    format, which load under any layout.

    Args:
        parallel: Layout and options: a ParallelConfig or a dict of its fields. None uses data parallelism.
        policy: Your own sharding policy. None selects one automatically.
        kwargs: ``process_group_backend``, ``timeout`` and ``cluster_environment`` of Lightning's DDPStrategy.

    Raises:
        ConfigError: The layout or an argument of the Trainer is not supported. Raised before training.
    """

    strategy_name = "shardformer"
    model: Any
    lightning_module: Any
    root_device: torch.device
    precision_plugin: Any
    optimizers: list[Optimizer]

    def __init__(self, parallel: Any = None, *, policy: Any = None, **kwargs: Any) -> None:
        self.parallel, self.policy = ParallelConfig.from_value(parallel), policy
        default = ParallelConfig()
        for name, remedy in UNSUPPORTED_FIELDS.items():
            if (value := getattr(self.parallel, name)) != getattr(default, name):
                raise ConfigError(f"ShardFormerStrategy does not support {name}={value!r}.", remedy=remedy)
        if self.parallel.on_nonfinite != default.on_nonfinite and self.parallel.effective_zero_stage is None:
            raise ConfigError(
                f"ShardFormerStrategy does not support on_nonfinite={self.parallel.on_nonfinite!r} without ZeRO.",
                remedy="Set zero_stage=1 in ParallelConfig, or use Trainer(detect_anomaly=True).",
            )
        known = ("process_group_backend", "timeout", "cluster_environment")
        for name in kwargs:
            if name not in known:
                supported = ", ".join(known)
                raise ConfigError(
                    f"ShardFormerStrategy received the unknown argument {name}.",
                    remedy=f"Remove this argument. The supported arguments are parallel, policy, {supported}.",
                )
        super().__init__(**kwargs)
        self.context: ParallelContext | None = None
        self._label_transforms: dict[int, LabelTransform] = {}

    # --- setup

    def setup_environment(self) -> None:
        """Initialize the process group and create the process grid."""
        super().setup_environment()
        self.context = get_or_create_parallel_context(self.context, self.parallel)

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, together with the optimizer that ``configure_optimizers`` returns."""
        context = self._context
        self.accelerator.setup(trainer)
        run_and_compare_across_ranks(
            context, partial(self._check_trainer_options, trainer), action_description="train with Lightning"
        )
        self.model = self.precision_plugin.convert_module(self.model)
        is_fitting = trainer.state.fn == pl.trainer.states.TrainerFn.FITTING
        if is_fitting:
            self.setup_optimizers(trainer)
        optimizers, example = self.optimizers if is_fitting else None, partial(self._get_example_inputs, trainer)
        engine = make_engine_without_data(self.sharded_model, optimizers, self.parallel, context, self.policy, example)
        self._move_unsharded_modules_to_device()
        # Lightning clips the parameters of the optimizer, which are slices of the model's under ZeRO
        self.precision_plugin.main_params = lambda _: engine.model.parameters()
        self.precision_plugin.clip_gradients = partial(pl.plugins.Precision.clip_gradients, self.precision_plugin)
        if is_fitting:
            self.optimizers = engine.optimizers
        self.setup_precision_plugin()
        for module in self.lightning_module.modules():
            if hasattr(module, "dist_sync_fn") and module.process_group is None:  # a metric of torchmetrics
                module.process_group = context.data.group
                if context.data.size == 1:
                    module.distributed_available_fn = _return_false

    def _get_example_inputs(self, trainer: Trainer) -> dict[str, Any] | None:
        """Return example inputs from the training data, with which a policy can be derived, or None."""
        source = trainer.fit_loop._data_source
        with preserve_cpu_rng_states():
            return make_example_forward_kwargs(source.dataloader(), self.sharded_model) if source.is_defined() else None

    def _move_unsharded_modules_to_device(self) -> None:
        """Move all of the LightningModule except the sharded model to this rank's device."""
        modules, name = self.lightning_module._modules, self._model_attribute_name
        model = modules[name]
        modules[name] = None  # keeps the order of the modules
        try:
            self.lightning_module.to(self.root_device)
        finally:
            modules[name] = model

    @property
    def _context(self) -> ParallelContext:
        assert self.context is not None
        return self.context

    @property
    def _world_axis(self) -> Axis:
        return self._context.flatten(*AXES) if self._context.world is not None else Axis("world")

    @property
    def _model_attribute_name(self) -> str:
        """Name of the LightningModule attribute that contains the model and all parameters."""
        owners = {name.partition(".")[0] for name, _ in self.lightning_module.named_parameters(remove_duplicate=False)}
        children = dict(self.lightning_module.named_children())
        if len(owners) != 1 or not owners <= children.keys():
            raise ConfigError(
                "ShardFormerStrategy can shard only one attribute of a LightningModule, but "
                f"{type(self.lightning_module).__name__} has parameters in {sorted(owners)}.",
                remedy="Put all parameters into one nn.Module, for example self.model = Model(...).",
            )
        return str(owners.pop())

    @property
    def sharded_model(self) -> nn.Module:
        """The model inside the LightningModule that this strategy shards."""
        model: nn.Module = getattr(self.lightning_module, self._model_attribute_name)
        return model

    def _check_trainer_options(self, trainer: Trainer) -> None:
        """Raise ConfigError for Trainer options that do not work with a sharded model."""
        plugins = pl.plugins
        known = (plugins.Precision, plugins.MixedPrecision, plugins.HalfPrecision, plugins.DoublePrecision)
        precision, io_plugin = type(self.precision_plugin), type(self.checkpoint_io)
        averaging = [type(each).__name__ for each in trainer.callbacks if _is_weight_averaging_callback(each)]
        problems = {
            "sync_batchnorm=True": (
                vars(self)["_layer_sync"] is not None,
                "Each data-parallel rank computes its own batch statistics",
            ),
            f"precision with {precision.__name__}": (precision not in known, "It replaces modules or parameters"),
            "precision='16-mixed'": (
                getattr(self.precision_plugin, "scaler", None) is not None,
                "Use 'bf16-mixed', or set precision='fp16' in ParallelConfig, which scales the loss",
            ),
            f"{precision.__name__} and ParallelConfig(precision={self.parallel.precision!r})": (
                precision is not plugins.Precision and self.parallel.precision != "fp32",
                "Both convert the parameters. Set only one of them",
            ),
            f"the plugin {io_plugin.__name__}": (
                io_plugin is not plugins.TorchCheckpointIO,
                "The strategy writes checkpoints in ShardFormer's format",
            ),
            "automatic_optimization=False": (
                not self.lightning_module.automatic_optimization,
                "The strategy weights the loss of training_step by its number of labels, and shards one optimizer",
            ),
            f"the callback {', '.join(averaging)}": (
                bool(averaging),
                "This callback averages copies of the module, but checkpoints would not contain these copies",
            ),
        }
        for setting, (is_used, rule) in problems.items():
            if is_used:
                raise ConfigError(
                    f"ShardFormerStrategy does not support {setting}.",
                    rule=rule,
                    remedy="Remove or change this setting of the Trainer.",
                )
        self._check_can_reuse_sharded_model(trainer)

    def _check_can_reuse_sharded_model(self, trainer: Trainer) -> None:
        """Raise ConfigError if the model was sharded with another layout, or trained with ZeRO before."""
        if METADATA_ATTRIBUTE not in self.sharded_model.__dict__:
            return
        table, sizes = get_sharding_metadata(self.sharded_model), self._context.sizes
        if table.context.sizes != sizes:
            raise ConfigError(
                f"The model is sharded over {table.context}, but the strategy uses {self._context}.",
                remedy="Pass the model's layout to the strategy, or create the model again and load a checkpoint.",
            )
        if trainer.state.fn == pl.trainer.states.TrainerFn.FITTING and table.gradient_owner is not None:
            raise ConfigError(
                "This model was trained with ZeRO in an earlier call to fit and cannot be trained again.",
                remedy="Create the model again and resume: trainer.fit(module, ckpt_path=...).",
            )

    # --- which ranks have batches of their own

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments that make Lightning's sampler split the data over the data-parallel ranks."""
        return {"num_replicas": self._context.data.size, "rank": self._context.data.rank}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Seed data loader workers by data-parallel rank, so that the ranks of a model replica get the same batches."""
        seed_worker = sys.modules[pl.seed_everything.__module__].pl_worker_init_function
        is_requested = os.environ.get("PL_SEED_WORKERS", "0") != "0"  # by seed_everything(workers=True)
        if is_requested and getattr(dataloader, "worker_init_fn", dataloader) is None:
            dataloader.worker_init_fn = partial(seed_worker, rank=self._context.data.rank)
        return dataloader

    def reduce(self, tensor: Any, group: torch.distributed.ProcessGroup | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a metric over the data-parallel ranks. Communicates one all-reduce of the tensor."""
        data = self._context.data
        if not _is_world_group(group):
            return super().reduce(tensor, group, reduce_op)
        return tensor if data.size == 1 else super().reduce(tensor, data.group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from all data-parallel ranks along a new dimension. Communicates one all-gather."""
        data = self._context.data
        if _is_world_group(group) and data.size == 1:
            return tensor.unsqueeze(0)
        gathered: Tensor = super().all_gather(tensor, data.group if _is_world_group(group) else group, sync_grads)
        return gathered

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether ``decision`` is true on all ranks or, if ``all`` is False, on at least one rank.

        All-gathers one integer from each rank.
        """
        found = [bool(number) for (number,) in all_gather_ints([int(decision)], self._world_axis)]
        return sum(found) == len(found) if all else any(found)

    # --- one step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` of the LightningModule, and weight its loss by the number of labels if configured.

        With ``average_loss_over="tokens"``, every label of the global batch counts equally. Communicates one number for
        each loss function of torch that ``training_step`` calls.
        """
        data = self._context.data
        if data.size == 1 or self.parallel.average_loss_over == "ranks":
            return super().training_step(*args, **kwargs)
        batch = {"args": args, "kwargs": kwargs}
        weights = MicroBatchLossScaler([batch], [1], None, self._label_transforms, (data, self.root_device))
        weights.start_recording_loss_calls(0)
        try:
            output = super().training_step(*args, **kwargs)
        finally:
            weights.stop_recording_loss_calls()
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            raise ConfigError(
                f"training_step returned None on data-parallel rank {data.rank} of {data.size}, but each rank must "
                "return a loss.",
                remedy="Return loss * 0.0 to skip the samples of this rank, or filter the data before training.",
            )
        weights.scale_loss(0, loss)
        weights.run_deferred_checks()
        return output

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass, after scaling the loss if ``ParallelConfig(precision="fp16")`` is set."""
        owner = get_sharding_metadata(self.sharded_model).gradient_owner
        with nullcontext(1) if owner is None else owner.scale_loss() as scale:
            loss = closure_loss if scale == 1 else closure_loss.float() * scale
            result: Tensor = super().backward(loss, *args, **kwargs)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them over the data-parallel ranks."""
        with no_sync(self.sharded_model):
            yield

    # --- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Always True, because a checkpoint can only be loaded after the model has been sharded."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the LightningModule without the sharded model, which is saved separately."""
        prefix = f"{self._model_attribute_name}."
        return {name: x for name, x in self.lightning_module.state_dict().items() if not name.startswith(prefix)}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an empty dict, because ``save_checkpoint`` saves the sharded optimizer state separately."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save the model, its optimizer and Lightning's state in a directory. All ranks must call this."""
        if storage_options is not None:
            raise ConfigError(
                f"storage_options={storage_options!r:.60} is not supported.",
                remedy="Remove storage_options, and save to a path on a shared file system.",
            )
        folder, model = Path(self.broadcast(str(filepath))), self.sharded_model
        written = io.BytesIO()
        torch.save(checkpoint, written)
        extra = {STATE_KEY: base64.b64encode(written.getvalue()).decode()}
        optimizers = self.optimizers if "optimizer_states" in checkpoint else None
        save_checkpoint(model, folder, optimizers, step=checkpoint["global_step"], extra=extra, retention=1)
        release_folder_lock(folder, model)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the model and its optimizer from a checkpoint of any layout, and return Lightning's own state."""
        folder = Path(self.broadcast(str(checkpoint_path)))
        if folder.is_file():  # saved by another strategy of Lightning
            loaded: dict[str, Any] = super().load_checkpoint(folder, weights_only)
            return loaded
        is_fitting = self.lightning_module.trainer.state.fn == pl.trainer.states.TrainerFn.FITTING
        found = load_checkpoint(self.sharded_model, folder, self.optimizers if is_fitting else None)
        if not isinstance(found.extra, dict) or STATE_KEY not in found.extra:
            raise ConfigError(
                f"The checkpoint {folder} does not contain the state of a Lightning Trainer.",
                remedy="To load only its weights, call shardformer.load_checkpoint(module.model, folder) before "
                "training.",
            )
        state = io.BytesIO(base64.b64decode(found.extra[STATE_KEY]))
        checkpoint: dict[str, Any] = torch.load(state, map_location="cpu", weights_only=weights_only is not False)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state dict of the LightningModule, with the weights of its model if the checkpoint has them."""
        prefix = f"{self._model_attribute_name}."
        state = checkpoint["state_dict"]
        if model := {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}:
            self.sharded_model.load_state_dict(model, strict=strict)
        self.lightning_module.load_state_dict(
            {n: x for n, x in state.items() if not n.startswith(prefix)}, strict=False
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer state that another Lightning strategy saved. ``load_checkpoint`` loads sharded states."""
        if any(checkpoint["optimizer_states"]):
            load_full_optimizer_state_dict(self.sharded_model, self.optimizers[0], checkpoint["optimizer_states"][0])

    def teardown(self) -> None:
        """Tear down Lightning's plugins, but leave the sharded model on its device."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def _is_world_group(process_group: torch.distributed.ProcessGroup | None) -> bool:
    return process_group is None or process_group is torch.distributed.group.WORLD


def _return_false() -> bool:
    return False


def _is_weight_averaging_callback(callback: Callback) -> bool:
    return any(kind.__name__ in UNSUPPORTED_CALLBACKS for kind in type(callback).__mro__)
