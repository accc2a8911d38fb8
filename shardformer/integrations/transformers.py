"""Subclasses of transformers' ``Trainer`` and ``Seq2SeqTrainer`` that shard models with ShardFormer.

>>> from shardformer.integrations.transformers import Trainer                             # doctest: +SKIP
>>> trainer = Trainer(model, args, train_dataset=..., parallel=ParallelConfig(tensor=2))  # doctest: +SKIP

The training loop, the logs, the callbacks and the evaluation are those of transformers. ``ShardedTrainer`` is a mixin
for other subclasses of ``transformers.Trainer``. With the ``TrainingArguments`` of this module, the trainers of
transformers and their subclasses shard the model themselves:

>>> args = TrainingArguments("out", parallel={"tensor": 2})                               # doctest: +SKIP
>>> trainer = transformers.Trainer(model, args, train_dataset=...)                        # doctest: +SKIP
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.checkpoint.plain_state import gather_full_optimizer_state_dict, load_full_optimizer_state_dict
from shardformer.comm.sharded_tensor import to_full_tensors
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError
from shardformer.integrations.accelerate import (
    Accelerator,
    DataParallelState,
    is_replicated_data_loader,
    unwrap_sharded_model,
)
from shardformer.integrations.global_batch_loss import (
    DataParallelLabelSmoother,
    GlobalBatchLossAverager,
    WeightedLossMode,
)
from shardformer.layout.sharding_metadata import get_sharding_metadata
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.policy import Policy
from shardformer.torch_patches import LibraryPatch, install_patch, replace_attribute
from shardformer.training.data_loader import make_example_forward_kwargs
from shardformer.training.initialize import get_or_create_parallel_context, make_engine_without_data, make_pipeline
from shardformer.transformers_compat import import_transformers, is_kv_cache
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.shard_optimizer import must_shard_optimizers, shard_optimizer

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Sampler
    from transformers import TrainingArguments as PlainArguments
    from transformers.trainer_utils import EvalLoopOutput, PredictionOutput

transformers: Any = import_transformers()


class ShardedTrainer:
    """A mixin that makes a Trainer class shard its model: ``class MyTrainer(ShardedTrainer, TheirTrainer)``.

    Args:
        model: A plain model, identical on every rank, or one that ``shard_model`` returned.
        args: Arguments of the training. Batch sizes are per data-parallel rank.
        parallel: Layout and options. None uses the layout of a sharded model, or else data parallelism.
        policy: Your own sharding policy. None selects one automatically.
        context: Existing process grid. None creates one over the launched processes.
        extra_args, kwargs: Arguments of the Trainer class.

    Raises:
        ConfigError: The layout or an argument is not supported. Raised before training.
    """

    replaces_fused_heads = False
    _gathers_loss = False
    gather_function: Any
    # attributes and methods of the Trainer class
    args: Any
    model: Any
    optimizer: Any
    accelerator: Any
    label_smoother: Any
    compute_loss_func: Any
    label_names: list[str]
    model_accepts_loss_kwargs: bool
    _train_batch_size: int
    _prepare_inputs: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    _get_collator_with_removed_columns: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: PlainArguments | None = None,
        *extra_args: Any,
        parallel: ParallelConfig | Mapping[str, Any] | None = None,
        policy: Policy | type[Policy] | None = None,
        context: ParallelContext | None = None,
        **kwargs: Any,
    ) -> None:
        self._set_parallel_layout(model, args, parallel, policy, context)
        if extra_args:
            super().__init__(model, args, *extra_args, **kwargs)  # type: ignore[call-arg]
        else:  # args is not the second argument of all trainers
            super().__init__(model, args=args, **kwargs)  # type: ignore[call-arg]
        self._shard_model_after_init()

    def _set_parallel_layout(
        self, model: Any, args: Any, parallel: Any, policy: Any = None, context: ParallelContext | None = None
    ) -> None:
        """Set the parallel layout and check the training arguments before Trainer is initialized."""
        if not self.replaces_fused_heads and any(kind.__module__.startswith("trl.") for kind in type(self).__mro__):
            raise ConfigError(
                f"ShardedTrainer does not support {type(self).__name__}, which is a TRL trainer.",
                remedy="Use shardformer.integrations.trl.ShardedTRLTrainer as the first base class instead.",
            )
        of_arguments = getattr(args, "parallel", None)
        if (
            parallel is not None
            and of_arguments is not None
            and ParallelConfig.from_value(of_arguments) != ParallelConfig.from_value(parallel)
        ):
            raise ConfigError(
                f"TrainingArguments(parallel={of_arguments}) differs from Trainer(parallel={parallel!r:.80}).",
                remedy="Pass the layout to only one of them.",
            )
        self.parallel, self.policy = ParallelConfig.from_value(of_arguments if parallel is None else parallel), policy
        sharded = unwrap_sharded_model(model)
        self.context = get_or_create_parallel_context(
            context or (get_sharding_metadata(sharded).context if sharded else None), self.parallel
        )
        self._loss_mean = GlobalBatchLossAverager(self.context.data)
        check_training_arguments(args, self.parallel)

    def _shard_model_after_init(self) -> None:
        if self.context.sequence.size > 1 and getattr(self.args, "predict_with_generate", False):
            raise ConfigError(
                f"predict_with_generate=True is not supported with sequence={self.context.sequence.size}.",
                remedy="Set predict_with_generate=False, or use the tensor axis instead of the sequence axis.",
            )
        self._check_options_supported_by_pipeline(self.context.pipe.size)
        if self.args.world_size == 1 and self.context.world is not None and prod(self.context.sizes.values()) > 1:
            raise ConfigError(
                f"TrainingArguments found one process, but the layout {self.context} needs several.",
                remedy="If you train on CPUs, pass use_cpu=True to TrainingArguments.",
            )
        self._shard_model(self.model)
        if self.label_smoother is not None:
            self.label_smoother = DataParallelLabelSmoother(self.label_smoother, self._loss_mean)

    def _shard_model(self, model: Any) -> None:
        """Shard the model, together with its optimizer if the user passed one."""
        is_stage = (
            self.has_pipeline_stages and unwrap_sharded_model(model) is not None
        )  # which knows only the total number
        has_count = hasattr(model, "num_parameters")
        self._num_parameters = model.num_parameters(exclude_embeddings=not is_stage) if has_count else 0
        optimizer = self.optimizer
        if unwrap_sharded_model(model) is None:
            engine = make_engine_without_data(
                model, optimizer, self.parallel, self.context, self.policy, self._get_example_inputs
            )
            self.optimizer = optimizer if optimizer is None else engine.optimizers[0]
            self.pipeline = engine.pipeline
        else:
            self.optimizer = None if optimizer is None else self._shard_optimizer(optimizer)
            self.pipeline = make_pipeline(unwrap_sharded_model(model), self.parallel, None, None)  # type: ignore[arg-type]

    def _get_example_inputs(self) -> dict[str, Any] | None:
        """Return example inputs for the model, from which a policy can be derived, or None."""
        data = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        collate = self._get_collator_with_removed_columns(copy.copy(self.data_collator), description="training")
        return make_example_forward_kwargs(data, self.model, collate)

    @property
    def sharded_model(self) -> nn.Module:
        """The sharded model, without wrappers such as ``torch.compile``."""
        found = unwrap_sharded_model(self.model)
        assert found is not None
        return found

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)  # type: ignore[misc]
        if hasattr(self, "state"):  # later than __init__, which shards the model itself
            self.optimizer = None
            self._shard_model(model)
        return model

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = Accelerator
        self.accelerator.set_parallel_context(self.context, self.parallel, self.policy)
        use_objects = self.args.eval_use_gather_object
        self.gather_function = partial(self.accelerator.gather_for_metrics, use_gather_object=use_objects)

    # --- which ranks have batches of their own

    def get_tp_size(self) -> int:
        """Return 1, because the accelerator already counts data-parallel ranks instead of processes."""
        return 1

    def _get_num_items_in_batch(self, batch_samples: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Return the number of items (label tokens) in a batch, as the average over the data-parallel ranks.

        Each rank divides its loss by this number, so that the mean over the ranks is the loss of the global batch.
        Trainer divides by the sum and multiplies by the number of processes, even if the model ignores the sum.
        """
        if self._loss_mean.has_only_padding_samples:
            batch_samples = [_mask_labels(batch) for batch in batch_samples]
        items = super()._get_num_items_in_batch(batch_samples, *args, **kwargs)  # type: ignore[misc]
        is_summed = items is not None and self.args.average_tokens_across_devices
        self._loss_mean.items = items / self.context.data.size if is_summed else None
        return self._loss_mean.items if is_summed else items

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        before = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False  # see _get_num_items_in_batch
        try:
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.args.average_tokens_across_devices = before

    def get_total_train_batch_size(self, args: PlainArguments) -> int:
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.context.data.size)

    @contextmanager
    def _override_world_size_and_rank(self, world_size: int, rank: int) -> Iterator[None]:
        """Temporarily override ``args.world_size`` and ``args.process_index``."""
        args = self.args
        before = args.distributed_state
        args.distributed_state = DataParallelState(before, world_size, rank)
        try:
            yield
        finally:
            args.distributed_state = before

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        data = self.context.data
        with self._override_world_size_and_rank(
            data.size, data.rank
        ):  # for the seeds of the loader's workers, and for batch_rebalance
            return super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]

    def set_initial_training_values(self, args: Any, loader: DataLoader[Any], *extra_args: Any, **kwargs: Any) -> Any:
        self._check_loader_splits_across_ranks(loader, "get_train_dataloader")
        return super().set_initial_training_values(args, loader, *extra_args, **kwargs)  # type: ignore[misc]

    def _check_loader_splits_across_ranks(self, data_loader: DataLoader[Any], method_name: str) -> None:
        """Raise ConfigError if all data-parallel ranks would read the same samples from a data loader."""
        if self.context.data.size > 1 and is_replicated_data_loader(data_loader):
            raise ConfigError(
                f"{type(self).__name__}.{method_name} returns a DataLoader that yields the same samples on all "
                f"{self.context.data.size} data-parallel ranks.",
                remedy="Return self.accelerator.prepare(loader), which splits the samples over the ranks.",
            )

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return self._scale_sampler_batch_size(super()._get_train_sampler(*args, **kwargs))  # type: ignore[misc]

    def _get_eval_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return self._scale_sampler_batch_size(super()._get_eval_sampler(*args, **kwargs))  # type: ignore[misc]

    def _scale_sampler_batch_size(self, sampler: Sampler[int] | None) -> Any:
        if isinstance(sampler, transformers.trainer_pt_utils.LengthGroupedSampler):
            sampler.batch_size *= self.context.data.size  # as in one process with the same global batch
        return sampler

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._override_world_size_and_rank(
            self.context.data.size, self.args.process_index
        ):  # for the speed in the log
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        with self._override_world_size_and_rank(self.context.data.size, self.args.process_index):
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate the model on a data set, and drop predictions and labels of samples that pad the last batch.

        Seq2SeqTrainer would keep them, because one process needs no padding. It averages the losses over batches.
        """
        self._check_loader_splits_across_ranks(dataloader, "get_eval_dataloader or get_test_dataloader")
        use_objects = self.args.eval_use_gather_object
        gather_losses = self.gather_function
        gather_samples = partial(self.accelerator.gather_for_metrics, use_gather_object=use_objects)

        def gather_for_eval(local_values: Any) -> Any:
            is_loss, self._gathers_loss = self._gathers_loss, False
            return gather_losses(local_values) if is_loss else gather_samples(local_values)

        self.gather_function = gather_for_eval
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.gather_function = gather_losses

    # --- one step

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer, and shard it for ZeRO or if the optimizer needs full weight matrices."""
        created = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        self.optimizer = self._shard_optimizer(created)
        return self.optimizer

    def _shard_optimizer(self, optimizer: Optimizer) -> Optimizer:
        inner = getattr(optimizer, "optimizer", optimizer)
        if not must_shard_optimizers(self.sharded_model, [inner], self.parallel.effective_zero_stage):
            return optimizer
        return shard_optimizer(self.sharded_model, optimizer, **self.parallel.get_zero_kwargs())

    def floating_point_ops(self, inputs: Any) -> float:
        """Estimate FLOPs as 6 x non-embedding parameters x tokens. Trainer sums the FLOPs over all processes."""
        name = getattr(self.model, "main_input_name", "input_ids")
        tokens = inputs.get(name) if isinstance(inputs, Mapping) else None
        if not isinstance(tokens, Tensor):
            return 0
        copies = self.args.world_size // self.context.data.size
        return float(6 * self._num_parameters * tokens.numel() / copies)

    def compute_loss_context_manager(self) -> Any:
        """Weight each mean loss by its number of labels, so that the average over the ranks is the global mean.

        A loss that the model divides by the number of items is not a mean loss, and stays unchanged.
        """
        stack = super().compute_loss_context_manager()  # type: ignore[misc]
        if self.context.data.size > 1 and self.args.average_tokens_across_devices:
            stack.enter_context(WeightedLossMode(self._loss_mean))
        return stack

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **kwargs: Any
    ) -> Any:
        """Evaluate the model on a batch, and gather sharded logits unless only the loss is needed.

        The loss is that of the global batch, without the samples that only pad the last batch of the data set.
        """
        if self.has_pipeline_stages:
            found = self._run_pipeline_prediction_step(inputs, prediction_loss_only, ignore_keys)
        else:
            step = partial(super().prediction_step, ignore_keys=ignore_keys, **kwargs)  # type: ignore[misc]
            found = self._run_prediction_step(step, model, inputs, prediction_loss_only)
        self._gathers_loss = found[0] is not None
        return found

    def _run_prediction_step(self, step_fn: Any, model: nn.Module, inputs: Any, prediction_loss_only: bool) -> Any:
        mean = self._loss_mean
        mean.batch_size = transformers.trainer_pt_utils.find_batch_size(inputs)
        real = self._count_non_padding_samples(inputs)
        if real is None:
            with mean.set_num_local_samples(None):
                loss, *outputs = to_full_tensors(step_fn(model, inputs, prediction_loss_only))
                return mean.average_over_ranks(loss), *outputs
        outputs = [None, None]
        if not prediction_loss_only:
            _, *outputs = to_full_tensors(step_fn(model, inputs, False))
        with mean.set_num_local_samples(real):
            loss, *_ = step_fn(model, _take_first_samples(inputs, max(real, 1)), True)
            return mean.average_over_ranks(to_full_tensors(loss)), *outputs

    def _count_non_padding_samples(self, inputs: Mapping[str, Any]) -> int | None:
        """Count this rank's samples in the last batch of the data set, without padding samples.

        None for any other batch, and for a batch whose rows are not samples.
        """
        state, data = self.accelerator.gradient_state, self.context.data
        size = self.args.eval_batch_size
        is_filled = data.size > 1 and state.end_of_dataloader and state.remainder > 0
        if not is_filled or transformers.trainer_pt_utils.find_batch_size(inputs) != size:
            return None
        return int(min(max(state.remainder - data.rank * size, 0), size))

    # --- pipeline stages

    @property
    def has_pipeline_stages(self) -> bool:
        """Whether the model is split into pipeline stages."""
        return self.context.pipe.size > 1

    def _check_options_supported_by_pipeline(self, num_stages: int) -> None:
        """Raise ConfigError for a custom loss and for other Trainer options that a pipeline does not support."""
        kind = type(self)
        problems = {
            "label_smoothing_factor": self.label_smoother is not None,
            "compute_loss_func": self.compute_loss_func is not None,
            f"{kind.__name__}.compute_loss": [c for c in kind.__mro__ if "compute_loss" in vars(c)]
            != [ShardedTrainer, transformers.Trainer],
            "predict_with_generate": getattr(self.args, "predict_with_generate", False),
            "neftune_noise_alpha": self.args.neftune_noise_alpha is not None,
            "gradient_accumulation_steps, for a model without num_items_in_batch": (
                self.args.gradient_accumulation_steps > 1 and not self.model_accepts_loss_kwargs
            ),
        }
        for setting, is_used in problems.items():
            if is_used and num_stages > 1:
                raise ConfigError(
                    f"Trainer does not support {setting} with pipe={num_stages}.",
                    remedy="Remove this setting, or set pipe=1.",
                )

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        if not self.has_pipeline_stages:
            self._loss_mean.batch_size = transformers.trainer_pt_utils.find_batch_size(inputs)
            with self._loss_mean.set_num_local_samples(None):
                loss: Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
                if self.args.average_tokens_across_devices:
                    self._loss_mean.warn_if_unequal_label_counts(
                        inputs.get("labels") if isinstance(inputs, Mapping) else None
                    )
            return loss
        model.train()
        with self.accelerator.autocast():
            return self.pipeline.step(self._prepare_pipeline_inputs(inputs, num_items_in_batch)).detach()

    def _prepare_pipeline_inputs(self, inputs: Mapping[str, Any], num_items_in_batch: Any) -> dict[str, Any]:
        """Prepare a batch for the pipeline, and add the number of items (label tokens) in the global batch."""
        found = dict(self._prepare_inputs(inputs))
        if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            found["num_items_in_batch"] = round(float(num_items_in_batch) * self.context.data.size)
        return found

    def _run_pipeline_prediction_step(self, inputs: Any, prediction_loss_only: bool, ignore_keys: Any) -> Any:
        labels = tuple(inputs[name] for name in self.label_names if inputs.get(name) is not None)
        config = getattr(self.model, "config", None)
        ignored = {"loss", *(ignore_keys or getattr(config, "keys_to_ignore_at_inference", ()))}
        loss = None
        with self.accelerator.autocast():
            if labels:
                real = self._count_non_padding_samples(inputs)
                counted = inputs if real is None else _mask_labels(inputs, real)
                items = self._get_num_items_in_batch([counted], self.args.device)
                loss = self.pipeline.evaluate(self._prepare_pipeline_inputs(counted, items)).detach()
            if prediction_loss_only:
                return loss, None, None
            output = self.pipeline.forward(self._prepare_pipeline_inputs(inputs, None), gather=True)
        kept = [value for name, value in output.items() if name not in ignored and not is_kv_cache(value)]
        logits = tuple(to_full_tensors(kept))
        return loss, logits[0] if len(logits) == 1 else logits, labels[0] if len(labels) == 1 else labels or None

    # --- saving and loading: all ranks must call these methods

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._joined_save = False
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        if self._joined_save:
            return
        if hasattr(self.model, "save_pretrained"):  # older releases of transformers call _save only on the first rank
            self.model.save_pretrained(output_dir or self.args.output_dir)
        else:
            full_state_dict(self.sharded_model)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Gather and save the full weights. Trainer calls this on all ranks for models that transformers sharded."""
        self._joined_save = True
        if state_dict is None and not hasattr(self.model, "save_pretrained"):
            state_dict = full_state_dict(self.sharded_model)
        self.is_distributed_loading_by_transformers = True
        try:
            super()._save(output_dir, state_dict)  # type: ignore[misc]
        finally:
            self.is_distributed_loading_by_transformers = False

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the unsharded optimizer state, which any layout and the Trainer of transformers can load."""
        raw = getattr(self.optimizer, "optimizer", self.optimizer)
        state = gather_full_optimizer_state_dict(self.sharded_model, raw, output_dir)
        with self._swap_optimizer(FullOptimizerStateSaver(state)):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        raw = getattr(self.optimizer, "optimizer", self.optimizer)
        loading = FullOptimizerStateLoader(self.sharded_model, raw)
        with (
            self._override_world_size_and_rank(1, self.args.process_index),
            self._swap_optimizer(loading),
        ):  # loads it into host memory
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    @contextmanager
    def _swap_optimizer(self, replacement: Any) -> Iterator[None]:
        optimizer, self.optimizer = self.optimizer, replacement
        try:
            yield
        finally:
            self.optimizer = optimizer

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if self.args.world_size > 1 and self.args.process_index == 0:
            with self._override_world_size_and_rank(
                1, 0
            ):  # the file that one process, or another number of processes, loads
                super()._save_rng_state(output_dir)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load the random state of the first rank that trains on the same batches as this rank."""
        size, index = self.args.world_size, self.args.process_index
        if checkpoint is not None and size > 1:
            files = [os.path.isfile(os.path.join(checkpoint, f"rng_state_{n}.pth")) for n in (size - 1, size)]
            first = self.context.grid.get_rank_at({"data": self.context.data.rank})
            size, index = (size, first) if files == [True, False] else (1, 0)
        with self._override_world_size_and_rank(size, index):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn about missing keys, except for tied weights, which are saved under only one of their names."""
        missing = set(load_result.missing_keys)
        tensors = self.model.state_dict(keep_vars=True)
        found = {id(value) for name, value in tensors.items() if name not in missing}
        really = [name for name in load_result.missing_keys if id(tensors.get(name)) not in found]
        super()._issue_warnings_after_load(type(load_result)(really, load_result.unexpected_keys))  # type: ignore[misc]


