"""Chains give the numbers, the gradients and the random stream of the plain operations, whatever a forward does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shardformer.errors import ConfigError, ShardFormerError
from shardformer.layers import fused_kernels as chain_kernels
from shardformer.layers.fused import OPERATIONS, JitActivation, JitDropout, finish, jit_problem, start_chain
from shardformer.layers.fused_chain import Chain
from shardformer.layers.fused_kernels import FORMULAS, Op, Signature, saved_inputs

HIDDEN = 24
NEW, SILU, GELU = JitActivation(Op("gelu_new")), JitActivation(Op("silu")), JitActivation(Op("gelu"))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fuse_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a device on which every chain is worth a kernel."""
    monkeypatch.setattr(chain_kernels, "FUSES_ALL", ("cpu",))


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch, fuse_all: None) -> Iterator[list[str]]:
    """Every chain is a kernel, made without the compiler; gives what ran."""
    ran: list[str] = []

    def kernel(function: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
        def noted(*inputs: Tensor) -> Any:
            kinds = " ".join(op.kind for op in signature.program)
            ran.append(kinds if not signature.wanted else f"backward of {' '.join(map(str, signature.wanted))}")
            return function(*inputs)

        return noted

    monkeypatch.setattr(chain_kernels, "_Kernel", kernel)
    chain_kernels._kernel.cache_clear()
    yield ran
    chain_kernels._kernel.cache_clear()


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def assert_same(ours: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], bound: float) -> None:
    """The same values, gradients of all inputs, and random numbers afterwards."""
    torch.manual_seed(7)
    y, after = ours(*inputs), torch.get_rng_state()
    torch.manual_seed(7)
    ref = plain(*inputs)
    assert torch.equal(after, torch.get_rng_state())
    assert y.dtype == ref.dtype and y.shape == ref.shape
    grad = torch.randn_like(ref)
    for a, b in zip([finish(y), *grads_of(y, inputs, grad)], [ref, *grads_of(ref, inputs, grad)], strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=bound, atol=bound * float(b.detach().abs().max().clamp(min=1)))


def grads_of(y: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    for x in inputs:
        x.grad = None
    y.backward(grad, retain_graph=True)
    assert all(x.grad is not None for x in inputs)
    return [x.grad for x in inputs if x.grad is not None]


def native(kind: str, value: float = 0.0) -> Callable[[Tensor], Tensor]:
    return lambda x: FORMULAS[kind](x, None, value)


# ours, plain, shapes of the inputs after x
CHAINS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], int]] = {
    "bias gelu_new": (lambda x, b: NEW(start_chain(x, b)), lambda x, b: native("gelu_new")(x + b), 0),
    "bias gelu": (lambda x, b: GELU(start_chain(x, b)), lambda x, b: F.gelu(x + b), 0),
    "silu mul": (lambda x, b, up: SILU(x) * (up + b), lambda x, b, up: F.silu(x) * (up + b), 1),
    "bias dropout add": (
        lambda x, b, r: r + JitDropout(0.2)(start_chain(x, b)),
        lambda x, b, r: r + F.dropout(x + b, 0.2),
        1,
    ),
}


@pytest.mark.parametrize(
    ("chain", "dtype", "bound"),
    [
        ("bias gelu_new", torch.float32, 1e-6),
        ("bias gelu_new", torch.float64, 1e-12),
        ("silu mul", torch.bfloat16, 2e-2),
        ("bias dropout add", torch.float32, 1e-6),
    ],
    ids=str,
)
def test_compiled_once_for_any_batch_with_the_plain_numbers(
    chain: str, dtype: torch.dtype, bound: float, fuse_all: None
) -> None:
    ours, plain, more = CHAINS[chain]
    before = num_graphs()
    # the first batch has as many tokens as features; a single token gets no kernel
    for shape in ((4, 6, HIDDEN), (3, 5, HIDDEN), (7, HIDDEN), (2, 2, 3, HIDDEN + 8), (1, 1, HIDDEN)):
        assert_same(ours, plain, leaves(shape, shape[-1:], *[shape] * more, dtype=dtype), bound)
    assert num_graphs() - before == 2  # one forward, one backward


