"""Builds the model, the optimizer, the scheduler and the hooks that a run's configuration names."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardformer.errors import ConfigError, ShardFormerError, did_you_mean, first_line
from shardformer.meta_init.lazy_init import LazyInit
from shardformer.train_command.config_schema import OptimizerTable, ScheduleTable, TrainConfig, remote_code_hint
from shardformer.train_command.datasets import TrainingData
from shardformer.train_command.model_config import from_data, load_model_config
from shardformer.training import hooks as included
from shardformer.training.hook import Hook
from shardformer.transformers_compat import configs_of, load_transformers
from shardformer.weights.from_pretrained import from_pretrained
from shardformer.zero.optimizers import LAMB, LARS, HybridAdam

NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Of names in lower case, as in transformers."""
PACKAGE_OPTIMIZERS = {kind.__name__: kind for kind in (LAMB, LARS, HybridAdam)}


MakeOptimizer = Callable[[nn.Module], Callable[[Iterable[nn.Parameter]], Optimizer]]
"""The model before it is sharded -> the parameters of it that are trained here -> what updates them."""
DECAY = "weight_decay"


def build_optimizer(table: OptimizerTable) -> MakeOptimizer:
    """How the optimizer is made. Raises ConfigError for a name, or an argument, that there is not."""
    theirs = {n: k for n, k in vars(torch.optim).items() if isinstance(k, type) and issubclass(k, Optimizer)}
    known = {name: kind for name, kind in {**theirs, **PACKAGE_OPTIMIZERS}.items() if name != "Optimizer"}
    if table.name not in known:
        raise ConfigError(
            f"optimizer.name = {table.name!r}",
            rule=f"It is a class of torch.optim, or {', '.join(PACKAGE_OPTIMIZERS)}",
            remedy=did_you_mean(table.name, known),
        )
    kind = known[table.name]
    said = {key: tuple(v) if isinstance(v, list) else v for key, v in (table.model_extra or {}).items()}
    check_arguments(kind, {"lr": table.lr, **said}, "optimizer", taken=("params",))
    default = inspect.signature(kind).parameters.get(DECAY)
    decays = bool(said.get(DECAY, default.default if default is not None else 0))
    if table.decay_biases_and_norms and not decays:
        raise ConfigError(
            f"optimizer.decay_biases_and_norms = true with {kind.__name__} and no {DECAY}",
            remedy=f"Write optimizer.{DECAY} = 0.01, or leave it out",
        )
    made = partial(_make_optimizer, kind, {"lr": table.lr, **said})
    made(list)([nn.Parameter(torch.zeros(1))])  # refuses values that cannot be, before anything is loaded
    return lambda model: made(_grouping(model) if decays and not table.decay_biases_and_norms else list)


def _make_optimizer(
    kind: Any, arguments: Mapping[str, Any], group: Callable[[Iterable[nn.Parameter]], list[Any]]
) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    return lambda params: _construct_optimizer(kind, arguments, group(params))


def _construct_optimizer(kind: Any, arguments: Mapping[str, Any], groups: list[Any]) -> Optimizer:
    try:
        found: Optimizer = kind(groups, **arguments)
    except Exception as error:  # each class checks its arguments in its own way
        shown = ", ".join(f"{name} = {value!r}" for name, value in arguments.items())
        raise ConfigError(
            f"{kind.__name__} does not take {shown}: {first_line(error)}", remedy="Correct the value"
        ) from error
    return found


