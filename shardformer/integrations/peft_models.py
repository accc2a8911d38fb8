"""Add, load, save, merge and remove PEFT adapters on a sharded model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardformer.comm.collective_call import run_and_compare_across_ranks, wait_for_all_ranks
from shardformer.comm.collectives import gather_full_tensor
from shardformer.consistency.initial_weights import broadcast_random_state
from shardformer.errors import ConfigError, InputError
from shardformer.integrations import shard_peft_model
from shardformer.integrations.peft_adapters import EMBEDDINGS
from shardformer.integrations.shard_peft_model import has_default_forward, is_peft_tuner_model, unwrap_peft_model
from shardformer.layout.packed_weights import check_no_quantized_weights, get_quantized_weights_numel
from shardformer.layout.sharding_metadata import (
    METADATA_ATTRIBUTE,
    ShardingMetadata,
    get_sharded_module_and_prefix,
    get_sharding_metadata,
)
from shardformer.module_paths import get_parent_and_attribute_name
from shardformer.sharding import checks
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row
from shardformer.tensor_parallel.parallel_module import ParallelModule
from shardformer.tensor_parallel.quantized_linear import QuantizedParallelLinear, make_unsharded_4bit_placeholder
from shardformer.torch_compat import IncompatibleKeys
from shardformer.transformers_compat import find_embeddings
from shardformer.weights.state_dict import gather_state_dict, load_state_dict

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

NEEDS_NO_VALUES = ("ADALORA", "IA3", "LOHA", "LOKR", "VERA")
"""Methods whose new adapters do not depend on the values of the weights; LoRA depends on its options."""


def add_and_shard_adapters(model: nn.Module, peft_config: PeftConfig, add_adapters_fn: Callable[[], Any]) -> Any:
    """Replace parallel layers with plain layers, let PEFT add adapters to the model, and then shard the adapters.

    All ranks must call it. Communicates one all-gather of each targeted weight if the adapters are computed from the
    weights (PiSSA, DoRA).

    Args:
        model: the sharded model, or PEFT's wrapper around it.
        peft_config: the configuration of the new adapters.

    Raises:
        ConfigError: on every rank, if an optimizer shards the model already, or the layout does not support the
            adapters. The model is then unchanged.
    """
    shard_peft_model.check_peft_version()
    state, inner = get_sharding_metadata(model), unwrap_peft_model(model)
    _check_can_change_adapters(state)
    needs_values = _needs_base_model_weights(peft_config)
    saved = getattr(peft_config, "modules_to_save", None) or ()
    if (needs_values or saved) and state.context.pipe.size > 1:
        raise ConfigError(
            f"{type(peft_config).__name__} reads weights or copies modules, which with pipe={state.context.pipe.size} "
            "may be on another pipeline stage.",
            remedy="Call peft.get_peft_model before shard_model.",
        )
    if needs_values:
        check_no_quantized_weights(inner, f"This {type(peft_config).__name__}, which is computed from the weights,")
    for axis in state.context.base_axes[::-1]:
        broadcast_random_state(axis, state.context.device)
    with checks.restore_model_on_error(model):
        layers = _find_parallel_layers(inner)
        with_values = {p for p in layers if needs_values or p.rpartition(".")[2] in saved or p in saved}
        plain = {path: _make_unsharded_layer(layer, state, path in with_values) for path, layer in layers.items()}
        for path, layer in plain.items():
            shard_peft_model.set_submodule(inner, path, layer)
        with (
            shard_peft_model.temporarily_remove_hooks(inner),
            shard_peft_model.without_sharding_metadata(inner),
        ):  # which PEFT would copy with modules
            made = run_and_compare_across_ranks(state.context, add_adapters_fn)
        wrappers = shard_peft_model.remove_peft_wrappers(inner)
        for path, layer in layers.items():
            outer = next((p for p in wrappers if path.startswith(f"{p}.")), path)
            _copy_peft_changes_to_parallel_layer(layer, plain[path], state)
            shard_peft_model.set_submodule(inner, outer, layer)
            for name, child in made._modules.items():
                if child is plain[path]:  # word_embeddings
                    made._modules[name] = layer
        shard_peft_model.add_peft_adapters(made, inner, wrappers)
    if made is not inner:
        patch_peft_methods(made)
    return made


def _check_can_change_adapters(metadata: ShardingMetadata) -> None:
    if metadata.gradient_owner is not None or metadata.parameter_owner is not None:
        raise ConfigError(
            "Adapters cannot be added or removed after shard_optimizer was called.",
            remedy="Add the adapters first, then create the optimizer and call shard_optimizer.",
        )


def _needs_base_model_weights(peft_config: PeftConfig) -> bool:
    if peft_config.is_prompt_learning:
        return True
    kind = str(getattr(peft_config.peft_type, "value", peft_config.peft_type))
    if kind == "LORA":
        plain = getattr(peft_config, "init_lora_weights", True) in (True, False, "gaussian")
        return not plain or bool(peft_config.use_dora)
    return kind not in NEEDS_NO_VALUES


def _find_parallel_layers(model: nn.Module) -> dict[str, ParallelModule]:
    """Return the parallel linear layers and embeddings by path, including those inside adapters."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, (Linear1D_Col, Linear1D_Row, *EMBEDDINGS)) and ".modules_to_save." not in path
    }


