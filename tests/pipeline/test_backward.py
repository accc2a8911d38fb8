"""The input part and the weight part equal one backward pass bitwise, and each hook runs once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardformer.comm.recorder import CollectiveRecorder
from shardformer.gradients.buckets import GradientSlot
from shardformer.gradients.reducer import GradientReducer
from shardformer.layout.shard_spec import ShardSpec
from shardformer.layout.sharding_metadata import GradientReduction, ParamEntry
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import Axis
from shardformer.pipeline.split_backward import run_input_backward
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row

H = 8
Model = Callable[..., Any]


class Residual(nn.Module):
    def __init__(self, layers: int = 3, bias: bool = True) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(H, 2 * H, bias=bias) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(2 * H, H, bias=bias) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in range(layers))

    def layer(self, i: int, x: Tensor) -> Tensor:
        return x + self.downs[i](F.gelu(self.ups[i](self.norms[i](x))))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.ups)):
            x = self.layer(i, x)
        return x


class Checkpointed(Residual):
    reentrant = False
    calls = 0

    def layer(self, i: int, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            self.calls += 1
            return Residual.layer(self, i, x)

        return checkpoint(run, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class PartlyCheckpointed(Residual):
    def layer(self, i: int, x: Tensor) -> Tensor:
        if i == 1:
            return checkpoint(super().layer, i, x, use_reentrant=False)
        return super().layer(i, x)


class Reused(Residual):
    """One layer three times, as in ALBERT. Its first weight is also used directly before and after."""

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.ups[0].weight.t() @ self.ups[0].weight
        for _ in range(3):
            x = self.layer(0, x)
        return x @ self.ups[0].weight.t() @ self.ups[0].weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


class Computed(nn.Module):
    """Weights computed from others: chunked, normalized, and a product that two matmuls share."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(2 * H, H))
        self.a, self.b = nn.Parameter(torch.randn(H, H)), nn.Parameter(torch.randn(H, H))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(H, H))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.fused.chunk(2)
        product = self.a @ self.b
        x = torch.tanh(F.linear(torch.tanh(F.linear(x, first, self.a[0])), second))
        return self.normed(torch.tanh(x @ product) @ product) * self.b.sum()


class Halves(nn.Module):
    """Two inputs and two outputs. One output depends on the second input only."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x) * torch.sigmoid(self.two(y)), self.two(y)


class Beside(nn.Module):
    """An output that depends on no input, and a tensor that reaches an output outside the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.place = nn.Linear(H, H), nn.Parameter(torch.randn(4, H))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        places = torch.sin(self.place)
        return self.linear(x + places), self.linear(places), x.detach() * 2


class BesideReentrant(Reentrant):
    """A chain that cannot run in part, and an output that depends on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(4, H))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), torch.sin(self.place)


class TensorParallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear1D_Col(H, 2 * H), Linear1D_Row(2 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class _Matmul(torch.autograd.Function):
    """A custom function that counts its runs. ``careful`` checks ``needs_input_grad``."""

    runs: list[tuple[bool, ...]] = []

    @staticmethod
    def forward(ctx: Any, careful: bool, x: Tensor, w: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        ctx.careful, ctx.scale = careful, scale
        return x @ w * scale, x.sum() + w.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        _Matmul.runs.append(ctx.needs_input_grad)
        needs = ctx.needs_input_grad if ctx.careful else (False, True, True, False)
        x_grad = grad @ w.t() * ctx.scale + other if needs[1] else None
        w_grad = x.flatten(0, -2).t() @ grad.flatten(0, -2) * ctx.scale + other if needs[2] else None
        return None, x_grad, w_grad, None


class Custom(nn.Module):
    def __init__(self, careful: bool, both: bool) -> None:
        super().__init__()
        self.careful, self.both = careful, both
        self.w, self.v = nn.Parameter(torch.randn(H, H)), nn.Parameter(torch.randn(H, H))

    def forward(self, x: Tensor) -> Tensor:
        for w in (self.w, self.v, self.w):
            x, total = _Matmul.apply(self.careful, x, w, 0.5)
            x = torch.tanh(x) + (total if self.both else 0)
        return x


class Embedding(nn.Module):
    """A first stage: the ids need no gradient, and the embedding is also used as a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp = nn.Embedding(11, H), Residual(1)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.detach()[..., 0] * 3).long() % 11
        return self.mlp(self.embed(ids)) @ self.embed.weight.t()


