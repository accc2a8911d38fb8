"""Resolves MODEL on the command line: a model type, a folder, a config.json, a hub name, or a function."""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from torch import Tensor, nn

from shardformer.discovery.example_inputs import unknown_inputs
from shardformer.discovery.reduced_model import ReducedModel, first_batch, probe_loss, reduce_model
from shardformer.discovery.shrink_config import build_meta_model, first_architecture, model_class
from shardformer.errors import TRACEBACK_VARIABLE, ConfigError, PolicyError, ShardFormerError, did_you_mean, first_line
from shardformer.pipeline.micro_batches import MEDIA_TOKEN_FIELDS, batch_size_of, special_token_ids, split_batch
from shardformer.policies.policy import Policy
from shardformer.transformers_compat import load_transformers
from shardformer.verify.small_models import (
    DEFAULT_HEAD,
    FAMILY_OF,
    HEAD_CLASSES,
    HEAD_CONFIG,
    SMALL_CONFIGS,
    RandomBatches,
    SmallModel,
    depth_of,
    is_vision_only,
    num_samples,
    sample_loss,
)

TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION")
"""Those of docs/coverage.md."""
MULTIMODAL_TASKS = (
    "MULTIMODAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "VISUAL_QUESTION_ANSWERING",
)
"""Those whose models read images and text together: a type that has several classes is known by this one."""


def main_classes(tasks: Sequence[str] = TASKS) -> dict[str, str]:
    """Model type -> the name of the class that the first of the auto classes for these tasks names."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for task in tasks:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).items():
            found.setdefault(model_type, names if isinstance(names, str) else names[0])
    return found


@lru_cache(maxsize=1)
def all_classes() -> Mapping[str, str]:
    """Every model type of transformers -> its class: of TOGETHER, of TASKS, of another task, or its base model."""
    from transformers.models.auto import modeling_auto

    names = (re.fullmatch("MODEL_FOR_(.*)_MAPPING_NAMES", name) for name in dir(modeling_auto))
    found = main_classes((*MULTIMODAL_TASKS, *TASKS, *(name[1] for name in names if name)))
    base = modeling_auto.MODEL_MAPPING_NAMES.items()
    return {**{kind: names if isinstance(names, str) else names[0] for kind, names in base}, **found}


CONTRAST = "return_loss"
"""The argument with which transformers' models compare each sample of a batch with each other."""


@dataclass(frozen=True)
class ReducedModelType:
    """A small model of a type, of its default config: call it to build the model. Picklable.

    Args:
        model_type: one of ``all_classes()``.
        head: a class of transformers; by default the type's first one.
    """

    model_type: str
    head: str = ""

    @property
    def head_class(self) -> str:
        return self.head or all_classes()[self.model_type]

    def config(self) -> Any:
        return _small(self).model.config

    def __call__(self) -> nn.Module:
        model = copy.deepcopy(_small(self).model)
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        return model

    def own(self) -> dict[str, Any]:
        """What goes with the model: batches, and a loss for one that makes none of its own."""
        batch_fn = ExampleBatches(self)
        batches: dict[str, Any] = {"batch_fn": batch_fn}
        own_loss = {"labels", CONTRAST} & batch_fn(0).keys()
        return batches if own_loss else {**batches, "loss_fn": output_mean, "loss_weight": num_samples}


@dataclass(frozen=True)
class ExampleBatch:
    """A batch that a model takes.

    Args:
        ids: field of the model's config -> a token that stands for images.
        compares: whether the model can be asked for a loss that compares its samples.
    """

    batch: Mapping[str, Tensor]
    ids: Mapping[str, int]
    dtype: torch.dtype
    compares: bool

    @staticmethod
    def of(model: nn.Module, batch: Mapping[str, Tensor]) -> ExampleBatch:
        compares = CONTRAST in inspect.signature(model.forward).parameters
        return ExampleBatch(batch, special_token_ids(model.config), next(model.parameters()).dtype, compares)


