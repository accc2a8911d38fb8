"""Saved tensors are on the host until the backward pass needs them, and gradients are bitwise equal."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from shardformer.errors import ConfigError
from shardformer.offload.activations import (
    PREFETCH_COUNT,
    ActivationStore,
    _register_activation_store_hooks,
    offload_activations,
)
from shardformer.offload.host import DEVICE_TO_HOST, HOST_TO_DEVICE, HostDeviceCopier
from shardformer.offload.saved_tensor_hooks import FETCHED, ActivationStats

Gradients = list[Tensor | None]


class Net(nn.Module):
    """A module with views, an expanded tensor, saved results, and tensors that can be modified in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("scale", torch.linspace(1, 2, 16))

    def forward(self, x: Tensor, changes: bool = False) -> Tensor:
        q, k, v = self.a(x).chunk(3, -1)
        h = torch.tanh(q) * k.transpose(-1, -2).reshape(q.shape) + v.sigmoid() * self.scale
        e = h[:, :1].expand_as(h) * h
        y = self.b(e)
        if changes:
            e.mul_(2)
        out: Tensor = (y * h).sum()
        return out


X = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(1))


def once(model: nn.Module) -> None:
    model(X).backward()


def twice_through_one_graph(model: nn.Module) -> None:
    loss = model(X)
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards(model: nn.Module) -> None:
    one, two = model(X), model(2 * X)
    (one * two).backward()


def gradients_of_gradients(model: nn.Module) -> None:
    first = torch.autograd.grad(model(X), list(model.parameters()), create_graph=True)
    torch.stack([g.square().sum() for g in first]).sum().backward()


def a_forward_that_is_given_up(model: nn.Module) -> None:
    model(3 * X)
    once(model)


def what_is_saved_is_changed(model: nn.Module) -> None:
    model(X, changes=True).backward()


def gradients(model: nn.Module, use: Callable[[nn.Module], None]) -> Gradients:
    model.zero_grad()
    use(model)
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(a: Gradients, b: Gradients) -> bool:
    return all(x is y is None or (x is not None and y is not None and torch.equal(x, y)) for x, y in zip(a, b))


def stored(model: nn.Module, link: HostDeviceCopier | None = None, min_bytes: int = 0) -> ActivationStore:
    store = ActivationStore(True, None, min_bytes, link)
    _register_activation_store_hooks(model, store, {})
    return store


def drained(store: ActivationStore) -> ActivationStats:
    """Return the stats after all copies to the host are complete."""
    while store._copying_to_host:
        store._finish_offload(store._copying_to_host.popleft())
    return store.stats()


USES = [once, twice_through_one_graph, two_forwards, gradients_of_gradients, a_forward_that_is_given_up]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("bandwidth", [None, 1e6], ids=["fast", "slow"])
def test_gradients_are_identical_and_all_memory_is_freed(
    use: Callable[[nn.Module], None], bandwidth: float | None
) -> None:
    model = Net()
    expected = gradients(model, use)
    store = stored(model, HostDeviceCopier(torch.device("cpu"), bandwidth=bandwidth))
    assert same(gradients(model, use), expected)
    gc.collect()
    figures = drained(store)
    assert (sum(figures.device.values()), figures.host) == (0, 0)
    assert figures.most_host > 10_000 and figures.bandwidth[DEVICE_TO_HOST] is not None
    assert "On the host: 0 bytes, at most" in str(figures)


def test_inplace_change_of_a_saved_tensor_raises() -> None:
    for model in (Net(), Net()):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(model, what_is_saved_is_changed)
        stored(model)
        with pytest.raises(RuntimeError, match=r"shape \(32, 16\) is at version 1; expected version 0"):
            gradients(model, what_is_saved_is_changed)
        assert same(gradients(model, once), gradients(Net(), once))