def _take_first_samples(inputs: Any, num_samples: int) -> Any:
    """Return the first ``num_samples`` samples of a batch, by slicing its tensors and lists."""
    size = transformers.trainer_pt_utils.find_batch_size(inputs)

    def slice_samples(nested_inputs: Any) -> Any:
        if isinstance(nested_inputs, Mapping):
            return {name: slice_samples(each) for name, each in nested_inputs.items()}
        is_tensor = isinstance(nested_inputs, Tensor) and nested_inputs.dim() > 0
        return (
            nested_inputs[:num_samples]
            if (is_tensor or isinstance(nested_inputs, list)) and len(nested_inputs) == size
            else nested_inputs
        )

    return slice_samples(inputs)


def _mask_labels(inputs: Mapping[str, Any], num_kept_samples: int = 0) -> dict[str, Any]:
    """Return a copy of a batch that ignores the labels (-100) of all samples after the first ``num_kept_samples``."""
    found = dict(inputs)
    for name in ("labels", "shift_labels"):
        if isinstance(found.get(name), Tensor) and not found[name].is_floating_point():
            found[name] = found[name].clone()
            found[name][num_kept_samples:] = -100
    return found


class FullOptimizerStateSaver:
    """Replaces the optimizer while Trainer saves a checkpoint, to provide the unsharded optimizer state."""

    def __init__(self, full_optimizer_state: dict[str, Any] | None) -> None:
        self._state = full_optimizer_state

    def state_dict(self) -> dict[str, Any] | None:
        return self._state


