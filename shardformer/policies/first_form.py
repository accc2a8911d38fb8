"""The first form of a policy, turned into module descriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from shardformer.errors import PolicyError
from shardformer.layers.embedding import VocabParallelEmbedding1D
from shardformer.layers.linear import FusedLinear1D_Col, Linear1D_Col, Linear1D_Row, VocabParallelLMHead1D
from shardformer.policies.policy import (
    Col_Layer,
    Layer,
    ModulePolicyDescription,
    Row_Layer,
    SubModuleReplacementDescription,
)

if TYPE_CHECKING:
    from shardformer.policies.policy import Policy


def descriptions_of(policy: Policy) -> dict[Any, ModulePolicyDescription]:
    """What ``argument_policy`` says, as ``module_policy`` says it.

    Raises PolicyError when a layer names neither a weight nor a bias.
    """
    arguments = policy.argument_policy(getattr(policy.model, "config", None), policy.axis.size)
    out = {}
    heads = {_module_path(layer) for layer in policy.unembedding()}
    for key, argument in arguments.items():
        layers = [layer for function in argument.param_funcs for layer in function()]
        out[key] = ModulePolicyDescription(
            attribute_replacement=dict(argument.attr_dict),
            sub_module_replacement=[_replacement(layer, heads) for layer in layers],
        )
    return out


def inject(policy: Policy, model: nn.Module) -> tuple[type, type] | None:
    """Gives the model the class that ``inject_policy`` names. Returns (the class before, the class now)."""
    pair = policy.inject_policy()
    if not pair:
        return None
    native, custom = pair
    if not isinstance(model, native):
        raise PolicyError(
            f"inject_policy names {native.__name__}, but the model is a {type(model).__name__}",
            rule="The first class is the model's own, the second takes its place",
            remedy=f"Return ({type(model).__name__}, {custom.__name__})",
        )
    model.__class__ = custom
    return native, custom


def bind(policy: Policy, model: nn.Module) -> list[tuple[str, str]]:
    """Ties the parameters that ``binding_policy`` pairs. Returns (name, name that it is tied to) of each."""
    done = []
    for source, target in (policy.binding_policy() or {}).items():
        source_param = model.get_parameter(source)
        path, _, name = target.rpartition(".")
        if source_param.shape != model.get_parameter(target).shape:
            raise PolicyError(
                f"binding_policy pairs {source} {tuple(source_param.shape)} with {target} "
                f"{tuple(model.get_parameter(target).shape)} (shapes on this rank)",
                rule="Parameters that are bound have one shape and are cut the same way",
                remedy="Shard both or neither",
            )
        setattr(model.get_submodule(path), name, source_param)
        done.append((target, source))
    return done


def _module_path(layer: Layer) -> str:
    path = layer.weight or layer.bias
    if not path:
        raise PolicyError(
            f"{type(layer).__name__} without weight and bias",
            rule="A layer is named by the path of its weight, such as 'attention.self.query.weight'",
            remedy="Give weight=",
        )
    return path.rpartition(".")[0]


def _replacement(layer: Layer, heads: set[str]) -> SubModuleReplacementDescription:
    path = _module_path(layer)
    target = layer.replace_layer
    kwargs: dict[str, Any] = {}
    if target is None:
        target = _default_target(layer, path in heads)
    if isinstance(layer, Col_Layer) and layer.gather_output:
        kwargs["gather_output"] = True
    if layer.n_cast is not None:
        target, kwargs["n_fused"] = FusedLinear1D_Col, layer.n_cast
    return SubModuleReplacementDescription(path, target, kwargs, ignore_if_not_exist=layer.ignore)


def _default_target(layer: Layer, is_head: bool) -> Any:
    if isinstance(layer, Row_Layer):
        return Linear1D_Row
    if is_head and not (isinstance(layer, Col_Layer) and layer.gather_output):
        return VocabParallelLMHead1D
    return _ColumnOrEmbedding


class _ColumnOrEmbedding:
    """Picks by the native module: an embedding is cut over its vocabulary, a linear over its output features."""

    __name__ = "Linear1D_Col"

    @staticmethod
    def from_native_module(module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        if isinstance(module, nn.Embedding):
            return VocabParallelEmbedding1D.from_native_module(module, process_group, **kwargs)
        return Linear1D_Col.from_native_module(module, process_group, **kwargs)


__all__ = ["bind", "descriptions_of", "inject"]
