"""A backward in two parts, for schedules that fill the bubble with the second (Qi et al. 2023, "Zero Bubble").

The input part runs the chain of nodes between the outputs and the inputs. A node of the chain where a gradient also
leaves towards something that trains (a matmul, towards its weight) is a fork::

    outputs -> AddmmBackward -> GeluBackward -> AddmmBackward -> inputs        the chain, run by the input part
                   |                                |
                   v                                v
               TBackward                        TBackward                      run by the weight part
                   v                                v
               weight 2                         weight 1

The input part notes what arrives at each fork. The weight part calls each fork again for the gradients that leave the
chain only, then hands all of them to autograd at once, so each leaf gets its whole gradient, and its hooks one call,
as in one backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from shardformer.torch_compat import (
    Node,
    as_tuple,
    custom_function_of,
    gradient_shape,
    is_packed,
    release_saved_tensors,
    run_in_turn_of,
)

Grads = tuple[Tensor | None, ...]


def backward_of_inputs(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightBackward]:
    """The gradients of ``inputs``, and the rest of the backward, to be run later.

    Nothing is accumulated into ``inputs``, which are leaves; None is the gradient of one that the outputs do not depend
    on. A gradient of None means one for an output of a single number, a loss, and that nothing arrived for any other.
    ``outputs`` and ``inputs`` may be given up after this call; ``grads`` may not be written to before the rest has run.

    Where the forward saved something that can only be had once or dearly (activation checkpointing, offloading), or the
    graph does not come apart, all of the backward happens here and the rest is empty. Without inputs that need a
    gradient all of it is the rest.
    """
    assert all(x.is_leaf for x in inputs), "what lies before the inputs belongs to another backward"
    given = [
        (get_gradient_edge(y), torch.ones_like(y) if grad is None else grad)
        for y, grad in zip(outputs, grads, strict=True)
        if y.requires_grad and (grad is not None or y.numel() == 1)
    ]
    wanted = {i: get_gradient_edge(x) for i, x in enumerate(inputs) if x.requires_grad}
    chain, forks, in_order = _chain_between([edge.node for edge, _ in given], {edge.node for edge in wanted.values()})
    beside = [(edge, grad) for edge, grad in given if edge.node not in chain]
    given = [(edge, grad) for edge, grad in given if edge.node in chain]
    found: list[Tensor | None] = [None] * len(inputs)
    if not given:
        return found, WeightBackward(beside)
    splits = in_order and not any(map(_runs_only_whole, chain)) and not any(is_packed(fork.node) for fork in forks)
    if not splits:
        return _plain_backward(given + beside, inputs), WeightBackward([])
    reached = {i: edge for i, edge in wanted.items() if edge.node in chain}
    ran: list[_BranchNode] = []
    for fork in forks:
        fork.listen(ran)
    try:
        edges, values = zip(*given)
        results = torch.autograd.grad(edges, list(reached.values()), values, retain_graph=bool(forks))
    finally:
        for fork in forks:
            fork.end_listening()
    for i, result in zip(reached, results, strict=True):
        found[i] = result
    if forks:
        release_saved_tensors(chain - {fork.node for fork in ran if fork.results is None})
    # a custom function's node is owned by the node before it, so the outputs' nodes are held
    return found, WeightBackward(beside, ran, [edge for edge, _ in given])


class WeightBackward:
    """The part of a backward that ``backward_of_inputs`` left: what trains gets its gradients."""

    def __init__(
        self,
        beside: list[tuple[GradientEdge, Tensor]],
        forks: list[_BranchNode] | None = None,
        held: list[GradientEdge] | None = None,
    ) -> None:
        self._beside, self._forks, self._held = beside, forks or [], held or []

    def run(self) -> None:
        """Accumulates into ``.grad`` of every leaf but the inputs, as backward does, then lets go of the graph.

        For a moment it holds the gradients of all these leaves once more, beside those in ``.grad``.
        """
        forks, given, held = self._forks, self._beside, self._held
        self._forks, self._beside, self._held = [], [], []
        called = [fork for fork in forks if fork.results is None]
        if called:
            exits = [edge for fork in called for edge in fork.exits.values()]
            _run_nodes_towards(exits, called)
        for fork in forks:
            given.extend(fork.leaving())
        if given:
            edges, values = (list(part) for part in zip(*given))
            given.clear()
            torch.autograd.backward(edges, values)
        held.clear()


@dataclass(eq=False)
class _BranchNode:
    """A node of the chain, and what its input part left for its weight part.

    Args:
        exits: the edges that leave the chain, by their place among the node's edges.
        grads: what arrived at the node.
        results: the gradients of the exits, by place; None as long as the weight part has to ask for them.
        asked: which gradients the forward asked of a custom function that can be asked for less.
    """

    node: Node
    exits: dict[int, GradientEdge]
    grads: Grads = ()
    results: dict[int, Tensor | None] | None = None
    asked: tuple[bool, ...] | None = None
    handles: list[Any] = field(default_factory=list)

    def listen(self, ran: list[_BranchNode]) -> None:
        """As the node runs in the input part, notes what arrives and what it gives; those that run come to ``ran``."""

        def before(grads: Grads) -> None:
            ran.append(self)
            self.grads = grads
            if self._can_be_asked():
                self.asked = self.node.needs_input_grad
                self.node.needs_input_grad = self._asking_for(leaving=False)
                if any(grad is None for grad in grads):
                    self.node.apply = filled

        def filled(*grads: Tensor | None) -> Any:
            # the engine calls this with zeros in place of None where the function wants them, which only it can tell
            self.grads = grads
            return type(self.node).apply(self.node, *grads)

        def after(results: Grads, _: Grads) -> None:
            # a custom function that does not look at what is asked computes all at once, and is not run a second time
            unasked = {k: results[k] for k in self.exits}
            cannot = custom_function_of(self.node) is not None and self.asked is None
            if cannot or any(grad is not None for grad in unasked.values()):
                self.results, self.grads = unasked, ()

        self.handles = [self.node.register_prehook(before), self.node.register_hook(after)]

    def end_listening(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        if self.asked is not None:
            self.node.needs_input_grad = self.asked
            self.node.__dict__.pop("apply", None)

    def _can_be_asked(self) -> bool:
        """Whether this is a custom function that can be told which gradients to compute, and called by hand."""
        function = custom_function_of(self.node)
        if function is None or getattr(function, "boxed_grads_call", False):
            return False
        needs: tuple[bool, ...] = self.node.needs_input_grad
        return sum(needs) == len(self._places())

    def _places(self) -> list[int]:
        return [k for k, (follower, _) in enumerate(self.node.next_functions) if follower is not None]

    def _asking_for(self, leaving: bool) -> tuple[bool, ...]:
        """``needs_input_grad`` for the exits only, or for all but them."""
        assert self.asked is not None
        # it has an entry an argument, the edges are one a tensor; those that need a gradient are the same in both
        places = iter(self._places())
        return tuple(needs and (next(places) in self.exits) == leaving for needs in self.asked)

    def call(self) -> None:
        """Computes the gradients of the exits, in a backward that goes to them and to nothing else."""
        grads, self.grads = self.grads, ()
        if self.asked is None:
            results = as_tuple(self.node(*grads))
        else:
            self.node.needs_input_grad = self._asking_for(leaving=True)
            given = as_tuple(self.node.apply(*grads))
            wanted = [grad for grad, needs in zip(given, self.asked) if needs]
            results = dict(zip(self._places(), wanted, strict=True))
        self.results = {k: results[k] for k in self.exits}

    def leaving(self) -> Iterator[tuple[GradientEdge, Tensor]]:
        """The exits with their gradients, which are given away."""
        results, self.results = self.results or {}, None
        for k, grad in results.items():
            if grad is not None:
                edge = self.exits[k]
                shape = gradient_shape(edge)
                yield self._in_turn(edge, grad), grad if grad.shape == shape else grad.sum_to_size(shape)

    def _in_turn(self, edge: GradientEdge, grad: Tensor) -> GradientEdge:
        """An edge that is passed when this node would be run.

        A leaf adds up what arrives in the order of its arrival, and sums in another order are other numbers. What is
        given to a leaf itself arrives before all else, so it goes by way of a view that takes the place of this node.
        """
        leaf = getattr(edge.node, "variable", None)
        if not isinstance(leaf, Tensor) or grad.layout is not torch.strided:
            return edge
        with torch.enable_grad():
            view: Node = leaf.view_as(leaf).grad_fn
        run_in_turn_of(view, self.node)
        return GradientEdge(view, 0)


def _chain_between(starts: Iterable[Node], ends: set[Node]) -> tuple[set[Node], list[_BranchNode], bool]:
    """The nodes on the ways from ``starts`` to ``ends``, those where other ways begin, and whether these keep order.

    They do not where a computed weight (a copy that autocast made) adds up three gradients or more, some from forks and
    some by way of other nodes: the weight part could not add them in the order of one backward.
    """
    before: dict[Node, list[Node]] = {start: [] for start in starts}
    to_visit = list(before)
    while to_visit:
        node = to_visit.pop()
        for follower, _ in node.next_functions:
            if follower is not None:
                if follower not in before:
                    before[follower] = []
                    to_visit.append(follower)
                before[follower].append(node)
    to_visit = [end for end in ends if end in before]
    chain = set(to_visit)
    while to_visit:
        for node in before[to_visit.pop()]:
            if node not in chain:
                chain.add(node)
                to_visit.append(node)
    forks, in_order = [], True
    for node in chain:
        edges = enumerate(node.next_functions)
        exits = {k: GradientEdge(f, i) for k, (f, i) in edges if f is not None and f not in chain}
        if exits:
            forks.append(_BranchNode(node, exits))
            for edge in exits.values():
                users = before[edge.node]
                computed = getattr(edge.node, "variable", None) is None
                in_order &= not computed or len(users) < 3 or chain.issuperset(users)
    return chain, forks, in_order


def _run_nodes_towards(edges: Sequence[GradientEdge], forks: Sequence[_BranchNode]) -> None:
    """Calls the nodes of ``forks`` in a backward of its own, so that they compute what flows to ``edges`` only.

    A node asks the backward that it runs in which of its gradients anybody waits for.
    """
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True)
        end = start.view(())
    assert end.grad_fn is not None

    def call(*_: object) -> None:
        for fork in forks:
            fork.call()

    end.grad_fn.register_hook(call)
    torch.autograd.grad([end], [get_gradient_edge(start), *edges], allow_unused=True)


def _plain_backward(given: Sequence[tuple[GradientEdge, Tensor]], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """A plain backward, after which the inputs' ``.grad`` are as they were before."""
    before = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    edges, values = zip(*given)
    torch.autograd.backward(edges, values)
    found = [x.grad for x in inputs]
    for x, grad in zip(inputs, before):
        x.grad = grad
    return found


def _runs_only_whole(node: Node) -> bool:
    """Whether the node is a backward of its own that will not be run for some gradients only, or a second time."""
    function = custom_function_of(node)  # reentrant checkpointing, and what torch.compile has made
    return function is CheckpointFunction or hasattr(function, "_aot_id")