def _grouping(model: nn.Module) -> Callable[[Iterable[nn.Parameter]], list[dict[str, Any]]]:
    """Parameters -> those that decay, and the others.

    Which these are is found by name before the model is sharded, so that it is the same under every layout. On every
    rank there are both groups, though a stage may have none of one: a checkpoint has the groups of all.
    """
    every = (name for name, _ in model.named_parameters(remove_duplicate=False))
    others = {name for name in every if not decays(model, name)}

    def grouped(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        names = {id(param): name for name, param in model.named_parameters()}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for param in params:
            groups[names[id(param)] not in others].append(param)
        return [{"params": groups[True]}, {"params": groups[False], DECAY: 0.0}]

    return grouped


def decays(model: nn.Module, name: str) -> bool:
    """Whether weight decay applies to a parameter: not to biases, nor to what a norm holds.

    As ``Trainer.get_decay_parameter_names`` of transformers, which goes by names and ``LayerNorm``; and every other
    module whose class is named as a norm, such as ``BatchNorm2d``.
    """
    holder = type(model.get_submodule(name.rpartition(".")[0]))
    is_norm = any("norm" in kind.__name__.lower() for kind in holder.__mro__)
    return not is_norm and NOT_DECAYED.search(name.lower()) is None


def check_arguments(kind: Any, given: Mapping[str, Any], where: str, taken: Iterable[str] = ()) -> None:
    """Raises ConfigError for an argument that a class does not take, or lacks."""
    parameters = inspect.signature(kind).parameters
    known = [name for name in parameters if name not in taken]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{where}.{name} = {given[name]!r}",
                rule=f"{kind.__name__} has no such argument",
                remedy=did_you_mean(name, known),
            )
    lacking = [name for name in known if parameters[name].default is inspect.Parameter.empty and name not in given]
    named = [name for name in lacking if parameters[name].kind in (parameters[name].POSITIONAL_OR_KEYWORD,)]
    if named:
        raise ConfigError(f"{where} does not say {named[0]}", rule=f"{kind.__name__} needs it", remedy="Write it")


def build_scheduler(table: ScheduleTable, num_steps: int) -> Callable[[Optimizer], LambdaLR]:
    """A function of the optimizer, for a run of so many steps."""
    share = shares_of(table, num_steps)
    return lambda optimizer: LambdaLR(optimizer, share)


def shares_of(table: ScheduleTable, num_steps: int) -> Callable[[int], float]:
    """step from 0 -> share of the learning rate, in a run of so many steps."""
    length = num_steps if table.steps is None else table.steps
    warmup = math.ceil(table.warmup * length) if table.warmup < 1 else round(table.warmup)
    return partial(lr_factor, table.name, warmup, length, table.min_lr_rate)


def lr_factor(name: str, warmup: int, num_steps: int, final: float, step: int) -> float:
    """Of the learning rate, in a step counted from 0.

    >>> [round(lr_factor("linear", 2, 6, 0.0, step), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(num_steps - warmup, 1), 1.0)
    fallen = {"constant": 0.0, "linear": done, "cosine": 0.5 - 0.5 * math.cos(math.pi * done)}[name]
    return 1 - (1 - final) * fallen


DEFAULTS = ("throughput", "progress", "json_lines", "checkpoint")
LAST = ("progress", "json_lines", "tensor_board", "checkpoint")
"""Those that write what others have measured."""
FOLDERS = {"json_lines": ".", "checkpoint": "checkpoints"}
"""Inside of the run's folder; of any other hook with a folder it has the name of the hook."""


