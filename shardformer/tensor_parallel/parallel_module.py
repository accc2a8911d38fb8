"""ParallelModule: a module with parameters that are shards of full ones. Also shards parameters in place.

When parameters are converted to 16 bits, buffers stay in fp32 and can reach a layer (the relative coordinates of Swin
V2, sinusoidal positions), as can a batch in fp32. torch raises an error for operands of different dtypes. Instead, the
input is cast to the dtype of the weight, as autocast does.
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

from shardformer.errors import ConfigError, PolicyError
from shardformer.layout.shard_spec import Coords, ShardSpec, Split
from shardformer.layout.slice_tensor import mark_slices
from shardformer.mesh.parallel_context import Axis
from shardformer.torch_compat import without_fake_tensors

RUNNING = "running_mean"
"""The buffer of a norm that keeps statistics. torch takes the weight of such a norm only in their dtype."""
_NARROW = "_shardformer_narrow"
"""The attribute of such a norm with its 16-bit parameters while a forward runs."""


def product_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype to which the factors of a matrix product are cast; None: they stay as they are."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return weight.dtype if is_wider(x, weight) else None


def is_wider(x: Any, weight: Tensor) -> bool:
    """Whether ``weight`` has 16 bits and ``x`` is a tensor of floats that have more, where autocast casts neither."""
    if not isinstance(x, Tensor) or x.dtype == weight.dtype:
        return False
    floats = x.is_floating_point() and weight.is_floating_point()
    return floats and weight.itemsize == 2 < x.itemsize and not torch.is_autocast_enabled(weight.device.type)


def accept_wide_inputs(model: nn.Module) -> None:
    """Lets the layers of torch.nn with parameters in 16 bits take inputs, and keep statistics, in fp32.

    Layers that run with such inputs as they are, such as ``nn.RMSNorm``, stay as they are; so do modules with a forward
    of their own.
    """
    for module in model.modules():
        if not _is_of_torch(module) or _weight_of(module) is None:
            continue
        if isinstance(module._buffers.get(RUNNING), Tensor):
            if _widen_parameters not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_widen_parameters)
                module.register_forward_hook(_put_back, always_call=True)
        elif _narrow_inputs not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_narrow_inputs, with_kwargs=True)


def _is_of_torch(module: nn.Module) -> bool:
    if isinstance(module, nn.RMSNorm) or "forward" in vars(module):
        return False
    return type(module).forward.__module__.startswith("torch.nn.modules.")


def _weight_of(module: nn.Module) -> Tensor | None:
    """A parameter of the module, or what stands in a stage for one that another stage holds."""
    held = (x for table in (module._parameters, vars(module)) for x in table.values() if isinstance(x, Tensor))
    return next((x for x in held if x.is_floating_point()), None)


def _narrow_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = _weight_of(module)
    given = [*args, *kwargs.values()]
    if weight is None or not any(is_wider(x, weight) for x in given):
        return None
    narrow = weight.dtype

    def cast(x: Any) -> Any:
        return x.to(narrow) if is_wider(x, weight) else x

    return tuple(map(cast, args)), {name: cast(x) for name, x in kwargs.items()}


def _widen_parameters(module: nn.Module, args: tuple[Any, ...]) -> None:
    """For this forward the weight and the bias have the dtype of the statistics."""
    statistics: Any = module._buffers[RUNNING]
    narrow = {n: p for n, p in module._parameters.items() if p is not None and is_wider(statistics, p)}
    module.__dict__[_NARROW] = narrow
    module._parameters.update(_cast(narrow, statistics.dtype))


def _put_back(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    module._parameters.update(module.__dict__.pop(_NARROW, {}))


def _cast(params: Mapping[str, nn.Parameter], dtype: torch.dtype) -> dict[str, Any]:
    return {name: param.to(dtype) for name, param in params.items()}


MODULE_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GroupLike = Axis | dist.ProcessGroup | None


class ParallelModule(nn.Module, ABC):
    """Base of the layers that replace a module by its part on this rank.

    Beside each sharded parameter stands its layout, in ``shard_specs`` under the parameter's local name. Parameters
    keep their names, so a sharded model's state dict has the keys of the plain one.
    """

    takes_grid = False
    """Whether it is made with a ``TensorGrid`` in the place of one axis."""

    def __init__(self, axis: Axis | None = None) -> None:
        super().__init__()
        self.axis = axis or Axis("tensor")
        self.shard_specs: dict[str, ShardSpec] = {}

    @property
    def coords(self) -> Coords:
        """This rank's place on the axis."""
        return {self.axis.name: self.axis.rank}

    @classmethod
    @abstractmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        """The parallel module that stands for ``module``, whose parameters hold the full values."""
        raise PolicyError(
            f"{cls.__name__} has no from_native_module of its own",
            rule="A target module makes itself of the native one: from_native_module(module, process_group, **kwargs)",
            remedy="Write that classmethod",
        )

    def register_shard(
        self, name: str, full: Tensor | None, spec: ShardSpec, shared: dict[int, nn.Parameter] | None = None
    ) -> None:
        """Registers this rank's part of ``full`` as parameter ``name`` with its layout.

        ``shared`` remembers parts already cut, by the identity of the full parameter, so tied weights stay tied.
        """
        if full is None:
            self.register_parameter(name, None)
            return
        part = None if shared is None else shared.get(id(full))
        if part is None:
            part = nn.Parameter(spec.slice(full, self.coords), requires_grad=full.requires_grad)
            if shared is not None:
                shared[id(full)] = part
        self.register_parameter(name, part)
        self.shard_specs[name] = spec
        if part.shape != full.shape:
            mark_slices(self, [name])


