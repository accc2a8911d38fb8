"""Builds the model, optimizer, learning-rate scheduler and hooks that a run configuration specifies."""

from __future__ import annotations

import fnmatch
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from shardformer.errors import (
    ConfigError,
    ShardFormerError,
    get_first_message_line,
    import_optional_module,
    suggest_similar_names,
)
from shardformer.filesystem import to_absolute_path
from shardformer.meta_init.lazy_init import LazyInit, has_deferred_weights
from shardformer.torch_compat import FakeTensor
from shardformer.torch_patches import LibraryPatch, replace_attribute, temporary_patch
from shardformer.train_command.config_schema import (
    LoraOptions,
    OptimizerOptions,
    ScheduleOptions,
    TrainConfig,
    get_builtin_hook_classes,
    suggest_config_key,
    suggest_trust_remote_code,
)
from shardformer.train_command.load_data import TrainingData
from shardformer.train_command.model_config import derive_config_fields_from_data, load_model_config
from shardformer.training.hook import Hook
from shardformer.transformers_compat import get_supported_config_classes, import_transformers, skip_weight_init
from shardformer.weights.from_pretrained import from_pretrained
from shardformer.zero.optimizers import LAMB, LARS, HybridAdam

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Pattern of lower-case parameter names that have no weight decay, as in transformers."""
PACKAGE_OPTIMIZERS = {kind.__name__: kind for kind in (LAMB, LARS, HybridAdam)}


MakeOptimizer = Callable[[nn.Module], Callable[[Iterable[nn.Parameter]], Optimizer]]
"""Function from the unsharded model to a function that creates an optimizer from local parameters."""
WEIGHT_DECAY = "weight_decay"
T = TypeVar("T")


def build_optimizer_factory(optimizer_options: OptimizerOptions) -> MakeOptimizer:
    """Return a function that creates the configured optimizer for a model. Raises ConfigError for invalid arguments."""
    known: dict[str, type[Optimizer]] = {
        n: k for n, k in vars(torch.optim).items() if isinstance(k, type) and issubclass(k, Optimizer)
    }
    known = {name: kind for name, kind in {**known, **PACKAGE_OPTIMIZERS}.items() if name != "Optimizer"}
    if ":" in optimizer_options.name:
        kind = import_user_class(optimizer_options.name, Optimizer, "optimizer.name")
    elif optimizer_options.name in known:
        kind = known[optimizer_options.name]
    else:
        names = ", ".join(PACKAGE_OPTIMIZERS)
        raise ConfigError(
            f"optimizer.name must be a class of torch.optim or one of {names}, but got {optimizer_options.name!r}.",
            rule='To use your own optimizer, specify its file and class, as in "my_optimizers.py:MyOptimizer".',
            remedy=suggest_similar_names(optimizer_options.name, known),
        )
    extra = {key: tuple(v) if isinstance(v, list) else v for key, v in (optimizer_options.model_extra or {}).items()}
    arguments: dict[str, Any] = {"lr": optimizer_options.lr, **extra}
    parameters = inspect.signature(kind).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        check_constructor_arguments(kind, arguments, "optimizer", ignored_names=list(parameters)[:1])

    def create_optimizer(
        group_fn: Callable[[Iterable[nn.Parameter]], list[Any]], params: Iterable[nn.Parameter]
    ) -> Optimizer:
        groups = group_fn(params)
        try:
            return kind(groups, **arguments)
        except Exception as error:  # classes raise different errors
            raise _make_optimizer_error(kind, arguments, error) from error

    # raises for invalid values before anything is loaded
    probe = create_optimizer(list, [nn.Parameter(torch.zeros(1))])
    has_decay = bool(probe.param_groups[0].get(WEIGHT_DECAY))
    if optimizer_options.decay_biases_and_norms and not has_decay:
        raise ConfigError(
            f"optimizer.decay_biases_and_norms = true has no effect, because {kind.__name__} has no weight decay.",
            remedy=f"Set optimizer.{WEIGHT_DECAY} = 0.01, or remove decay_biases_and_norms.",
        )
    is_grouped = (
        (has_decay and not optimizer_options.decay_biases_and_norms)
        or optimizer_options.lr_factors
        or optimizer_options.layer_decay != 1
    )
    return lambda model: partial(
        create_optimizer, _make_param_grouping_fn(optimizer_options, model, has_decay) if is_grouped else list
    )


def _make_optimizer_error(
    optimizer_class: type[Optimizer], arguments: Mapping[str, Any], exception: Exception
) -> ConfigError:
    """Explain in a ConfigError why an optimizer rejects its arguments or the parameters of the model."""
    reason = get_first_message_line(exception)
    try:
        optimizer_class([nn.Parameter(torch.zeros(2, 2))], **arguments)
    except Exception:  # classes raise different errors
        shown = ", ".join(f"{name} = {value!r}" for name, value in arguments.items())
        return ConfigError(
            f"{optimizer_class.__name__} does not accept the arguments {shown}: {reason}.",
            remedy="Fix these arguments in [optimizer].",
        )
    return ConfigError(
        f"{optimizer_class.__name__} does not accept all parameters of the model: {reason}.",
        remedy="Use another optimizer, or write a script with a second optimizer for the other parameters "
        "(docs/memory.md).",
    )


def _make_param_grouping_fn(
    optimizer_options: OptimizerOptions, model: nn.Module, optimizer_has_weight_decay: bool
) -> Callable[[Iterable[nn.Parameter]], list[dict[str, Any]]]:
    """Return a function that splits parameters into optimizer groups by their weight decay and learning rate.

    The names are taken from the model before sharding, so that the groups are the same under every layout. All groups
    exist on every pipeline stage, even if empty, because a checkpoint contains the groups of all stages.
    """
    factors = get_param_lr_factors(optimizer_options, model)
    kinds: dict[str, tuple[bool, float]] = {}
    kind_of_param: dict[int, tuple[bool, float]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        is_decayed = (
            not optimizer_has_weight_decay or optimizer_options.decay_biases_and_norms or has_weight_decay(model, name)
        )
        # tied weights have the group of their first name, even on a pipeline stage that has only the other name
        kinds[name] = kind_of_param.setdefault(id(param), (is_decayed, factors[name]))
    first = (True, 1.0)  # its learning rate is reported
    wanted = {*kinds.values(), first, *([(False, 1.0)] if optimizer_has_weight_decay else [])}
    order = sorted(wanted, key=lambda kind: (kind != first, not kind[0], -kind[1]))

    def group_params(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        names = {id(param): name for name, param in model.named_parameters()}
        groups: dict[tuple[bool, float], list[nn.Parameter]] = {kind: [] for kind in order}
        for param in params:
            groups[kinds[names[id(param)]]].append(param)
        return [
            {
                "params": group,
                **({} if is_decayed else {WEIGHT_DECAY: 0.0}),
                **({} if factor == 1 else {"lr": optimizer_options.lr * factor}),
            }
            for (is_decayed, factor), group in groups.items()
        ]

    return group_params


def get_param_lr_factors(optimizer_options: OptimizerOptions, model: nn.Module) -> dict[str, float]:
    """Return the learning-rate factor of each parameter, by parameter name.

    ``layer_decay`` counts the layers of the longest ``ModuleList`` from its end. Lists inside a layer, such as
    experts, do not count. Parameters before the list in the order of registration, such as embeddings, belong to the
    layer before the first one.

    Raises:
        ConfigError: A pattern matches no parameter, or the model has no stack of layers.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in optimizer_options.lr_factors:
        if not fnmatch.filter(names, pattern):
            near = suggest_similar_names(pattern, names)
            raise ConfigError(
                f"The pattern {pattern!r} in optimizer.lr_factors matches no parameter.",
                remedy=f"Fix the pattern. {near}",
            )
    depths = _count_layers_after_params(model, names) if optimizer_options.layer_decay != 1 else dict.fromkeys(names, 0)
    found = {name: optimizer_options.layer_decay ** depths[name] for name in names}
    for name in names:
        matching = (
            factor for pattern, factor in optimizer_options.lr_factors.items() if fnmatch.fnmatchcase(name, pattern)
        )
        found[name] *= next(matching, 1.0)
    return found


