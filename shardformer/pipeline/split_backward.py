"""Splits a backward pass into an input part and a weight part, for zero-bubble schedules (Qi et al., 2023).

The input part runs the *chain*, the autograd nodes between the outputs and the inputs. A chain node whose gradients
also flow to trainable leaves (such as a matmul, to its weight) is a *branch node*::

    outputs -> AddmmBackward -> GeluBackward -> AddmmBackward -> inputs        the chain, run by the input part
                   |                                |
                   v                                v
               TBackward                        TBackward                      run by the weight part
                   v                                v
               weight 2                         weight 1

The input part stores the incoming gradients of each branch node. The weight part calls each branch node again for the
gradients that leave the chain, then passes all of them to one autograd call. Each leaf therefore receives its full
gradient, and its hooks run once, as in a single backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from shardformer.torch_compat import (
    Node,
    as_tuple,
    copy_autograd_sequence_number,
    get_autograd_function_class,
    get_gradient_shape,
    has_saved_tensor_unpack_hooks,
    release_saved_tensors,
)

Grads = tuple[Tensor | None, ...]


def run_input_backward(
    outputs: Sequence[Tensor], grad_outputs: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightBackward]:
    """Compute only the gradients of the inputs, and return them with a ``WeightBackward`` to run later.

    Some nodes cannot run twice or in part (activation checkpointing, offloading, compiled code). In this case, or if a
    split would change the order of accumulation, this runs the full backward pass, and the returned one is empty. If no
    input needs a gradient, the returned one is the full backward pass.

    Args:
        outputs: may be freed after this call.
        grad_outputs: gradients of the outputs. None means 1 for a scalar, and no gradient for any other output. They
            must not be modified before the returned backward pass has run.
        inputs: leaf tensors. Their ``.grad`` is not changed, and an unused input has the gradient None.
    """
    assert all(x.is_leaf for x in inputs), "inputs must be leaf tensors"
    output_grads = [
        (get_gradient_edge(y), torch.ones_like(y) if grad is None else grad)
        for y, grad in zip(outputs, grad_outputs, strict=True)
        if y.requires_grad and (grad is not None or y.numel() == 1)
    ]
    input_edges = {i: get_gradient_edge(x) for i, x in enumerate(inputs) if x.requires_grad}
    starts, ends = [edge.node for edge, _ in output_grads], {edge.node for edge in input_edges.values()}
    chain, branches, is_ordered = _find_nodes_between(starts, ends)
    other_outputs = [(edge, grad) for edge, grad in output_grads if edge.node not in chain]
    output_grads = [(edge, grad) for edge, grad in output_grads if edge.node in chain]
    input_grads: list[Tensor | None] = [None] * len(inputs)
    if not output_grads:
        return input_grads, WeightBackward(other_outputs)
    runs_once = any(map(_requires_full_backward, chain)) or any(
        has_saved_tensor_unpack_hooks(branch.node) for branch in branches
    )
    if runs_once or not is_ordered:
        return _run_full_backward(output_grads + other_outputs, inputs), WeightBackward([])
    reached = {i: edge for i, edge in input_edges.items() if edge.node in chain}
    ran: list[_InputAndWeightGradNode] = []
    for branch in branches:
        branch.register_grad_recording_hooks(ran)
    try:
        edges, values = zip(*output_grads)
        results = torch.autograd.grad(edges, list(reached.values()), values, retain_graph=bool(branches))
    finally:
        for branch in branches:
            branch.remove_hooks()
    for i, result in zip(reached, results, strict=True):
        input_grads[i] = result
    if branches:
        release_saved_tensors(chain - {branch.node for branch in ran if branch.results is None})
    # keep the output nodes alive: the nodes that run before a custom function own its node
    return input_grads, WeightBackward(other_outputs, ran, [edge for edge, _ in output_grads])


class WeightBackward:
    """The second part of a split backward pass, which computes the gradients of the weights."""

    def __init__(
        self,
        other_output_grads: list[tuple[GradientEdge, Tensor]],
        branch_nodes: list[_InputAndWeightGradNode] | None = None,
        output_edges: list[GradientEdge] | None = None,
    ) -> None:
        self._other_outputs, self._branches, self._output_edges = (
            other_output_grads,
            branch_nodes or [],
            output_edges or [],
        )

    def run(self) -> None:
        """Compute the gradients of the weights, accumulate them in ``.grad``, and free the autograd graph.

        The peak memory includes a second copy of these gradients.
        """
        branches, output_grads, output_edges = self._branches, self._other_outputs, self._output_edges
        self._branches, self._other_outputs, self._output_edges = [], [], []
        if called := [branch for branch in branches if branch.results is None]:
            _compute_branch_grads(called)
        for branch in branches:
            output_grads.extend(branch.pop_weight_path_grads())
        if output_grads:
            edges, values = (list(part) for part in zip(*output_grads))
            output_grads.clear()
            torch.autograd.backward(edges, values)
        output_edges.clear()


@dataclass(eq=False)
class _InputAndWeightGradNode:
    """Autograd node that passes gradients to inputs and to weights, in two separate runs of its backward function.

    Args:
        exits: edges that leave the chain, by index among the node's edges.
        grads: incoming gradients of the node.
        results: gradients of the exits by index, or None until they are computed.
        needed_grads: original ``needs_input_grad`` of a custom function that supports partial gradients.
    """

    node: Node
    exits: dict[int, GradientEdge]
    grads: Grads = ()
    results: dict[int, Tensor | None] | None = None
    needed_grads: tuple[bool, ...] | None = None
    handles: list[RemovableHandle] = field(default_factory=list)

    def register_grad_recording_hooks(self, executed_nodes: list[_InputAndWeightGradNode]) -> None:
        """Register hooks that record the incoming gradients of this autograd node, for the later weight backward.

        Args:
            executed_nodes: a list to which the hooks append this node when it runs.
        """

        def grad_prehook(grads: Grads) -> None:
            executed_nodes.append(self)
            self.grads = grads
            if self._supports_partial_grads():
                self.needed_grads = self.node.needs_input_grad
                self.node.needs_input_grad = self._get_needs_input_grad(select_weights=False)
                if any(grad is None for grad in grads):
                    self.node.apply = apply_with_raw_grads

        def apply_with_raw_grads(*grads: Tensor | None) -> Any:
            # the autograd engine replaces None with zeros if the function materializes gradients
            self.grads = grads
            return type(self.node).apply(self.node, *grads)

        def grad_posthook(results: Grads, _: Grads) -> None:
            # a custom function that ignores needs_input_grad computes all gradients now, and must not run again
            exit_grads = {k: results[k] for k in self.exits}
            must_run_once = get_autograd_function_class(self.node) is not None and self.needed_grads is None
            if must_run_once or any(grad is not None for grad in exit_grads.values()):
                self.results, self.grads = exit_grads, ()

        self.handles = [self.node.register_prehook(grad_prehook), self.node.register_hook(grad_posthook)]

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        if self.needed_grads is not None:
            self.node.needs_input_grad = self.needed_grads
            self.node.__dict__.pop("apply", None)

    def _supports_partial_grads(self) -> bool:
        function = get_autograd_function_class(self.node)
        if function is None or getattr(function, "boxed_grads_call", False):
            return False
        needs: tuple[bool, ...] = self.node.needs_input_grad
        return sum(needs) == len(self._get_connected_edge_indices())

    def _get_connected_edge_indices(self) -> list[int]:
        return [k for k, (follower, _) in enumerate(self.node.next_functions) if follower is not None]

    def _get_needs_input_grad(self, select_weights: bool) -> tuple[bool, ...]:
        """Return ``needs_input_grad`` flags that request only the weight gradients, or only all other gradients."""
        assert self.needed_grads is not None
        # needs_input_grad has an entry per argument, next_functions one per tensor; those with gradients correspond
        indices = iter(self._get_connected_edge_indices())
        return tuple(needs and (next(indices) in self.exits) == select_weights for needs in self.needed_grads)

    def compute_weight_path_grads(self) -> None:
        """Run the autograd node again to compute the gradients that flow to the weights."""
        grads, self.grads = self.grads, ()
        if self.needed_grads is None:
            results = as_tuple(self.node(*grads))
        else:
            self.node.needs_input_grad = self._get_needs_input_grad(select_weights=True)
            input_grads = as_tuple(self.node.apply(*grads))
            needed = [grad for grad, needs in zip(input_grads, self.needed_grads) if needs]
            results = dict(zip(self._get_connected_edge_indices(), needed, strict=True))
        self.results = {k: results[k] for k in self.exits}

    def pop_weight_path_grads(self) -> Iterator[tuple[GradientEdge, Tensor]]:
        """Yield and free the gradients that flow to the weights, each with its edge in the autograd graph."""
        results, self.results = self.results or {}, None
        for k, grad in results.items():
            if grad is not None:
                edge = self.exits[k]
                shape = get_gradient_shape(edge)
                yield self._delay_accumulation(edge, grad), grad if grad.shape == shape else grad.sum_to_size(shape)

    def _delay_accumulation(self, edge: GradientEdge, grad: Tensor) -> GradientEdge:
        """Return a graph edge that makes autograd accumulate ``grad`` in the order of an ordinary backward pass.

        A leaf accumulates gradients in the order of arrival, and floating-point sums depend on this order. A gradient
        that is passed to autograd for the leaf itself would arrive first. A view of the leaf that has the position of
        this node delays it.
        """
        leaf = getattr(edge.node, "variable", None)
        if not isinstance(leaf, Tensor) or grad.layout is not torch.strided:
            return edge
        with torch.enable_grad():
            view: Node = leaf.view_as(leaf).grad_fn
        copy_autograd_sequence_number(view, self.node)
        return GradientEdge(view, 0)


def _find_nodes_between(
    start_nodes: Iterable[Node], end_nodes: set[Node]
) -> tuple[set[Node], list[_InputAndWeightGradNode], bool]:
    """Find the autograd nodes between ``start_nodes`` and ``end_nodes``, and those that also lead to weights.

    Also returns whether a split backward pass accumulates gradients in the same order as a full one.

    The order changes if a computed weight (a copy made by autocast) accumulates three or more gradients, some from
    branch nodes and some from other nodes.
    """
    before: dict[Node, list[Node]] = {start: [] for start in start_nodes}
    to_visit = list(before)
    while to_visit:
        node = to_visit.pop()
        for follower, _ in node.next_functions:
            if follower is not None:
                if follower not in before:
                    before[follower] = []
                    to_visit.append(follower)
                before[follower].append(node)
    to_visit = [end for end in end_nodes if end in before]
    chain = set(to_visit)
    while to_visit:
        for node in before[to_visit.pop()]:
            if node not in chain:
                chain.add(node)
                to_visit.append(node)
    branches, is_ordered = [], True
    for node in chain:
        edges = enumerate(node.next_functions)
        exits = {k: GradientEdge(f, i) for k, (f, i) in edges if f is not None and f not in chain}
        if exits:
            branches.append(_InputAndWeightGradNode(node, exits))
            for edge in exits.values():
                users = before[edge.node]
                computed = getattr(edge.node, "variable", None) is None
                is_ordered &= not computed or len(users) < 3 or chain.issuperset(users)
    return chain, branches, is_ordered


def _compute_branch_grads(branch_nodes: Sequence[_InputAndWeightGradNode]) -> None:
    """Compute the gradients that flow to the weights, in a backward pass that requests only these gradients.

    Such a backward pass is needed because a node queries it for the gradients to compute.
    """
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True)
        end = start.view(())
    assert end.grad_fn is not None

    def compute_grads_hook(*_: object) -> None:
        for branch in branch_nodes:
            branch.compute_weight_path_grads()

    end.grad_fn.register_hook(compute_grads_hook)
    edges = [edge for branch in branch_nodes for edge in branch.exits.values()]
    torch.autograd.grad([end], [get_gradient_edge(start), *edges], allow_unused=True)


def _run_full_backward(
    output_grads: Sequence[tuple[GradientEdge, Tensor]], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    before = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    edges, values = zip(*output_grads)
    torch.autograd.backward(edges, values)
    results = [x.grad for x in inputs]
    for x, grad in zip(inputs, before):
        x.grad = grad
    return results


def _requires_full_backward(node: Node) -> bool:
    function = get_autograd_function_class(node)  # reentrant checkpointing and torch.compile
    return function is CheckpointFunction or hasattr(function, "_aot_id")