def keep_hooks(new: nn.Module, native: nn.Module) -> None:
    """Gives a module the hooks of the one in whose place it comes, behind its own; their handles go on removing them.

    Where they would see a part, that is refused later.
    """
    for table, hooks in vars(native).items():
        if table.startswith(("_forward_", "_backward_")) and "hooks" in table and hooks:
            for key, own in getattr(new, table).items():
                hooks[key] = own
                hooks.move_to_end(key, last=False)
            setattr(new, table, hooks)


def check_native(module: nn.Module, *kinds: type[nn.Module]) -> None:
    """Refuses a module that does something else than the class that a parallel layer stands for.

    Raises ConfigError for a forward of its own, a weight that is computed (weight norm), and hooks.
    """
    what = None
    if module._parameters.get("weight") is None:
        what = "a weight that is computed of others"
    elif type(module).forward not in [kind.forward for kind in kinds] or "forward" in vars(module):
        what = None if _is_plain(module) else "a forward of its own"
    if what is None and _is_linear(module) and any(attrgetter(*MODULE_HOOK_TABLES)(module)):
        what = "hooks"
    if what is not None:
        raise ConfigError(
            f"The {type(module).__module__}.{type(module).__name__} has {what}",
            rule=f"A parallel layer stands for a plain {' or '.join(kind.__name__ for kind in kinds)} and does no more",
            remedy="Remove them, or hook the whole attention or MLP"
            if what == "hooks"
            else "Leave this module whole, or name a class of your own whose from_native_module does what it does",
        )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


@without_fake_tensors()
def _is_plain(module: nn.Module) -> bool:
    """Whether a forward of its own gives what the plain class does (FalconLinear, Conv1D), tried on a few numbers.

    Its weights may have no values yet, so a copy with others of the same shapes is tried.
    """
    if isinstance(module, nn.Embedding):
        return embedding_scale(module) == 1
    twin = copy.copy(module)
    twin._parameters = {
        name: None if p is None else nn.Parameter(_probe_values(p)) for name, p in module._parameters.items()
    }
    weight: Any = twin.weight
    turned = weight.t() if type(twin).__name__ == "Conv1D" else weight
    x = torch.linspace(-1, 1, 2 * turned.shape[1], dtype=weight.dtype).view(2, -1)
    expected = F.linear(x, turned, getattr(twin, "bias", None))
    try:
        with torch.no_grad():
            out = twin.forward(x)  # not the hooks
    except Exception:  # it takes something else
        return False
    if not isinstance(out, Tensor) or out.shape != expected.shape:
        return False
    allowed = max(1e-5, 2 * torch.finfo(weight.dtype).eps)  # a bias is added before the product is rounded, or after
    return bool((out - expected).abs().max() <= allowed * expected.abs().max())


