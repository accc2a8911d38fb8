"""The first form of a policy, turned into module descriptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardformer.errors import PolicyError, did_you_mean
from shardformer.mesh.parallel_context import Axis
from shardformer.module_paths import parent_of
from shardformer.policies.module_descriptions import (
    ModulePolicyDescription,
    SubModuleReplacementDescription,
    check_field_types,
)
from shardformer.tensor_parallel.layers import (
    FusedLinear1D_Col,
    Linear1D_Col,
    Linear1D_Row,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from shardformer.tensor_parallel.parallel_module import GroupLike, ParallelModule


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


class LegacyPolicy:
    """The functions that a policy of the first form overwrites; what they give, ``legacy_descriptions`` turns
    around."""

    model: Any
    axis: Axis

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


def legacy_descriptions(policy: LegacyPolicy) -> dict[Any, ModulePolicyDescription]:
    """What ``argument_policy`` says, as ``module_policy`` says it.

    Raises PolicyError for an argument that says nothing, and a layer that names no weight or not how it is cut.
    """
    arguments = policy.argument_policy(getattr(policy.model, "config", None), policy.axis.size)
    if not isinstance(arguments, dict):
        raise PolicyError(
            f"{type(policy).__name__}.argument_policy() gave {arguments!r:.80}",
            rule="It returns a dict: class of modules -> Argument(attr_dict={...}, param_funcs=[...])",
            remedy="Return that dict; docs/policies.md has an example",
        )
    wrong = next((said for said in arguments.values() if not isinstance(said, Argument)), None)
    if wrong is not None:
        raise PolicyError(
            f"{type(policy).__name__}.argument_policy() has {wrong!r:.80}",
            rule="What it says of a class of modules is an Argument(attr_dict={...}, param_funcs=[...])",
            remedy="Write that; docs/policies.md has an example",
        )
    for argument in arguments.values():
        check_field_types(argument)
    heads = {_module_path(layer) for layer in _returned(policy.unembedding())}
    return {key: _description(key, argument, heads) for key, argument in arguments.items()}


def _description(key: Any, argument: Argument, heads: set[str]) -> ModulePolicyDescription:
    functions, attributes = argument.param_funcs or [], argument.attr_dict or {}
    layers = [layer for function in functions for layer in _returned(function())]
    if not layers and not attributes:
        names = ", ".join(getattr(f, "__name__", str(f)) for f in functions) or "no functions"
        raise PolicyError(
            f"The Argument for {getattr(key, '__name__', key)} says nothing: {names} in param_funcs, no layers",
            rule="An Argument changes attributes (attr_dict), or its param_funcs list layers to cut",
            remedy="Overwrite the functions that it names, or leave it out",
        )
    return ModulePolicyDescription(
        attribute_replacement=dict(attributes),
        sub_module_replacement=[_replacement(layer, heads) for layer in layers],
    )


def inject_class(policy: LegacyPolicy, model: nn.Module) -> tuple[type, type] | None:
    """Gives the model the class that ``inject_policy`` names. Returns (the class before, the class now)."""
    if not (pair := _returned(policy.inject_policy())):
        return None
    native, custom = pair
    model.__class__ = custom
    return native, custom


def bind_parameters(policy: LegacyPolicy, model: nn.Module) -> list[tuple[str, str]]:
    """Ties the parameters that ``binding_policy`` pairs. Returns (name, name that it is tied to) of each."""
    done = []
    for source, target in dict(_returned(policy.binding_policy())).items():
        source_param = model.get_parameter(source)
        if source_param.shape != model.get_parameter(target).shape:
            raise PolicyError(
                f"binding_policy pairs {source} {tuple(source_param.shape)} with {target} "
                f"{tuple(model.get_parameter(target).shape)} (shapes on this rank)",
                remedy="Shard both or neither",
            )
        setattr(*parent_of(model, target), source_param)
        done.append((target, source))
    return done


def check_legacy(policy: LegacyPolicy, model: nn.Module) -> None:
    """Raises PolicyError when ``inject_policy`` or ``binding_policy`` names what the model does not have."""
    pair = _returned(policy.inject_policy())
    if pair:
        native, custom = pair
        if not isinstance(model, native):
            raise PolicyError(
                f"inject_policy names {native.__name__}, but the model is a {type(model).__name__}",
                rule="The first class is the model's own, the second takes its place",
                remedy=f"Return ({type(model).__name__}, {custom.__name__})",
            )
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in [n for bound in dict(_returned(policy.binding_policy())).items() for n in bound]:
        if name not in names:
            raise PolicyError(
                f"binding_policy names the parameter {name!r}, which {type(model).__name__} does not have",
                rule="It returns a dict: name of a parameter -> name of the parameter that is bound to it",
                remedy=did_you_mean(name, names),
            )


def _returned(answer: Any) -> Any:
    """What a function of a policy returned; nothing, where it was not written: None, or an exception handed back."""
    is_exception = isinstance(answer, BaseException) or (isinstance(answer, type) and issubclass(answer, BaseException))
    return () if answer is None or is_exception else answer


def _module_path(layer: Layer) -> str:
    if not isinstance(layer, Layer):
        raise PolicyError(
            f"{layer!r:.80} among the layers of a policy",
            remedy="Write Col_Layer(weight='fc1.weight', bias='fc1.bias')",
        )
    check_field_types(layer)
    path = layer.weight or layer.bias
    owners = {p.rpartition(".")[0] for p in (layer.weight, layer.bias) if p}
    if not path or len(owners) > 1 or "" in owners:
        raise PolicyError(
            f"{type(layer).__name__}(weight={layer.weight!r}, bias={layer.bias!r})",
            remedy="Give weight= and, where the layer has one, bias=, of one and the same layer",
        )
    return path.rpartition(".")[0]


def _replacement(layer: Layer, heads: set[str]) -> SubModuleReplacementDescription:
    path = _module_path(layer)
    kwargs: dict[str, Any] = {}
    if isinstance(layer, Col_Layer) and layer.gather_output:
        kwargs["gather_output"] = True
    target = layer.replace_layer
    if layer.n_cast is not None:
        kwargs["n_fused"] = layer.n_cast
        target = FusedLinear1D_Col if target in (None, Linear1D_Col) else target
    return SubModuleReplacementDescription(
        path, target or _default_target(layer, path in heads), kwargs, ignore_if_not_exist=layer.ignore
    )


def _default_target(layer: Layer, is_head: bool) -> Any:
    if isinstance(layer, Row_Layer):
        return Linear1D_Row
    if not isinstance(layer, Col_Layer):
        raise PolicyError(
            f"Layer(weight={layer.weight!r}) without replace_layer",
            rule="Col_Layer cuts along the output features, Row_Layer along the input features, Layer says neither",
            remedy="Write Col_Layer or Row_Layer, or name the class that takes its place: replace_layer=",
        )
    return VocabParallelLMHead1D if is_head and not layer.gather_output else ColumnOrEmbedding


class ColumnOrEmbedding(ParallelModule):
    """Picks by the native module: an embedding is cut over its vocabulary, a linear over its output features."""

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        target = VocabParallelEmbedding1D if isinstance(module, nn.Embedding) else Linear1D_Col
        return target.from_native_module(module, process_group, **kwargs)