def _make_unsharded_layer(layer: Any, metadata: ShardingMetadata, copy_weights: bool) -> nn.Module:
    """Return an unsharded copy of a parallel layer, with the full weights or zeros."""
    if isinstance(layer, QuantizedParallelLinear):
        return make_unsharded_4bit_placeholder(layer)
    if isinstance(layer, EMBEDDINGS):
        plain: Any = nn.Embedding(layer.num_embeddings, layer.embedding_dim, layer.padding_idx, device="meta")
    elif layer.transposed:
        from transformers.pytorch_utils import Conv1D

        with torch.device("meta"):
            plain = Conv1D(layer.out_features, layer.in_features)
    else:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    for name, param in layer._parameters.items():
        if param is None:
            plain._parameters[name] = None
            continue
        spec = layer.shard_specs[name]
        full = (
            gather_full_tensor(param.detach(), spec, metadata.get_axis)
            if copy_weights
            else param.new_zeros(()).expand(spec.shape)  # takes no memory
        )
        plain._parameters[name] = nn.Parameter(full, requires_grad=param.requires_grad)
    return plain.train(layer.training)  # type: ignore[no-any-return]


def _copy_peft_changes_to_parallel_layer(
    parallel_layer: ParallelModule, plain_layer: nn.Module, metadata: ShardingMetadata
) -> None:
    """Copy the changes that PEFT made to a plain layer (values, ``requires_grad``, hooks) to the parallel layer."""
    for name, param in parallel_layer._parameters.items():
        full = plain_layer._parameters[name]
        if param is None or full is None:
            continue
        param.requires_grad_(full.requires_grad)
        if full.numel() == 1 or any(full.stride()):  # it has values
            with torch.no_grad():
                param.copy_(parallel_layer.shard_specs[name].slice_full_tensor(full.detach(), metadata.coords))
    shard_peft_model.move_hooks(plain_layer, parallel_layer)


def patch_peft_methods(model: PeftModel) -> None:
    """Replace the methods of a ``PeftModel`` that save, load or merge adapters with versions for a sharded model."""
    tuner = type(model.base_model)
    for table, owner in ((_METHODS, type(model)), (_TUNER_METHODS, tuner)):
        for name, method in table.items():
            if hasattr(owner, name):
                model.__dict__[name] = method.__get__(model)
    model.__dict__["load_state_dict"] = load_state_dict.__get__(model)
    if is_peft_tuner_model(model.base_model) and not has_default_forward(model.base_model):
        model.base_model.__dict__["forward"] = _TunerForwardWithHooks(model.base_model)


