"""What has another name or form in another version of transformers, in one place.

transformers 5.24 calls the keys and values of earlier tokens ``cache``, in arguments and outputs; before, they were
``past_key_values`` or, in state space models, ``cache_params``. XLNet and RWKV have names of their own (``mems``,
``state``). The functions here recognise them by what they are, so that another name needs no change.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Unpack, get_args, get_origin

import torch
from torch import Tensor, nn

from shardformer.torch_patches import Patch, all_of, install, replace_attribute


def load_transformers() -> Any:
    """The module ``transformers``, ready to build models.

    Without docstrings (``python -OO``, ``PYTHONOPTIMIZE=2``) the decorator with which transformers documents its models
    raises ValueError when the module of a model is imported. It then becomes one that changes nothing.
    """
    import transformers

    if sys.flags.optimize >= 2:
        _leave_models_undocumented()
    return transformers


def save_code(model: Any, folder: str | os.PathLike[str], config: Any) -> None:
    """Copies the Python of a model that was loaded with ``trust_remote_code``, as ``save_pretrained`` does.

    Args:
        config: its ``auto_map`` then names the copy.
    """
    if getattr(model, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=config)


def configs_of(kind: Any) -> Collection[type] | None:
    """The classes of config of which an ``AutoModel`` class builds a model; None for any other class."""
    found: Collection[type] | None = getattr(kind, "_model_mapping", None)
    return found


DOCSTRING_PATCH = Patch(
    "transformers.utils.auto_docstring",
    "shardformer.transformers_compat",
    "under python -OO it raises ValueError, since there are no docstrings",
)


def _leave_models_undocumented() -> None:
    utils = importlib.import_module("transformers.utils")
    importlib.import_module("transformers.utils.auto_docstring")
    modules = utils, sys.modules["transformers.utils.auto_docstring"]  # utils has the function of that name
    install(DOCSTRING_PATCH, lambda: all_of(*(replace_attribute(m, "auto_docstring", _undocumented) for m in modules)))


def _undocumented(found: Any = None, **options: Any) -> Any:
    """``auto_docstring``, with or without arguments."""
    return (lambda later: later) if found is None else found


def is_cache(value: Any) -> bool:
    """Whether a model keeps keys and values of earlier tokens in an argument or a field of its output.

    That is a ``Cache`` of transformers or a class with its methods, or the older form: for each layer a tuple of
    tensors.
    """
    if not isinstance(value, Tensor) and hasattr(value, "get_seq_length"):
        return True
    layers = value if isinstance(value, (list, tuple)) else ()
    return bool(layers) and all(isinstance(layer, tuple) and _holds_tensors(layer) for layer in layers)


def _holds_tensors(layer: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) for x in layer) and all(x is None or isinstance(x, Tensor) for x in layer)


def caches_in(values: Iterable[Any]) -> list[Any]:
    """The caches among the arguments of a forward."""
    return [value for value in values if is_cache(value)]


def holds_tokens(cache: Any) -> bool:
    """Whether a cache holds keys and values of earlier tokens: a new one is empty."""
    count = getattr(cache, "get_seq_length", None)
    return count is None or bool(count())


def arguments_of(model: nn.Module) -> frozenset[str]:
    """The names of the arguments of a model's forward."""
    return frozenset(inspect.signature(model.forward).parameters)


def keywords_of(model: nn.Module) -> frozenset[str] | None:
    """The names of what a model's forward takes; None if it takes anything.

    Models of transformers declare what ``**kwargs`` may hold by a ``TypedDict``. What wraps a model, as adapters do,
    hands on what that one takes.
    """
    named: set[str] = set()
    takes_more = False
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            named.add(parameter.name)
        elif get_origin(parameter.annotation) is Unpack:
            declared = get_args(parameter.annotation)[0]
            named |= declared.__required_keys__ | declared.__optional_keys__
        else:
            takes_more = True
    unwrap: Any = getattr(model, "get_base_model", None)
    inner = unwrap() if takes_more and unwrap is not None else None
    known = keywords_of(inner) if isinstance(inner, nn.Module) and inner is not model else None
    if takes_more and known is None:
        return None
    return frozenset(named | (known or frozenset()))


def with_mask_as_cached(batch: Mapping[str, Any], model: nn.Module, *, is_checkpointed: bool) -> dict[str, Any]:
    """A batch for a forward without a cache, which attends to the same tokens as the forward with the model's own.

    transformers looks for several documents in a row (``position_ids`` that start again) only where there is neither an
    ``attention_mask`` nor a cache. A mask of ones, which hides nothing, stands for the cache.

    Args:
        is_checkpointed: whether transformers' gradient checkpointing is on, which leaves the cache out in training.
    """
    named = inspect.signature(model.forward).parameters
    if "use_cache" not in named:
        return dict(batch)
    config = getattr(model, "config", None)
    asked = batch.get("use_cache")
    if asked is None:
        get_text: Any = getattr(config, "get_text_config", None)
        text = config if get_text is None else get_text(decoder=True)
        asked = getattr(text, "use_cache", False) and not (is_checkpointed and model.training)
    made = {"use_cache": False, **batch}
    tokens = next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)
    has_positions = batch.get("position_ids") is not None and batch.get("attention_mask") is None
    if asked and has_positions and "attention_mask" in named and isinstance(tokens, Tensor):
        made["attention_mask"] = tokens.new_ones(tokens.shape[:2], dtype=torch.int64)
    return made


def without_caches(output: Any, arguments: Collection[str]) -> Any:
    """A model's output without what a later forward would continue with; None if the output has no such field.

    Args:
        output: of the forward.
        arguments: names of the forward's arguments. What it keeps for a later forward is passed back under the name
            that it has in the output (``mems``, ``state``), and is more than one tensor.
    """
    if not isinstance(output, Mapping):
        return None
    kept = {
        name: value
        for name, value in output.items()
        if not is_cache(value) and (name not in arguments or isinstance(value, Tensor))
    }
    make: Any = type(output)
    return None if len(kept) == len(output) else make(**kept)


def decode_together(model: nn.Module, begin: Callable[[], None], any_rank: Callable[[bool], bool]) -> None:
    """Makes ``generate`` of a model, and of models inside it, decode until the texts of all ranks are finished.

    transformers has a mode for it (``synced_gpus``): a rank whose text is finished goes on with forwards whose tokens
    it drops. There it asks all processes that torch knows; here it asks ``any_rank``.

    Args:
        begin: called before each ``generate``.
        any_rank: (whether this rank's text is unfinished) -> whether that of any rank is.
    """
    for module in model.modules():
        if hasattr(module, "_has_unfinished_sequences"):
            module.__dict__[_TOGETHER] = begin, any_rank
            for name, method in (("generate", _generate), ("_has_unfinished_sequences", _has_unfinished)):
                module.__dict__[name] = method.__get__(module)


_TOGETHER = "_shardformer_decode_together"


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    begin, _ = self.__dict__[_TOGETHER]
    begin()
    return type(self).generate(self, *args, **{**kwargs, "synced_gpus": True})


def _has_unfinished(self: Any, this_peer_finished: bool, *args: Any, **kwargs: Any) -> bool:
    _, any_rank = self.__dict__[_TOGETHER]
    is_unfinished: bool = any_rank(not this_peer_finished)
    return is_unfinished