def hook_key(name: str) -> str:
    """``EarlyStopping`` as ``early_stopping``, as the config has it."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


KNOWN_HOOKS = {hook_key(name): getattr(included, name) for name in included.__all__}


def build_hooks(config: TrainConfig) -> list[Hook]:
    """Those that measure before those that write.

    Raises ConfigError for a hook that there is not, and for an argument that it does not take.
    """
    said: dict[str, Any] = {**dict.fromkeys(DEFAULTS, True), **config.hooks}
    wanted = {name: arguments for name, arguments in said.items() if arguments is not False}
    order = sorted(wanted, key=lambda name: LAST.index(name) if name in LAST else -1)
    return [_make_hook(config, name, {} if wanted[name] is True else wanted[name]) for name in order]


def _make_hook(config: TrainConfig, name: str, arguments: dict[str, Any]) -> Hook:
    kind = _kind(name)
    if "folder" in inspect.signature(kind).parameters:
        arguments = {"folder": str(config.path / FOLDERS.get(name, name)), **arguments}
    check_arguments(kind, arguments, f"hooks.{name}")
    _check_types(kind, arguments, f"hooks.{name}")
    arguments = dict(arguments)
    if isinstance(folder := arguments.get("folder"), str):
        arguments["folder"] = os.path.expanduser(folder)
    several = [p.name for p in inspect.signature(kind).parameters.values() if p.kind is p.VAR_POSITIONAL]
    given = [value for name in several for value in arguments.pop(name, ())]
    hook: Hook = kind(*given, **arguments)
    return hook


def _check_types(kind: Any, arguments: dict[str, Any], where: str) -> None:
    """Raises ConfigError for a value that is not of the type that the class declares, where it declares one."""
    parameters = inspect.signature(kind).parameters
    for argument, value in arguments.items():
        try:
            adapter = TypeAdapter(get_type_hints(kind.__init__)[argument])
        except Exception:  # no type, one that only a type checker knows, or a class that is not plain data
            continue
        if parameters[argument].kind is inspect.Parameter.VAR_POSITIONAL:
            continue  # a type for each of them
        try:
            adapter.validate_json(json.dumps(value, default=str), strict=True)
        except ValidationError as error:
            raise ConfigError(
                f"{where}.{argument} = {value!r:.80}",
                rule="; or ".join(dict.fromkeys(each["msg"] for each in error.errors())),
                remedy="Correct the value",
            ) from error


def _kind(name: str) -> Any:
    file, colon, attribute = name.rpartition(":")
    if not colon:
        if name not in KNOWN_HOOKS:
            raise ConfigError(
                f"hooks.{name}",
                rule='A hook is one of those that come with the trainer, or of your own as "my_hooks.py:MyHook"',
                remedy=did_you_mean(name, KNOWN_HOOKS),
            )
        return KNOWN_HOOKS[name]
    found = getattr(_module(file, name), attribute, None)
    if not (isinstance(found, type) and issubclass(found, Hook)):
        raise ConfigError(f"hooks.{name!r}: {file} has no hook {attribute!r}", remedy="Correct the name")
    return found


def _module(file: str, name: str) -> Any:
    file = os.path.expanduser(file)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file) if Path(file).is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(
            f"hooks.{name!r}: there is no file {file!r}",
            rule='A hook of your own is named by its file and its class, as "my_hooks.py:MyHook"',
            remedy="Correct the path",
        )
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        where = f", line {lines[-1]}" if lines else ""
        raise ConfigError(
            f"hooks.{name!r}: {file}{where}: {type(error).__name__}: {first_line(error)}", remedy="Correct the file"
        ) from error
    return module


HEAD_OF = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "sequence_to_sequence": "AutoModelForSeq2SeqLM",
    "classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}
LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length")


def model_class_for(config: TrainConfig) -> Any:
    """The class of transformers. Raises ConfigError where there is none of that name."""
    transformers = load_transformers()

    name = config.model.head or HEAD_OF[config.model.task]
    kind = getattr(transformers, name, None)
    is_model = isinstance(kind, type) and (issubclass(kind, nn.Module) or configs_of(kind) is not None)
    if not is_model or not hasattr(kind, "from_pretrained"):
        known = [n for n in dir(transformers) if re.search(r"For[A-Z]|Model$", n)]
        raise ConfigError(
            f"model.head = {name!r}", rule="It is a model of transformers", remedy=did_you_mean(name, known)
        )
    return kind


def build_model(
    config: TrainConfig, data: TrainingData, saved: Any, *, lazy: bool = True, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The model, its weights not there yet, unless not ``lazy``: then they are random whatever the config says.

    In fp32, whatever it was saved in: what is kept in fewer bits, ``parallel.precision`` says.

    Args:
        saved: its config without what follows from the data.

    Raises ConfigError where it cannot be, and where the data do not fit it.
    """
    complete = load_model_config(config, from_data(config, data, saved))
    _check_fits(config, data, complete)
    kind = model_class_for(config)
    _check_task(config, complete, kind)
    torch.manual_seed(config.seed)
    try:
        model = _made(config, kind, complete, lazy=lazy, dtype=dtype)
    except ShardFormerError:
        raise
    except Exception as error:  # the code of a model may raise anything
        raise ConfigError(
            f"transformers cannot build {kind.__name__} of {config.model.name!r}: {type(error).__name__}: "
            f"{first_line(error)}",
            rule="model.task and model.head fit the model, and the fields of model.config fit each other",
            remedy=remote_code_hint("Correct them", error),
        ) from error
    _check_loss(model)
    return model


