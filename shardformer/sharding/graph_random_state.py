"""Make compiled layers draw the same random numbers as eager layers, with every torch.compile backend.

Eager operators draw from the generators of the process, and ``LocalRNGState`` replaces the state of the generators
inside a tensor-parallel block. A compiler may reorder or repeat such operators. In the graph of a layer, the random
state is therefore a tensor, which each drawing operator takes and returns:

    state --> dropout --> enter --> state of this rank --> dropout --> leave
                            |                                            |
                            +--> state of all ranks ---------------------+--> dropout --> state

The graph has the state of the generators as an additional input, and their new state as an additional output. The
operators that draw are those with torch's tag ``nondeterministic_seeded``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from shardformer.random_state import derive_rank_seed, get_torch_generators
from shardformer.torch_compat import FakeTensorMode, TorchDispatchMode, detect_fake_mode, schema_of, tolist_or_ones

Compiler = Callable[[Any, Sequence[Any]], Any]

_LIBRARY = torch.library.Library("shardformer", "FRAGMENT")
_LIBRARY.define("enter_random_state(int rank) -> ()")
_LIBRARY.define("leave_random_state() -> ()")
_LIBRARY.define("swap_random_state() -> ()")
_LIBRARY.define(
    "draw_local_state(Tensor state, int rank, str device) -> (Tensor, Tensor)", tags=torch.Tag.cudagraph_unsafe
)
ENTER, LEAVE, SWAP = (
    getattr(torch.ops.shardformer, f"{name}_random_state").default for name in ("enter", "leave", "swap")
)
"""Marks in a graph, which ``_RngStateDispatchMode`` replaces. ``LocalRNGState`` makes them."""


def _raise_uncompiled_marker_error(*_: Any) -> None:
    raise AssertionError("Bug in ShardFormer: a graph with random state markers ran without compile_with_rng_state.")


for _mark in (ENTER, LEAVE, SWAP):
    _name = _mark.name().partition("::")[2]
    _LIBRARY.impl(_name, _raise_uncompiled_marker_error, "CompositeExplicitAutograd")
    torch.library.register_fake(_mark, lambda *_: None, lib=_LIBRARY)
    fx.has_side_effect(_mark)


def get_joint_rng_state(device: torch.device) -> Tensor:
    """Concatenate the states of torch's random generators into one tensor."""
    states = [generator.get_state() for generator in get_torch_generators(device)]
    return states[0] if len(states) == 1 else torch.cat(states)


def set_joint_rng_state(rng_state: Tensor, device: torch.device) -> None:
    """Restore the states of torch's random generators from the tensor that ``get_joint_rng_state`` returned."""
    generators = get_torch_generators(device)
    sizes = [generator.get_state().numel() for generator in generators] if len(generators) > 1 else [rng_state.numel()]
    for generator, part in zip(generators, rng_state.split(sizes), strict=True):
        generator.set_state(part)


@contextmanager
def _use_rng_state(rng_state: Tensor, device: torch.device) -> Iterator[None]:
    before = get_joint_rng_state(device)
    set_joint_rng_state(rng_state, device)
    try:
        yield
    finally:
        set_joint_rng_state(before, device)


def _derive_local_rng_state(state: Tensor, rank: int, device: str) -> tuple[Tensor, Tensor]:
    """Derive a separate random state for one rank from the state that all ranks share.

    Returns the rank's state, and the shared state after drawing the seed of the block.
    """
    where = torch.device(device)
    with _use_rng_state(state, where):
        seed = int(tolist_or_ones(torch.randint(2**62, (), device="cpu")))
        after = get_joint_rng_state(where)
        for generator in get_torch_generators(where):
            generator.manual_seed(derive_rank_seed(seed, rank))
        return get_joint_rng_state(where), after


_LIBRARY.impl("draw_local_state", _derive_local_rng_state, "CompositeExplicitAutograd")
torch.library.register_fake(
    "shardformer::draw_local_state", lambda state, *_: (torch.empty_like(state), torch.empty_like(state)), lib=_LIBRARY
)


