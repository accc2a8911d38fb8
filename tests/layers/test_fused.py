"""Fused bias, activation and gate have the values and gradients of the separate operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from shardformer.kernels import fused_ops
from shardformer.kernels import fused_ops as fused
from shardformer.kernels.fused_ops import DeferredActivation, defer_bias_add

HIDDEN = 8


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operands of the fused kernels that ran."""
    found: list[str] = []

    def noted(act: Any, x: Tensor, bias: Tensor | None, gate: Tensor | None) -> Tensor:
        terms = {"bias": bias, "act": act, "gate": gate}
        found.append(" ".join(name for name, term in terms.items() if term is not None))
        return fused_ops.apply_bias_activation_gate(act, x, bias, gate)

    monkeypatch.setattr(fused, "get_compiled_bias_act_gate", lambda device: noted)
    return found


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def assert_same(ours: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], bound: float) -> None:
    """Check that values and the gradients of all inputs are equal."""
    y, ref = ours(*inputs), plain(*inputs)
    assert y.dtype == ref.dtype and y.shape == ref.shape
    grad = torch.randn_like(ref)
    for a, b in zip([y + 0, *grads_of(y, inputs, grad)], [ref, *grads_of(ref, inputs, grad)], strict=True):
        assert type(a) is Tensor
        torch.testing.assert_close(a, b, rtol=bound, atol=bound * float(b.detach().abs().max().clamp(min=1)))