def _made(config: TrainConfig, kind: Any, saved: Any, *, lazy: bool, dtype: torch.dtype) -> nn.Module:
    trust = config.model.trust_remote_code
    if not lazy:
        return _built(kind, saved, dtype, trust)
    if not config.model.random:
        return from_pretrained(kind, config.model.name, config=saved, dtype=dtype, trust_remote_code=trust)
    with LazyInit():
        return _built(kind, saved, dtype, trust)


def _check_loss(model: nn.Module) -> None:
    """Raises ConfigError for a model of transformers without a loss, such as what ``AutoModel`` builds."""
    kind = type(model)
    if kind.__module__.startswith("transformers.") and "labels" not in inspect.signature(kind.forward).parameters:
        raise ConfigError(
            f"model.head builds a {kind.__name__}, which takes no labels and returns no loss",
            remedy="Leave model.head out, or name a class with a head, such as AutoModelForCausalLM",
        )


def _built(kind: Any, saved: Any, dtype: torch.dtype, trust: bool) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if hasattr(kind, "from_config"):  # without an answer it may ask for consent on the standard input
            return cast(nn.Module, kind.from_config(saved, dtype=dtype, trust_remote_code=trust))
        return cast(nn.Module, kind(saved))
    finally:
        torch.set_default_dtype(before)


def _check_task(config: TrainConfig, saved: Any, kind: Any) -> None:
    """Raises ConfigError where transformers has no model of this type for the task."""
    known = configs_of(kind)
    if known is None or type(saved) in known or kind.__name__ in (getattr(saved, "auto_map", None) or {}):
        return
    transformers = load_transformers()
    tasks = [task for task, name in HEAD_OF.items() if type(saved) in (configs_of(getattr(transformers, name)) or ())]
    raise ConfigError(
        f"model.{'head' if config.model.head else 'task'} = {config.model.head or config.model.task!r} with "
        f"{config.model.name!r}, a model of the type {saved.model_type}",
        rule=f"{kind.__name__} of transformers has no model of this type",
        remedy=f"Write model.task = {' or '.join(map(repr, tasks))}, or take another model"
        if tasks
        else "Take another model",
    )


def _check_fits(config: TrainConfig, data: TrainingData, saved: Any) -> None:
    if data.tokens is None:
        return
    text = saved.get_text_config()
    size = getattr(text, "vocab_size", None)
    if size is not None and data.tokens.size > size:
        raise ConfigError(
            f"The tokenizer {data.tokens.name!r} has {data.tokens.size} tokens, and the model a vocabulary of {size}",
            remedy=f"Use the model's own tokenizer, or write model.config.vocab_size = {data.tokens.size} with random",
        )
    most = next((n for name in LENGTHS if isinstance(n := getattr(text, name, None), int) and n > 0), None)
    if most is not None and config.data.sequence_length > most:
        raise ConfigError(
            f"data.sequence_length = {config.data.sequence_length}, and the model has {most} positions",
            remedy=f"Use {most} or less; where positions are not weights (RoPE), model.config can say more of them",
        )
