"""Fused layer norm and RMS norm, and a fused bias, activation and gate for MLPs. Communicates nothing.

The RMS norms of transformers differ in where they round and how they use the weight. ``get_norm_kind`` identifies the
kind of a module by its output, not by its name: it runs a copy with test weights on a few values in several dtypes, and
selects the formula that gives the same result. A module that matches no formula is not supported.

Model               Fused
y = dense(x)        y without its bias
h = act(y)          act(y + bias), deferred
h * gate            act(y + bias) * gate in one kernel; if another operation reads h, act(y + bias) in one kernel
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any
from warnings import catch_warnings, simplefilter
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm.deferred_tensor import DeferredTensor, resolve_deferred_tensors
from shardformer.comm.sharded_tensor import Args, Kwargs, TorchFunction
from shardformer.errors import ConfigError
from shardformer.torch_compat import without_fake_tensors

# H hidden; x is (..., H), statistics over H are in fp32

HALF = (torch.bfloat16, torch.float16)
FORWARD_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)  # of an unsuitable module
_FILTERS = threading.RLock()
"""Lock for the global list of warning filters, because ranks may be threads."""
EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")


RMS_KINDS = ("llama", "t5", "gemma", "olmo", "torch")
"""Formulas of the RMS norms. With y = x / rms(x), computed in fp32:

    llama   w * y.to(x.dtype)
    t5      w * y, with y in the dtype of w if that has 16 bits; for fp64 x, only the mean is in fp32
    gemma   ((1 + w) * y).to(x.dtype)
    olmo    (w * y).to(x.dtype)
    torch   F.rms_norm: all in the dtype of x, the mean in fp32, or in fp64 for fp64 x
"""


def rms_norm(
    rms_kind: str,
    hidden_states: Tensor,
    weight: Tensor | None,
    eps: float | None,
    mean_fn: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Apply an RMS norm variant, with torch's fused kernel unless ``mean_fn`` is passed."""
    shape = hidden_states.shape[-1:]
    if weight is not None and rms_kind == "gemma":
        weight = 1.0 + weight.to(torch.float32)
    if mean_fn is None and rms_kind == "torch":
        return F.rms_norm(hidden_states, shape, weight, eps)
    if mean_fn is None and rms_kind == "gemma":
        return F.rms_norm(hidden_states.to(torch.float32), shape, weight, eps).to(hidden_states.dtype)
    if mean_fn is None and weight is not None and hidden_states.dtype == weight.dtype != torch.float64:
        # In 16 bits the kernel rounds once, after the weight: at most one unit in the last place from rounding twice.
        return F.rms_norm(hidden_states, shape, weight, eps).to(hidden_states.dtype)  # autocast may have returned fp32
    y = (
        hidden_states
        if hidden_states.dtype == torch.float64 and rms_kind in ("t5", "torch")
        else hidden_states.to(torch.float32)
    )
    if mean_fn is None and y.dtype == torch.float32:
        y = F.rms_norm(y, shape, None, eps)
    else:
        squares = (y.to(torch.float32) if rms_kind == "t5" else y).square()
        mean_square = squares.mean(-1, keepdim=True) if mean_fn is None else mean_fn(squares)
        y = y * torch.rsqrt(mean_square + (torch.finfo(hidden_states.dtype).eps if eps is None else eps))
    if rms_kind == "llama":
        y = y.to(hidden_states.dtype)
    if rms_kind == "t5" and weight is not None and weight.dtype in HALF:
        y = y.to(weight.dtype)
    y = y if weight is None else weight * y
    return y if rms_kind in ("llama", "t5") else y.to(hidden_states.dtype)


class FusedLayerNorm(nn.LayerNorm):
    """Layer norm with a single fused kernel: (..., H) -> (..., H). Communicates nothing."""

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> FusedLayerNorm:
        """Build a fused layer norm with the parameters of ``module``. Raises ConfigError for other modules."""
        _check_no_keyword_arguments(cls, kwargs)
        shape, eps = _get_normalized_shape(module), _find_norm_eps(module)
        if shape is None or eps is None or get_norm_kind(module) != "layer":
            raise _make_unsupported_norm_error(cls, module)
        norm = cls(shape, eps=eps, elementwise_affine=False)
        norm.elementwise_affine = module._parameters.get("weight") is not None
        _move_norm_parameters(norm, module, ("weight", "bias"))
        return norm


