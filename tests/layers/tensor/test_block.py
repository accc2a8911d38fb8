"""A tensor-parallel block equals the plain module for any forward, with one collective per direction."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardformer.comm.collectives import gather_full_tensor
from shardformer.comm.deferred_tensor import resolve_deferred_tensors
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.errors import ConfigError
from shardformer.layout.activation_layout import SEQUENCE_PARALLEL, ActivationLayout
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.tensor_parallel.block import TensorParallelBlock
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row
from shardformer.tensor_parallel.sequence_parallel import ActivationSharding
from tests.pools import WorkerPools

B, S, H, F = 2, 7, 6, 9
MODES = ("plain", "sequence", "overlap")
in_each_mode = pytest.mark.parametrize("mode", MODES)
over_two_and_four = pytest.mark.parametrize("ranks", [2, 4])

Forward = Callable[["Gate", Tensor], Tensor]


class Gate(nn.Module):
    """Two column-parallel linear layers and a row-parallel one, which a forward pass that is passed combines."""

    def __init__(self, body: Forward) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(H, F), nn.Linear(H, F), nn.Linear(F, H)
        self.body = body

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.body(self, hidden_states)


# ---------------------------------------------------------------------------------------------- supported forward
# passes


def straight(m: Gate, x: Tensor) -> Tensor:
    out: Tensor = m.down(torch.tanh(m.gate(x)) * m.up(x))
    return out


def other_order(m: Gate, x: Tensor) -> Tensor:
    up = m.up(x)
    out: Tensor = m.down(torch.tanh(m.gate(x)) * up)
    return out


def one_unused(m: Gate, x: Tensor) -> Tensor:
    out: Tensor = m.down(torch.tanh(m.gate(x)))
    return out


def one_called_twice(m: Gate, x: Tensor) -> Tensor:
    out: Tensor = m.down(torch.tanh(m.gate(x)) * m.gate(x) + m.up(x))
    return out


def of_something_else(m: Gate, x: Tensor) -> Tensor:
    """Call the column-parallel linear layers with a function of the block input."""
    out: Tensor = m.down(torch.tanh(m.gate(2 * x)) * m.up(x.sin()))
    return out


def one_of_something_else(m: Gate, x: Tensor) -> Tensor:
    out: Tensor = m.down(torch.tanh(m.gate(x)) * m.up(x - x.mean(-1, keepdim=True)))
    return out


def beside_the_columns(m: Gate, x: Tensor) -> Tensor:
    """Use the block input also outside the linear layers."""
    out: Tensor = m.down(torch.tanh(m.gate(x)) * m.up(x) * x.square().mean(-1, keepdim=True))
    return out


def detached(m: Gate, x: Tensor) -> Tensor:
    out: Tensor = m.down(torch.tanh(m.gate(x.detach())) * m.up(x).detach())
    return out


BODIES = (
    straight,
    other_order,
    one_unused,
    one_called_twice,
    of_something_else,
    one_of_something_else,
    beside_the_columns,
    detached,
)

# ------------------------------------------------------------------------------------------ around it: how it is called


def once(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = block(x)
    return out


def twice(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = block(x) + block(x.cos())
    return out


def nested(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = block(x + block(x))
    return out


def by_name(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = block(hidden_states=x)
    return out


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, x, use_reentrant=False)
    return out


def checkpointed_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, x, use_reentrant=True)
    return out


def after_a_failure(block: nn.Module, x: Tensor) -> Tensor:
    """Run after a forward pass that raised inside the block."""
    down = block.get_submodule("down")
    handle = down.register_forward_pre_hook(_fail)
    with suppress(ArithmeticError):
        block(x)
    handle.remove()
    out: Tensor = block(x)
    return out


def _fail(*_: Any) -> None:
    raise ArithmeticError


def without_gradient_before(block: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        block(x)
    with torch.inference_mode():
        block(x.detach())
    out: Tensor = block(x)
    return out


def of_a_copy(block: nn.Module, x: Tensor) -> Tensor:
    block(x)
    duplicate = copy.deepcopy(block)
    for p, q in zip(block.parameters(), duplicate.parameters(), strict=True):
        q.register_hook(lambda grad, p=p: setattr(p, "grad", grad))
    out: Tensor = duplicate(x)
    return out


CALLS = (
    once,
    twice,
    nested,
    by_name,
    checkpointed,
    checkpointed_reentrant,
    after_a_failure,
    without_gradient_before,
    of_a_copy,
)


class Stack(nn.Module):
    """One block with a residual; with sequence parallelism also a stack."""

    def __init__(self, body: Forward, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Gate(body)])
        self.double()
        self.call = call
        self.region: ActivationSharding | None = None

    def forward(self, x: Tensor) -> Tensor:
        region = self.region
        if region is not None:
            x = region.shard_stack_input(x, True)
        x = x + self.call(self.layers[0], x)
        return x if region is None else resolve_deferred_tensors(region.gather_stack_output(x))


def cut(stack: Stack, axis: Axis, mode: str) -> TensorParallelBlock:
    """Shard a layer as ``shard_model`` does."""
    if mode != "plain":
        stack.region = ActivationSharding(SEQUENCE_PARALLEL, axis, overlap=mode == "overlap")
    block, gate = TensorParallelBlock(stack.region or ActivationSharding(ActivationLayout(), axis)), stack.layers[0]
    for name in ("up", "gate"):
        column: Any = Linear1D_Col.from_native_module(getattr(gate, name), axis)
        column.block = block
        block.columns.append(column)
        setattr(gate, name, column)
    row: Any = Linear1D_Row.from_native_module(gate.down, axis)
    row.block = block
    gate.down = row
    block.register_entry_hooks(gate)
    return block


def compared(
    body: Forward,
    call: Callable[[nn.Module, Tensor], Tensor],
    mode: str,
    frozen: tuple[str, ...] = (),
    x_grad: bool = True,
) -> dict[str, float]:
    """Return the differences of the output and all gradients; 9 if only one model has a gradient."""
    axis = ParallelContext.from_default_process_group({}).tensor
    plain, ours = Stack(body, call), Stack(body, call)
    for stack in (plain, ours):
        for name, p in stack.named_parameters():
            p.requires_grad_(not any(f in name for f in frozen))
    cut(ours, axis, mode)
    torch.manual_seed(1)
    x, w = torch.randn(B, S, H).double(), torch.randn(B, S, H).double()
    xs = [x.clone().requires_grad_(x_grad) for _ in range(2)]
    outs = [plain(xs[0]), ours(xs[1])]
    for out in outs:
        if out.requires_grad:
            (out * w).sum().backward()
    specs = get_shard_specs(ours)
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {
        "output": (outs[0], outs[1]),
        "x": (xs[0].grad, xs[1].grad),
    }
    for name, p in ours.named_parameters():
        whole = None if p.grad is None else gather_full_tensor(p.grad, specs[name], lambda _: axis)
        if whole is not None and mode != "plain" and name.endswith("down.bias"):
            whole = gather_sum(whole, axis)  # computed on a slice of the sequence: the policy sums its gradient
        pairs[name] = (plain.get_parameter(name).grad, whole)
    return {name: difference(*pair) for name, pair in pairs.items()}


def gather_sum(x: Tensor, axis: Axis) -> Tensor:
    from shardformer.comm.collectives import all_reduce

    return all_reduce(x.clone(), axis)


def difference(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else 9.0
    return float((a - b).detach().abs().max())


@pytest.mark.reduced
@over_two_and_four
@in_each_mode
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_block_equals_the_plain_module_for_every_forward_pass(
    pools: WorkerPools, body: Forward, mode: str, ranks: int
) -> None:
    for found in pools(ranks).run(compared, body, once, mode):
        assert max(found.values()) < 1e-12, found


@pytest.mark.reduced
@in_each_mode
@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("body", [straight, beside_the_columns], ids=lambda f: f.__name__)
def test_block_equals_the_plain_module_for_every_call(pool2: WorkerPool, body: Forward, call: Any, mode: str) -> None:
    for found in pool2.run(compared, body, call, mode):
        assert max(found.values()) < 1e-12, found


@pytest.mark.reduced
@in_each_mode
@pytest.mark.parametrize("x_grad", [True, False], ids=["x needs a gradient", "x needs none"])
@pytest.mark.parametrize(
    "frozen",
    [("weight",), ("bias",), ("up", "gate"), ("down",), ("up.weight", "gate.bias"), ("up", "gate", "down")],
    ids="+".join,
)
def test_block_with_frozen_weights_equals_the_plain_module(
    pool2: WorkerPool, frozen: tuple[str, ...], x_grad: bool, mode: str
) -> None:
    for found in pool2.run(compared, straight, once, mode, frozen, x_grad):
        assert max(found.values()) < 1e-12, found


# ------------------------------------------------------------------------------------------------------- communication


def sent(mode: str, body: Forward, length: int = S, frozen: bool = False) -> tuple[list[Any], list[Any]]:
    axis = ParallelContext.from_default_process_group({}).tensor
    stack = Stack(body, once)
    cut(stack, axis, mode)
    for p in stack.parameters():
        p.requires_grad_(not frozen)
    x = torch.randn(B, length, H).double().requires_grad_(not frozen)
    with CollectiveRecorder(axis) as forward:
        y = stack(x)
    with CollectiveRecorder(axis) as backward:
        if not frozen:
            y.sum().backward()
    return [(c.op, c.payload_bytes) for c in forward.calls], [(c.op, c.payload_bytes) for c in backward.calls]


WHOLE = B * S * H * 8


@over_two_and_four
def test_block_communicates_one_tensor_per_direction(pools: WorkerPools, ranks: int) -> None:
    for forward, backward in pools(ranks).run(sent, "plain", straight):
        assert forward == [("all_reduce", WHOLE)]
        assert backward == [("all_reduce", WHOLE)]


@over_two_and_four
@pytest.mark.parametrize("mode", ["sequence", "overlap"])
def test_sequence_parallel_block_gathers_and_scatters_one_tensor(pools: WorkerPools, mode: str, ranks: int) -> None:
    for forward, backward in pools(ranks).run(sent, mode, straight):
        # the block's gather and scatter, then the end of the stack; and the other way around
        assert forward == [("all_gather", WHOLE), ("reduce_scatter", WHOLE), ("all_gather", WHOLE)]
        assert backward == [("all_gather", WHOLE), ("reduce_scatter", WHOLE), ("all_gather", WHOLE)]


def test_inputs_without_gradient_cost_no_backward_communication(pool2: WorkerPool) -> None:
    for mode in MODES:
        assert all(backward == [] for _, backward in pool2.run(sent, mode, straight, S, True))


def test_a_function_of_the_block_input_costs_one_more_collective(pool2: WorkerPool) -> None:
    """A linear layer with another input computes its own product, and the entry's gradient is one more collective."""
    for _, backward in pool2.run(sent, "plain", one_of_something_else):
        assert backward == [("all_reduce", WHOLE)] * 2