@without_fake_tensors()
def embedding_scale(embedding: nn.Embedding) -> float | None:
    """What the embedding multiplies its vectors by (Gemma's and BART's own classes do); None where it does more.

    It is read off copies, one with weights of one and one with others, since there may be no values yet, for every
    token but of two features. A factor may be rounded to the precision of the weights first (Gemma's), or not (BART's):
    that of the two which gives the very numbers, but for the last bit.
    """
    if type(embedding).forward is nn.Embedding.forward and "forward" not in vars(embedding):
        return 1.0
    twin, weight = copy.copy(embedding), embedding.weight[:, :2]
    ids = torch.arange(len(weight))

    def output(of: Tensor, ids: Tensor) -> Tensor:
        twin._parameters = {"weight": nn.Parameter(of)}
        out: Tensor = twin(ids)
        return out

    try:
        with torch.no_grad():
            waves = _probe_values(weight)
            out, found = output(waves, ids), F.embedding(ids, waves)
            dtypes = (weight.dtype, torch.float64)
            factors = [output(torch.ones(weight.shape, dtype=dtype), ids[:1]).flatten()[0].item() for dtype in dtypes]
            off = {factor: ((out - found * factor).abs() / (found * factor).abs()).max() for factor in factors}
            best = min(factors, key=lambda factor: off[factor])
            return best if out.shape == found.shape and off[best] <= torch.finfo(weight.dtype).eps else None
    except Exception:  # what it reads has no values, or it takes something else
        return None


def _probe_values(like: Tensor) -> Tensor:
    """Numbers in (-1, 1) that take next to no memory: each is that of its indices, the i-th of them i + 1 times."""
    strides = [dim + 1 for dim in range(like.dim())]
    num = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, strides, strict=True))
    return torch.sin(torch.arange(1, num + 1) * 0.7).to(like.dtype).as_strided(like.shape, strides)


def check_divides(what: str, size: int, axis: Axis) -> None:
    """Refuses a cut that leaves a rank with nothing."""
    if size < axis.size:
        raise ConfigError(
            f"{what}={size} cannot be cut into {axis.size} parts",
            remedy=f"Use a tensor size of {size} or less" if size > 1 else "Leave this layer whole",
        )


def shard_parameter(
    module: nn.Module,
    name: str,
    splits: Mapping[int, Split],
    axis: Axis,
    shared: dict[int, nn.Parameter] | None = None,
) -> Tensor:
    """Puts this rank's part in the place of the parameter or buffer ``name``. Returns the full one.

    The layout of a parameter stands beside it, as in a ``ParallelModule``, in ``module.shard_specs``, and the axis in
    ``module.shard_axis``. Communicates nothing; a parameter that is cut has this rank's part of the gradient.

    Args:
        splits: dim -> how it is cut.
        shared: parts already cut, by the identity of the full parameter, so tied ones stay tied.

    Raises ConfigError when a split is not of its dim's length.
    """
    full: Tensor = getattr(module, name)
    spec = ShardSpec(full.shape, {dim: split.with_axes(axis.name) for dim, split in splits.items()})
    coords = {axis.name: axis.rank}
    if name in module._buffers:
        module._buffers[name] = spec.slice(full, coords)
        return full
    shared = {} if shared is None else shared
    if id(full) not in shared:
        shared[id(full)] = nn.Parameter(spec.slice(full, coords), requires_grad=full.requires_grad)
    module.register_parameter(name, shared[id(full)])
    module.__dict__.setdefault("shard_specs", {})[name] = spec
    module.__dict__["shard_axis"] = axis
    return full