class FusedRMSNorm(nn.Module):
    """RMS norm with torch's fused kernel: (..., H) -> (..., H). Communicates nothing.

    Args:
        rms_kind: one of ``RMS_KINDS``. The kinds differ in where they round, and in whether the weight is an offset
            from 1.
    """

    weight: nn.Parameter | None

    def __init__(self, rms_kind: str, eps: float | None) -> None:
        super().__init__()
        self.kind, self.eps = rms_kind, eps

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> FusedRMSNorm:
        """Build a fused RMS norm with the weight of ``module``. Raises ConfigError for an unknown kind of norm."""
        _check_no_keyword_arguments(cls, kwargs)
        kind = get_norm_kind(module)
        if kind is None or kind == "layer":
            raise _make_unsupported_norm_error(cls, module)
        norm = cls(kind, _find_norm_eps(module))
        _move_norm_parameters(norm, module, ("weight",))
        return norm

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(self.kind, x, self.weight, self.eps)

    def extra_repr(self) -> str:
        size = "" if self.weight is None else f"{self.weight.shape[0]}, "
        return f"{size}eps={self.eps}, kind={self.kind}"


def make_fused_norm(module: nn.Module) -> nn.Module:
    """Create a fused replacement for a layer norm or RMS norm, with the same parameters.

    >>> make_fused_norm(nn.RMSNorm(8, eps=1e-6))
    FusedRMSNorm(8, eps=1e-06, kind=torch)

    Raises:
        ConfigError: if ``module`` is neither a layer norm nor an RMS norm of a known kind.
    """
    if isinstance(module, FusedLayerNorm | FusedRMSNorm):
        return module
    kind: type[FusedLayerNorm | FusedRMSNorm] = FusedLayerNorm if get_norm_kind(module) == "layer" else FusedRMSNorm
    return kind.from_native_module(module)


def _move_norm_parameters(target_norm: nn.Module, source_norm: nn.Module, param_names: tuple[str, ...]) -> None:
    """Move the parameters and attributes, such as ``variance_epsilon``, of a norm to its replacement."""
    for name in param_names:
        target_norm.register_parameter(name, source_norm._parameters.get(name))
    for name, value in vars(source_norm).items():
        if not name.startswith("_") and name not in ("training", "forward") and not hasattr(target_norm, name):
            setattr(target_norm, name, value)
    target_norm.train(source_norm.training)


def _find_norm_eps(module: nn.Module) -> float | None:
    """Read the epsilon of a norm from its attributes, or measure it with a test input."""
    named = [getattr(module, name) for name in EPS_NAMES if hasattr(module, name)]
    return next((eps for eps in named if isinstance(eps, float)), None) if named else _measure_norm_eps(module)


@without_fake_tensors()
def _measure_norm_eps(module: nn.Module) -> float | None:
    """Measure the epsilon of a norm by calling the norm with a nearly constant input.

    Solves y = w (x - mean) / sqrt(variance + eps) for eps. Returns None if this is not a small positive number.
    """
    shape = _get_normalized_shape(module)
    if shape is None or module._parameters.get("bias") is not None:
        return None
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        probe = _copy_with_test_params(module, torch.float64)
        x = _make_test_input(shape, 0.7)
        x = 1e-4 * (x - x.mean())
        weight = probe._parameters.get("weight")
        try:
            y = probe.forward(x[None])[0] / (1.0 if weight is None else weight)
        except FORWARD_ERRORS:
            return None
        eps = float(x.square().sum() / y.square().sum() - x.square().mean())
    return float(f"{eps:.3g}") if 0 < eps < 1e-2 else None


def _get_normalized_shape(module: nn.Module) -> tuple[int, ...] | None:
    """Return the ``normalized_shape`` of a norm, or None if the module cannot be a norm."""
    if not set(module._parameters) <= {"weight", "bias"} or module._modules or module._buffers:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None  # such as a gate or a condition
    weight = module._parameters.get("weight")
    if weight is not None:
        return tuple(weight.shape)
    shape = getattr(module, "normalized_shape", None)
    return tuple(shape) if isinstance(shape, tuple) else None


# --- identification of norms

# (dtype of x, dtype of the weight); mixed pairs distinguish where a class rounds and which dtype it returns
PROBE_INPUTS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
)
PLAIN_VALUES = (bool, int, float, str, torch.Size, torch.dtype, type(None))
_MODULE_STATE = frozenset(vars(nn.Module()))
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float64: 3e-7}  # relative; bf16: one unit in the last place


_KNOWN_KINDS: WeakKeyDictionary[type[nn.Module], dict[tuple[Any, ...], str | None]] = WeakKeyDictionary()
"""Results of ``get_norm_kind`` for each class and its settings, because a model has many identical norms."""


def get_norm_kind(module: nn.Module) -> str | None:
    """Identify the variant of layer norm or RMS norm that a module computes, or None for other modules."""
    shape, settings = _get_normalized_shape(module), _get_norm_settings(module)
    if shape is None:
        return None
    if settings is None:
        return _identify_norm_kind(module, shape)
    known = _KNOWN_KINDS.setdefault(type(module), {})
    if settings not in known:
        known[settings] = _identify_norm_kind(module, shape)
    return known[settings]