def _count_layers_after_params(model: nn.Module, param_names: Sequence[str]) -> dict[str, int]:
    """Count how many layers of the model's longest ``ModuleList`` come after each parameter."""
    stacks: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        is_in_layer = any(len(stack) > 1 and path.startswith(f"{outer}.") for outer, stack in stacks.items())
        if isinstance(module, nn.ModuleList) and not is_in_layer:
            stacks[path] = module
    path = max(stacks, key=lambda path: len(stacks[path]), default=None)
    if path is None or len(stacks[path]) < 2:
        raise ConfigError(
            f"optimizer.layer_decay has no effect, because {type(model).__name__} has no ModuleList of layers.",
            remedy="Remove layer_decay, or set the factors by parameter name with optimizer.lr_factors.",
        )
    count, prefix = len(stacks[path]), f"{path}."
    is_before, depths = True, {}
    for name in param_names:
        if name.startswith(prefix):
            is_before = False
            depths[name] = count - 1 - int(name.removeprefix(prefix).partition(".")[0])
        else:
            depths[name] = count if is_before else 0
    return depths


def has_weight_decay(model: nn.Module, param_name: str) -> bool:
    """Return False for biases and for parameters of normalization layers, and True for all other parameters.

    ``Trainer.get_decay_parameter_names`` in transformers uses the same rule. Here, it also applies to all modules whose
    class name contains "norm", such as ``BatchNorm2d``.
    """
    owner = type(model.get_submodule(param_name.rpartition(".")[0]))
    is_norm = any("norm" in kind.__name__.lower() for kind in owner.__mro__)
    return not is_norm and NOT_DECAYED.search(param_name.lower()) is None