@dataclass(frozen=True)
class ExampleBatches:
    """step -> a batch that a model takes: another one for each step and sample as far as tokens go.

    Args:
        model_fn: builds the model; a type's small one is known already.
    """

    model_fn: Callable[[], nn.Module]
    samples: int = 2

    def __call__(self, step: int) -> Mapping[str, Tensor]:
        fed = _fed(self.model_fn)
        given = batch_size_of(fed.batch)
        each = split_batch(fed.batch, [1] * given, ids=fed.ids)
        moved = [_moved(each[n % given], step + n // given, fed.ids) for n in range(self.samples)]
        batch = {name: torch.cat([one[name] for one in moved]) if x.dim() else x for name, x in fed.batch.items()}
        batch = {name: x.to(fed.dtype) if x.is_floating_point() else x for name, x in batch.items()}
        return {**batch, CONTRAST: torch.tensor(True)} if fed.compares and self.samples > 1 else batch

    def with_samples(self, samples: int) -> ExampleBatches:
        return replace(self, samples=samples)


def is_multimodal(head: str) -> bool:
    """Whether a class of transformers reads images or sounds, perhaps beside a text."""
    kind = model_class(head)
    names = inspect.signature(kind.forward).parameters if kind is not None else {}
    return any(name in names for name in ("pixel_values", "input_features", "input_values"))


def _moved(sample: Mapping[str, Tensor], by: int, ids: Mapping[str, int]) -> Mapping[str, Tensor]:
    """A sample with its words in other places; tokens that stand for something stay where they are."""
    if (tokens := sample.get(MEDIA_TOKEN_FIELDS)) is None:
        return sample
    words = ~torch.isin(tokens, torch.tensor([*ids.values(), -1]))
    moved = tokens.clone()
    moved[words] = tokens[words].roll(by)
    return {**sample, MEDIA_TOKEN_FIELDS: moved}


def output_mean(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """A mean over samples of all that a model gives."""
    return probe_loss(model(**batch), alike=True)


@lru_cache(maxsize=1)
def _fed(model_fn: Callable[[], nn.Module]) -> ExampleBatch:
    if isinstance(model_fn, ReducedModelType):
        twin = _small(model_fn)
        return ExampleBatch.of(twin.model, twin.batch)
    model = model_fn().eval()
    try:
        return ExampleBatch.of(model, first_batch(model))
    except Exception as error:  # whatever its forward raises
        raise _unknown(model, f"{type(error).__name__}: {first_line(error)}") from error


@lru_cache(maxsize=1)
def _small(small: ReducedModelType) -> ReducedModel:
    transformers = load_transformers()

    try:
        config = transformers.CONFIG_MAPPING[small.model_type](architectures=[small.head_class])
    except Exception as error:  # a default config that its own class refuses
        raise ConfigError(
            f"transformers builds no default config of {small.model_type}: {error!s:.200}",
            remedy="Give a folder, a config.json, or module:function",
        ) from error
    model = build_meta_model(config)
    try:
        return reduce_model(model, together=True)
    except PolicyError as error:
        raise _unknown(model, error.what) from error


def _unknown(model: nn.Module, why: str) -> ConfigError:
    needed, taken = unknown_inputs(model)
    lacks = f"; nothing is known of {', '.join(needed)}, which its forward needs" if needed else ""
    lacks += f"; without {', '.join(taken)}, of which nothing is known" if taken and not needed else ""
    return ConfigError(
        f"{type(model).__name__} ran with none of the batches that are made of its config{lacks} ({why:.400})",
        remedy="Give module:function, whose function returns (model_fn, batch_fn)",
    )


HUB_TIMEOUT_S = 5.0


def hub_url() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def is_hub_reachable() -> bool:
    """Whether the hub can be reached: asked once, where its own client would try each file for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        with urlopen(Request(hub_url(), method="HEAD"), timeout=HUB_TIMEOUT_S):
            return True
    except HTTPError:
        return True  # an answer, if not a friendly one
    except OSError:
        return False


MODULE_SPEC_FORMS = (
    "MODEL is a family, a model type of transformers, a folder, a config.json, a name on the Hugging Face hub, or "
    "module:function"
)


MOST_SAID = 600
"""Characters of an error of the user's."""


def module_of(where: str) -> ModuleType:
    """The module of a name, or of a file. Raises ConfigError where it is not there, or fails."""
    return _module_from_file(Path(where)) if where.endswith(".py") else _module(where)


def _module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with _without_input():
            return import_module(name)
    except (Exception, SystemExit) as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if name and (missing is None or not f"{name}.".startswith(f"{missing}.")):
            raise _not_imported(f"The module {name!r}", error) from error  # it is there, and fails
        raise ConfigError(
            f"There is no module {name!r}: {error}",
            rule=f"{MODULE_SPEC_FORMS}; modules are looked for in {str(Path.cwd())!r} and among what is installed",
            remedy="Correct the name, or give the file: path/to/file.py:function",
        ) from error


def call_user_function(function: Callable[[], Any], name: str) -> Any:
    """What a user's function returns. Raises ConfigError where it fails, ends the process, or asks for input."""
    try:
        with _without_input():
            return function()
    except ShardFormerError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{name} failed: {_error_with_location(error)}",
            remedy=f"Mend it: `python -c 'import ...'` shows where it fails, and {TRACEBACK_VARIABLE}=1 here",
        ) from error


@contextmanager
def _without_input() -> Iterator[None]:
    """In here nobody is asked: what reads from the terminal finds its end."""
    before = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before


def _error_with_location(error: BaseException) -> str:
    """The error, and the line of the user's file that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    line = getattr(error, "lineno", None) or (frames[-1].lineno if frames else None)
    ends = f"it ends the process: {type(error).__name__}" if isinstance(error, SystemExit) else type(error).__name__
    return f"{ends}: {error}"[:MOST_SAID] + (f" (line {line})" if line else "")


def _not_imported(what: str, error: BaseException) -> ConfigError:
    return ConfigError(
        f"{what} cannot be imported: {_error_with_location(error)}",
        remedy="Mend it: `python -c 'import ...'` shows where it fails",
    )


def _module_from_file(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(
            f"There is no file {str(path)!r}", rule=MODULE_SPEC_FORMS, remedy="Correct the path before the colon"
        )
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) != str(path):
        spec = spec_from_file_location(f"{path.stem}_of_the_user", path)
        assert spec is not None and spec.loader is not None
    # what the file imports from beside it, here and in the workers
    sys.path.insert(0, str(path.resolve().parent))
    module = sys.modules[spec.name] = module_from_spec(spec)
    assert spec.loader is not None
    try:
        with _without_input():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise _not_imported(str(path), error) from error
    return module


TOKENS = 13
"""Of a sample."""
MAX_SMALL_LAYERS, MOST_STAGES = 10_000, 256
_GIVEN = ("model_fn", "batch_fn", "loss_fn", "policy", "loss_weight")


@dataclass(frozen=True)
class Pretrained:
    """A model from a folder, a config.json or the hub: call it to build the model. Picklable.

    Args:
        where: the folder, the file, or the name on the hub.
        head: a class of transformers.
        random: random weights of the config instead of those that were saved.
        dropout: False sets every dropout of the config to zero.
        local: nothing is asked of the hub; a name means what was fetched before.
    """

    where: str
    head: str
    random: bool = False
    dropout: bool = True
    local: bool = True

    def config(self) -> Any:
        config = load_hf_config(self.where, self.local)
        if not self.dropout:
            for name, value in vars(config).items():
                if "drop" in name and isinstance(value, float):
                    setattr(config, name, 0.0)
        if self.head.endswith("ForSequenceClassification") and config.pad_token_id is None:
            config.pad_token_id = first_token(config.eos_token_id, 0)  # the head looks for the last token by it
        if self.head.endswith("ForQuestionAnswering"):
            config.num_labels = 2  # a start and an end
        if HEAD_CONFIG.get(self.head, {}).get("is_decoder"):
            config.is_decoder = True
        return config

    def __call__(self) -> nn.Module:
        transformers = load_transformers()

        transformers.logging.set_verbosity_error()  # every worker would say it, and that a new head is random is meant
        transformers.logging.disable_progress_bar()
        kind = getattr(transformers, self.head)
        config = self.config()
        try:
            model: nn.Module = (
                kind(config)
                if self.random
                else kind.from_pretrained(self.where, config=config, local_files_only=self.local)
            )
        except OSError as error:
            raise ConfigError(
                f"{self.where!r} gives no weights for {self.head}: {first_line(error)}",
                remedy="Give the path of the config.json itself for random weights, or save the weights beside it",
            ) from error
        except Exception as error:  # sizes that do not fit each other come up in any form
            raise ConfigError(
                f"transformers builds no {self.head} of {self.where!r}: {first_line(error)}",
                remedy="Correct config.json",
            ) from error
        return model


@dataclass(frozen=True)
class ModelSource:
    """A model that was found, and how to build and feed it.

    Args:
        title: for people.
        model_fn: builds the model; picklable.
        head: its class.
        config: its config; None where the model has none.
        own: what a function gave beside the model: ``batch_fn``, ``loss_fn``, ``policy``, ``loss_weight``.
    """

    title: str
    model_fn: Callable[[], nn.Module]
    head: str
    config: Any = None
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """What transformers calls the family, such as "bert"; empty without a config."""
        return getattr(self.config, "model_type", None) or ""

    @property
    def heads(self) -> tuple[str, ...]:
        """All head classes of the model's family. Raises ConfigError where they are not known."""
        if self.model_type not in HEAD_CLASSES or not isinstance(self.model_fn, SmallModel | Pretrained):
            raise ConfigError(
                f"The heads of {self.title} are not known",
                rule=f"Families with listed heads: {', '.join(HEAD_CLASSES)}, by name, folder, config or hub",
                remedy="Name one head with --head, or give one of these families",
            )
        return HEAD_CLASSES[self.model_type]

    def with_head(self, head: str) -> ModelSource:
        """The same model under another head. Raises ConfigError for a head that the family does not have."""
        if isinstance(self.model_fn, ReducedModelType):
            _check_class(head, self.title)
            return _of_type(self.model_type, head)
        if not isinstance(self.model_fn, SmallModel | Pretrained):
            raise ConfigError(
                f"head={head!r} for {self.title}", remedy="Let the function build the head, and leave the option out"
            )
        if self.model_type in HEAD_CLASSES and head not in HEAD_CLASSES[self.model_type]:
            raise ConfigError(
                f"{self.model_type} has no head {head!r}",
                rule=f"Its heads are {', '.join(HEAD_CLASSES[self.model_type])}",
                remedy=did_you_mean(head, HEAD_CLASSES[self.model_type]),
            )
        _check_class(head, self.title)
        model_fn = replace(self.model_fn, head=head)
        return replace(self, model_fn=model_fn, head=head, config=model_fn.config())

    def deeper(self, layers: int) -> ModelSource:
        """A family's small model with so many layers or more; any other model is as deep as it is."""
        if not isinstance(self.model_fn, SmallModel):
            return self
        if layers > MOST_STAGES:
            raise ConfigError(
                f"{layers} layers for {self.title}",
                rule=f"A small model is made as deep as its stages ask for, of {MOST_STAGES} layers at the most",
                remedy="Use fewer stages, or fewer --num-model-chunks",
            )
        model_fn = self.model_fn.deeper(layers)
        title = f"{self.title}, {depth_of(model_fn.family, self.head, layers)} layers"
        return replace(self, title=title, model_fn=model_fn, config=model_fn.config())

    def batches(self, batch: int = 4, sequence: int = TOKENS) -> Callable[[int], Mapping[str, Any]]:
        """step -> a global batch: the function's own, or random tokens of the model's vocabulary with labels.

        Also images and sounds of the sizes that the config says, in the text where the model has them there. Raises
        ConfigError for a model that takes something else, or fewer tokens in a row.
        """
        if "batch_fn" in self.own:
            batch_fn: Callable[[int], Mapping[str, Any]] = self.own["batch_fn"]
            return batch_fn.with_samples(batch) if isinstance(batch_fn, ExampleBatches) else batch_fn
        sizes = self.config.to_dict() if self.head in FAMILY_OF and hasattr(self.config, "to_dict") else {}
        if sizes and is_vision_only(self.head):
            return RandomBatches(self.head, batch=batch, num_labels=self.config.num_labels, changes=sizes)
        if isinstance(self.model_fn, Pretrained) and not sizes and is_multimodal(self.head):
            if sequence != TOKENS:
                raise ConfigError(
                    f"sequence={sequence} for {self.title}",
                    rule="A text with images or sounds in it has as many tokens as they ask for",
                    remedy="Leave it out",
                )
            return ExampleBatches(self.model_fn, batch)
        vocab_size = _vocab_size(self.config)
        if vocab_size is None:
            raise ConfigError(
                f"What {self.title} is fed cannot be guessed: its config has no vocab_size",
                remedy="Give module:function, a function that returns (model_fn, batch_fn)",
            )
        longest = getattr(self.config, "max_position_embeddings", None)
        if isinstance(longest, int) and sequence > longest:
            raise ConfigError(
                f"sequence={sequence} for {self.title}",
                rule=f"Its config allows {longest} positions",
                remedy=f"Use a sequence of {longest} or less",
            )
        eos = first_token(getattr(self.config, "eos_token_id", None), 2)
        return RandomBatches(self.head, vocab_size, batch, sequence, self.config.num_labels, eos, sizes)

    @property
    def loss_fn(self) -> Callable[[nn.Module, Mapping[str, Any]], Tensor] | None:
        """How the model's loss is had: the function's own way; None for ``model(**batch).loss``."""
        default = None if "batch_fn" in self.own else sample_loss
        loss_fn: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = self.own.get("loss_fn", default)
        return loss_fn


def find_model(name: str, *, dropout: bool = True) -> ModelSource:
    """The model that ``name`` means: see the top of this file.

    Args:
        name: what the user wrote.
        dropout: False sets the dropout of what is loaded to zero.

    Raises ConfigError, with what was tried, when there is no such model.
    """
    if name in SMALL_CONFIGS:
        sample = SmallModel(name)
        return ModelSource(f"the small random {name}", sample, sample.head_class, sample.config())
    path = Path(name).expanduser()
    if path.exists():
        return _from_pretrained(name, Pretrained(str(path), "", path.is_file(), dropout))
    if name in all_classes():
        return _of_type(name)
    if ":" in name:
        return _from_function(name)
    if name.startswith((".", "/", "~")) or name.endswith(".json") or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ConfigError(
            f"There is no folder or file {name!r} in {str(Path.cwd())!r}",
            rule=MODULE_SPEC_FORMS,
            remedy="Correct the path",
        )
    return _from_pretrained(name, Pretrained(name, "", dropout=dropout, local=not is_hub_reachable()))


def find_policy(name: str) -> type[Policy]:
    """The policy that ``path/to/file.py``, ``path/to/file.py:Class`` or ``module:Class`` means. Raises ConfigError."""
    where, _, class_name = (name, "", "") if name.endswith(".py") else name.rpartition(":")
    module = module_of(where or name)
    kinds = {n: v for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Policy)}
    own = [n for n, kind in kinds.items() if kind.__module__ == module.__name__]
    if not class_name and len(own) == 1:
        class_name = own[0]
    if class_name not in kinds:
        raise ConfigError(
            f"{where or name!r} has no policy {class_name!r}"
            if class_name
            else f"{where or name!r} has {len(own) or 'no'} policies, and none is named",
            rule="A policy is a subclass of shardformer.policies.policy.Policy, and FILE:CLASS names one of several",
            remedy=did_you_mean(class_name, own),
        )
    return kinds[class_name]


def load_hf_config(where: str, local: bool = True) -> Any:
    """The transformers config of a folder, a config.json or a name on the hub. Raises ConfigError."""
    transformers = load_transformers()

    try:
        config = transformers.AutoConfig.from_pretrained(where, trust_remote_code=False, local_files_only=local)
    except Exception as error:  # a file may hold anything, and its fields any value
        if Path(where).exists():
            raise ConfigError(
                f"{where!r} holds no config that transformers knows: {first_line(error)}",
                remedy="Give what save_pretrained wrote, or module:function for a model of your own",
            ) from error
        said = first_line(error)
        raise ConfigError(
            f"There is no model {where!r}: no family has that name, nor has a folder or file in {str(Path.cwd())!r}, "
            + (
                f"it was not fetched before, and {hub_url()} cannot be reached"
                if local
                else f"and {hub_url()} says: {said}"
            ),
            rule=f"{MODULE_SPEC_FORMS}; the families are {', '.join(SMALL_CONFIGS)}",
            remedy=f"{_did_you_mean(where)}Correct the name. For a machine without network, fetch the model on another "
            f"with `hf download {where} --local-dir DIR` and give DIR",
        ) from error
    layers = getattr(config, "num_hidden_layers", None)
    if type(layers) is int and layers > MAX_SMALL_LAYERS:
        raise ConfigError(
            f"{where!r} asks for {layers} layers",
            rule=f"A model has {MAX_SMALL_LAYERS} layers at the most: each is built, one after the other",
            remedy="Correct num_hidden_layers, or what this family calls it",
        )
    return config


def first_token(tokens: int | list[int] | None, default: int) -> int:
    """The first of what a config names as eos_token_id or the like."""
    if isinstance(tokens, list):
        return tokens[0] if tokens else default
    return default if tokens is None else tokens


def _of_type(model_type: str, head: str = "") -> ModelSource:
    small = ReducedModelType(model_type, head)
    return ModelSource(f"the small random {model_type}", small, small.head_class, small.config(), small.own())


def _from_pretrained(title: str, found: Pretrained) -> ModelSource:
    config = load_hf_config(found.where, found.local)
    head = first_architecture(config) or DEFAULT_HEAD.get(config.model_type, "")
    _check_class(head, title)
    return ModelSource(title, replace(found, head=head), head, config)


def _vocab_size(config: Any) -> int | None:
    """The smallest vocabulary of a model and its parts, None without any."""
    parts = [config, getattr(config, "text_config", None), getattr(config, "qformer_config", None)]
    sizes = [getattr(part, "vocab_size", None) for part in parts]
    return min((size for size in sizes if isinstance(size, int)), default=None)


def _check_class(head: str, title: str) -> None:
    transformers = load_transformers()

    if model_class(head) is None:
        raise ConfigError(
            f"{title} names the class {head!r}" if head else f"The config of {title} names no class",
            remedy=f"{_did_you_mean(head, {*dir(transformers)} - {head})}Give module:function for a class of your own",
        )


def _did_you_mean(name: str, known: Any = SMALL_CONFIGS) -> str:
    hint = did_you_mean(name, known)
    return f"{hint} " if hint.startswith("Did") else ""


# ------------------------------------------------------------------------------------------------------------ functions


def _from_function(name: str) -> ModelSource:
    where, _, function_name = name.rpartition(":")
    module = module_of(where)
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(
            f"{where!r} has no function {function_name!r}",
            rule="module:function names a function at the top of a module",
            remedy=did_you_mean(function_name, known),
        )
    if _takes_arguments(function):
        raise ConfigError(
            f"{name} takes the arguments {signature(function)}",
            remedy="Give its parameters defaults, or write a function around it",
        )
    given = call_user_function(function, name)
    if isinstance(given, nn.Module):
        return ModelSource(name, function, type(given).__name__, getattr(given, "config", None))
    own = dict(given) if isinstance(given, Mapping) else {}
    if isinstance(given, tuple) and len(given) == 2:
        own = dict(zip(_GIVEN, given))
    if not callable(own.get("model_fn")) or not set(own) <= set(_GIVEN):
        raise ConfigError(
            f"{name} gave {_describe(given)}",
            rule=f"The function gives a model, a tuple (model_fn, batch_fn), or a dict of {', '.join(_GIVEN)}",
            remedy="Return one of these, with functions from the top of the module",
        )
    model_fn = own.pop("model_fn")
    if "batch_fn" in own:
        return ModelSource(name, model_fn, "", own=own)
    model = call_user_function(model_fn, f"model_fn of {name}")
    return ModelSource(name, model_fn, type(model).__name__, getattr(model, "config", None), own)


def _takes_arguments(function: Callable[..., Any]) -> bool:
    try:
        parameters = signature(function).parameters.values()
    except ValueError:  # a function of C does not say
        return False
    needed = (p for p in parameters if p.default is Parameter.empty and p.kind != Parameter.VAR_POSITIONAL)
    return any(p.kind <= Parameter.KEYWORD_ONLY for p in needed)


def _describe(given: Any) -> str:
    if isinstance(given, tuple | Mapping):
        return f"a {type(given).__name__} of {', '.join(map(str, given)) if isinstance(given, Mapping) else len(given)}"
    return f"a {type(given).__name__}"