def _get_norm_settings(module: nn.Module) -> tuple[Any, ...] | None:
    """Create a hashable cache key from everything but the weights that determines a norm's output.

    Return None if the output may depend on anything else, such as a closure or an attribute that is a function.
    """
    cls = type(module)
    own = {name: value for name, value in vars(module).items() if name == "training" or name not in _MODULE_STATE}
    names = [name for name in dir(cls) if not (name.startswith("__") or hasattr(nn.Module, name))]
    shared = {name: value for name in names if not callable(value := getattr(cls, name, None))}
    has_state = getattr(cls.forward, "__closure__", ()) is not None  # a closure, or an object instead of a function
    if has_state or not all(map(_is_hashable_constant, (*own.values(), *shared.values()))):
        return None
    shapes = tuple((name, None if p is None else p.shape) for name, p in module._parameters.items())
    return cls.forward, shapes, tuple(sorted(own.items())), tuple(sorted(shared.items()))


def _is_hashable_constant(attribute: object) -> bool:
    return isinstance(attribute, PLAIN_VALUES) or (
        isinstance(attribute, tuple) and all(map(_is_hashable_constant, attribute))
    )


@without_fake_tensors()
def _identify_norm_kind(module: nn.Module, normalized_shape: tuple[int, ...]) -> str | None:
    eps = _find_norm_eps(module)
    has_weight, has_bias = (module._parameters.get(name) is not None for name in ("weight", "bias"))
    kinds = ["layer"] if eps is not None else []
    if len(normalized_shape) == 1 and not has_bias:
        kinds += RMS_KINDS if has_weight and eps is not None else ["torch"]
    errors = dict.fromkeys(kinds, 0.0)
    sizes = torch.tensor([1.0, 1e-3, 30.0], dtype=torch.float64).reshape(3, *[1] * len(normalized_shape))
    with _FILTERS, torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"), catch_warnings():
        simplefilter("ignore")  # torch warns that it has no fused kernel for mixed dtypes
        for x_dtype, weight_dtype in PROBE_INPUTS:
            x = (_make_test_input((3, *normalized_shape), 0.7) * sizes).to(x_dtype)
            probe, is_mixed = _copy_with_test_params(module, weight_dtype), x_dtype != weight_dtype
            weight, bias = (probe._parameters.get(name) for name in ("weight", "bias"))
            try:
                y = probe.forward(x)
            except FORWARD_ERRORS:
                y = None  # another kind of module, or no support for this pair of dtypes
            for kind in kinds:
                if kind == "layer" and not is_mixed:
                    formula = F.layer_norm(x, normalized_shape, weight, bias, eps or 0.0)
                    error = _compute_error_tolerance_ratio(
                        formula, y, min_denominator=1.0
                    )  # x - mean is already rounded
                    errors[kind] = max(errors[kind], error)
                elif kind != "layer" and (y is not None or not is_mixed):
                    errors[kind] = max(errors[kind], _compute_error_tolerance_ratio(rms_norm(kind, x, weight, eps), y))
    best = min(errors, key=lambda kind: errors[kind], default=None)
    return best if best is not None and errors[best] <= 1 else None