def freeze_matching_params(model: nn.Module, name_patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match one of the patterns, such as ``wte.*``.

    Raises:
        ConfigError: A pattern matches no parameter, or all parameters match.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in name_patterns:
        if not fnmatch.filter(names, pattern):
            near = suggest_similar_names(
                pattern.removesuffix(".*"), {name.rpartition(".")[0] for name in names} | {*names}
            )
            raise ConfigError(
                f"The pattern {pattern!r} in model.freeze matches no parameter.", remedy=f"Fix the pattern. {near}"
            )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in name_patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"model.freeze = {list(name_patterns)} freezes all parameters, so nothing would be trained.",
            remedy="Remove at least one pattern.",
        )


def freeze_and_add_lora(config: TrainConfig, model: nn.Module) -> nn.Module:
    """Freeze the parameters that match ``model.freeze``, and add LoRA adapters if ``lora`` is configured."""
    freeze_matching_params(model, config.model.freeze)
    return model if config.lora is None else add_lora_adapters(config.lora, model, config.model.task)


LORA_TASKS = {
    "causal": "CAUSAL_LM", "preference": "CAUSAL_LM", "sequence_to_sequence": "SEQ_2_SEQ_LM",
    "token_classification": "TOKEN_CLS", "classification": "SEQ_CLS", "multi_label_classification": "SEQ_CLS",
    "regression": "SEQ_CLS",
}  # fmt: skip
"""Task -> ``task_type`` in PEFT, which trains and saves the new head of a classifier too."""


def add_lora_adapters(lora_options: LoraOptions, model: nn.Module, task: str) -> nn.Module:
    """Add PEFT adapters to an unsharded model, and freeze its other parameters.

    Raises:
        ConfigError: PEFT is not installed, or does not accept the settings in ``lora_options`` for this model.
    """
    peft = import_optional_module("peft", "The table lora", "peft")
    try:
        settings = peft.LoraConfig(
            r=lora_options.rank,
            lora_alpha=lora_options.alpha,
            lora_dropout=lora_options.dropout,
            target_modules=lora_options.target_modules,
            modules_to_save=lora_options.modules_to_save,
            use_rslora=lora_options.use_rslora,
            use_dora=lora_options.use_dora,
            task_type=LORA_TASKS.get(task),
        )
        with LazyInit() if has_deferred_weights(model) else _disable_module_to(model):
            adapted: nn.Module = peft.get_peft_model(model, settings)
            return adapted
    except (ValueError, TypeError, RuntimeError) as error:
        reason = get_first_message_line(error)
        raise ConfigError(
            f"PEFT cannot add adapters to {type(model).__name__}: {reason}.",
            remedy="Fix lora.target_modules or lora.modules_to_save.",
        ) from error


