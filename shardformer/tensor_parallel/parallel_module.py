"""Base class of the tensor-parallel layers, and functions that shard the parameters of a module in place.

Also casts inputs to the dtype of 16-bit weights, as autocast does. A model that was converted to 16 bits keeps fp32
buffers (the relative coordinates of Swin V2, sinusoidal positions), and torch raises for operands of different dtypes.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.comm.collectives import SHARD_OF
from shardformer.errors import ConfigError, PolicyError
from shardformer.forward_hooks import ForwardArgs, HookOrder, register_forward_hooks
from shardformer.layout.shard_export_guard import guard_state_dict_shards
from shardformer.layout.shard_spec import Coords, ShardSpec, Split
from shardformer.mesh.parallel_context import Axis
from shardformer.module_paths import is_linear_or_conv1d
from shardformer.torch_compat import FakeTensor, without_fake_tensors

STATISTICS_BUFFER = "running_mean"
"""Buffer of norms that track statistics. torch requires that their weight has the same dtype."""
_SAVED_PARAMETERS = "_shardformer_narrow"
"""Attribute that stores the 16-bit parameters of such a norm during its forward pass."""


def select_matmul_dtype(inputs: Tensor, weight: Tensor) -> torch.dtype | None:
    """Return the dtype to which the operands of a matmul must be cast, or None if no cast is needed."""
    if torch.is_autocast_enabled(inputs.device.type):
        return torch.get_autocast_dtype(inputs.device.type)
    return weight.dtype if has_wider_dtype(inputs, weight) else None


def has_wider_dtype(tensor: Any, weight: Tensor) -> bool:
    """Return whether ``tensor`` has a wider floating-point dtype than the 16-bit ``weight``. False under autocast."""
    if not isinstance(tensor, Tensor) or tensor.dtype == weight.dtype:
        return False
    floats = tensor.is_floating_point() and weight.is_floating_point()
    return floats and weight.itemsize == 2 < tensor.itemsize and not torch.is_autocast_enabled(weight.device.type)


def enable_fp32_inputs_of_16bit_layers(model: nn.Module) -> None:
    """Make ``torch.nn`` layers with 16-bit parameters accept fp32 inputs and track fp32 statistics.

    Modules with a custom `forward` are not changed, nor are layers such as ``nn.RMSNorm`` that accept fp32 inputs.
    """
    for module in model.modules():
        is_native = "forward" not in vars(module) and type(module).forward.__module__.startswith("torch.nn.modules.")
        if not is_native or isinstance(module, nn.RMSNorm) or _get_first_float_param(module) is None:
            continue
        if isinstance(module._buffers.get(STATISTICS_BUFFER), Tensor):
            if _upcast_params_pre_hook not in module._forward_pre_hooks.values():
                before, after = _upcast_params_pre_hook, _restore_16bit_params_hook
                register_forward_hooks(module, HookOrder.CASTS, before, after, always_call=True)
        elif _cast_inputs_pre_hook not in module._forward_pre_hooks.values():
            register_forward_hooks(module, HookOrder.CASTS, _cast_inputs_pre_hook, with_kwargs=True)


def _get_first_float_param(module: nn.Module) -> Tensor | None:
    """Return the first floating-point parameter of a module, or its placeholder on other pipeline stages."""
    tensors = (x for table in (module._parameters, vars(module)) for x in table.values() if isinstance(x, Tensor))
    return next((x for x in tensors if x.is_floating_point()), None)


def _cast_inputs_pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardArgs | None:
    weight = _get_first_float_param(module)
    inputs = [*args, *kwargs.values()]
    if weight is None or not any(has_wider_dtype(x, weight) for x in inputs):
        return None
    narrow = weight.dtype

    def cast_to_weight_dtype(arg: Any) -> Any:
        return arg.to(narrow) if has_wider_dtype(arg, weight) else arg

    return tuple(map(cast_to_weight_dtype, args)), {name: cast_to_weight_dtype(x) for name, x in kwargs.items()}


def _upcast_params_pre_hook(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Cast the weight and bias of a norm to the dtype of its running statistics during one forward pass."""
    statistics: Any = module._buffers[STATISTICS_BUFFER]
    narrow = {n: p for n, p in module._parameters.items() if p is not None and has_wider_dtype(statistics, p)}
    module.__dict__[_SAVED_PARAMETERS] = narrow
    wide: dict[str, Any] = {name: param.to(statistics.dtype) for name, param in narrow.items()}
    module._parameters.update(wide)


def _restore_16bit_params_hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    module._parameters.update(module.__dict__.pop(_SAVED_PARAMETERS, {}))


MODULE_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GroupLike = Axis | dist.ProcessGroup | None