class _TunerForwardWithHooks:
    """A replacement for AdaLoRA's ``forward`` method, which also runs the hooks of the model that it calls."""

    def __init__(self, tuner_model: nn.Module) -> None:
        self._tuner = tuner_model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tuner: Any = self._tuner
        attributes = tuner.model.__dict__
        own = {name: attributes[name] for name in ("forward",) if name in attributes}

        def restore_forward() -> None:
            attributes.pop("forward", None)
            attributes.update(own)

        def call_with_hooks(*args: Any, **kwargs: Any) -> Any:
            restore_forward()
            return tuner.model(*args, **kwargs)

        attributes["forward"] = call_with_hooks
        try:
            return type(tuner).forward(tuner, *args, **kwargs)
        finally:
            restore_forward()


def _add_adapter(peft_model: PeftModel, adapter_name: str, peft_config: PeftConfig, **kwargs: Any) -> None:
    def call_add_adapter() -> PeftModel:
        type(peft_model).add_adapter(peft_model, adapter_name, peft_config, **kwargs)
        return peft_model

    add_and_shard_adapters(peft_model, peft_config, call_add_adapter)


def _load_adapter(
    peft_model: PeftModel, model_id: str, adapter_name: str, is_trainable: bool = False, **kwargs: Any
) -> Any:
    state = get_sharding_metadata(peft_model)
    kwargs.setdefault("torch_device", str(state.context.device))
    load = partial(type(peft_model).load_adapter, peft_model, model_id, adapter_name, is_trainable, **kwargs)
    if state.parameter_owner is None:
        return load()
    values: dict[str, Tensor] = {}

    def capture_state_dict(state_dict: Mapping[str, Tensor], *_: Any, **__: Any) -> IncompatibleKeys:
        values.update(state_dict)
        return IncompatibleKeys([name for name in peft_model.state_dict() if name not in state_dict], [])

    _, prefix = get_sharded_module_and_prefix(peft_model)

    def get_full_value(param_name: str, param: Tensor) -> Tensor:
        return param if param_name.startswith(prefix) else torch.zeros_like(param, device=state.context.device)

    with _use_full_parameters(peft_model, get_full_value) as full:
        peft_model.__dict__["load_state_dict"] = capture_state_dict
        try:
            loaded = load()
        finally:
            peft_model.__dict__["load_state_dict"] = load_state_dict.__get__(peft_model)
    prompts = {name: param.detach() for name, param in full.items() if not param.is_meta}  # PEFT itself copies these
    peft_model.load_state_dict({**values, **prompts}, strict=False)
    return loaded


@contextmanager
def _use_full_parameters(
    model: nn.Module, get_full_value: Callable[[str, Tensor], Tensor]
) -> Iterator[dict[str, nn.Parameter]]:
    """Temporarily replace the parameter shards of ZeRO stage 3 with full parameters, and yield them by name.

    No hooks run in the context, because the hooks of ZeRO communicate.

    Args:
        get_full_value: (name, meta tensor) -> value of the full parameter.
    """
    groups = getattr(get_sharding_metadata(model).gradient_owner, "stage3_param_groups", ())
    gathered = {id(p) for group in groups for p in group.params}
    shown: list[tuple[nn.Module, str, nn.Parameter]] = []
    full: dict[str, nn.Parameter] = {}
    try:
        for name, param in [(name, p) for name, p in model.named_parameters() if id(p) in gathered]:
            value = get_full_value(name, torch.empty(param.shape, dtype=param.dtype, device="meta"))
            owner, leaf = get_parent_and_attribute_name(model, name)
            shown.append((owner, leaf, param))
            full[name] = owner._parameters[leaf] = nn.Parameter(value, requires_grad=param.requires_grad)
        with shard_peft_model.temporarily_remove_hooks(model) if full else nullcontext():
            yield full
    finally:
        for owner, leaf, param in shown:
            owner._parameters[leaf] = param


def _delete_adapter(peft_model: PeftModel, adapter_name: str) -> None:
    _check_can_change_adapters(get_sharding_metadata(peft_model))
    type(peft_model).delete_adapter(peft_model, adapter_name)
    shard_peft_model.remove_adapter_metadata(peft_model, unwrap_peft_model(peft_model), adapter_name)


