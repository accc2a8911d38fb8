"""The layers of a model in the order in which they run, what each costs, and what stages need beside them.

A *unit* is one call of a layer. Most layers are called once, so unit and layer are the same; ALBERT calls one layer
again and again. The units of all stacks, in the order in which they run, are the chain: of an encoder-decoder first
the encoder's, then the decoder's. What stands before a stack (its *front*: embeddings) goes with its first unit, what
stands behind it (a norm, a pooler, the head) with its last.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise, takewhile
from typing import Any, TypeVar

import torch
from torch import nn

from shardformer.errors import ConfigError
from shardformer.layout.activation_layout import ActivationLayout, Dim, ShardedFrom
from shardformer.public_names import renamed_arguments

Record = TypeVar("Record", bound=Any)


def with_path_prefix(record: Record, path: str, *fields: str) -> Record:
    """The record with ``path`` before the paths in these fields; a ``?`` behind one goes."""
    return replace(record, **{field: _inside(path, getattr(record, field)) for field in fields})


def _inside(path: str, inner: Any) -> Any:
    if isinstance(inner, str):
        return ".".join(part for part in (path, inner.rstrip("?")) if part)
    return inner and tuple(_inside(path, each) for each in inner)


@renamed_arguments(
    {
        "before": "with_first_layer",
        "after": "with_last_layer",
        "from_first": "shared_from_first",
        "everywhere": "on_every_stage",
        "returns": "num_outputs",
    }
)
@dataclass(frozen=True, kw_only=True)
class PipelineHints:
    """What the stages of a pipeline need of a stack of layers beside the layers themselves.

    Args:
        with_first_layer, with_last_layer: paths of what goes with the first unit, and with the last, where the order
        in which the model
            registers its modules does not tell.
        shared_from_first: attributes of the first unit's module, modules among them, that the first unit of every stage
            has too.
        on_every_stage: paths of what every stage with a unit of this stack has.
        num_outputs: how many things a layer returns; 0 for its hidden states alone. None: 0 if its forward is annotated
            to return a tensor, 1 otherwise.
    """

    with_first_layer: Sequence[str] = ()
    with_last_layer: Sequence[str] = ()
    shared_from_first: Sequence[str] = ()
    on_every_stage: Sequence[str] = ()
    num_outputs: int | None = 0

    def for_layers(self, layers: nn.Module) -> PipelineHints:
        """The same, with the number of things that the first of ``layers`` returns."""
        if self.num_outputs is not None:
            return self
        forward = type(next(layers.children())).forward
        is_tensor = inspect.signature(forward).return_annotation in (torch.Tensor, "Tensor", "torch.Tensor")
        return replace(self, num_outputs=int(not is_tensor))


@renamed_arguments(
    {
        "gathers": "gather_modules",
        "around": "gather_with_blocks",
        "beside": "per_token_args",
        "apart": "token_free_modules",
    }
)
@dataclass(frozen=True)
class SequenceParallelHints:
    """What sequence parallelism has to know of a stack beside its blocks. Modules are named by their paths in a layer.

    Args:
        gather_modules: modules that need the whole sequence, where they hold no block: convolutions, attentions that
        stay
            whole. It is gathered around them.
        gather_with_blocks: modules that are given the whole sequence together with the blocks in them, as an MLP
        whose experts are
            given tokens in another order.
        per_token_args: arguments that are given for each token beside the hidden states, (B, S, ...): a layer's own
        by their
            names, those of a module that is given the whole sequence behind its path ("mixer.gate").
        token_free_modules: modules that are given no tokens, as a time step that scales all of them. What they give
        is summed over
            the ranks' tokens in the backward.
        between: whether the model's own code between two layers reads all positions, as where features of images are
            added to some. What a layer gives is then gathered where it is read; the next layer gathers nothing.
    """

    gather_modules: Sequence[str] = ()
    gather_with_blocks: Sequence[str] = ()
    per_token_args: Sequence[str] = ()
    token_free_modules: Sequence[str] = ()
    between: bool = False


@dataclass(frozen=True)
class StackDescription:
    """A stack of layers, which sequence parallelism runs through and a pipeline cuts.

    Args:
        layers: path of the ModuleList.
        final_norm: path of the norm behind it, which still sees a part of the sequence.
        context: (path of a module, name of its argument): states from another stack that all layers read. In a chain,
            where those of the stack before come in; None: as the hidden states of the first unit.
        whole_sequence: why sequence parallelism does not cut its sequence: its blocks enter and leave with all of it.
        reads_context: whether blocks read the context as it comes in; else it enters none of them there.
        layer_calls: path of the module that each unit calls, in order; of a stack of its own the layers, each once.
        stages: what stages have to have of it.
        sequence: what sequence parallelism has to know of it.
    """

    layers: str
    final_norm: str | None = None
    context: tuple[str, str] | None = None
    whole_sequence: str | None = None
    reads_context: bool = True
    layer_calls: tuple[str, ...] = ()
    stages: PipelineHints = PipelineHints()
    sequence: SequenceParallelHints = SequenceParallelHints()

    def within(self, path: str) -> StackDescription:
        """The same stack of a model that holds this one's at ``path``; a path may end in ``?``, which goes."""
        own = with_path_prefix(self, path, "layers", "final_norm", "layer_calls")
        stages = with_path_prefix(self.stages, path, "with_first_layer", "with_last_layer", "on_every_stage")
        return replace(own, context=self.context and (_inside(path, self.context[0]), self.context[1]), stages=stages)

    def layout_in(self, stream: ActivationLayout) -> ActivationLayout:
        """The stream in this stack: where the sequence stays whole, the stack does not cut it."""
        whole = Dim.SEQUENCE if self.whole_sequence else None
        cuts = [cut for cut in stream.shards if cut.begin is ShardedFrom.INPUTS or cut.dim is not whole]
        return replace(stream, shards=tuple(cuts))

    @property
    def repeats_layers(self) -> bool:
        """Whether some layer is called more than once."""
        return len(set(self.layer_calls)) < len(self.layer_calls)


