"""Build models from saved weights, so that each rank reads only its own shards from the files.

transformers decides which tensor in the files initializes which parameter, and in which dtype. It also initializes
missing parameters. transformers receives the tensors of the files without their values.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shardformer.errors import ConfigError, check_bool, get_first_message_line
from shardformer.meta_init.init_recipe import compute_deferred_values, get_deferred_storage
from shardformer.meta_init.lazy_init import NOTES, LazyInitFromPretrained, wrap_methods_to_record_weight_changes
from shardformer.meta_init.safetensors_source import load_safetensors_lazily
from shardformer.public_names import deprecate_renamed_function_arguments
from shardformer.transformers_compat import import_transformers

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
SINGLE, WEIGHTS_INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
ASYNC = "HF_DEACTIVATE_ASYNC_LOAD"
MAX_LISTED = 8

_one_at_a_time = Lock()  # transformers changes process-wide state while it loads


@deprecate_renamed_function_arguments({"kind": "model_class", "where": "pretrained_model_name_or_path"})
def from_pretrained(
    model_class: type[Any],
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    config: PreTrainedConfig | None = None,
    dtype: torch.dtype | str | None = None,
    all_bytes: bool = False,
    ignore_mismatched_sizes: bool = False,
    **options: Any,
) -> nn.Module:
    """Build a transformers model from saved weights. ``shard_model`` reads only the shards of each rank.

    Weights that the files lack, such as those of a new head, get the values that transformers' ``from_pretrained``
    produces after the same ``torch.manual_seed``. ``describe_sharding`` lists them.

    Args:
        model_class: a transformers model class, or an Auto class such as ``AutoModelForCausalLM``.
        pretrained_model_name_or_path: a folder written by ``save_pretrained`` (one safetensors file, or several with
            an index), or a model name on the Hugging Face Hub.
        config: a config to use instead of the one in the folder.
        dtype: dtype of the weights. None uses that of the config, as in transformers.
        all_bytes: whether ranks compare checksums over all bytes of the files, which each rank then reads. By default
            they compare headers and sampled bytes.
        ignore_mismatched_sizes: whether weights of another shape than in the files, such as those of a head with other
            classes, are initialized as missing weights are. By default they raise an error.
        options: options of the Hub, such as ``revision`` or ``local_files_only``; ``trust_remote_code=True`` to run
            Python code from the model's folder, for an Auto class; or fields of the config.

    Raises:
        ConfigError: if the files do not exist, a shape does not match, or layers of the base model have no weights.

    >>> model = from_pretrained(AutoModelForCausalLM, "my-llama")        # doctest: +SKIP
    >>> model = shard_model(model)                                       # doctest: +SKIP
    """
    hub = {name: options.pop(name) for name in HUB if name in options}
    trust = options.pop("trust_remote_code", False)
    check_bool("trust_remote_code", trust)
    check_bool("all_bytes", all_bytes)
    check_bool("ignore_mismatched_sizes", ignore_mismatched_sizes)
    path_or_name = str(pretrained_model_name_or_path)
    config, model_class = _load_config_and_class(model_class, path_or_name, config, trust, hub, options)
    files = [load_safetensors_lazily(path, all_bytes=all_bytes) for path in _find_safetensors_files(path_or_name, hub)]
    state = {key: tensor for file in files for key, tensor in file.items()}
    generation = _load_generation_config(path_or_name, hub)
    with _one_at_a_time, _disable_loading_threads(), _silence_transformers_logging(), LazyInitFromPretrained():
        model, info = _load_pretrained_with_info(
            model_class, path_or_name, config=config, state_dict=state, dtype=dtype, generation_config=generation
        )
        if ignore_mismatched_sizes:
            mismatched = {name for name, *_ in info["mismatched_keys"]}
            info = {**info, "mismatched_keys": [], "missing_keys": {*info["missing_keys"], *mismatched}}
        _check_loaded_weights_match_model(model, path_or_name, info)
        _tie_equal_params(model)
    model.name_or_path = model.config.name_or_path = path_or_name
    wrap_methods_to_record_weight_changes(model)
    vars(model)[NOTES] = [f"Weights loaded from {path_or_name!r}.", *_describe_missing_and_unexpected_weights(info)]
    return cast(nn.Module, model)


def _load_pretrained_with_info(model_class: type[Any], path_or_name: str, **options: Any) -> tuple[Any, Any]:
    try:
        loaded = model_class.from_pretrained(None, ignore_mismatched_sizes=True, output_loading_info=True, **options)
        return cast(tuple[Any, Any], loaded)
    except Exception as error:  # mismatched sizes raise errors of any type
        raise ConfigError(
            f"transformers cannot load the weights of {path_or_name!r} into a {model_class.__name__}: {error}.",
            remedy="Pass a model class that matches these weights.",
        ) from error


def _load_config_and_class(
    model_class: type[Any],
    path_or_name: str,
    config: PreTrainedConfig | None,
    trust_remote_code: bool,
    hub_options: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    transformers = import_transformers()

    if config is None:
        known = getattr(model_class, "config_class", None)
        # an Auto class without this argument would prompt on the standard input of each rank
        auto = {} if known else {"trust_remote_code": trust_remote_code, "code_revision": hub_options.get("revision")}
        try:
            config, unknown = (known or transformers.AutoConfig).from_pretrained(
                path_or_name, return_unused_kwargs=True, **auto, **hub_options, **options
            )
        except Exception as error:  # the file and its fields may contain any value
            reason = get_first_message_line(error)
            raise ConfigError(
                f"transformers cannot read the config of {path_or_name!r}: {reason}.",
                rule="A model with its own Python code requires trust_remote_code=True." if auto else "",
                remedy="Check the path or name, or pass a config.",
            ) from error
    else:
        unknown = dict(options)
    if unknown:
        option, hub_names = next(iter(unknown)), ", ".join(HUB)
        raise ConfigError(
            f"from_pretrained has no option {option!r}.",
            remedy=f"Pass a field of {type(config).__name__}, or one of these options: {hub_names}.",
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"from_pretrained does not support the quantized weights in {path_or_name!r}.",
            remedy="Load the unquantized weights instead.",
        )
    if issubclass(model_class, nn.Module):
        return config, model_class
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # one of the Auto classes
        try:
            return config, type(model_class.from_config(config, trust_remote_code=trust_remote_code))
        except Exception as error:
            reason = get_first_message_line(error)
            raise ConfigError(
                f"transformers cannot create a {model_class.__name__} from the config of {path_or_name!r}: {reason}.",
                rule="A model with its own Python code requires trust_remote_code=True.",
                remedy="Fix config.json, or pass the class of the model.",
            ) from error


def _find_safetensors_files(path_or_name: str, hub_options: Mapping[str, Any]) -> list[str]:
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}
    try:
        single = cached_file(path_or_name, SINGLE, **quiet, **hub_options)
        if single is not None:
            return [single]
        index = cached_file(path_or_name, WEIGHTS_INDEX_NAME, **quiet, **hub_options)
        if index is not None:
            _check_safetensors_index(path_or_name, index)
            return list(get_checkpoint_shard_files(path_or_name, index, **hub_options)[0])
    except (OSError, ValueError, KeyError) as error:
        reason = get_first_message_line(error)
        raise ConfigError(
            f"The weights of {path_or_name!r} cannot be read: {reason}.",
            remedy="Check the path, or save the model again with save_pretrained.",
        ) from error
    raise ConfigError(
        f"{path_or_name!r} contains neither {SINGLE} nor {WEIGHTS_INDEX_NAME}.",
        remedy="Check the path. To convert the weights, load the model with transformers and call save_pretrained.",
    )


def _check_safetensors_index(path_or_name: str, index_path: str) -> None:
    """Raise ConfigError if an index of safetensors files is invalid, or refers to files outside its folder."""
    try:
        with open(index_path, encoding="utf-8") as file:
            index = json.load(file)
        names = list(index["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {get_first_message_line(error)}"
        raise ConfigError(
            f"{WEIGHTS_INDEX_NAME} in {path_or_name!r} is not valid: {reason}.",
            remedy="Save the model again with save_pretrained.",
        ) from error
    for name in names:
        inside = isinstance(name, str) and not os.path.isabs(name) and ".." not in re.split(r"[/\\]", name)
        if not inside or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{WEIGHTS_INDEX_NAME} in {path_or_name!r} lists {name!r:.80}, which is not a safetensors file in "
                "this folder.",
                remedy="Save the model again with save_pretrained.",
            )


def _load_generation_config(path_or_name: str, hub_options: Mapping[str, Any]) -> GenerationConfig | None:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path_or_name, **hub_options)
    except (OSError, ValueError):
        return None  # most folders have none, and transformers derives one from the model's config


@contextmanager
def _disable_loading_threads() -> Iterator[None]:
    """Make transformers load weights without threads, because ShardFormer records only calls in the main thread."""
    before = os.environ.get(ASYNC)
    os.environ[ASYNC] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ASYNC]
        else:
            os.environ[ASYNC] = before


@contextmanager
def _silence_transformers_logging() -> Iterator[None]:
    """Hide transformers' progress bar on all ranks, and its loading report on all ranks except the first."""
    from transformers.utils import logging

    has_bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    if has_bar:
        logging.disable_progress_bar()
    if os.environ.get("RANK", "0") != "0":
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


