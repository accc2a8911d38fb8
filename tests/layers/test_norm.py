"""Fused norms have the values of the class they replace, and keep its parameters."""

from __future__ import annotations

import copy
import importlib
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.kernels.fused_ops import PROBE_INPUTS, FusedLayerNorm, FusedRMSNorm, get_norm_kind, make_fused_norm

HIDDEN = 48
CLASSES = {
    "nn.LayerNorm": ("torch.nn", "LayerNorm", "layer"),
    "nn.RMSNorm": ("torch.nn", "RMSNorm", "torch"),
    "llama": ("transformers.models.llama.modeling_llama", "LlamaRMSNorm", "llama"),
    "mistral": ("transformers.models.mistral.modeling_mistral", "MistralRMSNorm", "llama"),
    "t5": ("transformers.models.t5.modeling_t5", "T5LayerNorm", "t5"),
    "gemma": ("transformers.models.gemma.modeling_gemma", "GemmaRMSNorm", "gemma"),
    "olmo2": ("transformers.models.olmo2.modeling_olmo2", "Olmo2RMSNorm", "olmo"),
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def native_norm(name: str) -> nn.Module:
    module, cls, _ = CLASSES[name]
    norm: nn.Module = getattr(importlib.import_module(module), cls)(HIDDEN, eps=1e-6)
    for i, p in enumerate(norm.parameters()):
        p.data = 1 + 0.3 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(i))
    return norm