def llama() -> nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaModel

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=20, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaModel(config)


def bert() -> nn.Module:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertModel

    config = BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=20,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False)


class Hidden(nn.Module):
    """A transformers model that receives hidden states, as a later stage does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(H, H), nn.GELU(), nn.Linear(H, H, bias=False), nn.Tanh(), nn.Linear(H, H)),
    "residual": Residual,
    "reused": Reused,
    "attention": Attention,
    "computed weights": Computed,
    "beside": Beside,
    "embedding": Embedding,
    "checkpointed": Checkpointed,
    "reentrant": Reentrant,
    "beside, reentrant": BesideReentrant,
    "partly checkpointed": PartlyCheckpointed,
    "tensor parallel": TensorParallel,
    "custom, careful": lambda: Custom(True, True),
    "custom, careful, an output unused": lambda: Custom(True, False),
    "custom, careless": lambda: Custom(False, True),
    "llama": lambda: Hidden(llama()),
    "bert": lambda: Hidden(bert()),
    "identity": nn.Identity,
}


def made(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]().to(dtype)


def width(name: str) -> int:
    return 32 if name in ("llama", "bert") else H


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def as_tuple(y: Any) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


def grads_for(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [some(*y.shape, seed=7 + i, dtype=y.dtype) for i, y in enumerate(outputs)]


def plainly(model: nn.Module, *inputs: Tensor) -> list[Tensor | None]:
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    outputs = as_tuple(model(*inputs))
    pairs = [(y, g) for y, g in zip(outputs, grads_for(outputs)) if y.requires_grad]
    torch.autograd.backward(*zip(*pairs))
    return [x.grad for x in inputs]


def in_parts(model: nn.Module, *inputs: Tensor) -> tuple[list[Tensor | None], Callable[[], None]]:
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    outputs = as_tuple(model(*inputs))
    found, rest = run_input_backward(outputs, grads_for(outputs), inputs)
    assert all(x.grad is None for x in inputs)
    return found, rest.run


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(found: dict[str, Tensor | None] | list[Tensor | None], want: Any) -> None:
    keys = want.keys() if isinstance(want, dict) else range(len(want))
    for key in keys:
        a, b = found[key], want[key]  # type: ignore[index]  # a dict and a list read alike
        assert (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b)), key


@pytest.mark.parametrize("name", MODELS)
def test_input_and_weight_parts_equal_one_backward_bitwise(name: str) -> None:
    model, plain = made(name), made(name)
    x = some(2, 4, width(name))
    want = plainly(plain, x)
    found, rest = in_parts(model, x)
    assert_same(found, want)
    rest()
    assert_same(grads_of(model), grads_of(plain))
    rest()  # a second run has nothing left to do
    assert_same(grads_of(model), grads_of(plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["residual", "reused", "attention", "llama", "tensor parallel"])
def test_split_backward_in_training_dtypes(name: str, dtype: torch.dtype) -> None:
    model, plain = made(name, dtype), made(name, dtype)
    x = some(2, 4, width(name)).to(dtype)
    want = plainly(plain, x)
    found, rest = in_parts(model, x)
    rest()
    assert_same(found, want)
    assert_same(grads_of(model), grads_of(plain))


@pytest.mark.parametrize("name", ["residual", "reused", "bert"])
def test_split_backward_under_autocast(name: str) -> None:
    model, plain = made(name, torch.float32), made(name, torch.float32)
    x = some(2, 4, width(name)).float()
    with torch.autocast("cpu", torch.bfloat16):
        want = plainly(plain, x)
        found, rest = in_parts(model, x)
    rest()
    assert_same(found, want)
    assert_same(grads_of(model), grads_of(plain))


@pytest.mark.parametrize("name", ["residual", "reused", "custom, careful", "tensor parallel", "llama"])
def test_parts_of_micro_batches_in_mixed_order(name: str) -> None:
    model, plain = made(name), made(name)
    batches = [some(2, 4, width(name), seed=i) for i in range(4)]
    for i in (1, 0, 2, 3):  # the order in which the weight parts come
        plainly(plain, batches[i])
    rests = {i: in_parts(model, batches[i])[1] for i in (0, 1)}
    rests[1]()
    rests[2] = in_parts(model, batches[2])[1]
    rests[0]()
    rests[2]()
    in_parts(model, batches[3])[1]()
    assert_same(grads_of(model), grads_of(plain))


def test_outputs_that_depend_on_some_inputs() -> None:
    torch.manual_seed(1)
    model = Halves().double()
    plain = deepcopy(model)
    x, y = some(2, H), some(2, H, seed=1)
    want = plainly(plain, x, y)
    found, rest = in_parts(model, x, y)
    rest()
    assert_same(found, want)
    assert_same(grads_of(model), grads_of(plain))


def test_unused_input_has_no_gradient() -> None:
    model = Halves().double()
    x, y, z = some(2, H).requires_grad_(), some(2, H).requires_grad_(), some(2, H).requires_grad_()
    outputs = model(x, y)
    found, rest = run_input_backward(outputs[1:], grads_for(outputs[1:]), [x, some(2, H), y, z])
    assert [grad is None for grad in found] == [True, True, False, True]
    rest.run()
    assert model.one.weight.grad is None and model.two.weight.grad is not None


def test_loss_needs_no_gradient_and_output_without_gradient_is_skipped() -> None:
    model, x = Residual().double(), some(2, H).requires_grad_()
    y = model(x)
    (found,), rest = run_input_backward([y.sum(), y], [None, None], [x])
    rest.run()
    got = grads_of(model)
    model.zero_grad()
    y = model(x)
    y.sum().backward()
    assert_same({**got, "x": found}, {**grads_of(model), "x": x.grad})


def test_output_can_be_an_input_or_a_parameter() -> None:
    x, w = some(3).requires_grad_(), some(3).requires_grad_()
    (found,), rest = run_input_backward([x, w], [some(3, seed=1), some(3, seed=2)], [x])
    assert found is not None and torch.equal(found, some(3, seed=1)) and w.grad is None
    rest.run()
    assert w.grad is not None and torch.equal(w.grad, some(3, seed=2)) and x.grad is None


def test_without_inputs_everything_is_the_weight_part() -> None:
    model, plain = made("embedding"), made("embedding")
    x = some(2, 4, H)
    plainly(plain, x)
    y = model(x)
    found, rest = run_input_backward([y], grads_for([y]), [])
    assert found == [] and all(p.grad is None for p in model.parameters())
    rest.run()
    assert_same(grads_of(model), grads_of(plain))


@pytest.mark.parametrize("name", ["residual", "custom, careful", "tensor parallel"])
def test_only_weight_part_accumulates_weight_gradients(name: str) -> None:
    model = made(name)
    _, rest = in_parts(model, some(2, 4, H))
    assert all(p.grad is None for p in model.parameters())
    rest()
    assert all(p.grad is not None for p in model.parameters())


def test_frozen_stage_has_empty_weight_part() -> None:
    model, plain = made("residual"), made("residual")
    for net in (model, plain):
        net.requires_grad_(False)
    found, rest = in_parts(model, some(2, H))
    rest()
    assert_same(found, plainly(plain, some(2, H)))
    assert all(p.grad is None for p in model.parameters())


def test_partly_frozen_stage() -> None:
    model, plain = made("residual"), made("residual")
    for net in (model, plain):
        for name, p in net.named_parameters():
            p.requires_grad_("bias" in name or "ups.1" in name)
    found, rest = in_parts(model, some(2, H))
    rest()
    assert_same(found, plainly(plain, some(2, H)))
    assert_same(grads_of(model), grads_of(plain))


@pytest.mark.parametrize(
    "name", ["residual", "reused", "computed weights", "checkpointed", "custom, careless", "llama"]
)
def test_parameter_hooks_run_once_with_full_gradient(name: str) -> None:
    model, plain = made(name), made(name)
    seen: dict[str, list[Tensor]] = {}
    after: list[str] = []
    for key, p in model.named_parameters():
        p.register_hook(lambda grad, key=key: seen.setdefault(key, []).append(grad.clone()))
        p.register_post_accumulate_grad_hook(lambda _, key=key: after.append(key))
    x = some(2, 4, width(name))
    plainly(plain, x)
    in_parts(model, x)[1]()
    want = {key: grad for key, grad in grads_of(plain).items() if grad is not None}
    assert sorted(after) == sorted(seen) == sorted(want)
    assert all(len(grads) == 1 and torch.equal(grads[0], want[key]) for key, grads in seen.items())


def test_activation_and_module_hooks_run_once() -> None:
    model, plain = made("residual"), made("residual")
    calls: list[str] = []

    def doubled(module: nn.Module, _: Any, y: Tensor) -> None:
        y.register_hook(lambda grad: calls.append("tensor") or grad * 2)

    for net in (model, plain):
        net.ups[1].register_forward_hook(doubled)
        net.ups[2].register_full_backward_hook(lambda *_: calls.append("module"))
    want = plainly(plain, some(2, H))
    assert sorted(calls) == ["module", "tensor"]
    calls.clear()
    found, rest = in_parts(model, some(2, H))
    rest()
    assert sorted(calls) == ["module", "tensor"]
    assert_same(found, want)
    assert_same(grads_of(model), grads_of(plain))


def test_gradients_are_all_reduced_once() -> None:
    model, plain = made("reused"), made("reused")
    axis = Axis.of(None)
    ends: list[int] = []

    class Counted(GradientReducer):
        def _on_backward_end(self) -> None:
            ends.append(1)  # no other rank to average with

    quarter = GradientReduction(divisor=0.25)
    gradients = [GradientSlot(ParamEntry("", p, ShardSpec(p.shape), quarter), axis, {}) for p in model.parameters()]
    reducer = Counted(gradients, bucket_bytes=1 << 30)
    plainly(plain, some(2, H))
    in_parts(model, some(2, H))[1]()
    assert ends == [1] and reducer is not None  # what it sends at the end of a backward pass goes out once
    for key, grad in grads_of(plain).items():
        found = grads_of(model)[key]
        assert (found is None) == (grad is None) and (found is None or torch.equal(found, grad * 4))


def test_checkpointed_layer_is_recomputed_once() -> None:
    model = made("checkpointed")
    assert isinstance(model, Checkpointed)
    _, rest = in_parts(model, some(2, H))
    rest()
    assert model.calls == 2 * 3  # forward, and once more


def test_custom_function_runs_each_half_once_or_runs_once() -> None:
    x, only_w, only_x, both = some(2, H), (False, False, True, False), (False, True, False, False), (False, True) * 2
    _Matmul.runs.clear()
    _, rest = in_parts(Custom(True, True).double(), x)
    assert _Matmul.runs == [only_x] * 3
    rest()
    assert _Matmul.runs[3:] == [only_w] * 3
    _Matmul.runs.clear()
    in_parts(Custom(False, True).double(), x)[1]()
    assert len(_Matmul.runs) == 3 and both not in _Matmul.runs


def test_each_part_computes_only_its_own_gradients() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, x = made("residual"), some(2, 4, H)
    flops = []
    y = model(x.requires_grad_())
    with FlopCounterMode(display=False) as counter:
        _, rest = run_input_backward([y], grads_for([y]), [x])
    flops.append(counter.get_total_flops())
    with FlopCounterMode(display=False) as counter:
        rest.run()
    flops.append(counter.get_total_flops())
    y = model(x)
    with FlopCounterMode(display=False) as counter:
        y.backward(grads_for([y])[0])
    assert flops[0] == flops[1] and sum(flops) == counter.get_total_flops()


class _Own:
    """An object that supports weak references."""


def storages(node: Any, seen: set[Any] | None = None) -> set[tuple[str, int]]:
    """(node, bytes) of the tensors with at least two dims that a graph stores and that do not train."""
    seen = set() if seen is None else seen
    found = set()
    for name in (name for name in dir(node) if name.startswith("_raw_saved_")):
        saved = getattr(node, name)
        for one in saved if isinstance(saved, tuple) else [saved]:
            data = one.data if one is not None else None
            if data is not None and data.dim() > 1 and not isinstance(data, nn.Parameter):
                found.add((node.name(), data.data_ptr()))
    for follower, _ in node.next_functions:
        if follower is not None and follower not in seen:
            seen.add(follower)
            found |= storages(follower, seen)
    return found


def test_each_part_frees_the_tensors_that_it_alone_needs() -> None:
    model, x = made("residual"), some(2, H).requires_grad_()
    y = model(x)
    assert any(name.startswith("Gelu") for name, _ in storages(y.grad_fn))
    _, rest = run_input_backward([y], grads_for([y]), [x])
    held = storages(y.grad_fn)
    assert {name for name, _ in held} == {"AddmmBackward0", "NativeLayerNormBackward0"}
    own = weakref.ref(y.grad_fn.metadata.setdefault("own", _Own()))  # lives as long as the graph
    del y
    gc.disable()  # nothing may wait for it
    try:
        assert own() is not None
        rest.run()
        assert own() is None
    finally:
        gc.enable()


def test_finished_custom_function_frees_its_tensors() -> None:
    model, x = made("custom, careless"), some(2, H).requires_grad_()
    y = model(x)
    assert any("_Matmul" in name for name, _ in storages(y.grad_fn))
    rest = run_input_backward([y], grads_for([y]), [x])[1]
    assert storages(y.grad_fn) == set()
    rest.run()


def _over_ranks() -> tuple[int, int, int]:
    model, x = made("tensor parallel"), some(2, 4, H)
    plain = deepcopy(model)
    assert isinstance(model, TensorParallel) and isinstance(plain, TensorParallel)
    with CollectiveRecorder(plain.up.axis) as whole:
        want = plainly(plain, x)
    with CollectiveRecorder(model.up.axis) as first:
        found, rest = in_parts(model, x)
    assert all(p.grad is None for p in model.parameters())
    with CollectiveRecorder(model.up.axis) as second:
        rest()
    assert_same(found, want)
    assert_same(grads_of(model), grads_of(plain))
    return whole.count("all_reduce"), first.count("all_reduce"), second.count("all_reduce")


def test_input_part_runs_all_tensor_parallel_communication(pool2: WorkerPool) -> None:
    assert pool2.run(_over_ranks) == [(1, 1, 0)] * 2  # the column's, in backward


def test_second_backward_through_used_graph_raises() -> None:
    model, x = made("residual"), some(2, H).requires_grad_()
    y = model(x)
    run_input_backward([y], grads_for([y]), [x])
    with pytest.raises(RuntimeError, match="already been freed"):
        y.sum().backward()


def test_failure_removes_all_hooks() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if fails:
                raise ValueError("as asked")
            return grad

    fails = True
    model, x = Custom(True, False).double(), some(2, H).requires_grad_()
    y = model(Fails.apply(x))
    with pytest.raises(ValueError, match="as asked"):
        run_input_backward([y], grads_for([y]), [x])
    fails = False
    function = y.grad_fn.next_functions[0][0].next_functions[0][0]
    assert "_Matmul" in function.name() and vars(function).keys() == {"careful", "scale"}
    _Matmul.runs.clear()
    y.backward(grads_for([y])[0])
    assert _Matmul.runs == [(False, True, True, False)] * 3