def test_the_cpu_compiles_what_is_several_operations_and_leaves_the_rest_to_torch() -> None:
    before = num_graphs()
    for chain in ("bias gelu", "silu mul", "bias dropout add"):
        ours, plain, more = CHAINS[chain]
        shape = (4, 6, HIDDEN)
        assert_same(ours, plain, leaves(shape, (HIDDEN,), *[shape] * more), 1e-6)
    assert num_graphs() == before
    x, b = leaves((4, HIDDEN), (HIDDEN,))
    assert isinstance(NEW(start_chain(x, b)), Chain) and not isinstance(GELU(start_chain(x, b)), Chain)


ACTIVATIONS = {
    **{name: ("transformers.activations", name) for name in OPERATIONS if name.endswith(("Activation", "Tanh"))},
    "BloomGelu": ("transformers.models.bloom.modeling_bloom", "BloomGelu"),
    **{name: ("torch.nn", name) for name in ("SiLU", "ReLU", "GELU", "Tanh", "Sigmoid")},
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_gives_the_native_numbers(name: str, not_compiled: list[str]) -> None:
    module, cls = ACTIVATIONS[name]
    act: nn.Module = getattr(pytest.importorskip(module), cls)()
    jit = JitActivation.from_native_module(act)
    assert_same(
        lambda x, b: jit(start_chain(x, b)),
        lambda x, b: act(x + b),
        leaves((5, 3, 8), (8,), dtype=torch.float64),
        1e-12,
    )
    assert_same(jit, act, leaves((5, 3, 8), dtype=torch.float64), 1e-12)
    assert not_compiled[:2] == [f"bias {jit.op.kind}", "backward of 0 1"]


def test_of_two_chains_the_longer_one_takes_in_the_sum(not_compiled: list[str]) -> None:
    """GPT-J adds its attention, without a bias, to its MLP, with one."""
    assert_same(
        lambda x, b, y: start_chain(y) + start_chain(x, b),
        lambda x, b, y: y + (x + b),
        leaves((5, 8), (8,), (5, 8), dtype=torch.float64),
        1e-12,
    )
    assert not_compiled[0] == "bias add"


def test_tanh_gelu_of_torch_is_told_from_the_exact_one() -> None:
    assert JitActivation.from_native_module(nn.GELU("tanh")).op == Op("gelu_tanh")
    assert JitActivation.from_native_module(nn.GELU()).op == Op("gelu")
    assert repr(JitActivation.from_native_module(nn.SiLU())) == "JitActivation(silu)"


@pytest.mark.parametrize("act", [nn.Mish(), nn.PReLU(), nn.ReLU(inplace=True), nn.Linear(2, 2)])
def test_an_activation_that_chains_do_not_know_is_refused(act: nn.Module) -> None:
    with pytest.raises(ConfigError, match=type(act).__name__):
        JitActivation.from_native_module(act)


def test_a_dropout_that_is_not_plain_is_refused() -> None:
    for module in (nn.Dropout(0.1, inplace=True), nn.AlphaDropout(0.1), nn.Identity()):
        with pytest.raises(ConfigError, match="chain takes in nn"):
            JitDropout.from_native_module(module)
    assert not JitDropout.from_native_module(nn.Dropout(0.1).eval()).training
    options: dict[str, Any] = {"p": 1}
    with pytest.raises(ConfigError, match="p=1"):
        JitDropout.from_native_module(nn.Dropout(0.1), **options)


def test_what_backward_keeps() -> None:
    """Bias, dropout and residual: the mask, of one byte each; no activation."""
    assert saved_inputs((Op("bias"), Op("dropout", 0.1), Op("add"))) == (False, False, True, False)
    assert saved_inputs((Op("bias"), Op("gelu"))) == (True, True)
    assert saved_inputs((Op("silu"), Op("mul"), Op("dropout", 0.1), Op("add"))) == (True, True, True, False)


# -- whatever a forward does -------------------------------------------------------------------------------------------


class Doubled(Function):
    """A function that no ``__torch_function__`` announces, as the project's own collectives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        flat = (2 * grad).reshape(-1, grad.shape[-1])
        return (2 * grad) @ weight, flat.t() @ x.reshape(-1, x.shape[-1])


class Same(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


def used_twice(h: Tensor, w: Tensor) -> Tensor:
    return F.linear(h, w) + F.linear(h.square(), w) + h


def in_place(h: Tensor, w: Tensor) -> Tensor:
    h += w[0]
    h.mul_(2)
    return F.linear(h, w) + h


def item_assignment(h: Tensor, w: Tensor) -> Tensor:
    h[0] = 1.0
    return h * w[0]


def hooked(h: Tensor, w: Tensor) -> Tensor:
    h.register_hook(lambda grad: 5 * grad)
    return F.linear(h, w)


def kept_elsewhere(h: Tensor, w: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        y: Tensor = Doubled.apply(h, w)
        return y.tanh() * h


def below(h: Tensor, w: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return F.linear(h, w)


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "a custom function": Doubled.apply,
    "a custom function that returns its input": lambda h, w: F.linear(Same.apply(h), w),
    "used twice": used_twice,
    "in place": in_place,
    "an item assigned": item_assignment,
    "a hook": hooked,
    "an operation that is not announced": below,
    "saved tensors kept elsewhere": kept_elsewhere,
    "views and reductions": lambda h, w: (h.view(-1, 2).transpose(0, 1).sum() + h[..., :3].mean()) * w,
    "scaled": lambda h, w: F.linear(0.5 * h + 1.0, w),
    "both sides": lambda h, w: h * h + h * w[0],
    "broadcast": lambda h, w: h + w[0],
    "stacked": lambda h, w: torch.cat([h, torch.stack([h[0]] * 2)]) * w[0],
    "checkpointed": lambda h, w: checkpoint(lambda x: F.linear(x, w).tanh() + x, h, use_reentrant=False),
    "checkpointed the old way": lambda h, w: checkpoint(lambda x: F.linear(x, w).tanh() + x, h, use_reentrant=True),
}


@pytest.mark.parametrize("use", USES)
def test_no_use_of_a_chain_loses_a_gradient(use: str, not_compiled: list[str]) -> None:
    inputs = leaves((3, 4, 8), (8,), (8, 8), dtype=torch.float64)
    assert_same(
        lambda x, b, w: USES[use](GELU(start_chain(x, b)), w),
        lambda x, b, w: USES[use](F.gelu(x + b), w),
        inputs,
        1e-12,
    )
    assert not_compiled


def test_a_chain_knows_what_it_will_be_without_computing(not_compiled: list[str]) -> None:
    x, b, r = leaves((3, 4, 8), (8,), (3, 4, 8))
    chain = F.silu(start_chain(x.bfloat16(), b)) * r
    assert type(chain) is Chain
    assert (chain.shape, chain.dtype, chain.device, chain.dim()) == (x.shape, torch.float32, x.device, 3)
    assert chain.requires_grad and not chain.is_leaf and chain.size(-1) == len(b) and hash(chain) == hash(chain)
    assert not_compiled == []
    assert "grad_fn" in repr(chain)
    assert not_compiled == ["bias silu mul"]


def test_a_residual_ends_a_chain_and_a_lone_sum_stays_torchs_own(not_compiled: list[str]) -> None:
    x, r = leaves((3, 4, 8), (3, 4, 8))
    assert type(start_chain(x) + r) is Tensor
    assert not_compiled == []
    assert type(r + F.dropout(start_chain(x), 0.5)) is Tensor
    assert not_compiled == ["dropout add"]


def test_dropout_off_changes_nothing(not_compiled: list[str]) -> None:
    x, b, r = leaves((3, 8), (8,), (3, 8))
    for out in (JitDropout(0.5).eval()(start_chain(x, b)) + r, JitDropout(0.0)(start_chain(x, b)) + r):
        torch.testing.assert_close(out, x + b + r)
    assert not_compiled == ["bias add"] * 2
    assert JitDropout(1.0)(start_chain(x, b)).abs().max() == 0


def test_only_wanted_gradients_are_computed(not_compiled: list[str]) -> None:
    x, b, r = leaves((3, 8), (8,), (3, 8))
    (GELU(start_chain(x.detach(), b)) + r.detach()).sum().backward()
    assert b.grad is not None and x.grad is None and r.grad is None
    assert not_compiled == ["bias gelu add", "backward of 1"]


def test_without_gradients_and_in_inference_mode(not_compiled: list[str]) -> None:
    x, b = leaves((3, 8), (8,))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = F.linear(GELU(start_chain(x, b)), torch.eye(8))
            torch.testing.assert_close(y, F.gelu(x + b))
            assert not y.requires_grad
    with torch.no_grad():
        constant = GELU(start_chain(x, b))
    assert not (constant * 2.0).requires_grad  # as the plain tensor would be
    with torch.no_grad():
        y = GELU(start_chain(x, b)) + x
    assert not y.requires_grad


def test_what_began_without_gradients_gets_none_later() -> None:
    x, b = leaves((3, 8), (8,))
    with torch.no_grad():
        chain = start_chain(x, b)
    assert not F.linear(chain, torch.eye(8)).requires_grad


def test_an_input_changed_in_place_is_told(not_compiled: list[str]) -> None:
    x = torch.randn(3, 8)
    chain = SILU(x)
    x.add_(1)
    with pytest.raises(ShardFormerError, match="changed in place"):
        F.linear(chain, torch.eye(8))


def test_autocast_leaves_dtypes_as_the_plain_operations_do(not_compiled: list[str]) -> None:
    x, b, r, w = leaves((3, 4, 8), (8,), (3, 4, 8), (8, 8))

    def block(act: Callable[[Tensor], Tensor], add: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
        def forward(x: Tensor, b: Tensor, r: Tensor, w: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return r + F.dropout(F.linear(act(add(F.linear(x, w), b)), w), 0.3)

        return forward

    plain = block(F.gelu, lambda y, b: y + b.to(y.dtype))
    assert_same(block(GELU, start_chain), plain, [x, b, r, w], 2e-2)


def test_tensors_of_other_kinds_start_no_chain(not_compiled: list[str]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert start_chain(torch.ones(2, 3, device="meta"), torch.ones(3, device="meta")).is_meta
    assert start_chain(torch.ones(()), None).dim() == 0
    with FakeTensorMode():
        y = JitDropout(0.5)(GELU(start_chain(torch.ones(2, 3), torch.ones(3)))) + torch.ones(2, 3)
    assert not_compiled == [] and y.shape == (2, 3)


def test_under_a_mode_that_watches_operations_nothing_is_compiled(fuse_all: None) -> None:
    """torch.compile refuses to run under one: a FLOP counter, selective checkpointing."""
    x, b, w = leaves((4, 6, HIDDEN), (HIDDEN,), (HIDDEN, HIDDEN))
    before = num_graphs()
    with FlopCounterMode(display=False) as flops:
        F.linear(GELU(start_chain(F.linear(x, w), b)), w).sum().backward()
    assert num_graphs() == before and flops.get_total_flops() == 6 * 2 * x.numel() * HIDDEN


def test_inside_torch_compile_there_are_no_chains(fuse_all: None) -> None:
    x, b, r = leaves((5, 8), (8,), (5, 8))

    def forward(x: Tensor, b: Tensor, r: Tensor) -> Tensor:
        y: Tensor = JitDropout(0.0)(GELU(start_chain(x, b))) + r
        return y

    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, b, r), F.gelu(x + b) + r)


# -- whole models ------------------------------------------------------------------------------------------------------


class Finished(nn.Module):
    """A linear whose bias is left to the chain."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.transposed = not isinstance(linear, nn.Linear)

    def forward(self, x: Tensor) -> Tensor:
        return start_chain(x @ self.weight if self.transposed else F.linear(x, self.weight), self.bias)


def fuse(model: Any) -> Any:
    """As a policy would: all linears, activations and dropouts of the layers."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                setattr(parent, name, JitDropout.from_native_module(child))
            elif isinstance(child, nn.GELU) or type(child).__name__ in OPERATIONS:
                setattr(parent, name, JitActivation.from_native_module(child))
            elif type(child).__name__ in ("Linear", "Conv1D"):
                setattr(parent, name, Finished(child))
    return model


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=HIDDEN)
    )


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=31, bos_token_id=0, eos_token_id=0))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=HIDDEN
    )
    return LlamaForCausalLM(config)


def bloom() -> Any:
    """Adds dropout and residual in a function, and has an activation of its own."""
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=31, hidden_dropout=0.1))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=16, d_kv=8, num_heads=2, num_layers=2, d_ff=HIDDEN, vocab_size=31)
    config.update({"feed_forward_proj": "gated-gelu", "is_gated_act": True, "dense_act_fn": "gelu_new"})
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


MODELS = {
    "bert": (bert, {"bias gelu", "bias dropout add"}),
    "gpt2": (gpt2, {"bias gelu_new", "bias dropout add"}),
    "llama": (llama, {"silu mul"}),
    "bloom": (bloom, {"bias gelu_fast", "bias dropout add"}),
    "t5": (t5, {"gelu_new mul dropout", "dropout add"}),
}


def loss_and_grads(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(11)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_model(ours: Any, plain: Any, bound: float) -> None:
    ids = torch.randint(31, (3, 5))
    (loss, grads), (ref, ref_grads) = loss_and_grads(ours, ids), loss_and_grads(plain, ids)
    torch.testing.assert_close(loss, ref, rtol=bound, atol=0)
    assert grads.keys() == ref_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, ref_grads[name], rtol=bound, atol=bound, msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_models_with_dropout_train_as_before(name: str, not_compiled: list[str]) -> None:
    make, chains = MODELS[name]
    plain = make().double().train()
    ours = fuse(copy.deepcopy(plain))
    # causal language models compute their loss in fp32, LLaMA and T5 their norms
    assert_same_model(ours, plain, 1e-10 if name == "bert" else 1e-6)
    assert chains <= set(not_compiled)
    assert_same_model(copy.deepcopy(ours), plain, 1e-6)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_models_with_activation_checkpointing_train_as_before(
    name: str, reentrant: bool, not_compiled: list[str]
) -> None:
    plain = MODELS[name][0]().double().train()
    ours = fuse(copy.deepcopy(plain))
    for model in (ours, plain):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    assert_same_model(ours, plain, 1e-6)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_models_whose_chains_the_cpu_leaves_to_torch_train_as_before(name: str) -> None:
    plain = MODELS[name][0]().double().train()
    before = num_graphs()
    assert_same_model(fuse(copy.deepcopy(plain)), plain, 1e-10 if name == "bert" else 1e-6)
    assert num_graphs() == before


def test_a_compiled_model_trains_as_before() -> None:
    plain = gpt2().train()
    assert_same_model(fuse(copy.deepcopy(plain)), plain, 1e-5)


def test_generation_gives_the_same_tokens(not_compiled: list[str]) -> None:
    plain = gpt2().eval()
    ids = torch.randint(1, 31, (2, 4))
    arguments: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    arguments["attention_mask"] = torch.ones_like(ids)
    ours = fuse(copy.deepcopy(plain))
    assert torch.equal(ours.generate(ids, **arguments), plain.generate(ids, **arguments))


# -- the compiler ------------------------------------------------------------------------------------------------------


def test_the_problem_of_a_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jit_problem(torch.device("cpu")) is None
    with torch._inductor.config.patch({"cpp.cxx": ("/nowhere/c++",)}):
        assert "g++" in (jit_problem(torch.device("cpu")) or "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "triton" in (jit_problem(torch.device("cuda")) or "")


def test_a_failing_compilation_has_four_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Tensor) -> None:
        raise torch._dynamo.exc.TorchDynamoException("the compiler is missing\nand more")

    monkeypatch.setattr(torch, "compile", lambda function, **_: fails)
    chain_kernels._kernel.cache_clear()
    x, b = leaves((3, 8), (8,))
    with pytest.raises(ConfigError, match="bias, gelu_new: the compiler is missing") as caught:
        finish(NEW(start_chain(x, b)))
    assert "g++" in caught.value.remedy
    chain_kernels._kernel.cache_clear()