IN_PLACE = LibraryPatch(
    "torch.nn.Module.to",
    __name__,
    "does nothing while adapters are added to fake tensors, which torch cannot move",
)


def _disable_module_to(model: nn.Module) -> AbstractContextManager[Any]:
    """Disable ``Module.to`` while PEFT adds adapters to a model of fake tensors, because torch cannot move them."""
    if not isinstance(next(model.parameters()), FakeTensor):
        return nullcontext()
    return temporary_patch(IN_PLACE, lambda: replace_attribute(nn.Module, "to", lambda self, *args, **kwargs: self))


def check_constructor_arguments(
    cls: type, kwargs: Mapping[str, Any], config_section: str, ignored_names: Iterable[str] = ()
) -> None:
    """Raise ConfigError if a class does not accept one of the arguments, or if a required argument is missing."""
    parameters = inspect.signature(cls).parameters
    known = [name for name in parameters if name not in ignored_names]
    for name, value in kwargs.items():
        if name not in known:
            raise ConfigError(
                f"{config_section}.{name} = {value!r} is not valid, because {cls.__name__} has no argument {name!r}.",
                remedy=suggest_config_key(name, known),
            )
    for name in known:
        p = parameters[name]
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and name not in kwargs:
            raise ConfigError(f"{cls.__name__} requires the argument {name!r}.", remedy=f"Set {config_section}.{name}.")


def count_training_steps(config: TrainConfig, training_data: TrainingData) -> int:
    """Return the total number of training steps of a run."""
    if config.training.steps is not None:
        return config.training.steps
    return math.ceil((config.training.epochs or 1) * count_steps_per_epoch(config, training_data))


def count_steps_per_epoch(config: TrainConfig, training_data: TrainingData) -> int:
    """Return the number of training steps in one epoch."""
    samples, size = training_data.num_samples, config.data.batch_size
    assert samples is not None  # a stream requires training.steps
    return samples // size if config.data.drop_last else -(-samples // size)


class LambdaLR(lr_scheduler.LambdaLR):
    """Learning-rate scheduler of a run. After a constant schedule has warmed up, it keeps rates that a hook has set.

    It has the name of its base class, because a checkpoint stores the name, and earlier checkpoints must load.
    """

    lr_lambdas: list[Any]

    def get_lr(self) -> list[float | Tensor]:
        options, num_warmup_steps, *_ = self.lr_lambdas[0].args
        is_kept = options.name == "constant" and self.last_epoch >= max(num_warmup_steps, 1)
        return [group["lr"] for group in self.optimizer.param_groups] if is_kept else super().get_lr()


def build_lr_scheduler_factory(schedule_options: ScheduleOptions, num_steps: int) -> Callable[[Optimizer], LambdaLR]:
    """Return a function that creates a learning-rate scheduler for an optimizer and a run of ``num_steps`` steps."""
    return partial(LambdaLR, lr_lambda=make_lr_lambda(schedule_options, num_steps))


def make_lr_lambda(schedule_options: ScheduleOptions, num_steps: int) -> Callable[[int], float]:
    """Return a function that maps a step, counted from 0, to the factor for the base learning rate."""
    length = num_steps if schedule_options.steps is None else schedule_options.steps
    return partial(compute_lr_factor, schedule_options, count_warmup_steps(schedule_options, num_steps), length)


def count_warmup_steps(schedule_options: ScheduleOptions, num_steps: int) -> int:
    """Return the number of warm-up steps of a learning-rate schedule in a run of ``num_steps`` steps."""
    return _resolve_num_steps(
        schedule_options.warmup, num_steps if schedule_options.steps is None else schedule_options.steps
    )


def _resolve_num_steps(steps_or_fraction: float, num_steps: int) -> int:
    """Convert a number or fraction of steps to a number of steps. A value below 1 is a fraction of ``num_steps``."""
    return math.ceil(steps_or_fraction * num_steps) if steps_or_fraction < 1 else round(steps_or_fraction)


