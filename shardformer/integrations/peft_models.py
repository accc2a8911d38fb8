"""Add, load, save, merge and remove PEFT adapters on a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collective_call import run_and_compare_across_ranks, wait_for_all_ranks
from shardformer.comm.collectives import gather_full_tensor
from shardformer.consistency.initial_weights import broadcast_random_state
from shardformer.errors import ConfigError, InputError
from shardformer.integrations import shard_peft_model
from shardformer.integrations.peft_adapters import EMBEDDINGS
from shardformer.integrations.shard_peft_model import has_default_forward, is_tuner_model, unwrap_peft_model
from shardformer.layout.packed_weights import check_no_packed_weights, count_packed_values
from shardformer.layout.sharding_metadata import METADATA_ATTRIBUTE, ShardingMetadata, get_metadata, get_sharded_module
from shardformer.module_paths import get_parent_and_attribute_name
from shardformer.sharding import checks
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row
from shardformer.tensor_parallel.parallel_module import ParallelModule
from shardformer.tensor_parallel.quantized_linear import QuantizedLinear, make_4bit_placeholder
from shardformer.torch_compat import IncompatibleKeys
from shardformer.transformers_compat import find_embeddings
from shardformer.weights.state_dict import gather_state_dict, load_state_dict

NEEDS_NO_VALUES = ("ADALORA", "IA3", "LOHA", "LOKR", "VERA")
"""Methods whose new adapters do not depend on the values of the weights; LoRA depends on its options."""


def add_and_shard_adapters(model: Any, config: Any, add_adapters_fn: Callable[[], Any]) -> Any:
    """Replace parallel layers with plain layers, let PEFT add adapters to the model, and then shard the adapters.

    All ranks must call it. Communicates one all-gather of each targeted weight if the adapters are computed from the
    weights (PiSSA, DoRA).

    Args:
        model: the sharded model, or PEFT's wrapper around it.
        config: the configuration of the new adapters.

    Raises:
        ConfigError: on every rank, if an optimizer shards the model already, or the layout does not support the
            adapters. The model is then unchanged.
    """
    shard_peft_model.check_peft_version()
    state, inner = get_metadata(model), unwrap_peft_model(model)
    _check_can_change_adapters(state)
    needs_values = _needs_base_weights(config)
    saved = getattr(config, "modules_to_save", None) or ()
    if (needs_values or saved) and state.context.pipe.size > 1:
        raise ConfigError(
            f"This {type(config).__name__} reads weights or copies modules, so it cannot be added to a model that is "
            f"sharded with pipe={state.context.pipe.size}.",
            remedy="Call peft.get_peft_model before shard_model.",
        )
    if needs_values:
        check_no_packed_weights(inner, f"This {type(config).__name__}, which is computed from the weights,")
    for axis in state.context.base_axes[::-1]:
        broadcast_random_state(axis, state.context.device)
    with checks.restore_model_on_error(model):
        layers = _find_parallel_layers(inner)
        with_values = {p for p in layers if needs_values or p.rpartition(".")[2] in saved or p in saved}
        plain = {path: _make_plain_layer(layer, state, path in with_values) for path, layer in layers.items()}
        for path, layer in plain.items():
            shard_peft_model.set_submodule(inner, path, layer)
        with (
            shard_peft_model.without_hooks(inner),
            shard_peft_model.without_sharding_metadata(inner),
        ):  # which PEFT would copy with modules
            made = run_and_compare_across_ranks(state.context, add_adapters_fn)
        wrappers = shard_peft_model.remove_peft_wrappers(inner)
        for path, layer in layers.items():
            outer = next((p for p in wrappers if path.startswith(f"{p}.")), path)
            _copy_changes_to_parallel_layer(layer, plain[path], state)
            shard_peft_model.set_submodule(inner, outer, layer)
            for name, child in made._modules.items():
                if child is plain[path]:  # word_embeddings
                    made._modules[name] = layer
        shard_peft_model.add_adapters(made, inner, wrappers)
    if made is not inner:
        patch_peft_methods(made)
    return made


def _check_can_change_adapters(metadata: ShardingMetadata) -> None:
    if metadata.gradient_owner is not None or metadata.parameter_owner is not None:
        raise ConfigError(
            "Adapters cannot be added or removed after shard_optimizer was called.",
            remedy="Add the adapters first, then create the optimizer and call shard_optimizer.",
        )


def _needs_base_weights(config: Any) -> bool:
    if config.is_prompt_learning:
        return True
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind == "LORA":
        plain = getattr(config, "init_lora_weights", True) in (True, False, "gaussian")
        return not plain or bool(config.use_dora)
    return kind not in NEEDS_NO_VALUES


def _find_parallel_layers(model: nn.Module) -> dict[str, ParallelModule]:
    """Return the parallel linear layers and embeddings by path, including those inside adapters."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, (Linear1D_Col, Linear1D_Row, *EMBEDDINGS)) and ".modules_to_save." not in path
    }