@without_fake_tensors()
def is_elementwise(module: nn.Module) -> bool:
    """Return whether each output feature depends only on the same input feature."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        probe = _copy_with_test_params(module, torch.float64)
        size = next((p.shape[0] for p in probe.parameters()), 2)
        x = _make_test_input((3, size), 0.7)
        try:
            changed = (probe.forward(x) != probe.forward(torch.cat((x[:, :1] + 1, x[:, 1:]), -1))).any(0)
        except FORWARD_ERRORS:
            return False
    return changed.shape == (size,) and not changed[1:].any()


def _make_test_input(shape: tuple[int, ...], phase_step: float) -> Tensor:
    """Create a tensor of irregular test values in (-1, 1) without using the random state."""
    num = torch.Size(shape).numel()
    return torch.sin(torch.arange(1, num + 1, dtype=torch.float64) * phase_step).reshape(shape)


def _copy_with_test_params(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    probe = copy.copy(module)
    probe._parameters = {
        name: None if p is None else nn.Parameter((1.3 + _make_test_input(tuple(p.shape), 0.9 + 0.2 * i)).to(dtype))
        for i, (name, p) in enumerate(module._parameters.items())
    }
    return probe


def _compute_error_tolerance_ratio(expected: Tensor, actual: Tensor | None, min_denominator: float = 1e-4) -> float:
    """Compute the largest relative error, as a multiple of the tolerance for the dtype.

    Denominators are at least ``min_denominator``.
    """
    if not isinstance(actual, Tensor) or actual.dtype != expected.dtype or actual.shape != expected.shape:
        return float("inf")
    a, b = expected.to(torch.float64), actual.to(torch.float64)
    return float(((a - b).abs() / b.abs().clamp(min=min_denominator)).max()) / BOUNDS[actual.dtype]


def _check_no_keyword_arguments(cls: type[nn.Module], kwargs: dict[str, Any]) -> None:
    if kwargs:
        arguments = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
        raise ConfigError(
            f"{cls.__name__} takes no keyword arguments, but the policy passes {arguments}.",
            remedy="Remove these keyword arguments from the policy.",
        )


def _make_unsupported_norm_error(cls: type[nn.Module], module: nn.Module) -> ConfigError:
    return ConfigError(
        f"{cls.__name__} cannot replace a {type(module).__name__}, because the two compute different outputs.",
        remedy="Set enable_fused_normalization=False, or remove the module from the policy's list of norms.",
    )


TANH = functools.partial(F.gelu, approximate="tanh")


def apply_bias_activation_gate(
    activation_fn: Callable[[Tensor], Tensor] | None, hidden_states: Tensor, bias: Tensor | None, gate: Tensor | None
) -> Tensor:
    """Compute ``activation_fn(hidden_states + bias) * gate``, as in a gated MLP."""
    hidden_states = hidden_states if bias is None else hidden_states + bias
    hidden_states = hidden_states if activation_fn is None else activation_fn(hidden_states)
    return hidden_states if gate is None else hidden_states * gate


@functools.cache
def get_compiled_bias_act_gate(device_type: str) -> Callable[..., Tensor]:
    """Return ``apply_bias_activation_gate``, compiled unless the device is the CPU."""
    return (
        apply_bias_activation_gate if device_type == "cpu" else torch.compile(apply_bias_activation_gate, dynamic=True)
    )


class _DeferredBiasAdd(Function):
    """Autograd function with the gradients of ``x + bias`` that leaves the addition to a later fused kernel."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, bias: Tensor) -> Tensor:
        return hidden_states.view_as(hidden_states)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        return grad_output, grad_output.reshape(-1, grad_output.shape[-1]).sum(0)


class DeferredActivation(DeferredTensor):
    """Tensor ``act(x + bias)`` that is computed when it is used, so that a kernel can fuse it with the gate."""

    terms: tuple[Any, Tensor, Tensor | None]
    out: Tensor | None

    @classmethod
    def from_operands(cls, activation_fn: Any, hidden_states: Tensor, bias: Tensor | None) -> Tensor:
        formula = functools.partial(apply_bias_activation_gate, activation_fn, bias=bias, gate=None)
        # the gradient, for an autograd function that receives this tensor itself
        pull = lambda grad: torch.func.vjp(formula, hidden_states.detach())[1](grad)[0]  # noqa: E731
        deferred = cls.from_local(hidden_states, tuple(hidden_states.shape), None, None, formula, pull)
        deferred.terms, deferred.out = (activation_fn, hidden_states, bias), None
        return deferred

    def full_tensor(self) -> Tensor:
        if self._is_watched:
            return super().full_tensor()
        if self.out is None:
            function = (
                apply_bias_activation_gate if self.terms[0] is None else get_compiled_bias_act_gate(self.device.type)
            )
            with torch.enable_grad():
                self.out = function(*self.terms, None)
        return self.out if torch.is_grad_enabled() else self.out.detach()

    @classmethod
    def __torch_function__(cls, func: TorchFunction, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        operands, options = [a for a in args if isinstance(a, DeferredActivation)], kwargs or {}
        x = max(operands, key=lambda x: x.terms[0] is not None, default=None)
        if x is not None and x.out is None and not x._is_watched:
            act, y, bias = x.terms
            if act is None and func in (F.gelu, F.silu, F.relu, torch.tanh) and not options.get("inplace"):
                return cls.from_operands(TANH if options.get("approximate") == "tanh" else func, y, bias)
            if act is not None and func is Tensor.mul:
                gate = resolve_deferred_tensors(args[1] if args[0] is x else args[0])
                if isinstance(gate, Tensor) and gate.shape == y.shape:
                    return get_compiled_bias_act_gate(y.device.type)(act, y, bias, gate)
        return super().__torch_function__(func, types, args, kwargs)


def defer_bias_add(hidden_states: Tensor, bias: Tensor | None) -> Tensor:
    """Defer a bias addition, so that it can be fused with the next operation."""
    bias = None if bias is None else bias.to(hidden_states.dtype)
    if torch.compiler.is_compiling():  # which fuses the operations
        return hidden_states if bias is None else hidden_states + bias
    return DeferredActivation.from_operands(
        None,
        hidden_states if bias is None else _DeferredBiasAdd.apply(hidden_states, bias),
        None if bias is None else bias.detach(),
    )