def compute_lr_factor(schedule_options: ScheduleOptions, num_warmup_steps: int, num_steps: int, step: int) -> float:
    """Return the factor by which the schedule multiplies the base learning rate at ``step``, counted from 0.

    >>> [round(compute_lr_factor(ScheduleOptions(name="linear"), 2, 6, step), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    done = min((step - num_warmup_steps) / max(num_steps - num_warmup_steps, 1), 1.0)
    match schedule_options.name:
        case "constant":
            decay = 0.0
        case "linear":
            decay = done
        case "cosine":
            decay = 0.5 - 0.5 * math.cos(math.pi * done)
        case "cosine_with_restarts":
            decay = 1.0 if done == 1 else 0.5 - 0.5 * math.cos(math.pi * (done * schedule_options.cycles % 1))
        case "warmup_stable_decay":
            length = _resolve_num_steps(schedule_options.decay, num_steps)
            decay = min(max(step - (num_steps - length), 0) / max(length, 1), 1.0)
        case "inverse_sqrt":
            return math.sqrt(max(num_warmup_steps, 1) / max(step, num_warmup_steps, 1))
    return 1 - (1 - schedule_options.min_lr_rate) * decay


DEFAULTS = ("throughput", "progress", "json_lines", "checkpoint")
WRITING_HOOKS = ("progress", "json_lines", "tensor_board", "wandb", "mlflow", "checkpoint")
"""Hooks that write the metrics of other hooks, and therefore come after them."""
FOLDERS = {"json_lines": ".", "checkpoint": "checkpoints"}
"""Hook -> its subfolder in the folder of the run. By default, the subfolder has the name of the hook."""


KNOWN_HOOKS: dict[str, type[Hook]] = get_builtin_hook_classes()


def build_hooks(config: TrainConfig) -> list[Hook]:
    """Create the hooks that a run configuration enables. Hooks that write metrics come last."""
    options: dict[str, Any] = {**dict.fromkeys(DEFAULTS, True), **config.hooks}
    wanted = {name: arguments for name, arguments in options.items() if arguments is not False}
    order = sorted(wanted, key=lambda name: WRITING_HOOKS.index(name) if name in WRITING_HOOKS else -1)
    return [_make_hook(config, name, {} if wanted[name] is True else wanted[name]) for name in order]


def get_hook_output_folder(config: TrainConfig, hook_name: str) -> Path | None:
    """Return the output folder of a default hook such as ``checkpoint``, or None if the run disables the hook."""
    arguments = config.hooks.get(hook_name, True)
    if arguments is False:
        return None
    directory = arguments.get("directory") if isinstance(arguments, dict) else None
    return to_absolute_path(os.path.expanduser(directory or config.output_folder / FOLDERS[hook_name]))


def _make_hook(config: TrainConfig, hook_name: str, hook_kwargs: dict[str, Any]) -> Hook:
    kind = _find_hook_class(hook_name)
    parameters = inspect.signature(kind).parameters
    if "directory" in parameters:
        hook_kwargs = {
            "directory": str(config.output_folder / FOLDERS.get(hook_name, hook_name.rpartition(":")[2])),
            **hook_kwargs,
        }
    if "config" in parameters and hook_name in KNOWN_HOOKS:
        hook_kwargs = {"config": config.model_dump(mode="json"), **hook_kwargs}
    check_constructor_arguments(kind, hook_kwargs, f"hooks.{hook_name}")
    hook_kwargs = _validate_hook_kwargs(kind, hook_kwargs, f"hooks.{hook_name}")
    if isinstance(directory := hook_kwargs.get("directory"), str):
        hook_kwargs["directory"] = os.path.expanduser(directory)
    several = [p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL]
    positional = [value for name in several for value in hook_kwargs.pop(name, ())]
    hook: Hook = kind(*positional, **hook_kwargs)
    return hook


@dataclass(frozen=True)
class HookArgument:
    """Type, default value and description of one argument of a hook class."""

    annotation: Any
    default: Any = PydanticUndefined
    description: str = ""


def get_hook_constructor_arguments(hook_class: type[Hook]) -> dict[str, HookArgument]:
    """Return the constructor arguments of a hook class by name, except ``**options``."""
    found = {}
    try:
        hints = get_type_hints(hook_class.__init__, include_extras=True)
    except NameError:  # an annotation of a user's hook that is imported only for type checkers
        hints = {}
    for name, p in inspect.signature(hook_class).parameters.items():
        hint, *notes = get_args(hints[name]) if hasattr(hints.get(name), "__metadata__") else (hints.get(name, Any),)
        description = next((note for note in notes if isinstance(note, str)), "")
        if p.kind is p.VAR_POSITIONAL:
            found[name] = HookArgument(GenericAlias(list, hint), None, description)
        elif p.kind is not p.VAR_KEYWORD:
            found[name] = HookArgument(hint, PydanticUndefined if p.default is p.empty else p.default, description)
    return found


def _validate_hook_kwargs(hook_class: type, hook_kwargs: dict[str, Any], config_section: str) -> dict[str, Any]:
    """Validate the arguments of a hook against the types that its class declares, and return them."""
    known, found = get_hook_constructor_arguments(hook_class), dict(hook_kwargs)
    for name, value in hook_kwargs.items():
        try:
            adapter = TypeAdapter(known[name].annotation)
        except Exception:  # a type that pydantic does not know
            continue
        try:
            found[name] = adapter.validate_json(json.dumps(value, default=str), strict=True)
        except ValidationError as error:
            messages = "; or ".join(dict.fromkeys(each["msg"] for each in error.errors()))
            raise ConfigError(
                f"{config_section}.{name} = {value!r:.80} has the wrong type: {messages}.",
                rule=known[name].description.replace("`", "'"),
                remedy=f"Fix the value of {config_section}.{name}.",
            ) from error
    return found


def _find_hook_class(hook_name: str) -> type[Hook]:
    if hook_name in KNOWN_HOOKS:
        return KNOWN_HOOKS[hook_name]
    if ":" not in hook_name:
        raise ConfigError(
            f"There is no hook called {hook_name!r}.",
            rule='To use your own hook, specify its file and class, as in "my_hooks.py:MyHook".',
            remedy=suggest_config_key(hook_name, KNOWN_HOOKS),
        )
    return import_user_class(hook_name, Hook, f"hooks.{hook_name!r}")


def import_user_class(class_path: str, base_class: type[T], config_key: str) -> type[T]:
    """Import a subclass of ``base_class`` that a configuration specifies as file.py:Class or package.module:Class."""
    from shardformer.verify.model_source import import_module_or_file  # takes 0.6 s

    module, _, class_name = class_path.rpartition(":")
    found = getattr(import_module_or_file(os.path.expanduser(module)), class_name, None)
    if not (isinstance(found, type) and issubclass(found, base_class)):
        raise ConfigError(
            f"{module} contains no subclass of {base_class.__name__} called {class_name!r}.",
            remedy=f"Fix the class name in {config_key}.",
        )
    return found


AUTO_CLASSES = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "sequence_to_sequence": "AutoModelForSeq2SeqLM",
    "classification": "AutoModelForSequenceClassification",
    "multi_label_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "regression": "AutoModelForSequenceClassification",
    "preference": "AutoModelForCausalLM",
    "image_classification": "AutoModelForImageClassification",
}
POSITION_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length")


def get_transformers_model_class(config: TrainConfig) -> Any:
    """Return the transformers model class for ``model.head`` or, if it is not set, for ``model.task``.

    Raises:
        ConfigError: transformers has no such class.
    """
    transformers = import_transformers()

    name = config.model.head or AUTO_CLASSES[config.model.task]
    kind = getattr(transformers, name, None)
    is_model = isinstance(kind, type) and (
        issubclass(kind, nn.Module) or get_supported_config_classes(kind) is not None
    )
    if not is_model or not hasattr(kind, "from_pretrained"):
        known = [n for n in dir(transformers) if re.search(r"For[A-Z]|Model$", n)]
        raise ConfigError(
            f"model.head must be a transformers model class, but got {name!r}.",
            remedy=suggest_similar_names(name, known),
        )
    return kind


def build_model(
    config: TrainConfig,
    training_data: TrainingData,
    base_model_config: PreTrainedConfig,
    *,
    lazy_init: bool = True,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Build the model of a run, with its weights in ``dtype``.

    ``parallel.precision`` determines the dtype of the training steps. ``base_model_config`` is the config of the model
    without the fields that depend on the data. If ``lazy_init`` is False, the weights are not initialized, even if the
    run loads a checkpoint.
    """
    complete = load_model_config(config, derive_config_fields_from_data(config, training_data, base_model_config))
    _check_data_fits_model(config, training_data, complete)
    kind = get_transformers_model_class(config)
    _check_model_supports_task(config, complete, kind)
    torch.manual_seed(config.seed)
    trust = config.model.trust_remote_code
    try:
        if lazy_init and not config.model.random:
            has_new_classes = getattr(base_model_config, "num_labels", None) != getattr(complete, "num_labels", None)
            model = from_pretrained(
                kind, config.model.name, config=complete, dtype=dtype, trust_remote_code=trust,
                ignore_mismatched_sizes=has_new_classes,
            )  # fmt: skip
        else:
            with LazyInit() if lazy_init else skip_weight_init():
                model = create_model_from_config(kind, complete, dtype, trust)
            if not lazy_init:
                cast(Any, model).tie_weights()
    except ShardFormerError:
        raise
    except Exception as error:  # model code may raise any error
        reason = f"{type(error).__name__}: {get_first_message_line(error)}"
        raise ConfigError(
            f"transformers cannot build a {kind.__name__} from {config.model.name!r}: {reason}.",
            remedy=suggest_trust_remote_code("Fix model.task, model.head or model.config", error),
        ) from error
    kind = type(model)
    if kind.__module__.startswith("transformers.") and "labels" not in inspect.signature(kind.forward).parameters:
        raise ConfigError(
            f"The class {kind.__name__} in model.head accepts no labels and returns no loss.",
            remedy="Remove model.head, or set it to a class that computes a loss, such as AutoModelForCausalLM.",
        )
    return model


