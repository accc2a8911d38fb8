"""Support for legacy policies, which list the layers to shard in the method ``argument_policy``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardformer.errors import PolicyError, suggest_similar_names
from shardformer.mesh.parallel_context import Axis
from shardformer.module_paths import get_parent_and_attribute_name
from shardformer.policies.module_descriptions import (
    ModulePolicyDescription,
    SubModuleReplacementDescription,
    check_dataclass_field_types,
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
    """A linear layer or embedding that a legacy policy shards, with the paths of its weight and bias.

    Args:
        weight: path of the weight, such as ``attention.self.query.weight``.
        bias: path of the bias.
        replace_layer: class that replaces the layer. None uses Linear1D_Col, Linear1D_Row or, for an embedding,
            VocabParallelEmbedding1D.
        ignore: whether the layer may be missing from the model.
        n_cast: number of equal blocks that are fused in the weight (3 for a fused q, k, v).
    """

    weight: str | None = None
    bias: str | None = None
    replace_layer: Any = None
    ignore: bool = False
    n_cast: int | None = None


@dataclass
class Col_Layer(Layer):
    """A linear layer that a legacy policy shards along its output features (column-parallel).

    Args:
        gather_output: whether every rank gets the full output.
    """

    gather_output: bool = False


@dataclass
class Row_Layer(Layer):
    """A linear layer that a legacy policy shards along its input features (row-parallel)."""


@dataclass
class Argument:
    """The changes that a legacy policy makes to all modules of one class.

    Args:
        attr_dict: attribute -> its value after sharding.
        param_funcs: functions that return the layers to shard.
    """

    attr_dict: dict[str, Any] | None = field(default_factory=dict)
    param_funcs: list[Callable[[], list[Layer]]] | None = field(default_factory=list)


class LegacyPolicy:
    """Methods of ``Policy`` that only legacy policies override."""

    model: Any
    axis: Axis

    @staticmethod
    def argument_policy(model_config: Any, shard_config: int) -> dict[Any, Argument]:
        """Return the changes to each module class, such as the layers to shard, as a dict with classes as keys.

        ``shard_config`` is the tensor parallel size.
        """
        raise PolicyError(
            "The policy overrides neither module_policy() nor argument_policy(), so it does not shard any layer.",
            remedy="Derive the class from RolePolicy as in docs/policies.md, or override module_policy().",
        )

    @staticmethod
    def inject_policy() -> tuple[Any, ...]:
        """Return the model's class and its replacement, or an empty tuple to keep the class."""
        return ()

    @staticmethod
    def binding_policy() -> dict[str, str] | None:
        """Return the pairs of parameters to tie, as a dict from one parameter's path to the other's."""
        return None

    @staticmethod
    def attn_in() -> list[Layer]:
        """Return the linear layers that compute q, k and v in each attention module."""
        return []

    @staticmethod
    def attn_out() -> list[Layer]:
        """Return the output projections of the attention modules."""
        return []

    @staticmethod
    def mlp_in() -> list[Layer]:
        """Return the linear layers that read the input of each MLP."""
        return []

    @staticmethod
    def mlp_out() -> list[Layer]:
        """Return the linear layers that compute the output of each MLP."""
        return []

    @staticmethod
    def embedding() -> list[Layer]:
        """Return the embeddings to shard along the vocabulary."""
        return []

    @staticmethod
    def unembedding() -> list[Layer]:
        """Return the language model heads to shard along the vocabulary."""
        return []


def convert_legacy_policy(policy: LegacyPolicy) -> dict[Any, ModulePolicyDescription]:
    """Convert the ``Argument`` objects of a legacy policy to ``ModulePolicyDescription`` objects.

    Raises PolicyError for an ``Argument`` without effect, or a layer without a weight or a kind of sharding.
    """
    arguments = policy.argument_policy(getattr(policy.model, "config", None), policy.axis.size)
    values = list(arguments.values()) if isinstance(arguments, dict) else [arguments]
    wrong = [value for value in values if not isinstance(value, Argument)]
    if wrong or not isinstance(arguments, dict):
        first_wrong = [*wrong, arguments][0]
        raise PolicyError(
            f"{type(policy).__name__}.argument_policy() must return a dict of Argument objects, but got "
            f"{first_wrong!r:.80}.",
            remedy="Return {module class: Argument(attr_dict={...}, param_funcs=[...])} as in docs/policies.md.",
        )
    for argument in arguments.values():
        check_dataclass_field_types(argument)
    heads = {_get_layer_path(layer) for layer in _empty_if_not_implemented(policy.unembedding())}
    return {key: _convert_argument_to_module_description(key, argument, heads) for key, argument in arguments.items()}


def _convert_argument_to_module_description(
    module_key: type | str, argument: Argument, lm_head_paths: set[str]
) -> ModulePolicyDescription:
    functions, attributes = argument.param_funcs or [], argument.attr_dict or {}
    layers = [layer for function in functions for layer in _empty_if_not_implemented(function())]
    if not layers and not attributes:
        name = getattr(module_key, "__name__", module_key)
        names = ", ".join(getattr(f, "__name__", str(f)) for f in functions) or "no functions"
        raise PolicyError(
            f"The Argument for {name} has no effect, because attr_dict is empty and param_funcs ({names}) return no "
            "layers.",
            remedy="Set attr_dict, override the functions in param_funcs, or remove the Argument.",
        )
    return ModulePolicyDescription(
        attribute_replacement=dict(attributes),
        sub_module_replacement=[_make_layer_replacement(layer, lm_head_paths) for layer in layers],
    )