@cache
def make_random_op_with_explicit_state(op: Any) -> Any:
    """Create a version of a random operator that takes the random state as an argument and returns the new state.

    The new operator modifies none of its arguments. Where ``op`` writes to an argument, it returns the changed copy.
    """
    schema = schema_of(op)
    written = [n for n, arg in enumerate(schema.arguments) if arg.alias_info is not None and arg.alias_info.is_write]
    plain = re.sub(r"\(\w+!?(?: -> \w+)?\)(?= |\?|$|,|\))", "", str(schema)).partition("(")[2]
    arguments, _, results = plain.rpartition(") -> ")
    name = re.sub(r"\W+", "_", f"stateful_{op.name()}")
    kinds = results.strip("()") or "()"
    schema = f"{name}(Tensor random_state, str random_device, {arguments}) -> ({kinds}, Tensor)"
    _LIBRARY.define(schema, tags=torch.Tag.cudagraph_unsafe)

    def call_on_copies(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        copied = [x.clone() if n in written else x for n, x in enumerate(args)]
        out = op(*copied, **kwargs)
        return out if isinstance(out, tuple) else (out,)

    def run_with_rng_state(random_state: Tensor, random_device: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        where = torch.device(random_device)
        with _use_rng_state(random_state, where):
            return (*call_on_copies(args, kwargs), get_joint_rng_state(where))

    def fake_impl(random_state: Tensor, random_device: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (*call_on_copies(args, kwargs), torch.empty_like(random_state))

    _LIBRARY.impl(name, run_with_rng_state, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardformer::{name}", fake_impl, lib=_LIBRARY)
    return getattr(torch.ops.shardformer, name).default


class _RngStateDispatchMode(TorchDispatchMode):
    """A dispatch mode that passes a random state through all random operators while a layer is traced.

    Args:
        rng_state: the state of the generators before the layer.
    """

    def __init__(self, rng_state: Tensor, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class has no annotations
        self.state, self._device = rng_state, str(device)
        self._outer: list[Tensor] = []
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is ENTER:
            self.draws = True
            self.state, outer = torch.ops.shardformer.draw_local_state(self.state, args[0], self._device)
            self._outer.append(outer)
        elif func is LEAVE and self._outer:
            self.state = self._outer.pop()
        elif func is SWAP and self._outer:
            self.state, self._outer[-1] = self._outer[-1], self.state
        elif torch.Tag.nondeterministic_seeded in func.tags:
            return self._run_random_op_with_state(func, args, kwargs)
        elif func not in (LEAVE, SWAP):
            return func(*args, **kwargs)
        return None

    def _run_random_op_with_state(
        self, random_op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        self.draws = True
        *out, self.state = make_random_op_with_explicit_state(random_op)(self.state, self._device, *args, **kwargs)
        arguments = schema_of(random_op).arguments
        for x, argument in zip(args, arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                return x.copy_(out[0])
        return out[0] if len(out) == 1 else tuple(out)


def compile_with_rng_state(
    graph: fx.GraphModule, example_inputs: Sequence[Any], compile_fn: Compiler, device: torch.device
) -> Callable[..., Any]:
    """Compile a graph into a function that draws the same random numbers as the eager code."""
    draws = False

    def run_graph(*inputs_and_state: Any) -> tuple[Any, ...]:
        nonlocal draws
        *own, state = inputs_and_state
        with _RngStateDispatchMode(state, device) as mode:
            out = graph(*own)
        draws = draws or mode.draws
        return (*out, mode.state)

    state = get_joint_rng_state(device)
    mode = detect_fake_mode(example_inputs)
    if isinstance(mode, FakeTensorMode):
        state = mode.from_tensor(state, static_shapes=True)
    compiled = compile_fn(_build_graph_with_rng_state(run_graph, graph), [*example_inputs, state])

    def call_compiled(*graph_inputs: Any) -> Any:
        *out, after = compiled(*graph_inputs, get_joint_rng_state(device))
        if draws:
            set_joint_rng_state(after, device)
        return out

    return call_compiled


def _build_graph_with_rng_state(fn: Callable[..., Any], graph: fx.GraphModule) -> fx.GraphModule:
    """Build a graph that calls ``fn``, with the random state as an additional input and output."""
    new = fx.Graph()
    values = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values.append(new.placeholder(node.target))
            values[-1].meta = dict(node.meta)
        elif node.op == "output":
            count = len(node.args[0])
    out = new.call_function(fn, (*values, new.placeholder("random_state")))
    new.output(tuple(new.call_function(operator.getitem, (out, n)) for n in range(count + 1)))
    return fx.GraphModule(torch.nn.Module(), new)