def create_model_from_config(
    model_class: type[Any], model_config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> nn.Module:
    """Build a transformers model with random weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if hasattr(model_class, "from_config"):  # without trust_remote_code it may prompt for consent
            return cast(
                nn.Module, model_class.from_config(model_config, dtype=dtype, trust_remote_code=trust_remote_code)
            )
        return cast(nn.Module, model_class(model_config))
    finally:
        torch.set_default_dtype(before)


def _check_model_supports_task(config: TrainConfig, model_config: PreTrainedConfig, model_class: type[Any]) -> None:
    """Raise ConfigError if transformers has no class for the model type and the task of the run."""
    known = get_supported_config_classes(model_class)
    if (
        known is None
        or type(model_config) in known
        or model_class.__name__ in (getattr(model_config, "auto_map", None) or {})
    ):
        return
    transformers = import_transformers()
    tasks = [
        task
        for task, name in AUTO_CLASSES.items()
        if type(model_config) in (get_supported_config_classes(getattr(transformers, name)) or ())
    ]
    key, value = ("head", config.model.head) if config.model.head else ("task", config.model.task)
    alternative = f", or set model.task = {' or '.join(map(repr, tasks))}" if tasks else ""
    raise ConfigError(
        f"The model {config.model.name!r} has the type {model_config.model_type!r}, which does not support "
        f"model.{key} = {value!r}.",
        remedy=f"Use another model{alternative}.",
    )


def get_max_sequence_length(model_config: PreTrainedConfig) -> int | None:
    """Return the maximum sequence length that the config of a model specifies, or None if it specifies no limit."""
    text = model_config.get_text_config()
    return next((n for name in POSITION_FIELDS if isinstance(n := getattr(text, name, None), int) and n > 0), None)


def _check_data_fits_model(config: TrainConfig, training_data: TrainingData, model_config: PreTrainedConfig) -> None:
    if training_data.tokenizer is None:
        return
    text = model_config.get_text_config()
    size = getattr(text, "vocab_size", None)
    if size is not None and training_data.tokenizer.vocab_size > size:
        raise ConfigError(
            f"The tokenizer {training_data.tokenizer.name!r} has {training_data.tokenizer.vocab_size} tokens, but "
            f"the model has vocab_size={size}.",
            remedy="Use the tokenizer of the model, or set model.config.vocab_size = "
            f"{training_data.tokenizer.vocab_size} if the weights are random.",
        )
    most = get_max_sequence_length(model_config)
    if most is not None and config.data.sequence_length > most:
        raise ConfigError(
            f"data.sequence_length = {config.data.sequence_length} exceeds the model's maximum of {most} positions.",
            remedy=f"Use a sequence length of at most {most}. With rotary embeddings (RoPE), you can also increase the "
            "limit in model.config.",
        )
