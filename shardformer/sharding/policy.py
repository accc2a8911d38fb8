"""What a policy is: a description of how a model is sharded, that ``ModelSharder`` carries out.

Three ways to write one, of which each is turned into the next:

- roles (``shardformer.policies.roles.RolePolicy``): what the model is made of, as a table;
- the first form: ``argument_policy`` with lists of ``Col_Layer`` and ``Row_Layer``;
- ``module_policy``: for each kind of module, what becomes of its attributes, parameters and submodules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardformer.context import Axis
from shardformer.errors import PolicyError
from shardformer.layers.arguments import Bounds
from shardformer.layout import Split
from shardformer.pipeline.chain import Segment
from shardformer.sharding.config import ShardConfig

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
class BlockDescription:
    """A stretch of the described module that enters the tensor-parallel region once and leaves it once.

    Args:
        entry: path of the module whose first tensor argument enters.
        columns: paths of the column-parallel linears that read what entered.
        others: paths of column-parallel linears that read something else that has entered (cross-attention's states).
        row: path of the row-parallel linear at the exit.
        activated: whether an activation follows the columns at once, so that their bias can be fused with it.
        width: the width of this rank's heads, for a forward that reads it as the last dim of what enters.
        arguments: argument of the module at a path -> that path, which of its dims counts the heads, and (how many
            heads there are, from which to which this rank has).
        inputs: (path of a module, argument of its forward) that enters beside the first tensor of the entry.
        joins: path of an earlier block's row-parallel linear, which leaves with this one's: the layer adds the two.
        around: path of a module that needs the whole sequence, under sequence parallelism, outside of the block too.
        encloses: whether the module at the entry is the block by itself: all that it is given enters, and what it gives
            leaves. ``row`` names it too.
        summands: parameters of a module that encloses its block, and modules in it, that stay whole and are added to
            what it gives: each rank adds an equal part.
    """

    entry: str
    columns: Sequence[str]
    row: str
    others: Sequence[str] = ()
    activated: bool = False
    width: int | None = field(default=None, repr=False)  # ranks may differ in it, and agree on the rest
    arguments: Mapping[str, tuple[str, int, Bounds]] = field(default_factory=dict, repr=False)
    inputs: Sequence[tuple[str, str]] = ()
    joins: str | None = None
    around: str | None = None
    encloses: bool = False
    summands: Sequence[str] = ()


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


@dataclass
class StackDescription:
    """A stack of layers, which sequence parallelism runs through and a pipeline cuts.

    Args:
        layers: path of the ModuleList.
        final_norm: path of the norm behind it, which still sees a part of the sequence.
        context: (path of a module, name of its argument): states from another stack that all layers read.
        whole_sequence: why sequence parallelism does not cut its sequence: its blocks enter and leave with all of it.
    """

    layers: str
    final_norm: str | None = None
    context: tuple[str, str] | None = None
    whole_sequence: str | None = None


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

    attr_dict: dict[str, Any] = field(default_factory=dict)
    param_funcs: list[Callable[[], list[Layer]]] = field(default_factory=list)


class Policy:
    """How a model is sharded. Overwrite what your model needs; see the module's docstring for the three forms."""

    name: str | None = None
    notes: Sequence[str] = ()
    """What ``describe`` says of it."""

    def __init__(self) -> None:
        self.model: Any = None
        self.shard_config: ShardConfig = ShardConfig()
        self.axis: Axis = Axis("tensor")

    def set_model(self, model: nn.Module) -> None:
        """Makes the model known as ``self.model``."""
        self.model = model

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Makes the config known as ``self.shard_config``, and checks that the policy can do it."""
        self.shard_config = shard_config
        # with tensor parallelism off nothing is cut: the policy sees the model as one rank alone does
        self.axis = shard_config.resolve_context().tensor if shard_config.enable_tensor_parallelism else Axis("tensor")
        self.config_sanity_check()

    def config_sanity_check(self) -> None:
        """Raises ConfigError when the config asks for what this policy cannot do."""

    def preprocess(self) -> nn.Module:
        """Work on the plain model before it is sharded. Returns the model."""
        model: nn.Module = self.model
        return model

    def module_policy(self) -> Mapping[ModuleKey, ModulePolicyDescription]:
        """Which modules become what. By default what the first form says."""
        from shardformer.sharding.first_form import descriptions_of

        return descriptions_of(self)

    def postprocess(self) -> nn.Module:
        """Work on the sharded model. Returns the model."""
        model: nn.Module = self.model
        return model

    def stacks(self) -> list[StackDescription]:
        """The model's stacks of layers; sequence parallelism needs them."""
        return []

    def segments(self) -> list[Segment]:
        """The stacks as a pipeline cuts them, in the order in which they run."""
        return [
            Segment(
                stack.layers,
                tuple(f"{stack.layers}.{name}" for name, _ in self.model.get_submodule(stack.layers).named_children()),
                entry=stack.context if at else None,
                behind=(stack.final_norm,) if stack.final_norm else (),
                is_stretched=self.shard_config.enable_sequence_parallelism
                and self.axis.size > 1
                and not stack.whole_sequence,
            )
            for at, stack in enumerate(self.stacks())
        ]

    def refuses_pipeline(self) -> str | None:
        """Why the layers of this model cannot be on several stages; None where they can."""
        return None

    def replicated(self) -> list[str] | None:
        """Paths of what stays whole on purpose. None: whatever no rule names may."""
        return None

    # --- the first form

    @staticmethod
    def argument_policy(model_config: Any, shard_config: int) -> dict[Any, Argument]:
        """First form: class of module -> ``Argument``. ``shard_config`` is the size of the tensor axis."""
        raise PolicyError(
            "The policy says nothing",
            rule="A policy has module_policy(), argument_policy() or, as a RolePolicy, a table of roles",
            remedy="Overwrite one of them; docs/policies.md has an example of each",
        )

    @staticmethod
    def inject_policy() -> tuple[Any, ...]:
        """First form: (class of the model, class that takes its place), or nothing."""
        return ()

    @staticmethod
    def binding_policy() -> dict[str, str] | None:
        """First form: path of a parameter -> path of the parameter that is bound to it."""
        return None

    @staticmethod
    def attn_in() -> list[Layer]:
        """First form: the layers that make q, k and v."""
        return []

    @staticmethod
    def attn_out() -> list[Layer]:
        """First form: attention's output layers."""
        return []

    @staticmethod
    def mlp_in() -> list[Layer]:
        """First form: the MLP's first layers."""
        return []

    @staticmethod
    def mlp_out() -> list[Layer]:
        """First form: the MLP's last layers."""
        return []

    @staticmethod
    def embedding() -> list[Layer]:
        """First form: embeddings cut over the vocabulary."""
        return []

    @staticmethod
    def unembedding() -> list[Layer]:
        """First form: heads cut over the vocabulary."""
        return []