def grads_of(y: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    for x in inputs:
        x.grad = None
    y.backward(grad)
    assert all(x.grad is not None for x in inputs)
    return [x.grad for x in inputs if x.grad is not None]


class Doubled(Function):
    """A custom autograd function, which no rule of the tensor covers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        flat = (2 * grad).reshape(-1, grad.shape[-1])
        return (2 * grad) @ weight, flat.t() @ x.reshape(-1, x.shape[-1])


def in_place(h: Tensor, w: Tensor) -> Tensor:
    h += w[0]
    h.mul_(2)
    return F.linear(h, w) + h


def in_place_and_not_handed_on(h: Tensor, w: Tensor) -> Tensor:
    h.mul_(2)
    h[0] = 1.0
    return F.linear(h, w) + h


def hooked(h: Tensor, w: Tensor) -> Tensor:
    h.register_hook(lambda grad: 5 * grad)
    return F.linear(h, w) * h


def looked_at(h: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        assert not h.sum().requires_grad
    return F.linear(h, w)


def below(h: Tensor, w: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return F.linear(h, w)


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "a custom function": Doubled.apply,
    "used twice": lambda h, w: F.linear(h, w) + F.linear(h.square(), w) + h,
    "in place": in_place,
    "in place, not handed on": in_place_and_not_handed_on,
    "a hook": hooked,
    "a look without gradients": looked_at,
    "an operation that is not announced": below,
    "views and reductions": lambda h, w: (h.view(-1, 2).transpose(0, 1).sum() + h[..., :3].mean()) * w,
    "scaled": lambda h, w: F.linear(0.5 * h + 1.0, w),
    "with itself": lambda h, w: h * h + h * w[0],
    "activated twice": lambda h, w: w[0] * F.relu(h) + F.relu(h, inplace=True),
    "stacked": lambda h, w: torch.cat([h, torch.stack([h[0]] * 2)]) * w[0],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("act", [F.gelu, lambda x: x], ids=["act", "bias"])
def test_every_use_of_a_deferred_activation_keeps_its_gradient(use: str, act: Callable[[Tensor], Tensor]) -> None:
    assert_same(
        lambda x, b, w: USES[use](act(defer_bias_add(x + 0, b)), w),
        lambda x, b, w: USES[use](act(x + b), w),
        leaves((3, 4, HIDDEN), (HIDDEN,), (HIDDEN, HIDDEN)),
        1e-12,
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_has_the_same_gradients(reentrant: bool) -> None:
    def layer(x: Tensor, b: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.gelu(defer_bias_add(x + 0, b)), w)

    assert_same(
        lambda x, b, w: checkpoint(layer, x, b, w, use_reentrant=reentrant),
        lambda x, b, w: F.linear(F.gelu(x + b), w),
        leaves((3, 4, HIDDEN), (HIDDEN,), (HIDDEN, HIDDEN)),
        1e-12,
    )


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    **{type(act).__name__: act for act in (nn.GELU(), nn.SiLU(), nn.ReLU(), nn.Tanh(), nn.ReLU(inplace=True))},
    "GELU tanh": nn.GELU("tanh"),
}


@pytest.mark.parametrize("name", ACTS)
def test_bias_is_fused_with_the_activation(name: str, ran: list[str]) -> None:
    act = ACTS[name]
    bias = lambda x, b: act(defer_bias_add(x + 0, b))  # noqa: E731
    assert_same(bias, lambda x, b: act(x + b), leaves((3, 4, HIDDEN), (HIDDEN,)), 1e-12)
    assert_same(bias, lambda x, b: act(x + b), leaves((HIDDEN,), (HIDDEN,)), 1e-12)
    if name != "ReLU":  # the in-place ReLU is not fused
        assert ran == ["bias act"] * 2


@pytest.mark.parametrize("turned", [False, True])
def test_gate_is_fused_from_either_side(turned: bool, ran: list[str]) -> None:
    def gated(x: Tensor, b: Tensor, up: Tensor) -> Tensor:
        h, up = F.silu(defer_bias_add(x, b)), defer_bias_add(up, b)
        return up * h if turned else h * up

    assert_same(gated, lambda x, b, up: F.silu(x + b) * (up + b), leaves((3, 8), (8,), (3, 8)), 1e-12)
    assert ran == ["bias act gate"]


def test_a_factor_of_another_shape_is_not_fused(ran: list[str]) -> None:
    assert_same(
        lambda x, w: F.silu(defer_bias_add(x, None)) * w, lambda x, w: F.silu(x) * w, leaves((3, 8), (8,)), 1e-12
    )
    assert ran == ["act"]


def test_activation_is_deferred_until_its_values_are_read(ran: list[str]) -> None:
    x, b = leaves((3, 4, 8), (8,))
    h = F.gelu(defer_bias_add(x.bfloat16(), b))
    assert type(h) is DeferredActivation
    assert (h.shape, h.dtype, h.device, h.requires_grad) == (x.shape, torch.bfloat16, x.device, True)
    assert ran == []
    F.linear(h, torch.eye(8, dtype=torch.bfloat16))
    h.sum()
    assert ran == ["bias act"]


def test_backward_frees_all_saved_tensors() -> None:
    kept: list[Tensor] = []
    x, b, w = leaves((3, 4, 8), (8,), (8, 8))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t.clone(), lambda t: t):  # type: ignore[func-returns-value]
        loss = F.linear(F.gelu(defer_bias_add(x * 2, b)), w).sum()
    assert len(kept) == 3  # the activation's input; the product's two
    loss.backward()
    assert x.grad is not None and b.grad is not None


def test_fused_activation_works_under_no_grad_and_in_inference_mode() -> None:
    x, b = leaves((3, 8), (8,))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = F.linear(F.gelu(defer_bias_add(x + 0, b)), torch.eye(8, dtype=x.dtype))
            torch.testing.assert_close(y, F.gelu(x + b))
            assert not y.requires_grad


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it from users
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_kernel_equals_eager_for_any_batch_size(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    compiled = torch.compile(fused_ops.apply_bias_activation_gate, dynamic=True, backend=backend)
    monkeypatch.setattr(fused, "get_compiled_bias_act_gate", lambda device: compiled)
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    for shape in ((4, 6, 8), (3, 5, 8)):
        inputs = leaves(shape, (8,), shape, dtype=torch.float32)
        assert_same(
            lambda x, b, up: F.gelu(defer_bias_add(x, b), approximate="tanh") * up,
            lambda x, b, up: F.gelu(x + b, approximate="tanh") * up,
            inputs,
            1e-6,
        )
    assert counters["unique_graphs"] - before == 1
