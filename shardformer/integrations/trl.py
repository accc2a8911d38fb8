"""Subclasses of TRL's ``SFTTrainer``, ``DPOTrainer`` and other trainers that shard models with ShardFormer.

>>> from shardformer.integrations.trl import SFTTrainer                                     # doctest: +SKIP
>>> trainer = SFTTrainer(model, args, train_dataset=..., parallel=ParallelConfig(tensor=2))  # doctest: +SKIP

TRL's trainers multiply hidden states by the weight of the head themselves (``add_fused_lm_head``). If the head is
sharded over the vocabulary, each rank has a slice of this weight. Here the head computes the logits, which stay
sharded, and a few numbers per token are reduced over the ranks. ``ShardedTRLTrainer`` is a mixin for other trainers.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
import trl
from torch import Tensor, nn

from shardformer import torch_patches
from shardformer.comm.collectives import all_gather_objects, all_reduce
from shardformer.config import ParallelConfig
from shardformer.context_parallel.sequence_sharded_tensor import SequenceShardedTensor
from shardformer.discovery.reduced_model import check_packing_support
from shardformer.errors import ConfigError, check_minimum_library_version
from shardformer.gradient_accumulation.micro_batch_loss import ABSOLUTE
from shardformer.integrations.accelerate import Accelerator, unwrap_sharded_model
from shardformer.integrations.global_batch_loss import WeightedMeanMode
from shardformer.integrations.transformers import ShardedTrainer, transformers
from shardformer.layout.sharding_metadata import get_sharding_metadata
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.pipeline.contrastive_losses import DTYPE_ROUNDINGS, restore_model_after_trial
from shardformer.policies.policy import Policy
from shardformer.tensor_parallel.parallel_module import ParallelModule
from shardformer.tensor_parallel.vocab_parallel_logits import VocabParallelLogits, get_local_shard
from shardformer.tensor_parallel.vocab_parallel_loss import vocab_parallel_token_statistics
from shardformer.torch_compat import tree_leaves
from shardformer.training.initialize import initialize

check_minimum_library_version("trl", trl.__version__)

# B batch, S sequence, T tokens, H hidden, V vocabulary

FUSED_ARGUMENT, FUSED_FUNCTION = "fused_lm_head", "_ChunkedLogProbFunction"
"""Argument of a `forward` that TRL has replaced, and the global name of the function that it calls."""


class ShardedTRLTrainer(ShardedTrainer):
    """A mixin that makes a TRL trainer shard its models: ``class MyTrainer(ShardedTRLTrainer, trl.TheirTrainer)``.

    Takes the arguments of the trainer class, and ``parallel``, ``policy`` and ``context`` of ``ShardedTrainer``.
    Reference models and reward models are sharded over the same ranks.

    Raises:
        ConfigError: The layout or an argument is not supported. Raised before training.
    """

    replaces_fused_heads = True
    _has_tried_loss = False
    _trial_output_factors: tuple[float, ...] = ()
    loss_is_scaled_for_ga: bool | None
    current_gradient_accumulation_steps: int

    def __init__(
        self,
        *args: Any,
        parallel: ParallelConfig | Mapping[str, Any] | None = None,
        policy: Policy | type[Policy] | None = None,
        context: ParallelContext | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = {**dict(zip(self._get_positional_arg_names(), args, strict=False)), **kwargs}
        check_trl_arguments(arguments.get("args"), ParallelConfig.from_value(parallel))
        super().__init__(**arguments, parallel=parallel, policy=policy, context=context)
        self._scale_args_to_data_parallel_size()

    @classmethod
    def _get_positional_arg_names(cls) -> list[str]:
        """Return the names of the positional arguments that the TRL trainer accepts."""
        for theirs in cls.__mro__[cls.__mro__.index(ShardedTrainer) + 1 :]:
            parameters = list(inspect.signature(theirs).parameters.values())
            if not any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
                break
        return [parameter.name for parameter in parameters]

    def _scale_args_to_data_parallel_size(self) -> None:
        """Use the number of data-parallel ranks in settings where TRL used the number of processes."""
        args, data = self.args, self.context.data
        process = int(self.accelerator.state.process_index)
        if torch.initial_seed() == args.seed + process != args.seed + data.rank:  # set_seed(..., device_specific=True)
            transformers.set_seed(args.seed + data.rank)
        if getattr(args, "steps_per_generation", None) is None:
            return
        train, evaluated = args.per_device_train_batch_size, args.per_device_eval_batch_size
        args.generation_batch_size = train * data.size * args.steps_per_generation
        groups = [("per_device_train_batch_size", train, args.steps_per_generation, args.num_generations)]
        if args.eval_strategy != "no":
            in_eval = getattr(args, "num_generations_eval", None) or args.num_generations
            groups.append(("per_device_eval_batch_size", evaluated, 1, in_eval))
        for name, size, steps, generations in groups:
            if (completions := size * data.size * steps) % generations:
                raise ConfigError(
                    f"A batch of {completions} completions ({name}={size} on {data.size} data-parallel ranks) is not "
                    f"divisible by {generations} generations per prompt.",
                    remedy=f"Increase {name}, or use fewer generations.",
                )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with patch_gather_over_data(self.accelerator):
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with patch_gather_over_data(self.accelerator):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with patch_gather_over_data(self.accelerator):
            return super().predict(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__, self.accelerator.trained = ShardingAccelerator, type(self.model)

    def _shard_model(self, model: nn.Module) -> None:
        with rebuild_fused_heads(model):
            if getattr(self, "padding_free", False) and not hasattr(self, "pipeline"):
                self._check_packing_supported(model)
            super()._shard_model(model)
        forbid_reading_sharded_head_weights(self.sharded_model, type(self))

    def _check_packing_supported(self, model: nn.Module) -> None:
        option = "padding_free=True, which packing sets,"
        if unwrap_sharded_model(model) is not None:
            raise ConfigError(
                f"{option} requires an unsharded model, but got a sharded {type(model).__name__}.",
                remedy="Pass the unsharded model to the trainer, which shards it according to ParallelConfig(...).",
            )
        check_packing_support(model, option, "Set packing=False and padding_free=False")

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        if unwrap_sharded_model(self.model) is None:
            self._shard_model(self.model)
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        data = self.context.data
        if num_items_in_batch is None and self.loss_is_scaled_for_ga is None and "labels" in inputs and data.size > 1:
            peft = getattr(self.model, "active_peft_config", None)  # a virtual token predicts the first label
            first = 0 if getattr(peft, "is_prompt_learning", False) else 1
            count = inputs["labels"][..., first:].ne(-100).sum()
            num_items_in_batch = all_reduce(count, data, purpose="loss") / data.size
            if not model.training:
                self.current_gradient_accumulation_steps = 1  # training sets it before each step
        if self.context.sequence.size > 1 and inputs.get("position_ids") is not None:
            # arguments of kernels for packed rows; the attention over a sharded sequence reads the position_ids
            bounds = {*transformers.modeling_flash_attention_utils.FlashAttentionKwargs.__annotations__, "seq_idx"}
            inputs = {name: value for name, value in inputs.items() if name not in bounds}
        compute = partial(super().compute_loss, model, inputs, *args, num_items_in_batch=num_items_in_batch, **kwargs)
        if not self._must_equal_global_loss:
            return compute()
        models = {id(sharded): sharded for each in (model, *vars(self).values())
                  if (sharded := unwrap_sharded_model(each)) is not None}  # fmt: skip
        with WeightedMeanMode(self._loss_mean, list(models.values()), self._trial_output_factors):
            found = compute()
        if torch.is_grad_enabled():
            return found
        return (found[0].detach(), *found[1:]) if isinstance(found, tuple) else found.detach()

    # --- whether the loss over data-parallel ranks equals that of the global batch

    @property
    def _must_equal_global_loss(self) -> bool:
        """Whether the mean loss of the data-parallel ranks must be the loss of one process with the global batch.

        Trainers that generate completions compute the loss of each rank separately, as in TRL on several processes.
        """
        generates = getattr(self.args, "steps_per_generation", None) is not None
        return self.context.data.size > 1 and self.args.average_tokens_across_devices and not generates

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not self._has_tried_loss and self._must_equal_global_loss:
            self._has_tried_loss = True
            if self._does_loss_differ_from_global_loss(model):
                warnings.warn(
                    f"The loss of {type(self).__name__} for the global batch is not the mean of the losses of the "
                    f"{self.context.data.size} data-parallel ranks. For example, a loss may compare the samples of a "
                    "batch with each other. The results differ from training in one process with the global batch, "
                    "as they do in TRL on several processes. To get the same results, use another loss or set data=1. "
                    f"{type(self.args).__name__}(average_tokens_across_devices=False) disables this warning.",
                    stacklevel=2,
                )
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss

    def _does_loss_differ_from_global_loss(self, model: nn.Module) -> bool:
        """Run trials without gradients that compare the loss of a batch with the mean of the losses of its parts.

        Each rank computes the loss of one part, and then that of all parts. The outputs of the model and those of the
        reference model are multiplied by different factors, because they may be identical before the first step.
        Communicates in each trial what two losses communicate, and one number over the data-parallel ranks.
        """
        data, args = self.context.data, self.args
        num_parts = next(n for n in range(2, data.size + 1) if data.size % n == 0)
        groups = _select_trial_samples(self.train_dataset, num_parts, min(args.per_device_train_batch_size, 4))
        collate = self._get_collator_with_removed_columns(copy.copy(self.data_collator), description="training")
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else next(model.parameters()).dtype
        relative = max(RELATIVE_TOLERANCE, DTYPE_ROUNDINGS * torch.finfo(dtype).eps)
        with self._restore_after_trial(model):
            for samples, factor in zip(groups, TRIAL_FACTORS, strict=False):
                self._trial_output_factors = (2 * factor, -3 * factor)
                part = samples[data.rank % num_parts :: num_parts]
                of_part, of_all = (self._compute_trial_loss(model, collate(each)) for each in (part, samples))
                mean = all_reduce(of_part, data, purpose="loss") / data.size
                if abs(float(mean - of_all)) > ABSOLUTE + relative * max(abs(float(mean)), abs(float(of_all))):
                    return True  # NaN and infinity are not greater
        return False

    def _compute_trial_loss(self, model: nn.Module, batch: Any) -> Tensor:
        with self.compute_loss_context_manager():
            loss: Tensor = self.compute_loss(model, self._prepare_inputs(batch))
            return loss.detach().double()

    @contextmanager
    def _restore_after_trial(self, model: nn.Module) -> Iterator[None]:
        """Evaluate the model, and restore its state, the metrics and the counters of this trainer."""
        plain = (int, float, str, bool, type(None))
        before = {
            name: copy.deepcopy(value)
            for name, value in vars(self).items()
            if isinstance(value, (*plain, dict)) and all(isinstance(x, plain) for x in tree_leaves(value))
        }
        is_training = model.training
        model.eval()
        try:
            with restore_model_after_trial(model, self.accelerator.device), self._loss_mean.set_num_local_samples(None):
                yield
        finally:
            model.train(is_training)
            vars(self).update(before)
            self._trial_output_factors = ()


TRIAL_FACTORS = (1.0, 0.1, 0.01)
"""Scales of the outputs in the trials, so that some loss is neither linear nor saturated."""
RELATIVE_TOLERANCE = 1e-4


def _select_trial_samples(dataset: Any, num_parts: int, samples_per_part: int) -> list[list[Any]]:
    """Return up to three groups of samples: the shortest and longest ones, which alternate, and two in their order.

    Returns no groups if the samples cannot be read by their index.
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return []
    size = num_parts * min(samples_per_part, len(dataset) // num_parts)
    if not size:
        return []
    rows = [dataset[i] for i in range(min(2 * size, len(dataset)))]
    in_size = sorted(rows, key=lambda row: sum(len(value) for value in row.values() if hasattr(value, "__len__")))
    extremes = [in_size[i // 2] if i % 2 == 0 else in_size[-1 - i // 2] for i in range(size)]
    return [extremes, rows[:size], rows[-size:]]


class ShardingAccelerator(Accelerator):
    """An Accelerator that also shards models that are only evaluated, such as reference and reward models."""

    trained: type

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        if evaluation_mode and unwrap_sharded_model(model) is None and isinstance(model, transformers.PreTrainedModel):
            with rebuild_fused_heads(model):
                policy = self.policy if isinstance(model, self.trained) else None
                initialize(model, None, parallel=self.config, policy=policy, context=self.context)
            forbid_reading_sharded_head_weights(model, type(self))
        return super().prepare_model(model, device_placement, evaluation_mode)


UNSUPPORTED = {
    "use_vllm": "vLLM would need the full weights after each step. Generate with the sharded model instead",
    "use_transformers_continuous_batching": "Its scheduler runs independently on each rank",
    "use_transformers_paged": "Its scheduler runs independently on each rank",
    "activation_offloading": "Use ParallelConfig(activation_offload=...) instead",
}
"""Arguments of TRL's configurations that are not supported -> reason."""


def check_trl_arguments(args: Any, parallel_config: ParallelConfig) -> None:
    """Raise ConfigError if any argument of a TRL config does not work with a sharded model."""
    if getattr(args, "sync_ref_model", False) and parallel_config.effective_zero_stage == 3:
        raise ConfigError(
            f"{type(args).__name__}(sync_ref_model=True) is not supported with zero_stage=3.",
            remedy="Use zero_stage=2, or remove sync_ref_model.",
        )
    for name, reason in UNSUPPORTED.items():
        if value := getattr(args, name, None):
            raise ConfigError(
                f"{type(args).__name__}({name}={value!r}) is not supported for a sharded model.",
                rule=reason,
                remedy=f"Remove {name}.",
            )


# --- functions of accelerate that communicate over all processes


@contextmanager
def patch_gather_over_data(accelerator: Accelerator) -> Iterator[None]:
    """Make accelerate's ``gather``, ``gather_object`` and ``reduce`` communicate over the data-parallel ranks.

    Trainers that generate completions call these functions to collect the rewards of all processes.
    """
    from accelerate import utils

    data = accelerator.context.data

    def gather_object(local_objects: list[Any]) -> list[Any]:
        return [value for of_rank in all_gather_objects(local_objects, data) for value in of_rank]

    replaced = {"gather": accelerator.gather, "gather_object": gather_object, "reduce": accelerator.reduce}

    originals = {name: getattr(utils, name) for name in replaced}

    def apply() -> torch_patches.Undo:
        for name, new in replaced.items():
            _replace_accelerate_function(name, originals[name], new)

        def undo() -> None:
            for name, new in replaced.items():
                _replace_accelerate_function(name, new, originals[name])

        return undo

    patch = torch_patches.LibraryPatch(
        "accelerate.utils.gather, gather_object and reduce",
        f"{__name__}.patch_gather_over_data of accelerator {id(accelerator)}",
        "they collect from all processes, even from those that have the same batch",
    )
    with torch_patches.temporary_patch(patch, apply):
        yield


def _replace_accelerate_function(function_name: str, old_fn: Callable[..., Any], new_fn: Callable[..., Any]) -> None:
    """Patch a function of accelerate.utils in all modules that import it, except accelerate's own."""
    for module in list(sys.modules.values()):
        path = str(getattr(module, "__name__", ""))
        is_theirs = path.startswith("accelerate.") and path != "accelerate.utils"
        if not is_theirs and getattr(module, "__dict__", {}).get(function_name) is old_fn:
            setattr(module, function_name, new_fn)


# --- weights that a trainer may not read


def forbid_reading_sharded_head_weights(model: nn.Module, trainer_class: type) -> None:
    """Make the model's output head raise ConfigError if a trainer reads its sharded weights directly.

    Each rank has a slice of the weight. The trainer would use this slice as if it were the full weight.
    """
    modules = {kind.__module__ for kind in trainer_class.__mro__}
    find_head = getattr(model, "get_output_embeddings", None)
    head = None if find_head is None else find_head()
    for layer in () if head is None else find_sharded_layers(head):
        properties = {
            name: property(partial(_get_weight_unless_read_by_trainer, name, modules)) for name in layer._parameters
        }
        kind = type(layer)
        layer.__class__ = type(kind.__name__, (kind,), {**properties, "__module__": kind.__module__})
    get_sharding_metadata(model).on_adapted(model)  # the checks of the forward pass accept the new class


def _get_weight_unless_read_by_trainer(param_name: str, trainer_modules: set[str], layer: nn.Module) -> Any:
    frame: Any = sys._getframe(1)
    while frame.f_code.co_name == "__getattr__":  # of a module that wraps the layer
        frame = frame.f_back
    reader = frame.f_globals.get("__name__", "")
    is_trainer = reader in trainer_modules and reader.partition(".")[0] not in (
        "shardformer",
        "transformers",
        "torch",
        "builtins",
    )
    if is_trainer or reader.startswith("trl."):
        raise ConfigError(
            f"{reader}.{frame.f_code.co_name} reads the {param_name} of the LM head, but each rank has only a "
            "slice of it.",
            remedy="Use the logits of the model, or a layout without the tensor axis.",
        )
    return layer._parameters[param_name]


def find_sharded_layers(module: nn.Module) -> list[ParallelModule]:
    """Return all layers in a module that have sharded parameters."""
    layers = [each for each in module.modules() if isinstance(each, ParallelModule)]
    return [layer for layer in layers if any(spec.is_sharded for spec in layer.shard_specs.values())]


# --- the fused head


@contextmanager
def rebuild_fused_heads(model: nn.Module) -> Iterator[None]:
    """Remove TRL's fused heads before the model is sharded, and add them again to the sharded model."""
    fused = {
        module: vars(module)["forward"]
        for module in model.modules()
        if _is_trl_fused_forward(vars(module).get("forward"))
    }
    for module in fused:
        del module.__dict__["forward"]
    try:
        yield
    except BaseException:
        for module, forward in fused.items():
            module.forward = forward
        raise
    for module, forward in fused.items():
        module.forward = MethodType(_make_sharded_head_forward(forward.__func__, module), module)


def _is_trl_fused_forward(forward: Callable[..., Any] | None) -> bool:
    code = getattr(getattr(forward, "__func__", None), "__code__", None)
    return code is not None and FUSED_ARGUMENT in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _make_sharded_head_forward(fused_forward: FunctionType, model: nn.Module) -> FunctionType:
    """Adapt TRL's fused ``forward`` to a sharded output head."""
    code = fused_forward.__code__
    if fused_forward.__globals__["__name__"] == __name__:
        return fused_forward
    if FUSED_FUNCTION not in code.co_names or "original_forward" not in code.co_freevars:
        raise ConfigError(
            f"trl {trl.__version__} does not support a sharded LM head.",
            remedy="Install trl 1.16, or use data parallelism only.",
        )
    replaced = {
        FUSED_FUNCTION: SimpleNamespace(
            apply=partial(
                compute_token_logprobs_and_entropies,
                model.get_output_embeddings,
                fused_forward.__globals__[FUSED_FUNCTION].apply,
            )
        ),
        "_use_triton": lambda device: False,  # which would select positions, and gather a sharded sequence for it
        "__name__": __name__,
    }
    cells = dict(zip(code.co_freevars, fused_forward.__closure__ or (), strict=True))
    cells["original_forward"] = type(next(iter(cells.values())))(model.forward)
    globals_ = {**fused_forward.__globals__, **replaced}
    copied = FunctionType(code, globals_, fused_forward.__name__, fused_forward.__defaults__, tuple(cells.values()))
    copied.__kwdefaults__ = fused_forward.__kwdefaults__
    copied.__dict__.update(fused_forward.__dict__)
    return copied


def compute_token_logprobs_and_entropies(
    get_output_head_fn: Any, unsharded_fn: Any, hidden_TH: Tensor, weight: Tensor, bias: Tensor | None,
    labels_T: Tensor, temperature: float, chunk_size: int, softcap: float | None, scale: float, outputs: Any,
) -> Any:  # fmt: skip
    """Compute the label log-probabilities and entropies that TRL's fused head returns, also for a sharded head.

    A sharded head communicates what ``vocab_parallel_statistics`` and the head itself communicate.
    """
    if isinstance(hidden_TH, SequenceShardedTensor):
        rows = hidden_TH.rows
        local = (hidden_TH.local, weight, bias, rows.slice_local(labels_T, 0))
        found = compute_token_logprobs_and_entropies(
            get_output_head_fn, unsharded_fn, *local, temperature, chunk_size, softcap, scale, outputs
        )
        return tuple(None if x is None else SequenceShardedTensor(x, rows, 0) for x in found)
    head = get_output_head_fn()
    if not find_sharded_layers(head):
        return unsharded_fn(hidden_TH, weight, bias, labels_T, temperature, chunk_size, softcap, scale, outputs)
    logits_TV = head(hidden_TH)
    axis = Axis("tensor")  # of one rank, for a head that gathers its logits
    bounds: tuple[int, ...] = (0, logits_TV.shape[-1])
    if isinstance(logits_TV, VocabParallelLogits):
        axis, bounds, logits_TV = logits_TV.axis, logits_TV.bounds, get_local_shard(logits_TV)
    if (scale, softcap, temperature) != (1.0, None, 1.0):
        logits_TV = logits_TV.float() * scale
        logits_TV = (logits_TV if softcap is None else softcap * torch.tanh(logits_TV / softcap)) / temperature
    return tuple(vocab_parallel_token_statistics(logits_TV, labels_T, axis, bounds, outputs))


class SFTTrainer(ShardedTRLTrainer, trl.SFTTrainer):  # type: ignore[misc]
    """A ``trl.SFTTrainer`` that shards its model. ``ShardedTRLTrainer`` describes the additional arguments."""


class DPOTrainer(ShardedTRLTrainer, trl.DPOTrainer):  # type: ignore[misc]
    """A ``trl.DPOTrainer`` that shards its models. ``ShardedTRLTrainer`` describes the additional arguments."""


class RewardTrainer(ShardedTRLTrainer, trl.RewardTrainer):  # type: ignore[misc]
    """A ``trl.RewardTrainer`` that shards its model. ``ShardedTRLTrainer`` describes the additional arguments."""


class GRPOTrainer(ShardedTRLTrainer, trl.GRPOTrainer):  # type: ignore[misc]
    """A ``trl.GRPOTrainer`` that shards its models. ``ShardedTRLTrainer`` describes the additional arguments."""
