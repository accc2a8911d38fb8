"""Wrappers that hide differences between transformers versions.

transformers 5.24 names the keys and values of earlier tokens ``cache``, in arguments and outputs. Before, the name was
``past_key_values`` or, in state space models, ``cache_params``. XLNet and RWKV use other names (``mems``, ``state``).
The functions here recognize caches by their type, so that a new name needs no change.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Unpack, get_args, get_origin

import torch
from torch import Tensor, nn

from shardformer.torch_patches import LibraryPatch, chain_undo_functions, install_patch, replace_attribute

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig, PreTrainedModel


def import_transformers() -> Any:
    """Import ``transformers``, with a workaround for Python without docstrings.

    Without docstrings (``python -OO``, ``PYTHONOPTIMIZE=2``), transformers' decorator that documents its models raises
    ValueError when the module of a model is imported. It is then replaced by a decorator that does nothing.
    """
    import transformers

    if sys.flags.optimize >= 2:
        _disable_auto_docstring()
    return transformers


def save_custom_code(model: PreTrainedModel, save_directory: str | os.PathLike[str], config: PreTrainedConfig) -> None:
    """Copy the Python files of a ``trust_remote_code`` model into a folder, as ``save_pretrained`` does.

    Args:
        config: the config whose ``auto_map`` is updated.
    """
    if getattr(model, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, save_directory, config=config)


def skip_weight_init() -> AbstractContextManager[Any]:
    """Return a context manager that skips weight initialization and weight tying when models are built.

    Under fake tensors, some initializations of torch (``trunc_normal_``) fail, because they read values.
    """
    from transformers.initialization import no_init_weights

    context: AbstractContextManager[Any] = no_init_weights()
    return context


def get_supported_config_classes(auto_model_class: type) -> Collection[type] | None:
    """Return the config classes supported by a transformers Auto class, or None for other classes."""
    found: Collection[type] | None = getattr(auto_model_class, "_model_mapping", None)
    return found


DOCSTRING_PATCH = LibraryPatch(
    "transformers.utils.auto_docstring",
    "shardformer.transformers_compat",
    "avoids a ValueError under `python -OO`, which removes docstrings",
)


def _disable_auto_docstring() -> None:
    utils = importlib.import_module("transformers.utils")
    importlib.import_module("transformers.utils.auto_docstring")
    modules = utils, sys.modules["transformers.utils.auto_docstring"]  # utils has the function of that name
    install_patch(
        DOCSTRING_PATCH,
        lambda: chain_undo_functions(
            *(replace_attribute(m, "auto_docstring", _return_class_unchanged) for m in modules)
        ),
    )


def _return_class_unchanged(cls: Any = None, **kwargs: Any) -> Any:
    """Return the class unchanged. Replaces transformers' ``auto_docstring`` decorator."""
    return (lambda later: later) if cls is None else cls


def is_kv_cache(value: Any) -> bool:
    """Return whether a model argument or output is a key-value cache.

    A cache is a transformers ``Cache``, an object with its methods, or, in older models, one tuple of tensors per
    layer.
    """
    if not isinstance(value, Tensor) and hasattr(type(value), "get_seq_length"):
        return True
    layers = value if isinstance(value, (list, tuple)) else ()
    return bool(layers) and all(isinstance(layer, tuple) and _is_tuple_of_tensors(layer) for layer in layers)


def _is_tuple_of_tensors(cache_layer: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) for x in cache_layer) and all(
        x is None or isinstance(x, Tensor) for x in cache_layer
    )


def find_kv_caches(forward_args: Iterable[Any]) -> list[Any]:
    """Find the key-value caches among the arguments of a forward pass."""
    return [value for value in forward_args if is_kv_cache(value)]


def has_cached_tokens(kv_cache: Cache | tuple[Any, ...]) -> bool:
    """Return whether a key-value cache contains tokens from an earlier forward pass."""
    count = getattr(kv_cache, "get_seq_length", None)
    return count is None or bool(count())


def unwrap_checkpointed_forward(forward_fn: Any) -> Any:
    """Remove transformers' activation checkpointing wrapper from a layer's ``forward``.

    transformers 5.20 and later wrap the `forward` of each class of layers that supports activation checkpointing.
    Earlier releases wrap ``__call__``.
    """
    while getattr(getattr(forward_fn, "__code__", None), "co_name", "") == "forward_with_checkpointing":
        forward_fn = forward_fn.__wrapped__
    return forward_fn


def get_gradient_checkpointing_fn(layer: nn.Module) -> Callable[..., Any] | None:
    """Return the function for activation checkpointing of a layer, or None if it is disabled."""
    is_enabled = layer.training and getattr(layer, "gradient_checkpointing", False)
    return getattr(layer, "_gradient_checkpointing_func", None) if is_enabled else None


def get_forward_arg_names(model: nn.Module) -> frozenset[str]:
    """Return the argument names of a model's ``forward`` method."""
    return frozenset(inspect.signature(model.forward).parameters)