class Keep(Function):
    """Save tensors and compare the restored ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        ctx.copies = [(t.clone(), t.stride(), t.dtype) for t in kept]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        for t, (value, stride, dtype) in zip(ctx.saved_tensors, ctx.copies, strict=True):
            assert torch.equal(t, value) and (t.stride(), t.dtype) == (stride, dtype)
        return (grad, *[None] * len(ctx.copies))


class Keeper(nn.Module):
    def __init__(self, make: Callable[[], list[Tensor]]) -> None:
        super().__init__()
        self.weight, self.make = nn.Parameter(torch.ones(3)), make

    def forward(self) -> Tensor:
        out: Tensor = Keep.apply(self.weight, *self.make())
        return out


def kinds() -> list[Tensor]:
    x, big = torch.randn(6, 8, 10), torch.randn(64, 50)
    bits = torch.arange(240, dtype=torch.uint8)
    return [
        *(x, x.transpose(0, 2), x[1:3], x[:, 2], x[:, :, 1:2].expand(6, 8, 5), x.as_strided((3, 4), (2, 1), 7)),
        *(big[3], big[5:9], big.t()[2:4], torch.arange(200), torch.randn(70) > 0, bits[3:203], bits.view(torch.int16)),
        *(torch.randn(9, dtype=torch.complex64), torch.randn(9, dtype=torch.complex64).conj(), torch.tensor(2.5)),
        *(torch.empty(0, 4), torch.randn(5, 5).to(torch.bfloat16), torch.randn(4, 4).to_sparse().to_dense()),
    ]


def test_views_keep_their_strides_and_dtypes() -> None:
    model = Keeper(kinds)
    store = stored(model)
    model().sum().backward()
    assert store.stats().most_host > 64 * 50 * 4


def test_views_share_storage_and_small_slices_do_not() -> None:
    x, big = torch.randn(30, 40), torch.randn(1000, 10)
    store = stored(model := Keeper(lambda: [*x.chunk(3, 1), x, x.t(), big[10:14], big[10:14].t()]))
    loss = model().sum()
    assert store.stats().host == 30 * 40 * 4 + 4 * 10 * 4
    loss.backward()


@pytest.mark.parametrize("enabled", [False, True])
def test_parameters_their_views_and_casts_and_buffers_are_not_moved(enabled: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.BatchNorm1d(64).eval(), nn.Linear(64, 64))
    store = stored(model, min_bytes=65)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        loss = model(torch.randn(2, 64)).float().sum()
    assert drained(store).host == 4 * 2 * 64 * (2 if enabled else 4)  # the inputs of all four, in 16 bits or 32
    loss.backward()
    assert drained(store).host == 0


class Deep(nn.Module):
    """Checkpointed layers with inputs of equal size. ``at`` is called before each layer."""

    def __init__(self, layers: int = 12, width: int = 32, *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.reentrant, self.at = reentrant, lambda x: None

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for layer in self.layers:
            self.at(x)  # type: ignore[func-returns-value]
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)) + x, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_at_most_two_checkpoint_inputs_are_on_the_device(reentrant: bool) -> None:
    """Only storages in copy (forward pass) or prefetched (backward pass) are on the device."""
    model, x = Deep(reentrant=reentrant), torch.randn(64, 32, requires_grad=True)
    size = x.nbytes
    expected = gradients(model, lambda m: m(x).sum().backward())
    seen: list[StorageWeakRef] = []
    model.at = lambda x: seen.append(StorageWeakRef(x.untyped_storage()))
    store = stored(model, HostDeviceCopier(torch.device("cpu"), bandwidth=2e7))
    model.zero_grad()
    loss = model(x).sum()
    forward = store.stats()
    assert forward.most_host == 12 * size and forward.most <= (PREFETCH_COUNT + 1) * size
    assert sum(not storage.expired() for storage in seen) <= PREFETCH_COUNT + 1  # the memory was freed
    held: list[int] = []
    for layer in model.layers:
        layer.weight.register_hook(lambda grad: held.append(store.stats().device[FETCHED]))
    store.reset()
    loss.backward()
    assert same([p.grad for p in model.parameters()], expected)
    assert store.stats().most <= (2 * PREFETCH_COUNT + 1) * size
    assert sorted(held)[len(held) // 2] >= 2 * size, "nothing was brought ahead"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_gpu_memory_is_freed() -> None:
    def peak(on: str) -> tuple[int, Gradients]:
        model, x = Deep(24, 1024).cuda(), torch.randn(4096, 1024, device="cuda", requires_grad=True)
        store = offload_activations(model, on)
        torch.cuda.reset_peak_memory_stats()
        begin = torch.cuda.memory_allocated()
        loss = model(x).sum()
        in_forward = torch.cuda.max_memory_allocated() - begin
        loss.backward()
        torch.cuda.synchronize()
        assert on == "device" or (store.stats().bandwidth[HOST_TO_DEVICE] or 0) > 0
        return in_forward, [p.grad for p in model.parameters()]

    (host, found), (device, expected) = peak("host"), peak("device")
    assert same(found, expected) and host < device - 12 * 4096 * 1024 * 4


def test_without_moves_the_store_counts_all_inputs() -> None:
    model, x = Deep(), torch.randn(64, 32, requires_grad=True)
    store = offload_activations(model, "device", min_bytes=0)
    loss = model(x).sum()
    assert sum(store.stats().device.values()) == 12 * x.nbytes
    loss.backward()
    assert (store.stats().most, store.stats().most_host) == (12 * x.nbytes, 0)


def test_tensors_below_min_bytes_are_not_moved() -> None:
    model, x = Deep(), torch.randn(64, 32, requires_grad=True)
    store = offload_activations(model, min_bytes=x.nbytes + 1)
    model(x).sum().backward()
    assert (store.stats().most, store.stats().most_host) == (12 * x.nbytes, 0)


def test_prefetch_follows_the_order_of_the_backward_pass() -> None:
    model, x = Deep(5), torch.randn(64, 32, requires_grad=True)
    store = stored(model, link := HostDeviceCopier(torch.device("cpu")))
    loss = model(x).sum()
    drained(store)
    loss.backward()
    assert [copied.direction for copied in link.log] == [DEVICE_TO_HOST] * 5 + [HOST_TO_DEVICE] * 5


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_under_a_checkpoint_is_identical(reentrant: bool) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh())
        return Around(layer, reentrant)

    expected = gradients(model(), seeded)
    stored(other := model())
    assert same(gradients(other, seeded), expected)


class Around(nn.Module):
    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x


def seeded(model: nn.Module) -> None:
    torch.manual_seed(7)
    model((X * 1).requires_grad_()).square().sum().backward()


# ------------------------------------------------------------------------------------------------- beside other things


def top() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def test_foreign_hooks_around_a_forward_store_its_tensors() -> None:
    model = Net()
    expected = gradients(model, once)
    store = stored(model)
    for reentrant in (False, True):
        gradients(model, lambda m, r=reentrant: checkpoint(m, X.clone().requires_grad_(), use_reentrant=r).backward())
        assert same([p.grad for p in model.parameters()], expected)
    with torch.autograd.graph.save_on_cpu():
        loss = model(X)
    assert same(gradients(model, lambda m: loss.backward()), expected)
    assert store.stats().most_host == 0 and top() is None


def test_without_gradients_nothing_is_stored() -> None:
    store = stored(model := Net())
    with torch.no_grad():
        model(X)
    with torch.inference_mode():
        model(X)
    assert (store.stats().most, store.stats().most_host) == (0, 0)


def test_nested_and_copied_models_have_their_own_store() -> None:
    inner = Net()
    expected = gradients(inner, once)
    own, around = stored(inner), stored(outer := nn.Sequential(nn.Linear(16, 16), inner))
    outer(X).backward()
    assert own.stats().most_host > around.stats().most_host > 0
    other = copy.deepcopy(inner)
    own.reset()
    assert same(gradients(other, once), expected)
    assert own.stats().most_host == 0 and top() is None


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_interrupted_forward_pass_leaves_no_hooks(kind: type[BaseException]) -> None:
    model = Net()
    expected = gradients(model, once)
    stored(model)

    def fail(*_: Any) -> None:
        raise kind

    hook = model.b.register_forward_pre_hook(fail)
    with pytest.raises(kind):
        model(X)
    hook.remove()
    assert same(gradients(model, once), expected)
    assert top() is None


@pytest.mark.slow
def test_compiled_submodules_and_models() -> None:
    model = Net()
    expected = gradients(model, once)
    store = stored(part := copy.deepcopy(model))
    part.a.compile(backend="aot_eager")
    assert same(gradients(part, once), expected)
    assert store.stats().most_host > 0
    stored(whole := copy.deepcopy(model))
    compiled: Any = torch.compile(whole, backend="aot_eager")
    assert same(gradients(whole, lambda _: compiled(X).backward()), expected)


@pytest.mark.slow
def test_model_compiles_without_graph_breaks() -> None:
    stored(model := nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), model(X))


def test_second_call_raises_and_remove_is_final() -> None:
    store = offload_activations(model := Net(), min_bytes=0)
    loss = model(X)
    with pytest.raises(ConfigError, match="offload_activations was already called for this Net"):
        offload_activations(model)
    store.remove()
    loss.backward()  # stored tensors remain available
    store.reset()
    once(model)
    assert store.stats().most_host == 0
    offload_activations(model, min_bytes=0).remove()
    with pytest.raises(ConfigError, match=r"to='disk'.*'device', 'host', 'tensor', 'tensor.host'"):
        offload_activations(model, "disk")
    with pytest.raises(ConfigError, match=r"this Net with to='tensor', because its layers are unknown"):
        offload_activations(model, "tensor")