def _check_loaded_weights_match_model(
    model: PreTrainedModel, path_or_name: str, loading_info: Mapping[str, Any]
) -> None:
    if loading_info["mismatched_keys"]:
        name, *shapes = sorted(loading_info["mismatched_keys"])[0]
        saved_shape, shape = map(tuple, shapes)
        raise ConfigError(
            f"{path_or_name!r} contains {name!r} with shape {saved_shape}, but {type(model).__name__} expects {shape}.",
            remedy="Pass the config that the weights were saved with. To initialize such weights randomly, pass "
            "ignore_mismatched_sizes=True.",
        )
    missing = set(loading_info["missing_keys"])
    if not set(dict(model.named_parameters(remove_duplicate=False))) - missing:
        expected, found = min(missing), min(loading_info["unexpected_keys"], default="nothing")
        raise ConfigError(
            f"None of the weights in {path_or_name!r} belong to {type(model).__name__}: the model expects "
            f"{expected!r}, but the files contain {found!r}.",
            remedy="Pass the model class that the weights were saved with.",
        )
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix or " ") else ""
    lacking = [key for key in sorted(missing) if key.startswith(prefix) and re.search(r"\.\d+\.", key)]
    if lacking:
        names = _abbreviate_names(lacking)
        raise ConfigError(
            f"{path_or_name!r} contains no weights for the layer parameters {names}.",
            remedy="Pass a config with as many layers as the saved model. For random weights, use LazyInit instead.",
        )