def _make_plain_layer(layer: Any, metadata: ShardingMetadata, with_values: bool) -> nn.Module:
    """Return an unsharded copy of a parallel layer, with the full weights or zeros."""
    if isinstance(layer, QuantizedLinear):
        return make_4bit_placeholder(layer)
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
            if with_values
            else param.new_zeros(()).expand(spec.shape)  # takes no memory
        )
        plain._parameters[name] = nn.Parameter(full, requires_grad=param.requires_grad)
    return plain.train(layer.training)  # type: ignore[no-any-return]


def _copy_changes_to_parallel_layer(layer: ParallelModule, plain: nn.Module, metadata: ShardingMetadata) -> None:
    """Copy the changes that PEFT made to a plain layer (values, ``requires_grad``, hooks) to the parallel layer."""
    for name, param in layer._parameters.items():
        full = plain._parameters[name]
        if param is None or full is None:
            continue
        param.requires_grad_(full.requires_grad)
        if full.numel() == 1 or any(full.stride()):  # it has values
            with torch.no_grad():
                param.copy_(layer.shard_specs[name].slice_full_tensor(full.detach(), metadata.coords))
    shard_peft_model.move_hooks_between(plain, layer)


def patch_peft_methods(model: Any) -> None:
    """Replace the methods of a ``PeftModel`` that save, load or merge adapters with versions for a sharded model."""
    tuner = type(model.base_model)
    for table, owner in ((_METHODS, type(model)), (_TUNER_METHODS, tuner)):
        for name, method in table.items():
            if hasattr(owner, name):
                model.__dict__[name] = method.__get__(model)
    model.__dict__["load_state_dict"] = load_state_dict.__get__(model)
    if is_tuner_model(model.base_model) and not has_default_forward(model.base_model):
        model.base_model.__dict__["forward"] = _TunerForwardWithHooks(model.base_model)


class _TunerForwardWithHooks:
    """A replacement for AdaLoRA's ``forward`` method, which also runs the hooks of the model that it calls."""

    def __init__(self, tuner: nn.Module) -> None:
        self._tuner = tuner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tuner: Any = self._tuner
        attributes = tuner.model.__dict__
        own = {name: attributes[name] for name in ("forward",) if name in attributes}

        def restore() -> None:
            attributes.pop("forward", None)
            attributes.update(own)

        def call(*args: Any, **kwargs: Any) -> Any:
            restore()
            return tuner.model(*args, **kwargs)

        attributes["forward"] = call
        try:
            return type(tuner).forward(tuner, *args, **kwargs)
        finally:
            restore()


def _add_adapter(self: Any, adapter_name: str, peft_config: Any, **options: Any) -> None:
    def change() -> Any:
        type(self).add_adapter(self, adapter_name, peft_config, **options)
        return self

    add_and_shard_adapters(self, peft_config, change)


def _load_adapter(self: Any, model_id: Any, adapter_name: str, is_trainable: bool = False, **options: Any) -> Any:
    state = get_metadata(self)
    options.setdefault("torch_device", str(state.context.device))
    load = partial(type(self).load_adapter, self, model_id, adapter_name, is_trainable, **options)
    if state.parameter_owner is None:
        return load()
    values: dict[str, Tensor] = {}

    def keep(state_dict: Mapping[str, Tensor], *_: Any, **__: Any) -> Any:
        values.update(state_dict)
        return IncompatibleKeys([name for name in self.state_dict() if name not in state_dict], [])

    _, prefix = get_sharded_module(self)

    def show(name: str, param: Tensor) -> Tensor:
        return param if name.startswith(prefix) else torch.zeros_like(param, device=state.context.device)

    with _use_full_parameters(self, show) as full:
        self.__dict__["load_state_dict"] = keep
        try:
            loaded = load()
        finally:
            self.__dict__["load_state_dict"] = load_state_dict.__get__(self)
    prompts = {name: param.detach() for name, param in full.items() if not param.is_meta}  # PEFT itself copies these
    self.load_state_dict({**values, **prompts}, strict=False)
    return loaded