class FullOptimizerStateLoader:
    """Replaces the optimizer while Trainer loads a checkpoint, to load an unsharded optimizer state."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_full_optimizer_state_dict(self._model, self._optimizer, state_dict)


UNSUPPORTED = {
    "fsdp": "ShardFormer shards the model. Use ParallelConfig(zero_stage=1, 2 or 3)",
    "deepspeed": "ShardFormer shards the model. Use ParallelConfig(zero_stage=1, 2 or 3)",
    "parallelism_config": "ShardFormer shards the model. Set the sizes of the axes in ParallelConfig",
    "use_liger_kernel": "Its kernels replace modules of the model, and compute the loss from full logits",
    "auto_find_batch_size": "Ranks would retry with different batch sizes",
}
"""Arguments of TrainingArguments that are not supported -> reason."""
FUSED_BACKWARD = ("lomo", "adalomo", "layerwise")
"""Parts of the names of optimizers that update parameters during the backward pass."""


def check_training_arguments(args: PlainArguments, parallel_config: ParallelConfig) -> None:
    """Raise ConfigError if any of the ``TrainingArguments`` does not work with a sharded model."""
    if parallel_config.max_grad_norm is not None:
        raise ConfigError(
            f"ParallelConfig(max_grad_norm={parallel_config.max_grad_norm}) is not supported, because Trainer clips "
            "the gradients.",
            remedy="Set TrainingArguments(max_grad_norm=...) instead.",
        )
    for name, reason in UNSUPPORTED.items():
        if value := getattr(args, name, None):
            raise ConfigError(
                f"TrainingArguments({name}={value!r:.60}) is not supported for a sharded model.",
                rule=reason,
                remedy=f"Remove {name}.",
            )
    optim = str(getattr(getattr(args, "optim", ""), "value", ""))
    if any(part in optim for part in FUSED_BACKWARD):
        raise ConfigError(
            f"TrainingArguments(optim={optim!r}) is not supported, because it updates parameters during the backward "
            "pass.",
            remedy="Use another optimizer. To save memory for gradients, set zero_stage=2.",
        )


class Trainer(ShardedTrainer, transformers.Trainer):  # type: ignore[misc]
    """A ``transformers.Trainer`` that shards its model. ``ShardedTrainer`` describes the additional arguments."""


class Seq2SeqTrainer(ShardedTrainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """A ``transformers.Seq2SeqTrainer`` that shards its model. See ``ShardedTrainer`` for additional arguments."""


# --- the layout in the arguments of an unmodified Trainer


@dataclass
class ParallelArguments:
    """A mixin that adds the parallel layout to ``TrainingArguments``.

    Args:
        parallel: Fields of ``ParallelConfig``, as a dict or in JSON, or a ``ParallelConfig``. None does not shard.
    """

    parallel: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Layout and options of shardformer.ParallelConfig, in JSON"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if isinstance(self.parallel, str):
            self.parallel = json.loads(self.parallel)
        if self.parallel is not None:
            defaults = ParallelConfig().to_dict()
            found = ParallelConfig.from_value(self.parallel).to_dict().items()
            self.parallel = {name: value for name, value in found if value != defaults[name]}  # can be written as JSON
            install_patch(
                TRAINER_PATCH, lambda: replace_attribute(transformers.Trainer, "__init__", _init_trainer_with_sharding)
            )


@dataclass
class TrainingArguments(ParallelArguments, transformers.TrainingArguments):  # type: ignore[misc]
    """A subclass of ``transformers.TrainingArguments`` that makes an unmodified Trainer shard its model."""


@dataclass
class Seq2SeqTrainingArguments(ParallelArguments, transformers.Seq2SeqTrainingArguments):  # type: ignore[misc]
    """A subclass of ``transformers.Seq2SeqTrainingArguments`` that makes a Seq2SeqTrainer shard its model."""


TRAINER_PATCH = LibraryPatch(
    "transformers.Trainer.__init__",
    "shardformer.integrations.transformers",
    "shards the model if the Trainer's arguments contain a layout",
)
_INIT = transformers.Trainer.__init__


@wraps(_INIT)
def _init_trainer_with_sharding(
    trainer: Any, model: Any = None, args: Any = None, *extra_args: Any, **kwargs: Any
) -> None:
    is_sharded = isinstance(trainer, ShardedTrainer)  # which sets the layout itself
    if is_sharded or getattr(args, "parallel", None) is None:
        _INIT(trainer, model, args, *extra_args, **kwargs)
        return
    kind: Any = type(trainer)
    trainer.__class__ = _make_sharded_trainer_class(kind)
    trainer._set_parallel_layout(model, args, None)
    _INIT(trainer, model, args, *extra_args, **kwargs)
    trainer._shard_model_after_init()


@cache
def _make_sharded_trainer_class(trainer_class: type) -> type:
    return type(
        trainer_class.__name__,
        (ShardedTrainer, trainer_class),
        {"__module__": trainer_class.__module__, "__doc__": trainer_class.__doc__},
    )