def run(norm: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = x.clone().requires_grad_()
    y: Tensor = norm(x)
    return y.detach(), list(torch.autograd.grad(y, [x, *norm.parameters()], grad.to(y.dtype)))


def ulps(a: Tensor, b: Tensor) -> int:
    """Return the largest distance of two bf16 tensors in units in the last place."""
    as_int = [t.view(torch.int16).int() for t in (a, b)]
    return int(
        (
            torch.where(as_int[0] < 0, -32768 - as_int[0], as_int[0])
            - torch.where(as_int[1] < 0, -32768 - as_int[1], as_int[1])
        )
        .abs()
        .max()
    )


@pytest.mark.parametrize("name", CLASSES)
def test_norm_kind_is_identified_and_parameters_are_kept(name: str) -> None:
    native = native_norm(name).eval()
    fused = make_fused_norm(native)
    assert getattr(fused, "kind", "layer") == CLASSES[name][2]
    assert dict(fused.named_parameters()).keys() == dict(native.named_parameters()).keys()
    assert all(getattr(fused, n) is p for n, p in native.named_parameters())
    assert not fused.training
    public = {k: v for k, v in vars(native).items() if not k.startswith("_") and k != "training"}
    assert {k: getattr(fused, k) for k in public} == public
    assert make_fused_norm(fused) is fused


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_equal_the_native_norm(name: str, dtype: torch.dtype) -> None:
    native = native_norm(name).to(dtype)
    fused = make_fused_norm(copy.deepcopy(native))
    x, grad = torch.randn(2, 2, 5, HIDDEN, dtype=dtype) * 3
    # classes that compute in fp32 whatever comes have gradients with the noise of fp32
    in_fp64 = dtype == torch.float64 and CLASSES[name][2] in ("layer", "torch")
    (y, grads), (ref, ref_grads) = run(fused, x, grad), run(native, x, grad)
    torch.testing.assert_close(
        y, ref, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=1e-6 if not in_fp64 else 1e-12
    )
    for g, r in zip(grads, ref_grads, strict=True):
        torch.testing.assert_close(g, r, rtol=1e-11 if in_fp64 else 2e-6, atol=1e-11 if in_fp64 else 4e-6)


@pytest.mark.parametrize("name", CLASSES)
def test_bf16_outputs_differ_by_at_most_one_ulp(name: str) -> None:
    native = native_norm(name).bfloat16()
    fused = make_fused_norm(copy.deepcopy(native))
    x, grad = torch.randn(2, 64, HIDDEN).bfloat16()
    (y, grads), (ref, ref_grads) = run(fused, x, grad), run(native, x, grad)
    assert y.dtype == torch.bfloat16 and ulps(y, ref) <= 1
    for g, r in zip(grads, ref_grads, strict=True):
        assert (g - r).norm() <= 2e-2 * r.norm()


@pytest.mark.parametrize("name", ["llama", "t5", "gemma", "olmo2"])
@pytest.mark.parametrize("dtypes", PROBE_INPUTS, ids=str)
def test_mixed_dtypes_give_the_native_dtype_and_values(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    native = native_norm(name).to(dtypes[1])
    x = torch.randn(8, HIDDEN).to(dtypes[0])
    y, ref = make_fused_norm(native)(x), native(x)
    assert y.dtype == ref.dtype
    half = torch.bfloat16 in (y.dtype, x.dtype)
    torch.testing.assert_close(y, ref, rtol=2**-7 if half else 1e-6, atol=1e-6)


def test_autocast_gives_the_native_dtype() -> None:
    native = native_norm("llama")
    x = torch.randn(8, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        for inputs in (x, x.bfloat16()):
            y, ref = make_fused_norm(native)(inputs), native(inputs)
            assert y.dtype == ref.dtype
            torch.testing.assert_close(y, ref, rtol=1e-6, atol=1e-6)


def test_a_norm_on_the_meta_device_is_identified() -> None:
    with torch.device("meta"):
        native = native_norm("gemma")
    fused = make_fused_norm(native)
    assert isinstance(fused, FusedRMSNorm) and fused.kind == "gemma" and fused.weight is native.weight


def test_identification_does_not_use_the_random_state() -> None:
    native = native_norm("llama")
    before = torch.get_rng_state()
    make_fused_norm(native)
    assert torch.equal(torch.get_rng_state(), before)


class ScaledNorm(nn.Module):
    """An RMS norm that doubles its output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(HIDDEN)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.rms_norm(x, (HIDDEN,), self.weight, self.eps)


class GatedNorm(nn.RMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x) * (1 if gate is None else gate)


class LargerEpsNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 10 * self.eps)


@pytest.mark.parametrize(
    "module",
    [ScaledNorm(), GatedNorm(HIDDEN), LargerEpsNorm(HIDDEN), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Identity()],
)
def test_a_module_that_matches_no_formula_raises_with_its_name(module: nn.Module) -> None:
    for make in (make_fused_norm, FusedLayerNorm.from_native_module, FusedRMSNorm.from_native_module):
        with pytest.raises(ConfigError, match=type(module).__name__) as caught:
            make(module)
        assert caught.value.remedy


def test_an_unknown_option_raises() -> None:
    options: dict[str, Any] = {"gather_output": True}
    with pytest.raises(ConfigError, match="gather_output=True"):
        FusedRMSNorm.from_native_module(nn.RMSNorm(4), None, **options)


def test_norms_without_parameters_stay_without_parameters() -> None:
    x = torch.randn(3, HIDDEN)
    for native in (nn.LayerNorm(HIDDEN, elementwise_affine=False), nn.RMSNorm(HIDDEN, elementwise_affine=False)):
        fused = make_fused_norm(native)
        assert list(fused.parameters()) == []
        torch.testing.assert_close(fused(x), native(x))


def test_fused_layer_norm_is_an_instance_of_layer_norm() -> None:
    assert isinstance(make_fused_norm(nn.LayerNorm(4)), nn.LayerNorm)


class Slow(nn.LayerNorm):
    """A norm that calls ``before`` at the start of its forward pass."""

    before: Callable[[], Any]

    def forward(self, x: Tensor) -> Tensor:
        self.before()
        return super().forward(x)


def test_identification_in_two_threads_restores_warning_filters() -> None:
    """Without a lock, the second thread would restore the filters that the first thread had changed."""
    second_is_in, first_has_left = threading.Event(), threading.Event()

    class First(Slow):
        @staticmethod
        def before() -> None:
            if not futures:
                futures.append(pool.submit(get_norm_kind, Second(HIDDEN)))
                second_is_in.wait(0.3)

    class Second(Slow):
        @staticmethod
        def before() -> None:
            second_is_in.set()
            first_has_left.wait(60)

    futures: list[Future[str | None]] = []
    with warnings.catch_warnings(), ThreadPoolExecutor(1) as pool:
        filters = list(warnings.filters)
        assert get_norm_kind(First(HIDDEN)) == "layer"
        first_has_left.set()
        assert futures[0].result(60) == "layer"
        assert warnings.filters == filters


CALLS: list[int] = []


class Counted(nn.Module):
    """A norm that counts its calls. Its kind depends on an attribute of its class."""

    scaled = False

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(1)
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return ((1.0 + self.weight.float() if self.scaled else self.weight) * y.type_as(x)).type_as(x)


def test_equal_norms_are_identified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 80 layers has 160 equal norms. A norm that differs in anything is identified by its own output."""
    kind = get_norm_kind(Counted())
    assert kind == "olmo" and CALLS
    CALLS.clear()
    assert get_norm_kind(Counted()) == kind and not CALLS
    assert get_norm_kind(Counted(eps=1e-5)) == kind and CALLS
    other = Counted()
    monkeypatch.setattr(other, "forward", lambda x: x.tanh())
    assert get_norm_kind(other) is None
    monkeypatch.setattr(Counted, "scaled", True)
    assert get_norm_kind(Counted()) != kind
    monkeypatch.setattr(Counted, "forward", lambda self, x: x.tanh())
    assert get_norm_kind(Counted()) is None