def _save_pretrained(peft_model: PeftModel, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
    """Gather the adapters, and save them in PEFT's format on the first rank. All ranks must call it.

    Communicates one all-gather per sharded adapter parameter. A pipeline also needs one broadcast per parameter.
    """
    context = get_sharding_metadata(peft_model).context
    wait_for_all_ranks("save_pretrained", *context.base_axes)
    kwargs.pop("is_main_process", None)
    weights = kwargs.pop("state_dict", None) or _gather_adapter_state_dict(
        peft_model, kwargs.get("save_embedding_layers", "auto")
    )

    def save_on_first_rank() -> None:
        is_first = all(axis.rank == 0 for axis in context.axes.values())
        if is_first:
            with (
                _temporarily_add_remote_stage_adapters(peft_model),
                _use_full_parameters(peft_model, lambda name, p: weights.get(name, p)),
                _use_plain_embeddings(peft_model),
            ):
                type(peft_model).save_pretrained(peft_model, save_directory, state_dict=weights, **kwargs)

    run_and_compare_across_ranks(
        context, save_on_first_rank, action_description=f"write to {str(save_directory)!r}", error_class=InputError
    )


@contextmanager
def _temporarily_add_remote_stage_adapters(peft_model: PeftModel) -> Iterator[None]:
    """Temporarily add the adapters of other pipeline stages, because PEFT saves only adapters in the model."""
    inner = unwrap_peft_model(peft_model)
    elsewhere = get_sharding_metadata(peft_model).adapters.elsewhere
    hidden = {path: inner.get_submodule(path) for path in elsewhere}
    try:
        for path, wrapper in elsewhere.items():
            shard_peft_model.set_submodule(inner, path, wrapper)
        yield
    finally:
        for path, module in hidden.items():
            shard_peft_model.set_submodule(inner, path, module)


@contextmanager
def _use_plain_embeddings(peft_model: PeftModel) -> Iterator[None]:
    """Temporarily replace parallel embeddings and LM heads with plain layers, because PEFT expects them."""
    state, shown = get_sharding_metadata(peft_model), []
    for tuner in _get_input_and_output_embeddings(unwrap_peft_model(peft_model)):
        if shard_peft_model.is_peft_wrapper(tuner) and isinstance(
            layer := shard_peft_model.get_wrapped_module(tuner), ParallelModule
        ):
            shown.append((*shard_peft_model.find_innermost_wrapper_and_attribute(tuner), layer))
    try:
        for holder, name, layer in shown:
            holder._modules[name] = _make_unsharded_layer(layer, state, copy_weights=False)
        yield
    finally:
        for holder, name, layer in shown:
            holder._modules[name] = layer


def _get_input_and_output_embeddings(model: nn.Module) -> list[nn.Module]:
    return [found for kind in ("input", "output") if (found := find_embeddings(model, kind)) is not None]


def _gather_adapter_state_dict(peft_model: PeftModel, save_embedding_layers: bool | str) -> dict[str, Tensor]:
    inner, adapters = unwrap_peft_model(peft_model), get_sharding_metadata(peft_model).adapters
    configs = peft_model.peft_config.values()
    needs_base = save_embedding_layers is True or any(getattr(c, "bias", "none") != "none" for c in configs)
    prefix = next((f"{path}." for path, module in peft_model.named_modules() if module is inner and path), "")
    embeddings = set(map(id, _get_input_and_output_embeddings(inner)))
    paths = tuple(f"{path}." for path, module in inner.named_modules() if id(module) in embeddings)

    def is_selected(tensor_name: str) -> bool:
        if needs_base or not tensor_name.startswith(prefix):
            return True
        inside = tensor_name.removeprefix(prefix)
        return inside.startswith(paths) or (adapters is not None and inside in adapters.own)

    return gather_state_dict(peft_model, is_selected)


def _check_can_merge_adapters(peft_model: PeftModel, method_name: str) -> None:
    state = get_sharding_metadata(peft_model)
    if state.parameter_owner is not None:
        raise ConfigError(
            f"{method_name} is not supported while ZeRO stage 3 shards the parameters.",
            remedy="Save the adapters with save_pretrained, and merge them in a run without ZeRO stage 3.",
        )
    if method_name != "unload" and any(isinstance(module, QuantizedParallelLinear) for module in peft_model.modules()):
        raise ConfigError(
            f"{method_name} is not supported while tensor parallelism shards quantized weights.",
            remedy="Save the adapters with save_pretrained, and merge them in one process.",
        )
    wait_for_all_ranks(method_name, *state.context.base_axes)


def _merge_and_unload(peft_model: PeftModel, *args: Any, **kwargs: Any) -> nn.Module:
    return _call_unload_method(peft_model, "merge_and_unload", *args, **kwargs)


def _unload(peft_model: PeftModel, *args: Any, **kwargs: Any) -> nn.Module:
    return _call_unload_method(peft_model, "unload", *args, **kwargs)


def _call_unload_method(peft_model: PeftModel, method_name: str, *args: Any, **kwargs: Any) -> nn.Module:
    state, inner = get_sharding_metadata(peft_model), unwrap_peft_model(peft_model)
    _check_can_merge_adapters(peft_model, method_name)
    _check_can_change_adapters(state)
    config: Any = getattr(inner, "config", None)
    ties = getattr(config, "tie_word_embeddings", None)
    with shard_peft_model.update_metadata_after_adapter_removal(inner):
        run_and_compare_across_ranks(
            state.context, lambda: getattr(peft_model.base_model, method_name)(*args, **kwargs)
        )
    if ties is not None and state.context.pipe.size > 1:
        config.tie_word_embeddings = ties  # PEFT compares weights that may be on different stages
    peft_model.__dict__.pop(METADATA_ATTRIBUTE, None)
    return inner


def _merge_adapter(peft_model: PeftModel, *args: Any, **kwargs: Any) -> None:
    _check_can_merge_adapters(peft_model, "merge_adapter")
    run_and_compare_across_ranks(
        get_sharding_metadata(peft_model).context, lambda: peft_model.base_model.merge_adapter(*args, **kwargs)
    )


def _unmerge_adapter(peft_model: PeftModel, *args: Any, **kwargs: Any) -> None:
    _check_can_merge_adapters(peft_model, "unmerge_adapter")
    run_and_compare_across_ranks(
        get_sharding_metadata(peft_model).context, lambda: peft_model.base_model.unmerge_adapter(*args, **kwargs)
    )


def _add_weighted_adapter(peft_model: PeftModel, *args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        "add_weighted_adapter is not supported on a sharded model.",
        remedy="Call this method before shard_model, or call it in one process and load the new adapter.",
    )


def _get_nb_trainable_parameters(peft_model: PeftModel) -> tuple[int, int]:
    """Return the numbers of trainable and of all parameters of the full, unsharded model."""
    state = get_sharding_metadata(peft_model)
    if state.context.pipe.size > 1:
        raise ConfigError(
            f"get_nb_trainable_parameters is not supported with pipe={state.context.pipe.size}.",
            remedy="Call get_nb_trainable_parameters before you shard the model.",
        )
    counts = [(prod(entry.spec.shape), entry.param.requires_grad) for entry in state.entries]
    counts.append((get_quantized_weights_numel(peft_model), False))
    return sum(n for n, trains in counts if trains), sum(n for n, _ in counts)


_METHODS: Mapping[str, Callable[..., Any]] = {
    "add_adapter": _add_adapter,
    "load_adapter": _load_adapter,
    "delete_adapter": _delete_adapter,
    "save_pretrained": _save_pretrained,
    "get_nb_trainable_parameters": _get_nb_trainable_parameters,
}
_TUNER_METHODS: Mapping[str, Callable[..., Any]] = {
    "merge_and_unload": _merge_and_unload,
    "unload": _unload,
    "merge_adapter": _merge_adapter,
    "unmerge_adapter": _unmerge_adapter,
    "add_weighted_adapter": _add_weighted_adapter,
}
