"""Finds the model that the command-line argument MODEL selects, such as a model type, a folder or a function."""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from torch import Tensor, nn

from shardformer.discovery.example_inputs import find_unknown_forward_args
from shardformer.discovery.reduced_model import (
    ReducedModel,
    compute_loss_from_all_outputs,
    find_accepted_example_batch,
    reduce_model,
)
from shardformer.discovery.shrink_config import build_meta_model, find_transformers_model_class, get_first_architecture
from shardformer.errors import (
    TRACEBACK_VARIABLE,
    ConfigError,
    PolicyError,
    ShardFormerError,
    get_first_message_line,
    suggest_similar_names,
)
from shardformer.gradient_accumulation.micro_batches import (
    MEDIA_TOKEN_FIELDS,
    get_batch_size,
    get_special_token_ids,
    split_batch,
)
from shardformer.policies.policy import Policy
from shardformer.transformers_compat import import_transformers
from shardformer.verify.small_models import (
    DEFAULT_HEAD,
    FAMILY_OF,
    HEAD_CLASSES,
    HEAD_CONFIG,
    SMALL_CONFIGS,
    RandomBatchFactory,
    SmallModelFactory,
    compute_model_loss,
    count_samples,
    is_vision_only,
    round_up_to_supported_num_layers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION")
"""The tasks of docs/coverage.md."""
MULTIMODAL_TASKS = (
    "MULTIMODAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "VISUAL_QUESTION_ANSWERING",
)
"""Tasks whose models read images and text. They determine the main class of a model type with several classes."""


def get_class_names_by_model_type(tasks: Sequence[str] = TASKS) -> dict[str, str]:
    """Map each transformers model type to its class for the first supported task in ``tasks``."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for task in tasks:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).items():
            found.setdefault(model_type, names if isinstance(names, str) else names[0])
    return found


@lru_cache(maxsize=1)
def get_main_class_names_by_model_type() -> Mapping[str, str]:
    """Map each transformers model type to the name of its main class."""
    from transformers.models.auto import modeling_auto

    names = (re.fullmatch("MODEL_FOR_(.*)_MAPPING_NAMES", name) for name in dir(modeling_auto))
    found = get_class_names_by_model_type((*MULTIMODAL_TASKS, *TASKS, *(name[1] for name in names if name)))
    base = modeling_auto.MODEL_MAPPING_NAMES.items()
    return {**{kind: names if isinstance(names, str) else names[0] for kind, names in base}, **found}


CONTRAST = "return_loss"
"""Argument that makes transformers' contrastive models compare the samples of a batch with each other."""


@dataclass(frozen=True)
class ReducedModelFactory:
    """Picklable function that builds a small random model from the default config of a transformers model type.

    Args:
        model_type: one of ``get_main_class_names_by_model_type()``.
        head: a class of transformers. If empty, it is the main class of the type.
    """

    model_type: str
    head: str = ""

    @property
    def head_class(self) -> str:
        return self.head or get_main_class_names_by_model_type()[self.model_type]

    def get_config(self) -> PreTrainedConfig:
        return _make_reduced_model(self).model.config

    def __call__(self) -> nn.Module:
        model = copy.deepcopy(_make_reduced_model(self).model)
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        return model

    def get_batch_and_loss_fn(self) -> dict[str, Any]:
        """Return a ``batch_fn`` for the model, and a ``loss_fn`` if the model does not compute a loss itself."""
        batch_fn = ExampleBatchFactory(self)
        batches: dict[str, Any] = {"batch_fn": batch_fn}
        own_loss = {"labels", CONTRAST} & batch_fn(0).keys()
        return batches if own_loss else {**batches, "loss_fn": compute_label_free_loss, "loss_weight": count_samples}


@dataclass(frozen=True)
class ExampleBatch:
    """Example batch of a model, from which the batches of all steps are derived.

    Args:
        media_token_ids: token ids of image and sound placeholders, by the names of their config fields.
        has_contrastive_loss: whether the model has a contrastive loss, which compares the samples.
    """

    batch: Mapping[str, Tensor]
    media_token_ids: Mapping[str, int]
    dtype: torch.dtype
    has_contrastive_loss: bool

    @staticmethod
    def from_model(model: nn.Module, batch: Mapping[str, Tensor]) -> ExampleBatch:
        compares = CONTRAST in inspect.signature(model.forward).parameters
        return ExampleBatch(batch, get_special_token_ids(model.config), next(model.parameters()).dtype, compares)


@dataclass(frozen=True)
class ExampleBatchFactory:
    """Picklable function that returns an example batch for each step. The text tokens differ between steps.

    Args:
        model_fn: builds the model.
    """

    model_fn: Callable[[], nn.Module]
    samples: int = 2

    def __call__(self, step: int) -> Mapping[str, Tensor]:
        example = _make_example_batch(self.model_fn)
        count = get_batch_size(example.batch)
        each = split_batch(example.batch, [1] * count, media_token_ids=example.media_token_ids)
        rolled = [
            _roll_text_tokens(each[n % count], step + n // count, example.media_token_ids) for n in range(self.samples)
        ]
        batch = {name: torch.cat([one[name] for one in rolled]) if x.dim() else x for name, x in example.batch.items()}
        batch = {name: x.to(example.dtype) if x.is_floating_point() else x for name, x in batch.items()}
        return {**batch, CONTRAST: torch.tensor(True)} if example.has_contrastive_loss and self.samples > 1 else batch

    def with_samples(self, num_samples: int) -> ExampleBatchFactory:
        return replace(self, samples=num_samples)


def is_multimodal(head_class: str) -> bool:
    """Return whether the forward method of a transformers class accepts images or audio."""
    kind = find_transformers_model_class(head_class)
    names = inspect.signature(kind.forward).parameters if kind is not None else {}
    return any(name in names for name in ("pixel_values", "input_features", "input_values"))


def _roll_text_tokens(
    sample: Mapping[str, Tensor], shift: int, placeholder_ids: Mapping[str, int]
) -> Mapping[str, Tensor]:
    """Rotate the text tokens of a sample by ``shift`` positions, without moving image or audio placeholders."""
    if (tokens := sample.get(MEDIA_TOKEN_FIELDS)) is None:
        return sample
    is_text = ~torch.isin(tokens, torch.tensor([*placeholder_ids.values(), -1]))
    rolled = tokens.clone()
    rolled[is_text] = tokens[is_text].roll(shift)
    return {**sample, MEDIA_TOKEN_FIELDS: rolled}


def compute_label_free_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Compute a loss without labels, from the mean squares of all model outputs."""
    return compute_loss_from_all_outputs(model(**batch), equal_sample_weights=True)


@lru_cache(maxsize=1)
def _make_example_batch(model_fn: Callable[[], nn.Module]) -> ExampleBatch:
    if isinstance(model_fn, ReducedModelFactory):
        small = _make_reduced_model(model_fn)
        return ExampleBatch.from_model(small.model, small.batch)
    model = model_fn().eval()
    try:
        return ExampleBatch.from_model(model, find_accepted_example_batch(model))
    except Exception as error:
        raise _make_example_batch_error(model, error) from error


@lru_cache(maxsize=1)
def _make_reduced_model(factory: ReducedModelFactory) -> ReducedModel:
    transformers = import_transformers()
    try:
        config = transformers.CONFIG_MAPPING[factory.model_type](architectures=[factory.head_class])
    except Exception as error:  # some default configs fail in their own class
        raise ConfigError(
            f"transformers cannot create the default config of {factory.model_type}: {error!s:.200}.",
            remedy="Pass a folder with a config.json, or module:function for your own model.",
        ) from error
    model = build_meta_model(config)
    try:
        return reduce_model(model, with_media_tokens=True)
    except PolicyError as error:
        raise _make_example_batch_error(model, error) from error


def _make_example_batch_error(model: nn.Module, exception: Exception) -> ConfigError:
    text = get_first_message_line(exception)
    reason = exception.what if isinstance(exception, ShardFormerError) else f"{type(exception).__name__}: {text}"
    needed, optional = find_unknown_forward_args(model)
    inputs = ", ".join(needed or optional)
    return ConfigError(
        f"Cannot create an example batch for {type(model).__name__} from its config: {reason:.400}.",
        rule=f"ShardFormer cannot generate values for the inputs {inputs}." if inputs else "",
        remedy="Pass FILE.py:function, where the function returns (model_fn, batch_fn), or call "
        "verify(model_fn, batch_fn) in Python (docs/add-a-model.md).",
    )


HUB_TIMEOUT_S = 5.0


def get_hub_url() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def is_hub_reachable() -> bool:
    """Return whether the Hugging Face hub answers a request within 5 seconds."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        with urlopen(Request(get_hub_url(), method="HEAD"), timeout=HUB_TIMEOUT_S):
            return True
    except HTTPError:
        return True  # the server answered
    except OSError:
        return False


MAX_ERROR_LENGTH = 600  # maximum number of characters of an error in user code


def import_module_or_file(name_or_file: str) -> ModuleType:
    """Import a module by its name or from a .py file. Raises ConfigError if the import fails."""
    return (
        _import_module_from_file(Path(name_or_file))
        if name_or_file.endswith(".py")
        else _import_module_by_name(name_or_file)
    )


def _import_module_by_name(module_name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with _stdin_from_devnull():
            return import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if module_name and (missing is None or not f"{module_name}.".startswith(f"{missing}.")):
            raise _make_import_error(module_name, error) from error
        directory = str(Path.cwd())
        raise ConfigError(
            f"The module {module_name!r} was not found in {directory!r} or in the installed packages ({error}).",
            remedy="Fix the name, or pass a file and a name in it, such as path/to/file.py:name.",
        ) from error


def call_user_fn_and_convert_errors(fn: Callable[[], Any], fn_name: str) -> Any:
    """Call a user's function, and convert its exceptions to ConfigError."""
    try:
        with _stdin_from_devnull():
            return fn()
    except ShardFormerError:
        raise
    except (Exception, SystemExit) as error:
        reason = _format_error_with_location(error)
        raise ConfigError(
            f"The function {fn_name} failed: {reason}.",
            remedy=f"Fix the error in the function. To see the traceback, set {TRACEBACK_VARIABLE}=1.",
        ) from error


@contextmanager
def _stdin_from_devnull() -> Iterator[None]:
    """Make standard input empty inside a ``with`` block, so that user code cannot wait for input."""
    before = sys.stdin
    with open(os.devnull, encoding="utf-8") as empty:
        sys.stdin = empty
        try:
            yield
        finally:
            sys.stdin = before


def _format_error_with_location(exception: BaseException, file_path: str = "") -> str:
    """Format an exception in user code as one line, with its class, message and line number."""
    all_frames = traceback.extract_tb(exception.__traceback__)
    frames = [frame for frame in all_frames if frame.filename == os.path.abspath(file_path)] or all_frames
    line = getattr(exception, "lineno", None) or (frames[-1].lineno if frames else None)
    kind = (
        f"the code exits the process: {type(exception).__name__}"
        if isinstance(exception, SystemExit)
        else type(exception).__name__
    )
    return f"{kind}: {exception}"[:MAX_ERROR_LENGTH] + (f" (line {line})" if line else "")


def _make_import_error(module_name_or_path: str, exception: BaseException) -> ConfigError:
    reason = _format_error_with_location(exception, module_name_or_path)
    return ConfigError(
        f"The module {module_name_or_path!r} cannot be imported: {reason}.",
        remedy=f"Fix the error in the module. To see the traceback, set {TRACEBACK_VARIABLE}=1.",
    )


def _import_module_from_file(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(
            f"There is no Python file '{path}'.", remedy="Pass the path of a file, such as path/to/file.py:name."
        )
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) != str(path):
        spec = spec_from_file_location(f"{path.stem}_of_the_user", path)
        assert spec is not None and spec.loader is not None
    # for imports of modules in the same folder, here and in the workers
    sys.path.insert(0, str(path.resolve().parent))
    module = sys.modules[spec.name] = module_from_spec(spec)
    assert spec.loader is not None
    try:
        with _stdin_from_devnull():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise _make_import_error(str(path), error) from error
    return module


TOKENS = 13  # default number of tokens per sample
MAX_SMALL_LAYERS, MAX_STAGE_LAYERS = 10_000, 256
_FUNCTION_KEYS = ("model_fn", "batch_fn", "loss_fn", "policy", "loss_weight")


@dataclass(frozen=True)
class PretrainedModelFactory:
    """Picklable function that builds a transformers model from a folder, a config.json or the hub.

    Args:
        name_or_path: the folder, the file, or the name on the hub.
        head: a class of transformers.
        has_random_weights: initialize random weights from the config instead of loading weights.
        use_dropout: False sets every dropout of the config to zero.
        local_files_only: use only files in the local cache of the hub.
    """

    name_or_path: str
    head: str
    has_random_weights: bool = False
    use_dropout: bool = True
    local_files_only: bool = True

    def get_config(self) -> PreTrainedConfig:
        config = load_hf_config(self.name_or_path, self.local_files_only)
        if not self.use_dropout:
            for name, value in vars(config).items():
                if "drop" in name and isinstance(value, float):
                    setattr(config, name, 0.0)
        if self.head.endswith("ForSequenceClassification") and config.pad_token_id is None:
            config.pad_token_id = get_first_token_id(config.eos_token_id, 0)  # the head finds the last token by it
        if self.head.endswith("ForQuestionAnswering"):
            config.num_labels = 2  # start and end
        if HEAD_CONFIG.get(self.head, {}).get("is_decoder"):
            config.is_decoder = True
        return config

    def __call__(self) -> nn.Module:
        transformers = import_transformers()

        transformers.logging.set_verbosity_error()  # every worker would warn about a newly initialized head
        transformers.logging.disable_progress_bar()
        kind = getattr(transformers, self.head)
        config = self.get_config()
        try:
            model: nn.Module = (
                kind(config)
                if self.has_random_weights
                else kind.from_pretrained(self.name_or_path, config=config, local_files_only=self.local_files_only)
            )
        except OSError as error:
            reason = get_first_message_line(error)
            raise ConfigError(
                f"The weights of {self.head} cannot be loaded from {self.name_or_path!r}: {reason}.",
                remedy="Save the weights in this folder, or pass the path of its config.json to use random weights.",
            ) from error
        except Exception as error:  # inconsistent sizes raise errors of any type
            reason = get_first_message_line(error)
            raise ConfigError(
                f"transformers cannot create a {self.head} from {self.name_or_path!r}: {reason}.",
                remedy="Fix the config.json of the model.",
            ) from error
        return model


@dataclass(frozen=True)
class ModelSource:
    """A model that the user selected on the command line, with functions that build the model and its batches.

    Args:
        title: name of the model for messages.
        model_fn: builds the model. Picklable.
        head: class name of the model.
        config: config of the model, or None.
        user_overrides: other values that a user function returned: ``batch_fn``, ``loss_fn``, ``policy``,
            ``loss_weight``.
    """

    title: str
    model_fn: Callable[[], nn.Module]
    head: str
    config: Any = None
    user_overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """Model type in transformers, such as "bert", or "" if the model has no config."""
        return getattr(self.config, "model_type", None) or ""

    @property
    def head_classes(self) -> tuple[str, ...]:
        """Names of all head classes of the model's family, such as BertForMaskedLM. Raises ConfigError if unknown."""
        if self.model_type not in HEAD_CLASSES or not isinstance(
            self.model_fn, SmallModelFactory | PretrainedModelFactory
        ):
            families = ", ".join(HEAD_CLASSES)
            raise ConfigError(
                f"The head classes of {self.title} cannot be listed, because its family is not built into ShardFormer.",
                remedy=f"Select a head class with --head, or pass a model of one of the families {families}.",
            )
        return HEAD_CLASSES[self.model_type]

    def with_head_class(self, head_class: str) -> ModelSource:
        """Return a source that builds this model with another head class. Raises ConfigError for an unknown head."""
        if isinstance(self.model_fn, ReducedModelFactory):
            _check_transformers_class_exists(head_class, self.title)
            return _make_source_from_model_type(self.model_type, head_class)
        if not isinstance(self.model_fn, SmallModelFactory | PretrainedModelFactory):
            raise ConfigError(
                f"--head {head_class} has no effect on {self.title}, because your own function creates this model.",
                remedy="Remove --head, and add the head in your function.",
            )
        known = HEAD_CLASSES.get(self.model_type)
        if known is not None and head_class not in known:
            head_classes = ", ".join(known)
            raise ConfigError(
                f"{self.model_type} has no head class {head_class!r}.",
                rule=f"Use one of {head_classes}.",
                remedy=suggest_similar_names(head_class, known),
            )
        _check_transformers_class_exists(head_class, self.title)
        model_fn = replace(self.model_fn, head=head_class)
        return replace(self, model_fn=model_fn, head=head_class, config=model_fn.get_config())

    def with_min_layers(self, min_layers: int) -> ModelSource:
        """Return this source with at least ``min_layers`` layers in its small model. Other models are not changed."""
        if not isinstance(self.model_fn, SmallModelFactory):
            return self
        if min_layers > MAX_STAGE_LAYERS:
            raise ConfigError(
                f"The pipeline needs {min_layers} layers, but verify limits {self.title} to {MAX_STAGE_LAYERS} layers.",
                remedy="Use fewer pipeline stages, or decrease --num-model-chunks.",
            )
        model_fn = self.model_fn.with_min_layers(min_layers)
        title = f"{self.title}, {round_up_to_supported_num_layers(model_fn.family, self.head, min_layers)} layers"
        return replace(self, title=title, model_fn=model_fn, config=model_fn.get_config())

    def make_batch_fn(self, batch_size: int = 4, sequence_length: int = TOKENS) -> Callable[[int], Mapping[str, Any]]:
        """Return the user's ``batch_fn``, or create a function that returns the global batch of a step.

        By default, batches contain random tokens with labels. Images and sounds have the sizes of the config. Raises
        ConfigError if the inputs of the model are unknown, or if the model accepts fewer tokens.
        """
        if "batch_fn" in self.user_overrides:
            batch_fn: Callable[[int], Mapping[str, Any]] = self.user_overrides["batch_fn"]
            return batch_fn.with_samples(batch_size) if isinstance(batch_fn, ExampleBatchFactory) else batch_fn
        sizes = self.config.to_dict() if self.head in FAMILY_OF and hasattr(self.config, "to_dict") else {}
        if sizes and is_vision_only(self.head):
            return RandomBatchFactory(
                self.head, batch_size=batch_size, num_labels=self.config.num_labels, changes=sizes
            )
        if isinstance(self.model_fn, PretrainedModelFactory) and not sizes and is_multimodal(self.head):
            if sequence_length != TOKENS:
                raise ConfigError(
                    f"--tokens {sequence_length} has no effect on {self.title}, because its images, audio or video "
                    "determine the number of tokens.",
                    remedy="Remove --tokens.",
                )
            return ExampleBatchFactory(self.model_fn, batch_size)
        vocab_size = _get_min_vocab_size(self.config)
        if vocab_size is None:
            raise ConfigError(
                f"The inputs of {self.title} are unknown, because it has no config with a vocab_size.",
                remedy="Pass FILE.py:function, where the function returns (model_fn, batch_fn), or call "
                "verify(model_fn, batch_fn) in Python (docs/add-a-model.md).",
            )
        longest = getattr(self.config, "max_position_embeddings", None)
        if isinstance(longest, int) and sequence_length > longest:
            raise ConfigError(
                f"{self.title} has max_position_embeddings={longest}, but each sample has {sequence_length} tokens.",
                remedy=f"Use --tokens {longest} or fewer.",
            )
        eos = get_first_token_id(getattr(self.config, "eos_token_id", None), 2)
        return RandomBatchFactory(
            self.head, vocab_size, batch_size, sequence_length, self.config.num_labels, eos, sizes
        )

    @property
    def loss_fn(self) -> Callable[[nn.Module, Mapping[str, Any]], Tensor] | None:
        """The user's loss function, ``compute_model_loss`` for random batches, or None to use the model's own loss."""
        default = None if "batch_fn" in self.user_overrides else compute_model_loss
        loss_fn: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = self.user_overrides.get("loss_fn", default)
        return loss_fn


def find_model_source(model_spec: str, *, use_dropout: bool = True) -> ModelSource:
    """Find the model that the command-line argument MODEL selects, and return how to build it.

    Args:
        model_spec: a family, a model type, a folder, a config.json, a name on the hub, or ``module:function``.
        use_dropout: False sets the dropout of a loaded model to zero.

    Raises:
        ConfigError: no such model exists.
    """
    if model_spec in SMALL_CONFIGS:
        sample = SmallModelFactory(model_spec)
        return ModelSource(f"the small random {model_spec}", sample, sample.head_class, sample.get_config())
    path = Path(model_spec).expanduser()
    if path.exists():
        return _make_pretrained_source(model_spec, PretrainedModelFactory(str(path), "", path.is_file(), use_dropout))
    if model_spec in get_main_class_names_by_model_type():
        return _make_source_from_model_type(model_spec)
    if ":" in model_spec:
        return _select_model_of_user_function(model_spec)
    if (
        model_spec.startswith((".", "/", "~"))
        or model_spec.endswith(".json")
        or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model_spec)
    ):
        directory = str(Path.cwd())
        raise ConfigError(
            f"There is no file or folder {model_spec!r} (current directory: {directory!r}).",
            remedy="Check the path, or pass a model family, a name on the Hugging Face hub, or module:function.",
        )
    return _make_pretrained_source(
        model_spec,
        PretrainedModelFactory(model_spec, "", use_dropout=use_dropout, local_files_only=not is_hub_reachable()),
    )


def import_policy_class(policy_file_or_class_path: str) -> type[Policy]:
    """Import a policy class that is specified as ``path/to/file.py``, ``path/to/file.py:Class`` or ``module:Class``."""
    where, _, class_name = (
        (policy_file_or_class_path, "", "")
        if policy_file_or_class_path.endswith(".py")
        else policy_file_or_class_path.rpartition(":")
    )
    module = import_module_or_file(where or policy_file_or_class_path)
    kinds = {n: v for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Policy)}
    own = [n for n, kind in kinds.items() if kind.__module__ == module.__name__]
    if not class_name and len(own) == 1:
        class_name = own[0]
    source, count, suggestion = where or policy_file_or_class_path, len(own), suggest_similar_names(class_name, own)
    if not class_name:
        raise ConfigError(
            f"{source!r} must contain exactly one policy (a subclass of shardformer.policies.Policy), but has {count}.",
            remedy=f"Select a class with FILE:CLASS. {suggestion}",
        )
    if class_name not in kinds:
        raise ConfigError(
            f"{source!r} contains no policy named {class_name!r}.",
            remedy=f"Pass the name of a subclass of shardformer.policies.Policy. {suggestion}",
        )
    return kinds[class_name]


def load_hf_config(name_or_path: str, local_files_only: bool = True) -> PreTrainedConfig:
    """Load a transformers config from a folder, a config.json or the hub. Raises ConfigError if it is not found."""
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(
            name_or_path, trust_remote_code=False, local_files_only=local_files_only
        )
    except Exception as error:  # invalid files raise errors of any type
        reason = get_first_message_line(error)
        if Path(name_or_path).exists():
            raise ConfigError(
                f"transformers cannot read the config in {name_or_path!r}: {reason}.",
                remedy="Pass a folder that was written by save_pretrained, or module:function for your own model.",
            ) from error
        reason, hint = (
            f"{get_hub_url()} cannot be reached" if local_files_only else reason,
            _suggest_names(name_or_path),
        )
        raise ConfigError(
            f"There is no model family, local path or Hugging Face model named {name_or_path!r}: {reason}.",
            remedy=f"{hint}Correct the name, or pass a folder DIR from `hf download {name_or_path} --local-dir DIR`.",
        ) from error
    layers = getattr(config, "num_hidden_layers", None)
    if type(layers) is int and layers > MAX_SMALL_LAYERS:
        raise ConfigError(
            f"The config {name_or_path!r} has {layers} layers, but verify supports at most {MAX_SMALL_LAYERS} layers.",
            remedy="Decrease the number of layers in the config, such as num_hidden_layers.",
        )
    return config


def get_first_token_id(token_ids: int | list[int] | None, default: int) -> int:
    """Return the token id in a config field such as ``eos_token_id``. If the field is a list, return the first id."""
    if isinstance(token_ids, list):
        return token_ids[0] if token_ids else default
    return default if token_ids is None else token_ids


def _make_source_from_model_type(model_type: str, head_class: str = "") -> ModelSource:
    small = ReducedModelFactory(model_type, head_class)
    return ModelSource(
        f"the small random {model_type}", small, small.head_class, small.get_config(), small.get_batch_and_loss_fn()
    )


def _make_pretrained_source(title: str, model_factory: PretrainedModelFactory) -> ModelSource:
    config = load_hf_config(model_factory.name_or_path, model_factory.local_files_only)
    head = get_first_architecture(config) or DEFAULT_HEAD.get(config.model_type, "")
    _check_transformers_class_exists(head, title)
    return ModelSource(title, replace(model_factory, head=head), head, config)


def _get_min_vocab_size(config: Any) -> int | None:
    """Return the smallest ``vocab_size`` in a config and its nested configs, or None if they have none."""
    parts = [config, getattr(config, "text_config", None), getattr(config, "qformer_config", None)]
    sizes = [getattr(part, "vocab_size", None) for part in parts]
    return min((size for size in sizes if isinstance(size, int)), default=None)


def _check_transformers_class_exists(class_name: str, model_title: str) -> None:
    if not class_name:
        raise ConfigError(
            f"The config of {model_title} does not specify a model class.",
            remedy="Set architectures in the config to the name of the class.",
        )
    if find_transformers_model_class(class_name) is None:
        hint = _suggest_names(class_name, {*dir(import_transformers())} - {class_name})
        raise ConfigError(
            f"transformers has no model class {class_name!r}, which was specified for {model_title}.",
            remedy=f"{hint}To use your own class, pass module:function.",
        )


def _suggest_names(unknown_name: str, candidates: Iterable[str] = SMALL_CONFIGS) -> str:
    hint = suggest_similar_names(unknown_name, candidates)
    return f"{hint} " if hint.startswith("Did") else ""


def _select_model_of_user_function(module_and_function_name: str) -> ModelSource:
    where, _, function_name = module_and_function_name.rpartition(":")
    module = import_module_or_file(where)
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(
            f"The module {where!r} has no function {function_name!r}.",
            rule="Define the function at the top level of the module.",
            remedy=suggest_similar_names(function_name, known),
        )
    parameters = signature(function)
    try:
        parameters.bind()
    except TypeError as error:
        raise ConfigError(
            f"verify calls the function {module_and_function_name} without arguments, but the function has the "
            f"parameters {parameters}.",
            remedy="Give each parameter a default value, or pass a function without parameters.",
        ) from error
    except ValueError:  # a function written in C may have no signature
        pass
    returned = call_user_fn_and_convert_errors(function, module_and_function_name)
    if isinstance(returned, nn.Module):
        return ModelSource(
            module_and_function_name, function, type(returned).__name__, getattr(returned, "config", None)
        )
    own = dict(returned) if isinstance(returned, Mapping) else {}
    if isinstance(returned, tuple) and len(returned) == 2:
        own = dict(zip(_FUNCTION_KEYS, returned))
    if not callable(own.get("model_fn")) or not set(own) <= set(_FUNCTION_KEYS):
        value, keys = _describe_returned_value(returned), ", ".join(_FUNCTION_KEYS[1:])
        raise ConfigError(
            f"The function {module_and_function_name} returned {value} instead of a model.",
            remedy=f"Return a model, a tuple (model_fn, batch_fn), or a dict with model_fn and optionally {keys}.",
        )
    model_fn = own.pop("model_fn")
    if "batch_fn" in own:
        return ModelSource(module_and_function_name, model_fn, "", user_overrides=own)
    model = call_user_fn_and_convert_errors(model_fn, f"model_fn of {module_and_function_name}")
    return ModelSource(module_and_function_name, model_fn, type(model).__name__, getattr(model, "config", None), own)


def _describe_returned_value(returned_value: Any) -> str:
    if isinstance(returned_value, tuple | Mapping):
        content = ", ".join(map(str, returned_value)) if isinstance(returned_value, Mapping) else len(returned_value)
        return f"a {type(returned_value).__name__} of {content}"
    return f"a {type(returned_value).__name__}"
