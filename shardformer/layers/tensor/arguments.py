"""What a module reads, changed before its forward: tensors that enter a block beside the hidden states, summands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardformer.comm.conjugates import leave_block, scatter_output
from shardformer.errors import PolicyError
from shardformer.layers.tensor.edges import SEQUENCE, enter
from shardformer.layers.tensor.stream import Stream
from shardformer.mesh.axis import Axis

Bounds = tuple[int, int, int]
"""How many heads there are, and from which to which this rank has."""


def change_argument(module: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Before each forward of ``module`` its argument ``name``, where it is a tensor, becomes ``change`` of it.

    Raises PolicyError when its forward names no such argument.
    """
    names = list(inspect.signature(module.forward).parameters)
    if name not in names and "kwargs" not in names:
        raise PolicyError(
            f"{type(module).__name__}.forward has no argument {name!r}",
            rule="What enters beside the hidden states is named by the module and the argument that bring it",
            remedy=f"Its arguments are {', '.join(names)}",
        )
    position = names.index(name) if name in names else len(names)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(kwargs.get(name), Tensor):
            return args, {**kwargs, name: change(kwargs[name])}
        if len(args) > position and isinstance(args[position], Tensor):
            return (*args[:position], change(args[position]), *args[position + 1 :]), kwargs
        return args, kwargs

    module.register_forward_pre_hook(enter, with_kwargs=True)


def of_local_heads(x: Tensor, dim: int, bounds: Bounds, axis: Axis) -> Tensor:
    """The part of this rank's heads: of a dim that counts heads, or samples times heads.

    Backward, where x needs a gradient: one all-reduce of x.
    """
    heads, start, end = bounds
    if x.shape[dim] % heads:
        return x  # one for all heads
    entered = enter(x, axis) if x.requires_grad else x
    by_head: Tensor = entered.unflatten(dim, (-1, heads))
    return by_head.narrow(dim + 1, start, end - start).flatten(dim, dim + 1)


def enclose(module: nn.Module, stream: Stream, summands: Sequence[str] = ()) -> None:
    """Makes ``module`` a block by itself: every tensor that it is given enters, and its output is the ranks' sum.

    Where the stream is cut, what it is given for each token is gathered first, and each rank keeps its tokens' sums:
    what comes before, as a router, sees this rank's tokens alone.

    Communicates: forward one all-reduce of the output, backward one of the gradient of each tensor that needs one;
    where the stream is cut an all-gather of each tensor and a reduce-scatter of the output, and backward the other way
    round.

    Args:
        summands: what every rank has whole and adds to what the module gives: its own parameters (a bias behind the
            experts), and modules in it (an identity among them). Each rank adds an equal part, so that the gradients of
            all ranks add up to the whole one.
    """
    axis = stream.axis
    own = [name for name in summands if name in module._parameters]

    def entered(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        tokens = stream.by_token(x)
        if tokens is not None:
            return stream.gathered(tokens).view(-1, *x.shape[1:]) if x.dim() == tokens.dim() - 1 else stream.gathered(x)
        return enter(x, axis) if x.is_floating_point() and x.requires_grad else x

    def left(output: Tensor) -> Tensor:
        if not stream.is_cut:
            return leave_block(output, axis)
        whole = output if output.dim() == 3 else output.view(-1, stream.full, *output.shape[1:])
        part = scatter_output(whole, axis, SEQUENCE)
        return part if output.dim() == 3 else part.reshape(-1, *output.shape[1:])

    def enter_all(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return tuple(entered(x) for x in args), {name: entered(x) for name, x in kwargs.items()}

    def share(module: nn.Module, args: tuple[Any, ...]) -> None:
        # an attribute of the module's own is found before its parameter
        vars(module).update({name: module.get_parameter(name) / axis.size for name in own})

    def end_share(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for name in own:
            vars(module).pop(name, None)

    module.register_forward_pre_hook(enter_all, with_kwargs=True)
    module.register_forward_hook(lambda _, __, output: left(output))
    if own:
        module.register_forward_pre_hook(share)
        module.register_forward_hook(end_share, always_call=True)
    for name in set(summands) - set(own):
        module.get_submodule(name).register_forward_hook(lambda _, __, output: output / axis.size)