def get_accepted_forward_kwargs(model: nn.Module) -> frozenset[str] | None:
    """Return the keyword arguments that a model's ``forward`` accepts, or None if it accepts any.

    transformers declares the content of ``**kwargs`` by a ``TypedDict``. Wrappers such as adapters accept the arguments
    of the wrapped model.
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
    known = get_accepted_forward_kwargs(inner) if isinstance(inner, nn.Module) and inner is not model else None
    if takes_more and known is None:
        return None
    return frozenset(named | (known or frozenset()))


def filter_forward_kwargs(batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Drop the batch entries that a model's ``forward`` does not accept as keyword arguments."""
    names = get_accepted_forward_kwargs(model)
    return {name: value for name, value in batch.items() if names is None or name in names}


def copy_batch_with_cache_disabled(
    batch: Mapping[str, Any], model: nn.Module, *, uses_gradient_checkpointing: bool
) -> dict[str, Any]:
    """Copy a batch with the key-value cache disabled, but with the default attention mask.

    transformers detects packed documents (``position_ids`` that restart) only if there is neither an ``attention_mask``
    nor a cache. To replace the cache, an attention mask of ones is added.

    Args:
        uses_gradient_checkpointing: whether transformers' gradient checkpointing is on, which disables the cache in
            training.
    """
    named = inspect.signature(model.forward).parameters
    if "use_cache" not in named:
        return dict(batch)
    config = getattr(model, "config", None)
    uses_cache = batch.get("use_cache")
    if uses_cache is None:
        get_text: Any = getattr(config, "get_text_config", None)
        text = config if get_text is None else get_text(decoder=True)
        uses_cache = getattr(text, "use_cache", False) and not (uses_gradient_checkpointing and model.training)
    new = {"use_cache": False, **batch}
    tokens = next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)
    has_positions = batch.get("position_ids") is not None and batch.get("attention_mask") is None
    if uses_cache and has_positions and "attention_mask" in named and isinstance(tokens, Tensor):
        new["attention_mask"] = tokens.new_ones(tokens.shape[:2], dtype=torch.int64)
    return new


def remove_kv_caches(model_output: Any, forward_arg_names: Collection[str]) -> Any:
    """Copy a model's output without key-value caches, or return None if it has no cache.

    Args:
        model_output: the output of the forward pass.
        forward_arg_names: names of the forward pass's arguments. A field with one of these names that is not a single
            tensor (``mems``, ``state``) is passed to a later forward pass, and is removed as well.
    """
    if not isinstance(model_output, Mapping):
        return None
    kept = {
        name: value
        for name, value in model_output.items()
        if not is_kv_cache(value) and (name not in forward_arg_names or isinstance(value, Tensor))
    }
    make: Any = type(model_output)
    return None if len(kept) == len(model_output) else make(**kept)


def synchronize_generation(
    model: nn.Module, before_generate: Callable[[], None], is_true_on_any_rank: Callable[[bool], bool]
) -> None:
    """Make ``model.generate`` continue on every rank until all ranks have finished their sequences.

    transformers has a mode for this (``synced_gpus``), in which a finished rank continues with forward passes whose
    tokens are discarded. The mode checks all processes of torch.distributed. Here it calls ``is_true_on_any_rank``
    instead.

    Args:
        before_generate: called before each ``generate``.
        is_true_on_any_rank: (whether this rank has unfinished sequences) -> whether any rank has.
    """
    for module in model.modules():
        if hasattr(type(module), "_has_unfinished_sequences"):  # a PEFT wrapper has the attributes of its model
            module.__dict__[_DECODE_HOOKS] = before_generate, is_true_on_any_rank
            for name, method in (
                ("generate", _generate_synchronized),
                ("_has_unfinished_sequences", _has_unfinished_on_any_rank),
            ):
                module.__dict__[name] = method.__get__(module)


_DECODE_HOOKS = "_shardformer_decode_together"


def _generate_synchronized(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    begin, _ = model.__dict__[_DECODE_HOOKS]
    begin()
    return type(model).generate(model, *args, **{**kwargs, "synced_gpus": True})


def _has_unfinished_on_any_rank(model: PreTrainedModel, this_peer_finished: bool, *args: Any, **kwargs: Any) -> bool:
    _, any_rank = model.__dict__[_DECODE_HOOKS]
    is_unfinished: bool = any_rank(not this_peer_finished)
    return is_unfinished


def find_embeddings(model: nn.Module, embedding_kind: str) -> nn.Module | None:
    """Find the "input" or "output" embeddings of a transformers model, or None if it has none."""
    try:
        found: nn.Module | None = getattr(model, f"get_{embedding_kind}_embeddings")()
    except (AttributeError, RuntimeError):  # how transformers reports that there are none
        return None
    return found


def get_uniform_config_field(config: PreTrainedConfig, field_name: str) -> Any:
    """Return the value of a config field, or None if it is missing or differs between layers."""
    try:
        return getattr(config, field_name, None)
    except Exception:  # transformers raises an error for a value that differs between layers
        return None