def _layers_of(layers: nn.Module, path: str) -> list[str]:
    """The path of each layer in the order of the list; of one that the list holds several times, its first path."""
    first: dict[int, str] = {}
    return [first.setdefault(id(m), f"{path}.{name}") for name, m in layers._modules.items() if m is not None]


LayerRange = range
"""The units that one virtual stage runs, from ``start`` to before ``stop``."""


@dataclass(frozen=True)
class LayerSequence:
    """The stacks of a model in the order in which they run."""

    stacks: tuple[StackDescription, ...]

    @classmethod
    def of(cls, model: nn.Module, stacks: Sequence[StackDescription]) -> LayerSequence:
        """These stacks of a model: what the first is given are the model's inputs, and an empty one is left out."""
        found = []
        for at, stack in enumerate(stacks):
            layers = _layers_of(model.get_submodule(stack.layers), stack.layers)
            found.append(
                replace(stack, layer_calls=stack.layer_calls or tuple(layers), context=stack.context if at else None)
            )
        return cls(tuple(stack for stack in found if stack.layer_calls))

    @property
    def layer_calls(self) -> tuple[str, ...]:
        return tuple(chain.from_iterable(s.layer_calls for s in self.stacks))

    @property
    def starts(self) -> tuple[int, ...]:
        """The first unit of each stack."""
        return tuple(accumulate((len(s.layer_calls) for s in self.stacks[:-1]), initial=0))[: len(self.stacks)]

    def stack_of(self, unit: int) -> int:
        """The stack that holds a unit."""
        return max(i for i, start in enumerate(self.starts) if start <= unit)

    def received_states(self, unit: int) -> tuple[str, ...]:
        """What the stage before hands over where a stage begins with ``unit``: "hidden", "context", or both."""
        if unit == 0:
            return ()
        index = self.stack_of(unit)
        has_context = index > 0 and self.stacks[index].context is not None
        begins = unit == self.starts[index]
        return (() if begins and has_context else ("hidden",)) + (("context",) if has_context else ())

    def stage_ranges(self, bounds: Sequence[int]) -> list[LayerRange]:
        """The spans between bounds, which are as many as the stages and one."""
        return [LayerRange(a, b) for a, b in pairwise(bounds)]


def owner_layers(model: nn.Module, units: LayerSequence) -> dict[str, frozenset[int]]:
    """The units that each parameter and buffer goes with, by each of its names.

    What stands in a layer goes with every call of it. All else goes with the first or the last unit of a stack: what
    the model registers before a stack's first layer is its front, what it registers behind it (or inside of the module
    that holds the stack before) goes with that stack's last; ``before`` and ``after`` of a stack say what differs.
    """
    order = {name: at for at, name in enumerate(_in_order(model))}
    return {name: frozenset(_homes_of(name, units, order)) for name in order}


def owner_stages(home: Mapping[str, frozenset[int]], spans: Sequence[LayerRange]) -> dict[str, frozenset[int]]:
    """The virtual stages that hold each parameter and buffer, by name: those that run a unit it goes with."""
    return {
        name: frozenset(v for v, span in enumerate(spans) if any(unit in span for unit in units))
        for name, units in home.items()
    }