class ParallelModule(nn.Module, ABC):
    """Base class of layers that replace a module and store only this rank's shard of its parameters.

    ``shard_specs`` maps the local name of each sharded parameter to its layout. Parameters keep their names, so the
    state dict of a sharded model has the keys of the original model.
    """

    takes_grid = False
    """Whether the constructor takes a ``TensorGrid`` instead of one axis."""

    def __init__(self, axis: Axis | None = None) -> None:
        super().__init__()
        if isinstance(axis, dist.ProcessGroup):
            raise ConfigError(
                f"The argument axis of {type(self).__name__} must be an Axis, but got the process group {axis}.",
                remedy="Pass Axis.of(process_group).",
            )
        self.axis = axis or Axis("tensor")
        self.shard_specs: dict[str, ShardSpec] = {}

    @property
    def coords(self) -> Coords:
        return {self.axis.name: self.axis.rank}

    @classmethod
    @abstractmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        """Build a parallel module with the parameters of ``module``, which is not sharded yet."""
        raise PolicyError(
            f"{cls.__name__} does not define from_native_module.",
            remedy="Add the classmethod from_native_module(module, process_group, **kwargs).",
        )

    def register_shard(
        self, name: str, full: Tensor | None, spec: ShardSpec, shared: dict[int, nn.Parameter] | None = None
    ) -> None:
        """Register this rank's shard of ``full`` as parameter ``name``, and record its layout.

        ``shared`` maps the id of a full parameter to its shard, so that tied weights stay tied.
        """
        if full is None:
            self.register_parameter(name, None)
            return
        shard = _get_or_create_shard(full, spec, self.coords, shared)
        axes = tuple(axis for splits in spec.splits.values() for split in splits for axis in split.axes)
        setattr(shard, SHARD_OF, (f"{type(self).__name__}.{name}", axes))
        self.register_parameter(name, shard)
        self.shard_specs[name] = spec
        if shard.shape != full.shape:
            guard_state_dict_shards(self, [name])


def _get_or_create_shard(
    full_param: Tensor, shard_spec: ShardSpec, coords: Coords, shard_by_param_id: dict[int, nn.Parameter] | None
) -> nn.Parameter:
    shard_by_param_id = {} if shard_by_param_id is None else shard_by_param_id
    if id(full_param) not in shard_by_param_id:
        shard_by_param_id[id(full_param)] = nn.Parameter(
            shard_spec.slice_full_tensor(full_param, coords), requires_grad=full_param.requires_grad
        )
    return shard_by_param_id[id(full_param)]


def move_hooks(target_module: nn.Module, source_module: nn.Module) -> None:
    """Move the hooks of ``source_module`` to ``target_module``, and run them after the hooks of ``target_module``.

    The handles of the hooks keep working. A later check rejects hooks that would see a shard, not the full tensor.
    """
    for table, hooks in vars(source_module).items():
        if table.startswith(("_forward_", "_backward_")) and "hooks" in table and hooks:
            for key, own in getattr(target_module, table).items():
                hooks[key] = own
                hooks.move_to_end(key, last=False)
            setattr(target_module, table, hooks)


def check_behaves_like_plain_module(module: nn.Module, *module_classes: type[nn.Module]) -> None:
    """Raise ConfigError unless ``module`` computes the same results as a plain module of one of these classes.

    Reasons are a custom `forward`, a computed weight (weight norm), and hooks.
    """
    found = None
    name = f"{type(module).__module__}.{type(module).__name__}"
    if module._parameters.get("weight") is None:
        found = "a weight that is computed from other parameters"
    elif type(module).forward not in [kind.forward for kind in module_classes] or "forward" in vars(module):
        found = None if _matches_standard_forward(module) else "a custom `forward`"
    if found is not None:
        raise ConfigError(
            f"The module {name} has {found}, so a tensor-parallel layer cannot replace it.",
            remedy="Do not shard this module, or write a ParallelModule subclass for it.",
        )
    if is_linear_or_conv1d(module) and any(attrgetter(*MODULE_HOOK_TABLES)(module)):
        raise ConfigError(
            f"The module {name} has hooks, so a tensor-parallel layer cannot replace it.",
            remedy="Remove the hooks, or register them on the attention module or MLP that contains the module.",
        )


