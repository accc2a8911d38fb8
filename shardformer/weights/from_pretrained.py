"""from_pretrained: saved weights, of which each rank reads its part.

transformers itself finds out which tensor of the files belongs where, under which name and in which dtype, and makes
what the files lack. It is given all tensors of the files, without values.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any, cast

import torch
from torch import nn

from shardformer.errors import ConfigError, check_bool, first_line
from shardformer.meta_init.init_recipe import deferred_storage_of, values_of
from shardformer.meta_init.lazy_init import LazyLoading, record_calls
from shardformer.meta_init.materialization import NOTES
from shardformer.meta_init.safetensors_source import lazy_tensors
from shardformer.public_names import renamed_parameters
from shardformer.transformers_compat import load_transformers

HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
SINGLE, WEIGHTS_INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
ASYNC = "HF_DEACTIVATE_ASYNC_LOAD"
MAX_LISTED = 8
CONSENT = "trust_remote_code=True runs the Python that lies beside the weights"

_one_at_a_time = Lock()  # transformers changes things of the whole process while it loads


@renamed_parameters({"kind": "model_class", "where": "pretrained_model_name_or_path"})
def from_pretrained(
    model_class: type[Any],
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    config: Any = None,
    dtype: Any = None,
    all_bytes: bool = False,
    **options: Any,
) -> nn.Module:
    """A model with saved weights, none of which is read yet: ``shard_model`` lets each rank read its part.

    Args:
        model_class: a class of transformers, also one of ``AutoModelForCausalLM`` and the like.
        pretrained_model_name_or_path: a folder that ``save_pretrained`` wrote (one safetensors file, or several and
        an index), or a name on the
            Hugging Face hub.
        config: in place of the folder's.
        dtype: of the weights; None takes that of the config, as transformers does.
        all_bytes: whether ranks compare checksums of all bytes of the files, which each of them then reads, and not of
            their headers and of sampled bytes alone.
        options: of the hub, such as ``revision`` or ``local_files_only``; ``trust_remote_code=True`` runs Python that
            lies beside the weights, for an Auto class; any other is a field of the config.

    Weights that the files lack, such as those of a new head, get the numbers that transformers' ``from_pretrained``
    gives them after the same ``torch.manual_seed``; ``describe_sharding`` names them. Raises ConfigError when there
    are no such files, when a shape does not fit, and when layers of the base model have no weights.

    >>> model = from_pretrained(AutoModelForCausalLM, "my-llama")        # doctest: +SKIP
    >>> model = shard_model(model)                                       # doctest: +SKIP
    """
    hub = {name: options.pop(name) for name in HUB if name in options}
    trust = options.pop("trust_remote_code", False)
    check_bool("trust_remote_code", trust)
    check_bool("all_bytes", all_bytes)
    config, model_class = _config_and_class(
        model_class, str(pretrained_model_name_or_path), config, trust, hub, options
    )
    files = [lazy_tensors(path, all_bytes=all_bytes) for path in _files(str(pretrained_model_name_or_path), hub)]
    state = {key: tensor for file in files for key, tensor in file.items()}
    generation = _generation(str(pretrained_model_name_or_path), hub)
    with _one_at_a_time, _in_this_thread(), LazyLoading():
        model, info = _loaded(
            model_class,
            str(pretrained_model_name_or_path),
            config=config,
            state_dict=dict(state),
            dtype=dtype,
            generation_config=generation,
        )
        _check(model, str(pretrained_model_name_or_path), info)
        _tie_equal(model)
    model.name_or_path = model.config.name_or_path = str(pretrained_model_name_or_path)
    record_calls(model)
    vars(model)[NOTES] = [f"The weights are those of {str(pretrained_model_name_or_path)!r}.", *_notes(info)]
    return cast(nn.Module, model)


def _loaded(kind: Any, where: str, **given: Any) -> tuple[Any, Any]:
    """The model, its weights not there yet, and what transformers says of them."""
    try:
        return cast(
            tuple[Any, Any],
            kind.from_pretrained(None, ignore_mismatched_sizes=True, output_loading_info=True, **given),
        )
    except Exception as error:  # sizes that do not fit each other come up in any form
        raise ConfigError(
            f"transformers cannot put the weights of {where!r} into {kind.__name__}: {error}",
            remedy="See whether from_pretrained of transformers loads it, and in which class",
        ) from error


def _config_and_class(
    kind: Any, where: str, config: Any, trust: bool, hub: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Any, Any]:
    transformers = load_transformers()

    if config is None:
        known = getattr(kind, "config_class", None)
        # of an Auto class: without an answer to this transformers would ask on the standard input of each rank
        auto = {} if known else {"trust_remote_code": trust, "code_revision": hub.get("revision")}
        try:
            config, unknown = (known or transformers.AutoConfig).from_pretrained(
                where, return_unused_kwargs=True, **auto, **hub, **options
            )
        except Exception as error:  # a file may hold anything, and its fields any value
            raise ConfigError(
                f"{where!r} holds no config that transformers knows: {first_line(error)}",
                remedy=f"Correct the path or name, or give config=. {CONSENT}"
                if auto
                else "Correct the path or name, or give config=",
            ) from error
    else:
        unknown = dict(options)
    if unknown:
        raise ConfigError(
            f"There is no option {next(iter(unknown))!r}",
            rule=f"Options are fields of the {type(config).__name__}, and {', '.join(HUB)}",
            remedy="Leave it out" if not options.keys() - unknown.keys() else "Correct its name",
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{where!r} is quantized", remedy="Take the weights that it was made from")
    if issubclass(kind, nn.Module):
        return config, kind
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # one of the Auto classes
        try:
            return config, type(kind.from_config(config, trust_remote_code=trust))
        except Exception as error:
            raise ConfigError(
                f"transformers builds no {kind.__name__} of the config of {where!r}: {first_line(error)}",
                remedy=f"Correct config.json, or give the class of the model. {CONSENT}",
            ) from error


def _files(where: str, hub: Mapping[str, Any]) -> list[str]:
    """The safetensors files of a folder, or of a name on the hub, fetched."""
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}
    try:
        single = cached_file(where, SINGLE, **quiet, **hub)
        if single is not None:
            return [single]
        index = cached_file(where, WEIGHTS_INDEX_NAME, **quiet, **hub)
        if index is not None:
            _check_index(where, index)
            return list(get_checkpoint_shard_files(where, index, **hub)[0])
    except (OSError, ValueError, KeyError) as error:
        raise _no_files(where, first_line(error)) from error
    raise _no_files(where, f"it has neither {SINGLE} nor {WEIGHTS_INDEX_NAME}")


def _check_index(where: str, path: str) -> None:
    """Raises ConfigError for an index that names other files than those of its folder."""
    try:
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
        names = list(index["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_files(
            where, f"{WEIGHTS_INDEX_NAME} is not an index ({type(error).__name__}: {first_line(error)})"
        ) from error
    for name in names:
        inside = isinstance(name, str) and not os.path.isabs(name) and ".." not in re.split(r"[/\\]", name)
        if not inside or not name.endswith(".safetensors"):
            raise _no_files(
                where, f"{WEIGHTS_INDEX_NAME} names {name!r:.80}, and may name safetensors files of its folder alone"
            )


def _no_files(where: str, why: str) -> ConfigError:
    return ConfigError(
        f"There are no weights in {where!r}: {why}",
        rule="Weights are read in parts from safetensors files, as save_pretrained writes them",
        remedy="Correct the path, or load the model with transformers and save_pretrained it once",
    )


def _generation(where: str, hub: Mapping[str, Any]) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(where, **hub)
    except (OSError, ValueError):
        return None  # most folders have none; transformers makes one of the model's config


@contextmanager
def _in_this_thread() -> Iterator[None]:
    """transformers loads in threads, where nothing is recorded, unless the environment says otherwise."""
    before = os.environ.get(ASYNC)
    os.environ[ASYNC] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ASYNC]
        else:
            os.environ[ASYNC] = before


def _check(model: Any, where: str, info: Mapping[str, Any]) -> None:
    if info["mismatched_keys"]:
        name, saved, own = sorted(info["mismatched_keys"])[0]
        raise ConfigError(
            f"{name!r} is {tuple(saved)} in {where!r} and {tuple(own)} in this {type(model).__name__}"
            + (f"; so are {len(info['mismatched_keys']) - 1} more" if len(info["mismatched_keys"]) > 1 else ""),
            remedy="Give the config that they were saved with",
        )
    missing = set(info["missing_keys"])
    if not set(dict(model.named_parameters(remove_duplicate=False))) - missing:
        raise ConfigError(
            f"Nothing in {where!r} fits {type(model).__name__}: the model has {sorted(missing)[0]!r}, "
            f"the files have {min(info['unexpected_keys'], default='nothing')!r}",
            remedy="Name the class that they were saved from",
        )
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix or " ") else ""
    lacking = [key for key in sorted(missing) if key.startswith(prefix) and re.search(r"\.\d+\.", key)]
    if lacking:
        raise ConfigError(
            f"{where!r} has no weights for {_listed(lacking)}",
            rule="Only what stands outside of a model's layers, such as a new head, may start from random numbers",
            remedy="Give a config with as many layers as were saved, or build under LazyInit for random weights",
        )


def _tie_equal(model: Any) -> None:
    """Ties what is to be tied and was saved twice, as transformers does where both are equal."""
    for target, source in list(getattr(model, "all_tied_weights_keys", {}).items()):
        one, other = model.get_parameter(target), model.get_parameter(source)
        if one is other or deferred_storage_of(one) is None or deferred_storage_of(other) is None:
            continue
        if torch.equal(values_of(one), values_of(other)):
            owner, _, name = target.rpartition(".")
            setattr(model.get_submodule(owner), name, other)
        else:
            model.all_tied_weights_keys.pop(target)


def _notes(info: Mapping[str, Iterable[str]]) -> list[str]:
    out = []
    if info["missing_keys"]:
        out.append(f"Not saved, so new, with random numbers: {_listed(sorted(info['missing_keys']))}.")
    if info["unexpected_keys"]:
        out.append(f"Saved, and not in this model: {_listed(sorted(info['unexpected_keys']))}.")
    return out


def _listed(names: list[str]) -> str:
    return ", ".join(names[:MAX_LISTED]) + (f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else "")