@contextmanager
def _use_full_parameters(model: Any, get_value: Callable[[str, Tensor], Tensor]) -> Iterator[dict[str, nn.Parameter]]:
    """Temporarily give a model full parameters instead of those sharded by ZeRO stage 3, and yield them by name.

    No hooks run in the context, because the hooks of ZeRO communicate.

    Args:
        get_value: (name, meta tensor) -> value of the full parameter.
    """
    groups = getattr(get_metadata(model).gradient_owner, "stage3_param_groups", ())
    gathered = {id(p) for group in groups for p in group.params}
    shown: list[tuple[nn.Module, str, nn.Parameter]] = []
    full: dict[str, nn.Parameter] = {}
    try:
        for name, param in [(name, p) for name, p in model.named_parameters() if id(p) in gathered]:
            value = get_value(name, torch.empty(param.shape, dtype=param.dtype, device="meta"))
            owner, leaf = get_parent_and_attribute_name(model, name)
            shown.append((owner, leaf, param))
            full[name] = owner._parameters[leaf] = nn.Parameter(value, requires_grad=param.requires_grad)
        with shard_peft_model.without_hooks(model) if full else nullcontext():
            yield full
    finally:
        for owner, leaf, param in shown:
            owner._parameters[leaf] = param


def _delete_adapter(self: Any, adapter_name: str) -> None:
    _check_can_change_adapters(get_metadata(self))
    type(self).delete_adapter(self, adapter_name)
    shard_peft_model.remove_adapter_metadata(self, unwrap_peft_model(self), adapter_name)


def _save_pretrained(self: Any, save_directory: Any, **options: Any) -> None:
    """Gather the adapters, and save them in PEFT's format on the first rank. All ranks must call it.

    Communicates one all-gather per sharded adapter parameter. A pipeline also needs one broadcast per parameter.
    """
    context = get_metadata(self).context
    wait_for_all_ranks("save_pretrained", *context.base_axes)
    options.pop("is_main_process", None)
    weights = options.pop("state_dict", None) or _gather_adapter_state_dict(
        self, options.get("save_embedding_layers", "auto")
    )

    def write() -> None:
        is_first = all(axis.rank == 0 for axis in context.axes.values())
        if is_first:
            with (
                _add_other_stage_adapters(self),
                _use_full_parameters(self, lambda name, p: weights.get(name, p)),
                _replace_parallel_embeddings(self),
            ):
                type(self).save_pretrained(self, save_directory, state_dict=weights, **options)

    run_and_compare_across_ranks(context, write, action=f"write to {str(save_directory)!r}", error=InputError)


@contextmanager
def _add_other_stage_adapters(self: Any) -> Iterator[None]:
    """Temporarily add the adapters of other pipeline stages, because PEFT saves only adapters in the model."""
    inner = unwrap_peft_model(self)
    elsewhere = get_metadata(self).adapters.elsewhere
    hidden = {path: inner.get_submodule(path) for path in elsewhere}
    try:
        for path, wrapper in elsewhere.items():
            shard_peft_model.set_submodule(inner, path, wrapper)
        yield
    finally:
        for path, module in hidden.items():
            shard_peft_model.set_submodule(inner, path, module)


@contextmanager
def _replace_parallel_embeddings(self: Any) -> Iterator[None]:
    """Temporarily replace parallel embeddings and LM heads with plain layers, because PEFT expects them."""
    state, shown = get_metadata(self), []
    for tuner in _get_input_and_output_embeddings(unwrap_peft_model(self)):
        if shard_peft_model.is_peft_wrapper(tuner) and isinstance(
            layer := shard_peft_model.get_wrapped_module(tuner), ParallelModule
        ):
            shown.append((*shard_peft_model.find_innermost_wrapper(tuner), layer))
    try:
        for holder, name, layer in shown:
            holder._modules[name] = _make_plain_layer(layer, state, with_values=False)
        yield
    finally:
        for holder, name, layer in shown:
            holder._modules[name] = layer