def _in_order(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in chain(module._parameters.items(), module._buffers.items()):
            if value is not None:
                yield f"{path}.{name}" if path else name


def _homes_of(name: str, units: LayerSequence, order: Mapping[str, int]) -> Iterable[int]:
    for stack, start in zip(units.stacks, units.starts, strict=True):
        whole = range(start, start + len(stack.layer_calls))
        from_first = [f"{stack.layer_calls[0]}.{path}" for path in stack.stages.shared_from_first]
        if any(_is_under(name, path) for path in (*stack.stages.on_every_stage, *from_first)):
            return whole
        inside = [u for u in whole if _is_under(name, stack.layer_calls[u - start])]
        if inside:
            return inside
    for stack, start in zip(units.stacks, units.starts, strict=True):
        if any(_is_under(name, path) for path in stack.stages.with_first_layer):
            return [start]
        if any(_is_under(name, path) for path in (*stack.stages.with_last_layer, stack.final_norm) if path):
            return [start + len(stack.layer_calls) - 1]
    return [_unit_beside(name, units, order)]


def _unit_beside(name: str, units: LayerSequence, order: Mapping[str, int]) -> int:
    """The unit that something outside of the layers goes with, by the place where the model registers it."""
    starts = units.starts
    firsts = [min(at for n, at in order.items() if _is_under(n, s.layer_calls[0])) for s in units.stacks]
    before = [i for i, first in enumerate(firsts) if order[name] < first]
    follows = before[0] if before else len(firsts)  # the stack it stands before
    shared = [_common(name, s.layers) for s in units.stacks]
    nearest = max(shared[:follows], default=-1)
    if follows < len(firsts) and shared[follows] >= nearest:
        # what a stack hands to the next directly is made before it is handed on
        return starts[follows] - (follows > 0 and units.stacks[follows].context is None)
    earlier = follows - 1 if not nearest else max(i for i in range(follows) if shared[i] == nearest)
    return starts[earlier] + len(units.stacks[earlier].layer_calls) - 1


def _common(name: str, layers: str) -> int:
    """How many parts of two paths are the same, from the left."""
    pairs = zip(name.split("."), layers.split("."), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _is_under(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def no_layers_error(model: nn.Module, said: str, notes: Sequence[str] = ()) -> ConfigError:
    """For a model whose policy names no stack that can be cut; ``notes`` of that policy say why."""
    why = f". {' '.join(notes).removesuffix('.')}" if notes else ""
    return ConfigError(
        f"pipe={said} and a {type(model).__name__}, whose policy names no stack of layers{why}",
        rule="A pipeline cuts a stack of layers, which run one behind the other, into stages",
        remedy="Leave pipe out, or name the stack in a policy: stacks() of a Policy, stack of a RolePolicy",
    )


MIN_COST = 1e-9
"""What a layer without any weight costs, so that it counts at all."""


def estimate_layer_costs(model: nn.Module, chain: LayerSequence, home: Mapping[str, frozenset[int]]) -> list[float]:
    """What each unit costs a token, about: the elements of the matrices that it meets, of experts those it is sent to.

    A table that is looked up costs nothing; what stands before and behind a stack counts with its first and last unit.
    """
    units = chain.layer_calls
    per_module = {path: _matrices(model, model.get_submodule(path)) for path in dict.fromkeys(units)}
    costs = [MIN_COST + per_module[path] for path in units]
    tables = {id(m) for m in model.modules() if isinstance(m, nn.Embedding)}
    for path, module in model.named_modules() if units else ():
        for name, p in module.named_parameters(recurse=False):
            at, *others = home[f"{path}.{name}" if path else name]
            if p.dim() >= 2 and id(module) not in tables and not others and not f"{path}.".startswith(f"{units[at]}."):
                costs[at] += p.numel()
    return costs


def _matrices(model: nn.Module, module: nn.Module) -> float:
    config: Any = getattr(model, "config", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    total = 0.0
    for p in module.parameters():
        if p.dim() == 2 or p.dim() > 3:
            total += p.numel()
        elif p.dim() == 3:
            total += p.numel() * min(1.0, chosen / p.shape[0]) if isinstance(chosen, int) else p.numel()
    return total


def measure_layer_costs(
    model: nn.Module, chain: LayerSequence, run: Callable[[], Any], rounds: int, device: torch.device
) -> list[float]:
    """The seconds of each unit in a forward of the plain model, the least of some rounds.

    What runs between two units counts with the second, what runs behind the last one with that.
    """
    marks: list[float] = []

    def mark(*_: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(time.perf_counter())

    handles = [model.get_submodule(path).register_forward_hook(mark) for path in dict.fromkeys(chain.layer_calls)]
    found: list[list[float]] = []
    try:
        for _ in range(rounds + 1):  # the first only warms up
            marks.clear()
            mark()
            run()
            mark()
            marks[-2:] = marks[-1:]  # the last unit ends with the model
            found.append([b - a for a, b in pairwise(marks)])
    finally:
        for handle in handles:
            handle.remove()
    return [min(each) for each in zip(*found[1:], strict=True)]
