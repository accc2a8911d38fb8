"""The twin of a model: the same classes with a small config, on which a policy is found and proven in seconds."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import PolicyError, first_line
from shardformer.layers.dropout import silence_dropout
from shardformer.lazy.materialize import copy_with_values, is_lazy
from shardformer.pipeline.flat import TOKENS, ids_of
from shardformer.policies.infer.own_code import apart_from, take_over
from shardformer.policies.infer.prove import Reference, loss_of
from shardformer.policies.infer.together import MODALITIES, feature_width, in_text, text_width, values_beside_text
from shardformer.testing.zoo.inputs import (
    Forward,
    UnknownInputsError,
    batches_for,
    guessed_for,
    inputs_of,
    labelled,
    runner,
)
from shardformer.testing.zoo.layers import kinds_of_layers, more_layers
from shardformer.testing.zoo.measure import changed, numbers
from shardformer.testing.zoo.shrink import SMALL_NUMEL, Shrinker

PRECISIONS = (torch.float64, torch.float32)
ONE_AT_A_TIME = threading.RLock()
"""Ranks that are threads share the random states, which a comparison of forwards sets."""
UNTRIED = "the layout was not tried, since no small batch could be made"
"""Why a batch with an input is refused that the small model was never called with."""
MOST_NUMEL = 10 * SMALL_NUMEL
"""Of one whose parts are not joined yet."""


@dataclass(frozen=True)
class Further:
    """A call of a small model with inputs that its first batch lacks, images or sounds in its text, and their names."""

    run: Forward
    names: tuple[str, ...]


@dataclass(frozen=True)
class Twin:
    """A small model, what calls it with a batch, and that batch.

    Args:
        further: calls with other inputs that it takes as well.
        untried: inputs of images and sounds that no call has, since no way to lay them out is known.
    """

    model: nn.Module
    run: Forward
    batch: Mapping[str, Tensor]
    further: tuple[Further, ...] = ()
    untried: tuple[str, ...] = ()

    def reference(self, run: Forward | None = None) -> Reference:
        """What the model gives for its batch, or for that of another ``run``, and for the further ones."""
        return replace(Reference.of(self.model, run or self.run), also=self.also())

    def also(self) -> tuple[Reference, ...]:
        """What the model gives for the further batches."""
        return tuple(Reference.of(self.model, further.run) for further in self.further)

    def unproven(self, against: str | None) -> dict[str, str]:
        """The inputs with which a layout is not proven, and why: those that were not tried, and those of the further
        calls where there is something ``against`` it."""
        further = [name for each in self.further for name in each.names] if against is not None else []
        return {**dict.fromkeys(self.untried, UNTRIED), **dict.fromkeys(further, against or "")}

    @property
    def samples(self) -> int:
        """Of the batch."""
        return Counter(len(x) for x in self.batch.values() if x.dim()).most_common(1)[0][0]


def twin_of(model: nn.Module, batch: Mapping[str, Tensor] | None = None, *, together: bool = False) -> Twin:
    """A small model of the class of ``model`` that trains on the CPU, in fp64 or else in fp32: see ``_runs``.

    It is fed text alone where it takes that; with ``together`` images and sounds that stand in it as well.

    Raises PolicyError where neither a twin can be built and run nor the model is small enough to be its own.
    """
    problems = []
    try:
        makes = list(_shrunk_twins(model))
    except Exception as error:  # its class takes more than a config, or asks for what no other config has
        makes, problems = [], [f"{type(error).__name__}: {str(error).strip()[:160]}"]
    copied = partial(copy_with_values if is_lazy(model) else copy.deepcopy, model)
    if sum(p.numel() for p in model.parameters()) <= SMALL_NUMEL:
        makes.append(copied)
    for make, dtype in product(makes, PRECISIONS):
        try:
            twin = _made(make, dtype)
            if make is not copied:
                if lacks := kinds_of_layers(model) - kinds_of_layers(twin):
                    raise ValueError(f"it lacks {len(lacks)} of the kinds of layers")
                take_over(twin, model)
            with apart_from(model):
                run, fed = _runs(twin, batch, together=together)
            further = () if batch is not None or together else tuple(_further(twin, fed))
            tried = {*fed, *(name for each in further for name in each.names)}
            untried = [name for name in values_beside_text(twin) if name not in tried] if batch is None else []
            return Twin(twin, run, fed, further, tuple(untried))
        except UnknownInputsError:
            raise  # no other twin would be told
        except PolicyError as error:
            problems.append(error.what)
        except Exception as error:  # relations between the fields that no measurement tells
            problems.append(f"{type(error).__name__}: {str(error).strip()[:160]}")
    raise PolicyError(
        f"No small twin of {type(model).__name__} can be built and run: {'; '.join(dict.fromkeys(problems))}",
        rule=f"A policy is found and proven on a small model of the same classes, of up to {SMALL_NUMEL:,} parameters",
        remedy="Write the roles down (docs/policies.md), or infer them from a small config of yours; where the inputs "
        "are special, give an example of a batch that fits it: infer(model, batch={...})",
    )


def own_twin_of(model: nn.Module) -> Twin:
    """A copy of a small model that trains on the CPU, without its hooks; what it takes is guessed where need be.

    Raises PolicyError where it cannot be copied or run so.
    """
    name, problem = type(model).__name__, f"it has more than {SMALL_NUMEL:,} parameters"
    makes = [partial(copy_with_values if is_lazy(model) else copy.deepcopy, model)]
    if sum(p.numel() for p in model.parameters()) > SMALL_NUMEL:
        makes = []
    for make, dtype in product(makes, PRECISIONS):
        try:
            twin = without_hooks(_made(make, dtype))
            with apart_from(model):
                return Twin(twin, *_runs(twin, None, guesses=True))
        except PolicyError as error:
            problem = error.what
        except Exception as error:  # a model of somebody's own can raise anything
            problem = f"{type(error).__name__}: {first_line(error)[:160]}"
    raise PolicyError(
        f"No copy of {name} can be run: {problem}",
        rule=f"A policy is proven on a model of up to {SMALL_NUMEL:,} parameters, in one forward and backward",
        remedy="Compare it yourself: shardformer.verify.verify(make_model, batches, tensor=2, policy=...)",
    )


def twin_or_copy_of(model: nn.Module) -> Twin:
    """A small model of the class of ``model``; else, of a module of the user's own, a copy of it.

    Raises PolicyError where there is neither.
    """
    try:
        return twin_of(model)
    except PolicyError as error:
        problem = error
    try:
        return own_twin_of(model)
    except PolicyError as error:
        raise PolicyError(
            f"{problem.what.rstrip('.')}; and {error.what[0].lower()}{error.what[1:]}",
            rule="The layers of a module are found, and their cut is validated, on a smaller model of its class, which "
            "is built as type(model)(config) from the config of transformers in model.config, or on a copy of the "
            f"module, which has up to {SMALL_NUMEL:,} parameters and runs on what its forward cannot do without",
            remedy="Let the class take a config alone and keep it as self.config, or give all arguments of forward but "
            "the tokens or features a default",
        ) from None


def without_hooks(model: nn.Module) -> nn.Module:
    """The model, whose forwards nobody listens to any longer."""
    for module in model.modules():
        for name, table in vars(module).items():
            if name.startswith("_") and name.endswith(("forward_hooks", "forward_pre_hooks", "backward_hooks")):
                table.clear()
    return model


def _made(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().to(device="cpu", dtype=dtype).eval().requires_grad_(True)


def _shrunk_twins(model: nn.Module) -> Iterator[Callable[[], nn.Module]]:
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return
    shrinker = Shrinker(model)
    # with few layers, or as many as it takes to have one of each kind
    for anew, even, layers in product((False, True), (False, True), dict.fromkeys((0, more_layers(model)))):
        yield partial(_shrunk_twin, shrinker, even=even, layers=layers, anew=anew)


def _shrunk_twin(shrinker: Shrinker, **how: Any) -> nn.Module:
    small = shrinker.config(**how)
    if (numel := shrinker.numel(small)) <= MOST_NUMEL:  # of them, some may be what joins two parts
        model = type(shrinker.model)(small)
        model = _joined(model, small) if hasattr(model, "get_input_embeddings") else model
        numel = sum(p.numel() for p in model.parameters())
    if numel > SMALL_NUMEL:
        raise ValueError(f"with its config shrunk it still has {numel:,} parameters")
    return model


def _joined(model: nn.Module, small: Any) -> nn.Module:
    """The model with features of images as wide as its text, which the number that says it does not tell by itself."""
    made = dict(inputs_of(model))
    if width := feature_width(model, made):
        for path, value in numbers(small):
            if value == width and len(path) > 1:
                try:
                    other: nn.Module = type(model)(changed(small, {path: text_width(model)}))
                    if not feature_width(other, made):
                        return other
                except Exception:  # another number of this size
                    continue
    return model


def _runs(
    twin: nn.Module, batch: Mapping[str, Tensor] | None, *, together: bool = False, guesses: bool = False
) -> tuple[Forward, Mapping[str, Tensor]]:
    """The call that training makes, with the first of the batches that the twin takes, and that batch.

    The twin comes to make its own loss, and to be in training mode, where it can.
    """
    problem: Exception | None = None
    for given in [batch] if batch is not None else _batches(twin, together=together, guesses=guesses):
        for candidate in (*labelled(twin, given), given):
            run = runner(twin, candidate)
            try:
                native = copy.deepcopy(twin)  # some modules keep what a forward made
                if candidate is not given and getattr(run(native), "loss", None) is None:
                    continue
                Reference.of(native, run).check_finite()
                _train(twin, run, runner(twin, candidate, seed=1))
                return run, candidate
            except Exception as error:
                problem = error if problem is None or candidate is given else problem
    assert problem is not None
    raise problem


def _batches(twin: nn.Module, *, together: bool, guesses: bool = False) -> Iterator[Mapping[str, Tensor]]:
    """Those that have images and sounds in their texts are the first or the last; behind them what it might be."""
    guessed = guessed_for(twin) if guesses else []
    try:
        known = batches_for(twin)
    except UnknownInputsError:
        if not guessed:
            raise
        known = []
    ways = [in_text(twin, dict(inputs_of(twin))), known]
    for way in ways if together else reversed(ways):
        yield from way
    yield from guessed


def first_batch(model: nn.Module) -> Mapping[str, Tensor]:
    """The first of the batches that a model as it is takes, with labels where it then makes its own loss.

    Raises what the first of them failed with.
    """
    problem: Exception | None = None
    for given in _batches(model, together=True):
        for candidate in (*labelled(model, given), given):
            try:
                with torch.no_grad():
                    output = runner(model, candidate)(model)
                if candidate is given or getattr(output, "loss", None) is not None:
                    return candidate
            except Exception as error:
                problem = problem or error
    assert problem is not None
    raise problem


def _further(twin: nn.Module, fed: Mapping[str, Tensor]) -> Iterator[Further]:
    """The first of the batches with images and sounds that the twin takes, where ``fed`` has none: in their texts, or
    apart from them."""
    made = dict(inputs_of(twin))
    for given in (*in_text(twin, made), made):
        floats = [name for name, x in given.items() if x.is_floating_point()]
        stands = _stands_for_something(twin, given) and not _stands_for_something(twin, fed)
        names = tuple(name for name in floats if stands or name not in fed)
        for candidate in (*labelled(twin, given), given) if names else ():
            run = runner(twin, candidate)
            try:
                if candidate is not given and getattr(run(copy.deepcopy(twin)), "loss", None) is None:
                    continue
                Reference.of(copy.deepcopy(twin), run).check_finite()
            except Exception:  # laid out for another model
                continue
            yield Further(run, names)
            return


def _stands_for_something(twin: nn.Module, given: Mapping[str, Tensor]) -> bool:
    """Whether a text has a token in it that stands for an image or a sound."""
    ids = [x for name, x in ids_of(getattr(twin, "config", None)).items() if name.startswith(tuple(MODALITIES))]
    return TOKENS in given and bool(torch.isin(given[TOKENS], torch.tensor([*ids, -1])).any())


def _train(twin: nn.Module, run: Forward, reseeded: Forward) -> None:
    """Puts the twin in training mode without dropout; or in eval mode, where it is random even so, or fails."""
    silence_dropout(twin.train())
    try:
        first, again = copy.deepcopy(twin), copy.deepcopy(twin)
        reference = Reference.of(first, run)
        reference.check_finite()
        is_random = any(loss_of(call(again)).item() != reference.loss for call in (run, reseeded))
    except Exception:
        is_random = True
    twin.train(not is_random)