def _get_input_and_output_embeddings(model: Any) -> list[nn.Module]:
    return [found for kind in ("input", "output") if (found := find_embeddings(model, kind)) is not None]


def _gather_adapter_state_dict(self: Any, save_embedding_layers: Any) -> dict[str, Tensor]:
    inner, adapters = unwrap_peft_model(self), get_metadata(self).adapters
    configs = self.peft_config.values()
    needs_base = save_embedding_layers is True or any(getattr(c, "bias", "none") != "none" for c in configs)
    prefix = next((f"{path}." for path, module in self.named_modules() if module is inner and path), "")
    embeddings = set(map(id, _get_input_and_output_embeddings(inner)))
    paths = tuple(f"{path}." for path, module in inner.named_modules() if id(module) in embeddings)

    def is_selected(name: str) -> bool:
        if needs_base or not name.startswith(prefix):
            return True
        inside = name.removeprefix(prefix)
        return inside.startswith(paths) or (adapters is not None and inside in adapters.own)

    return gather_state_dict(self, is_selected)


@contextmanager
def _prepare_adapter_merge(self: Any, method_name: str) -> Iterator[None]:
    state = get_metadata(self)
    if state.parameter_owner is not None:
        raise ConfigError(
            f"{method_name} is not supported while ZeRO stage 3 shards the parameters.",
            remedy="Save the adapters with save_pretrained, and merge them in a run without ZeRO stage 3.",
        )
    if method_name != "unload" and any(isinstance(module, QuantizedLinear) for module in self.modules()):
        raise ConfigError(
            f"{method_name} is not supported while tensor parallelism shards quantized weights.",
            remedy="Save the adapters with save_pretrained, and merge them in one process.",
        )
    wait_for_all_ranks(method_name, *state.context.base_axes)
    yield


def _merge_and_unload(self: Any, *args: Any, **options: Any) -> nn.Module:
    return _call_unload_method(self, "merge_and_unload", *args, **options)


def _unload(self: Any, *args: Any, **options: Any) -> nn.Module:
    return _call_unload_method(self, "unload", *args, **options)


def _call_unload_method(self: Any, method_name: str, *args: Any, **options: Any) -> nn.Module:
    state, inner = get_metadata(self), unwrap_peft_model(self)
    with _prepare_adapter_merge(self, method_name):
        _check_can_change_adapters(state)
        config: Any = getattr(inner, "config", None)
        ties = getattr(config, "tie_word_embeddings", None)
        with shard_peft_model.update_after_adapter_removal(inner):
            run_and_compare_across_ranks(state.context, lambda: getattr(self.base_model, method_name)(*args, **options))
        if ties is not None and state.context.pipe.size > 1:
            config.tie_word_embeddings = ties  # PEFT compares weights that may be on different stages
    self.__dict__.pop(METADATA_ATTRIBUTE, None)
    return inner


def _merge_adapter(self: Any, *args: Any, **options: Any) -> None:
    with _prepare_adapter_merge(self, "merge_adapter"):
        run_and_compare_across_ranks(
            get_metadata(self).context, lambda: self.base_model.merge_adapter(*args, **options)
        )


def _unmerge_adapter(self: Any, *args: Any, **options: Any) -> None:
    with _prepare_adapter_merge(self, "unmerge_adapter"):
        run_and_compare_across_ranks(
            get_metadata(self).context, lambda: self.base_model.unmerge_adapter(*args, **options)
        )


def _add_weighted_adapter(self: Any, *args: Any, **options: Any) -> None:
    raise ConfigError(
        "add_weighted_adapter is not supported on a sharded model.",
        remedy="Call it before shard_model, or call it in one process and load the new adapter.",
    )


def _get_nb_trainable_parameters(self: Any) -> tuple[int, int]:
    """Return the numbers of trainable and of all parameters of the full, unsharded model."""
    state = get_metadata(self)
    if state.context.pipe.size > 1:
        raise ConfigError(
            f"get_nb_trainable_parameters is not supported with pipe={state.context.pipe.size}.",
            remedy="Call it on the plain model before you shard it.",
        )
    counts = [(prod(entry.spec.shape), entry.param.requires_grad) for entry in state.entries]
    counts.append((count_packed_values(self), False))
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
