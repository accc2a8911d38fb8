"""Descriptions of what becomes of a model's modules: what a policy says, and ``shardformer.sharding`` carries out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from shardformer.layers.tensor.arguments import Bounds
from shardformer.layout.split import Split
from shardformer.pipeline.chain import prefixed

ModuleKey = str | type[nn.Module]
"""Which modules a description is about: their class, their class's name, or their path with ``*`` for indices."""


@dataclass
class SubModuleReplacementDescription:
    """One submodule and the module that takes its place.

    Args:
        suffix: path of the submodule inside the described module.
        target_module: a class whose ``from_native_module(module, process_group, **kwargs)`` makes the replacement.
        kwargs: handed to ``from_native_module``.
        ignore_if_not_exist: whether a submodule that is not there is passed over, instead of an error.
    """

    suffix: str
    target_module: Any
    kwargs: dict[str, Any] | None = None
    ignore_if_not_exist: bool = False


@dataclass
class BlockArguments:
    """What a forward is given beside the first tensor of a block's entry, or reads off that, where ranks matter to it.

    Args:
        at: path of the module whose forward it is.
        entering: those of its arguments that enter by themselves.
        by_head: argument -> which of its dims counts the heads.
        bounds: how many heads there are, from which to which this rank has.
        width: the width of this rank's heads, for a forward that reads it as the last dim of what enters.
        kv_heads: how many key-value heads there are, and those that this rank's forward sees, in its order.
    """

    at: str
    entering: Sequence[str] = ()
    by_head: Mapping[str, int] = field(default_factory=dict)
    bounds: Bounds = field(default=(0, 0, 0), repr=False)  # ranks differ in it, and agree on the rest
    width: int | None = field(default=None, repr=False)
    kv_heads: tuple[int, tuple[int, ...]] = field(default=(0, ()), repr=False)


@dataclass
class BlockDescription:
    """A part of the described module that enters the tensor-parallel region once and leaves it once.

    Args:
        entry: path of the module whose first tensor argument enters.
        columns: paths of the column-parallel linears that read what entered.
        row: path of the row-parallel linear at the exit.
        others: paths of column-parallel linears that read something else that has entered (cross-attention's states).
        arguments: what else the forward of a module in it is given.
        activated: whether an activation follows the columns at once, so that their bias can be fused with it.
        exits_with: path of an earlier block's row-parallel linear, which exits with this one's: the layer adds them.
        gathers_around: path of a module that needs the whole sequence, under sequence parallelism, outside of the
            block too.
        summands: for a module that is a block by itself, named by ``entry`` and ``row`` (all that it is given enters,
            and what it gives leaves): the parameters and modules in it that stay whole and are added to what it gives,
            of which each rank adds an equal part. None for any other block.
    """

    entry: str
    columns: Sequence[str]
    row: str
    others: Sequence[str] = ()
    arguments: BlockArguments | None = None
    activated: bool = False
    exits_with: str | None = None
    gathers_around: str | None = None
    summands: Sequence[str] | None = None

    def within(self, path: str) -> BlockDescription:
        """The same block of a model that holds the described module at ``path``."""
        own = prefixed(self, path, "entry", "columns", "row", "others", "exits_with", "gathers_around")
        return replace(own, arguments=self.arguments and prefixed(self.arguments, path, "at"))

    @property
    def holds_exit(self) -> bool:
        """Whether the module at the entry holds the linear at the exit too."""
        return f"{self.row}.".startswith(f"{self.entry}." if self.entry else "")


@dataclass
class ModulePolicyDescription:
    """What becomes of the modules of one kind.

    Args:
        attribute_replacement: attribute (a path may lead to it) -> its value after sharding.
        param_replacement: functions that change the module's parameters in place.
        sub_module_replacement: submodules and what takes their place.
        method_replacement: method name -> function that takes its place.
        blocks: which of the replaced linears share one entry and one exit.
        parameters: parameter or buffer that a module holds itself (a path may lead to it) -> dim -> how it is cut.
            Without any dim it stays whole, and is read by what this rank has of a block: its gradient is summed.
    """

    attribute_replacement: dict[str, Any] | None = None
    param_replacement: list[Callable[[nn.Module], Any]] | None = None
    sub_module_replacement: list[SubModuleReplacementDescription] | None = None
    method_replacement: dict[str, Callable[..., Any]] | None = None
    blocks: list[BlockDescription] | None = None
    parameters: dict[str, dict[int, Split]] | None = None


def merged(descriptions: Sequence[ModulePolicyDescription]) -> ModulePolicyDescription:
    """What several descriptions of one kind of module say together, of what roles say."""
    return ModulePolicyDescription(
        attribute_replacement={n: value for d in descriptions for n, value in (d.attribute_replacement or {}).items()},
        sub_module_replacement=[sub for d in descriptions for sub in d.sub_module_replacement or []],
        blocks=[block for d in descriptions for block in d.blocks or []],
        parameters={n: splits for d in descriptions for n, splits in (d.parameters or {}).items()},
    )


@dataclass
class Layer:
    """First form: one layer to shard, by the paths of its weight and bias inside the described module.

    Args:
        weight: path of the weight, such as ``attention.self.query.weight``.
        bias: path of the bias.
        replace_layer: the class that takes the layer's place. None picks Linear1D_Col, Linear1D_Row or, for an
            embedding, VocabParallelEmbedding1D.
        ignore: whether a layer that is not there is passed over.
        n_cast: how many blocks of one size lie behind each other in the weight (3 for a fused q, k, v).
    """

    weight: str | None = None
    bias: str | None = None
    replace_layer: Any = None
    ignore: bool = False
    n_cast: int | None = None


@dataclass
class Col_Layer(Layer):
    """First form: a layer cut along its output features. ``gather_output`` gives every rank the full output."""

    gather_output: bool = False


@dataclass
class Row_Layer(Layer):
    """First form: a layer cut along its input features."""


@dataclass
class Argument:
    """First form: new values of attributes, and functions that list the layers to shard, of one class of modules."""

    attr_dict: dict[str, Any] | None = field(default_factory=dict)
    param_funcs: list[Callable[[], list[Layer]]] | None = field(default_factory=list)