def _tie_equal_params(model: PreTrainedModel) -> None:
    """Tie the parameters that the model declares as tied if their saved weights are equal, as transformers does."""
    for target, source in list(getattr(model, "all_tied_weights_keys", {}).items()):
        one, other = model.get_parameter(target), model.get_parameter(source)
        if one is other or get_deferred_storage(one) is None or get_deferred_storage(other) is None:
            continue
        if torch.equal(compute_deferred_values(one), compute_deferred_values(other)):
            owner, _, name = target.rpartition(".")
            setattr(model.get_submodule(owner), name, other)
        else:
            model.all_tied_weights_keys.pop(target)


def _describe_missing_and_unexpected_weights(loading_info: Mapping[str, Iterable[str]]) -> list[str]:
    out = []
    if loading_info["missing_keys"]:
        out.append(
            f"Not in the files, so randomly initialized: {_abbreviate_names(sorted(loading_info['missing_keys']))}."
        )
    if loading_info["unexpected_keys"]:
        out.append(
            f"In the files, but not in this model: {_abbreviate_names(sorted(loading_info['unexpected_keys']))}."
        )
    return out


def _abbreviate_names(weight_names: list[str]) -> str:
    return ", ".join(weight_names[:MAX_LISTED]) + (
        f" and {len(weight_names) - MAX_LISTED} more" if len(weight_names) > MAX_LISTED else ""
    )