def replace_model_class(policy: LegacyPolicy, model: nn.Module) -> tuple[type, type] | None:
    """Replace the class of the model with the class that ``inject_policy`` returns.

    Returns (class before, class after), or None if the policy keeps the class.
    """
    if not (pair := _empty_if_not_implemented(policy.inject_policy())):
        return None
    native, custom = pair
    model.__class__ = custom
    return native, custom


def tie_parameters(policy: LegacyPolicy, model: nn.Module) -> list[tuple[str, str]]:
    """Tie the two parameters of each pair that ``binding_policy`` returns.

    Returns (name, name of the parameter to which it is tied) for each pair.
    """
    tied = []
    for source, target in dict(_empty_if_not_implemented(policy.binding_policy())).items():
        source_param = model.get_parameter(source)
        source_shape, target_shape = tuple(source_param.shape), tuple(model.get_parameter(target).shape)
        if source_shape != target_shape:
            raise PolicyError(
                f"binding_policy cannot tie {source} to {target}, because their shapes on this rank differ: "
                f"{source_shape} and {target_shape}.",
                remedy="Shard both parameters in the same way, or shard neither.",
            )
        setattr(*get_parent_and_attribute_name(model, target), source_param)
        tied.append((target, source))
    return tied


def check_legacy_policy(policy: LegacyPolicy, model: nn.Module) -> None:
    """Raise PolicyError if a legacy policy refers to a class or parameter that the model does not have."""
    pair = _empty_if_not_implemented(policy.inject_policy())
    if pair and not isinstance(model, pair[0]):
        raise PolicyError(
            f"inject_policy replaces the class {pair[0].__name__}, but the model is a {type(model).__name__}.",
            remedy=f"Return ({type(model).__name__}, {pair[1].__name__}) from inject_policy.",
        )
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in [n for bound in dict(_empty_if_not_implemented(policy.binding_policy())).items() for n in bound]:
        if name not in names:
            raise PolicyError(
                f"binding_policy ties the parameter {name!r}, but {type(model).__name__} has no such parameter.",
                remedy=suggest_similar_names(name, names),
            )


def _empty_if_not_implemented(method_result: Any) -> Any:
    """Return the result of a legacy policy's method, or () if the method is not implemented.

    A method that is not implemented returns None or an exception.
    """
    is_exception = isinstance(method_result, BaseException) or (
        isinstance(method_result, type) and issubclass(method_result, BaseException)
    )
    return () if method_result is None or is_exception else method_result


def _get_layer_path(layer: Layer) -> str:
    if not isinstance(layer, Layer):
        raise PolicyError(
            f"The layers of a policy must be Layer objects, but got {layer!r:.80}.",
            remedy="Use Col_Layer or Row_Layer, for example Col_Layer(weight='fc1.weight', bias='fc1.bias').",
        )
    check_dataclass_field_types(layer)
    path = layer.weight or layer.bias
    owners = {p.rpartition(".")[0] for p in (layer.weight, layer.bias) if p}
    if not path or len(owners) > 1 or "" in owners:
        raise PolicyError(
            "The weight and the bias of a Layer must belong to one module, but got "
            f"{type(layer).__name__}(weight={layer.weight!r}, bias={layer.bias!r}).",
            remedy="Pass paths such as weight='fc1.weight' and bias='fc1.bias'.",
        )
    return path.rpartition(".")[0]


def _make_layer_replacement(layer: Layer, lm_head_paths: set[str]) -> SubModuleReplacementDescription:
    path, target = _get_layer_path(layer), layer.replace_layer
    kwargs: dict[str, Any] = {"gather_output": True} if isinstance(layer, Col_Layer) and layer.gather_output else {}
    if layer.n_cast is not None:
        kwargs["n_fused"] = layer.n_cast
        target = FusedLinear1D_Col if target in (None, Linear1D_Col) else target
    target = target or _choose_parallel_layer_class(layer, path in lm_head_paths)
    return SubModuleReplacementDescription(path, target, kwargs, ignore_if_not_exist=layer.ignore)


def _choose_parallel_layer_class(layer: Layer, is_lm_head: bool) -> type[ParallelModule]:
    if isinstance(layer, Row_Layer):
        return Linear1D_Row
    if not isinstance(layer, Col_Layer):
        raise PolicyError(
            f"Layer(weight={layer.weight!r}) has no replace_layer, so the dimension to shard is unknown.",
            remedy="Use Col_Layer to shard the output features, or Row_Layer to shard the input features.",
        )
    return VocabParallelLMHead1D if is_lm_head and not layer.gather_output else ColumnParallelOrEmbedding


class ColumnParallelOrEmbedding(ParallelModule):
    """Creates a vocabulary-parallel embedding from an embedding, and otherwise a column-parallel layer."""

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        target = VocabParallelEmbedding1D if isinstance(module, nn.Embedding) else Linear1D_Col
        return target.from_native_module(module, process_group, **kwargs)