@without_fake_tensors()
def _matches_standard_forward(module: nn.Module) -> bool:
    """Run a custom `forward` on test values to check that it gives the same results as the standard one.

    Examples are FalconLinear and Conv1D. The weights may be on the meta device, so the forward pass runs on a copy with
    test weights of the same shapes.
    """
    if isinstance(module, nn.Embedding):
        return measure_embedding_scale(module) == 1
    probe = copy.copy(module)
    probe._parameters = {
        name: None if p is None else nn.Parameter(_make_test_tensor_like(p)) for name, p in module._parameters.items()
    }
    weight: Any = probe.weight
    matrix = weight.t() if type(probe).__name__ == "Conv1D" else weight
    x = torch.linspace(-1, 1, 2 * matrix.shape[1], dtype=weight.dtype).view(2, -1)
    expected = F.linear(x, matrix, getattr(probe, "bias", None))
    try:
        with torch.no_grad():
            out = probe.forward(x)  # without the hooks
    except Exception:  # the forward pass takes other arguments
        return False
    if not isinstance(out, Tensor) or out.shape != expected.shape:
        return False
    allowed = max(1e-5, 2 * torch.finfo(weight.dtype).eps)  # the bias is added before or after rounding the product
    return bool((out - expected).abs().max() <= allowed * expected.abs().max())


@without_fake_tensors()
def measure_embedding_scale(embedding: nn.Embedding) -> float | None:
    """Measure the factor by which an embedding scales its vectors, or return None if it changes them otherwise.

    The factor is measured on copies of the embedding with two features, because the weights may be on the meta device.
    Gemma rounds the factor to the dtype of the weights and BART does not. The function tests both, and returns the
    factor that reproduces the output to one unit in the last place.
    """
    if type(embedding).forward is nn.Embedding.forward and "forward" not in vars(embedding):
        return 1.0
    probe, weight = copy.copy(embedding), embedding.weight[:, :2]
    probe._buffers = {  # a dry run has fake tensors, which know the value of a constant
        name: getattr(buffer, "constant", None) if isinstance(buffer, FakeTensor) else buffer
        for name, buffer in embedding._buffers.items()
    }
    ids = torch.arange(len(weight))

    def run_embedding(table: Tensor, ids: Tensor) -> Tensor:
        probe._parameters = {"weight": nn.Parameter(table)}
        out: Tensor = probe(ids)
        return out

    try:
        with torch.no_grad():
            table = _make_test_tensor_like(weight)
            out, plain = run_embedding(table, ids), F.embedding(ids, table)
            dtypes = (weight.dtype, torch.float64)
            factors = [
                run_embedding(torch.ones(weight.shape, dtype=dtype), ids[:1]).flatten()[0].item() for dtype in dtypes
            ]
            errors = {factor: ((out - plain * factor).abs() / (plain * factor).abs()).max() for factor in factors}
            best = min(factors, key=lambda factor: errors[factor])
            return best if out.shape == plain.shape and errors[best] <= torch.finfo(weight.dtype).eps else None
    except Exception:  # the forward pass reads a meta tensor or takes other arguments
        return None


def _make_test_tensor_like(reference: Tensor) -> Tensor:
    """Create a tensor of nonzero test values in (-1, 1), with the shape and dtype of ``reference``.

    The tensor is a view of a small vector.
    """
    strides = [dim + 1 for dim in range(reference.dim())]
    num = 1 + sum((size - 1) * stride for size, stride in zip(reference.shape, strides, strict=True))
    return torch.sin(torch.arange(1, num + 1) * 0.7).to(reference.dtype).as_strided(reference.shape, strides)


def check_dim_is_shardable(dim_name: str, dim_size: int, axis: Axis) -> None:
    """Raise ConfigError if a dim is too small to give every rank at least one element."""
    if dim_size < axis.size:
        raise ConfigError(
            f"A layer with {dim_name}={dim_size} cannot be sharded over {axis.size} ranks.",
            remedy=f"Use a tensor size of at most {dim_size}, or do not shard the layer.",
        )


def shard_parameter(
    module: nn.Module,
    param_name: str,
    split_by_dim: Mapping[int, Split],
    axis: Axis,
    shard_by_param_id: dict[int, nn.Parameter] | None = None,
) -> Tensor:
    """Replace a parameter or buffer of ``module`` with this rank's shard, and return the full tensor.

    Stores the layout of a parameter in ``module.shard_specs`` and the axis in ``module.shard_axis``. Communicates
    nothing.

    Args:
        split_by_dim: sharded dim -> its split.
        shard_by_param_id: id of a full parameter -> its shard, so that tied parameters stay tied.

    Raises:
        ConfigError: if a split does not have the length of its dim.
    """
    full: Tensor = getattr(module, param_name)
    spec = ShardSpec(full.shape, {dim: split.with_axis(axis.name) for dim, split in split_by_dim.items()})
    coords = {axis.name: axis.rank}
    if param_name in module._buffers:
        module._buffers[param_name] = spec.slice_full_tensor(full, coords)
        return full
    module.register_parameter(param_name, _get_or_create_shard(full, spec, coords, shard_by_param_id))
    module.__dict__.setdefault("shard_specs", {})[param_name] = spec
    module.__dict__["shard_axis"] = axis
    return full