# ------------------------------------------------------------------------------------------------------ errors


def with_a_shorter_input(mode: str) -> None:
    stack = Stack(straight, lambda block, x: block(x[:, :1]))
    cut(stack, ParallelContext.from_default_process_group({}).tensor, mode)
    stack(torch.randn(B, S, H).double())


def test_an_input_of_another_length_raises_on_all_ranks(pool2: WorkerPool) -> None:
    for mode in ("sequence", "overlap"):
        with pytest.raises(ConfigError, match="for a sequence of 7"):
            pool2.run(with_a_shorter_input, mode)


# ------------------------------------------------------------------------------------------------------- memory


def left_behind(mode: str, call: Callable[[nn.Module, Tensor], Tensor]) -> list[bool]:
    """Return whether the input of the block is freed after the backward pass."""
    axis = ParallelContext.from_default_process_group({}).tensor
    stack = Stack(straight, call)
    block = cut(stack, axis, mode)
    seen: list[Any] = []
    stack.layers[0].gate.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    loss = stack(torch.randn(B, S, H).double().requires_grad_()).sum()
    loss.backward()
    del loss
    return [ref() is None for ref in seen] + [not block.is_open]


@in_each_mode
@pytest.mark.parametrize("call", [once, checkpointed, checkpointed_reentrant], ids=lambda f: f.__name__)
def test_backward_frees_the_block_input(pool2: WorkerPool, call: Any, mode: str) -> None:
    for found in pool2.run(left_behind, mode, call):
        assert all(found), found


class Offsets(nn.Module):
    """A module without inputs, such as relative positions, that has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return nn.functional.dropout(self.values, 0.5, self.training)


def offsets_in_eval_mode() -> list[float]:
    stream = ActivationSharding(
        SEQUENCE_PARALLEL, ParallelContext.from_default_process_group({}).tensor, has_random_ops=True
    )
    offsets = Offsets().eval()
    stream.register_token_free_hooks(offsets, has_random_ops=True)
    stream.shard_stack_input(torch.randn(B, S, H), False)
    return [float(value) for value in offsets()]


def test_token_free_module_without_arguments_runs_in_eval_mode(pool2: WorkerPool) -> None:
    assert pool2.run(offsets_in_eval_mode) == [[1.0] * 3] * 2
