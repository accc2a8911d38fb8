"""The reduced model: the same classes with a small config, on which a policy is derived and validated in seconds."""

from __future__ import annotations

import copy
import inspect
import re
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property, partial
from itertools import product
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardformer.discovery.config_fields import integer_fields, with_fields
from shardformer.discovery.example_inputs import (
    MODALITIES,
    Forward,
    UnknownInputsError,
    example_batches,
    feature_width,
    forward_call,
    guessed_batches,
    insert_media_tokens,
    named_inputs,
    text_width,
    values_beside_text,
    with_labels,
)
from shardformer.discovery.shrink_config import SMALL_NUMEL, ConfigShrinker, layer_kinds, min_layers
from shardformer.errors import PolicyError, first_line
from shardformer.meta_init.materialization import is_lazy, materialized_copy
from shardformer.pipeline.micro_batches import MEDIA_TOKEN_FIELDS, special_token_ids
from shardformer.torch_compat import has_data

LIBRARIES = ("torch", "transformers", "timm", "shardformer")

RELATIVE = 1e-4
"""Of the largest number of a gradient. Some models cast to fp32 inside; what is wrong is larger by far."""
ROUNDING = 64
"""Times the precision and the largest gradient of all: what is zero but for rounding, as a key's bias."""

FP32_EPS = torch.finfo(torch.float32).eps / 2
"""What one operation rounds away where a model casts to fp32 inside, of the numbers that it is given."""
OPERATIONS = 16
"""Of which the roundings may add up."""


@dataclass(frozen=True)
class ReferenceGradients:
    """The plain model, what it gives, and the gradients of the mean square of that.

    Args:
        also: the same of further batches, with inputs that the first one lacks (images).
    """

    model: nn.Module
    run: Forward
    loss: float
    gradients: dict[str, Tensor | None]
    also: tuple[ReferenceGradients, ...] = ()

    @cached_property
    def allowed(self) -> dict[str, float]:
        """By how much each gradient may differ."""
        return gradient_tolerances(self.gradients)

    @cached_property
    def rounding(self) -> dict[str, float]:
        """By how much gradients may differ where the model computes in fp32 inside.

        Measured, as it depends on what cancels out: the gradient of one number, a scale, is the sum of all tokens' and
        may be much smaller than these. So each weight is moved by what fp32 rounds away, and the gradients compared.
        """
        moved = copy_sharing_values(self.model)
        draws = torch.Generator().manual_seed(0)
        for p in moved.parameters():
            signs = torch.randint(0, 2, p.shape, generator=draws).to(p) * 2 - 1
            p.data = p.detach() * (1 + FP32_EPS * signs)  # not in place: its values are shared
        found = ReferenceGradients.of(moved, self.run).gradients
        both = {name: (g, found[name]) for name, g in self.gradients.items() if g is not None and g.numel()}
        measured = {n: OPERATIONS * (a - b).abs().max().item() for n, (a, b) in both.items() if b is not None}
        most = ROUNDING * FP32_EPS * max((a.abs().max().item() for a, _ in both.values()), default=0.0)
        return {name: min(x, most) for name, x in measured.items()}  # a router that chose another expert is no rounding

    def is_near(self, name: str, difference: float) -> bool:
        """Whether a gradient of this name that differs by so much is the same but for rounding."""
        return difference <= self.allowed[name] or difference <= self.rounding.get(name, 0.0)

    @staticmethod
    def of(model: nn.Module, run: Forward) -> ReferenceGradients:
        """Runs ``model`` forward and backward."""
        model.zero_grad()
        with torch.enable_grad():  # whoever infers may be about to compute without
            loss = probe_loss(run(model))
            loss.backward()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return ReferenceGradients(model, run, loss.item(), gradients)

    def check_finite(self) -> None:
        """Raises ValueError where nothing could be told from it: in fp64 some mask with what fp32 cannot hold."""
        of = [("the output", torch.tensor(self.loss)), *(("a gradient", g) for g in self.gradients.values())]
        for what, tensor in of:
            if tensor is not None and not tensor.isfinite().all():
                raise ValueError(f"{what} is not finite, in {next(self.model.parameters()).dtype}")


def gradient_tolerances(gradients: Mapping[str, Tensor | None]) -> dict[str, float]:
    """By how much gradients may differ from these."""
    given = {name: g for name, g in gradients.items() if g is not None and g.numel()}
    largest = {name: g.abs().max().item() for name, g in given.items()}
    floor = ROUNDING * max((torch.finfo(g.dtype).eps * largest[name] for name, g in given.items()), default=0.0)
    return {name: max(RELATIVE * x, floor) for name, x in largest.items()}


def copy_sharing_values(model: nn.Module) -> nn.Module:
    """A copy whose parameters share their values with the model's, and have gradients of their own."""
    own: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters() if type(p) is nn.Parameter
    }
    return copy.deepcopy(model, own)


def probe_loss(output: Any, *, alike: bool = False) -> Tensor:
    """The mean squares of all that a model gives, as one number; ``alike`` weighs the samples of a batch alike."""
    floats = [x for x in tree_leaves(output_fields(output)) if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.stack([weighted(x, x.shape[alike:]).double() for x in floats]).sum()


def weighted(x: Tensor, shape: torch.Size) -> Tensor:
    """A number of which no two places of the last dims, of that shape, have the same gradient."""
    weights = torch.linspace(0.5, 1.5, shape.numel(), dtype=x.dtype, device=x.device).view(shape)
    return (x * weights).square().mean()


def output_fields(output: Any) -> Any:
    if is_dataclass(output) and not hasattr(output, "keys"):
        return vars(output)
    return dict(output) if hasattr(output, "keys") else output


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout to zero: two layouts draw different random numbers, of the same kind."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        config = getattr(module, "config", None)
        for name, value in list(vars(config).items()) if config is not None else []:
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)


def runs_library_code(module: nn.Module) -> bool:
    """Whether a module runs the forward of its class, and that class is from a library."""
    of_class: Any = inspect.unwrap(type(module).forward)
    return "forward" not in vars(module) and _package_of(of_class) in LIBRARIES


def take_over(twin: nn.Module, model: nn.Module) -> None:
    """Replaces forwards in a twin as they were replaced in ``model``.

    Raises ValueError if the twin does not have the module, and if the new forward is not a method of its module: it
    would still run on the module in ``model``.
    """
    places = dict(twin.named_modules())
    for path, module in model.named_modules():
        if "forward" not in vars(module):
            continue
        method = vars(module)["forward"]
        if not (inspect.ismethod(method) and method.__self__ is module):
            raise ValueError(f"the forward of {path} was replaced, and not by a method of it")
        if path in places:
            places[path].__dict__["forward"] = MethodType(method.__func__, places[path])
    if lacks := _replaced(model).keys() - _replaced(twin).keys():
        raise ValueError(f"it lacks the forward that {next(iter(lacks))[0]} was given")


def _replaced(model: nn.Module) -> Counter[tuple[str, Any]]:
    """The replaced forwards, each with its path, in which * stands for the number of a layer."""
    found = ((path, vars(m)["forward"]) for path, m in model.named_modules() if "forward" in vars(m))
    return Counter((re.sub(r"\d+", "*", path), getattr(method, "__func__", None)) for path, method in found)


@contextmanager
def apart_from(model: nn.Module) -> Iterator[None]:
    """Raises ValueError if what runs in here, a copy of ``model``, reads weights or buffers of ``model`` itself.

    So does a copy with a replaced forward or a hook that is a closure over a module: copies of it share the closure. A
    comparison with such a copy would show nothing, and its gradients would be added to those of the model.
    """
    watch = _Reads(model)
    try:
        with watch:
            yield
    except Exception as error:
        if not watch.found:
            raise
        raise ValueError(_NOT_APART) from error
    if watch.found:
        raise ValueError(_NOT_APART)


_NOT_APART = "a copy of it runs modules of the model itself, by a replaced forward or a hook that holds them"


class _Reads(TorchDispatchMode):
    """Raises RuntimeError where a function of torch reads a weight or a buffer of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        held = (x for x in (*model.parameters(), *model.buffers()) if has_data(x) and x.layout == torch.strided)
        self._storages = {x.untyped_storage().data_ptr() for x in held if x.numel()}
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and has_data(x):
                self.found = self.found or x.untyped_storage().data_ptr() in self._storages
        if self.found:
            raise RuntimeError(_NOT_APART)
        return func(*args, **(kwargs or {}))


def known_by(model: nn.Module) -> Hashable | None:
    """A key of a model: a proof holds for all models with the same key, whatever the number of their layers.

    None for a model without a config, or with user code: it shares no proof.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string") or not all(map(runs_library_code, model.modules())):
        return None
    kinds = frozenset((re.sub(r"\d+", "*", path), type(module)) for path, module in model.named_modules())
    return type(model), config.to_json_string(), kinds


def _package_of(function: Any) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]


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
class ReducedModel:
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

    def reference(self, run: Forward | None = None) -> ReferenceGradients:
        """What the model gives for its batch, or for that of another ``run``, and for the further ones."""
        return replace(ReferenceGradients.of(self.model, run or self.run), also=self.also())

    def also(self) -> tuple[ReferenceGradients, ...]:
        """What the model gives for the further batches."""
        return tuple(ReferenceGradients.of(self.model, further.run) for further in self.further)

    def unproven(self, against: str | None) -> dict[str, str]:
        """The inputs with which a layout is not proven, and why: those that were not tried, and those of the further
        calls where there is something ``against`` it."""
        further = [name for each in self.further for name in each.names] if against is not None else []
        return {**dict.fromkeys(self.untried, UNTRIED), **dict.fromkeys(further, against or "")}

    @property
    def samples(self) -> int:
        """Of the batch."""
        return Counter(len(x) for x in self.batch.values() if x.dim()).most_common(1)[0][0]


def reduce_model(
    model: nn.Module, batch: Mapping[str, Tensor] | None = None, *, together: bool = False
) -> ReducedModel:
    """A small model of the class of ``model`` that trains on the CPU, in fp64 or else in fp32: see ``_trainable_call``.

    It is fed text alone where it takes that; with ``together`` images and sounds that stand in it as well.

    Raises PolicyError where neither a twin can be built and run nor the model is small enough to be its own.
    """
    problems = []
    try:
        makes = list(_reduced_models(model))
    except Exception as error:  # its class takes more than a config, or asks for what no other config has
        makes, problems = [], [f"{type(error).__name__}: {str(error).strip()[:160]}"]
    copied = partial(materialized_copy if is_lazy(model) else copy.deepcopy, model)
    if sum(p.numel() for p in model.parameters()) <= SMALL_NUMEL:
        makes.append(copied)
    for make, dtype in product(makes, PRECISIONS):
        try:
            twin = _build(make, dtype)
            if make is not copied:
                if lacks := layer_kinds(model) - layer_kinds(twin):
                    raise ValueError(f"it lacks {len(lacks)} of the kinds of layers")
                take_over(twin, model)
            with apart_from(model):
                run, fed = _trainable_call(twin, batch, together=together)
            further = () if batch is not None or together else tuple(_further(twin, fed))
            tried = {*fed, *(name for each in further for name in each.names)}
            untried = [name for name in values_beside_text(twin) if name not in tried] if batch is None else []
            return ReducedModel(twin, run, fed, further, tuple(untried))
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
        "are special, give an example of a batch that fits it: derive_policy(model, batch={...})",
    )


def copy_small_model(model: nn.Module) -> ReducedModel:
    """A copy of a small model that trains on the CPU, without its hooks; what it takes is guessed where need be.

    Raises PolicyError where it cannot be copied or run so.
    """
    name, problem = type(model).__name__, f"it has more than {SMALL_NUMEL:,} parameters"
    makes = [partial(materialized_copy if is_lazy(model) else copy.deepcopy, model)]
    if sum(p.numel() for p in model.parameters()) > SMALL_NUMEL:
        makes = []
    for make, dtype in product(makes, PRECISIONS):
        try:
            twin = without_hooks(_build(make, dtype))
            with apart_from(model):
                return ReducedModel(twin, *_trainable_call(twin, None, guesses=True))
        except PolicyError as error:
            problem = error.what
        except Exception as error:  # a model of somebody's own can raise anything
            problem = f"{type(error).__name__}: {first_line(error)[:160]}"
    raise PolicyError(
        f"No copy of {name} can be run: {problem}",
        rule=f"A policy is proven on a model of up to {SMALL_NUMEL:,} parameters, in one forward and backward",
        remedy="Compare it yourself: shardformer.verify.verification.verify(make_model, batches, tensor=2, policy=...)",
    )


def twin_or_copy_of(model: nn.Module) -> ReducedModel:
    """A small model of the class of ``model``; else, of a module of the user's own, a copy of it.

    Raises PolicyError where there is neither.
    """
    try:
        return reduce_model(model)
    except PolicyError as error:
        problem = error
    try:
        return copy_small_model(model)
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


def _build(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().to(device="cpu", dtype=dtype).eval().requires_grad_(True)


def _reduced_models(model: nn.Module) -> Iterator[Callable[[], nn.Module]]:
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return
    shrinker = ConfigShrinker(model)
    # with few layers, or as many as it takes to have one of each kind
    for anew, even, layers in product((False, True), (False, True), dict.fromkeys((0, min_layers(model)))):
        yield partial(_reduced_model, shrinker, even=even, layers=layers, anew=anew)


def _reduced_model(shrinker: ConfigShrinker, **how: Any) -> nn.Module:
    small = shrinker.config(**how)
    if (numel := shrinker.numel(small)) <= MOST_NUMEL:  # of them, some may be what joins two parts
        model = type(shrinker.model)(small)
        model = _with_matching_widths(model, small) if hasattr(model, "get_input_embeddings") else model
        numel = sum(p.numel() for p in model.parameters())
    if numel > SMALL_NUMEL:
        raise ValueError(f"with its config shrunk it still has {numel:,} parameters")
    return model


def _with_matching_widths(model: nn.Module, small: Any) -> nn.Module:
    """The model with features of images as wide as its text, which the number that says it does not tell by itself."""
    made = dict(named_inputs(model))
    if width := feature_width(model, made):
        for path, value in integer_fields(small):
            if value == width and len(path) > 1:
                try:
                    other: nn.Module = type(model)(with_fields(small, {path: text_width(model)}))
                    if not feature_width(other, made):
                        return other
                except Exception:  # another number of this size
                    continue
    return model


def _trainable_call(
    twin: nn.Module, batch: Mapping[str, Tensor] | None, *, together: bool = False, guesses: bool = False
) -> tuple[Forward, Mapping[str, Tensor]]:
    """The call that training makes, with the first of the batches that the twin takes, and that batch.

    The twin comes to make its own loss, and to be in training mode, where it can.
    """
    problem: Exception | None = None
    for given in [batch] if batch is not None else _batches(twin, together=together, guesses=guesses):
        for candidate in (*with_labels(twin, given), given):
            run = forward_call(twin, candidate)
            try:
                native = copy.deepcopy(twin)  # some modules keep what a forward made
                if candidate is not given and getattr(run(native), "loss", None) is None:
                    continue
                ReferenceGradients.of(native, run).check_finite()
                _train(twin, run, forward_call(twin, candidate, seed=1))
                return run, candidate
            except Exception as error:
                problem = error if problem is None or candidate is given else problem
    assert problem is not None
    raise problem


def _batches(twin: nn.Module, *, together: bool, guesses: bool = False) -> Iterator[Mapping[str, Tensor]]:
    """Those that have images and sounds in their texts are the first or the last; behind them what it might be."""
    guessed = guessed_batches(twin) if guesses else []
    try:
        known = example_batches(twin)
    except UnknownInputsError:
        if not guessed:
            raise
        known = []
    ways = [insert_media_tokens(twin, dict(named_inputs(twin))), known]
    for way in ways if together else reversed(ways):
        yield from way
    yield from guessed


def first_batch(model: nn.Module) -> Mapping[str, Tensor]:
    """The first of the batches that a model as it is takes, with labels where it then makes its own loss.

    Raises what the first of them failed with.
    """
    problem: Exception | None = None
    for given in _batches(model, together=True):
        for candidate in (*with_labels(model, given), given):
            try:
                with torch.no_grad():
                    output = forward_call(model, candidate)(model)
                if candidate is given or getattr(output, "loss", None) is not None:
                    return candidate
            except Exception as error:
                problem = problem or error
    assert problem is not None
    raise problem


def _further(twin: nn.Module, fed: Mapping[str, Tensor]) -> Iterator[Further]:
    """The first of the batches with images and sounds that the twin takes, where ``fed`` has none: in their texts, or
    apart from them."""
    made = dict(named_inputs(twin))
    for given in (*insert_media_tokens(twin, made), made):
        floats = [name for name, x in given.items() if x.is_floating_point()]
        stands = _stands_for_something(twin, given) and not _stands_for_something(twin, fed)
        names = tuple(name for name in floats if stands or name not in fed)
        for candidate in (*with_labels(twin, given), given) if names else ():
            run = forward_call(twin, candidate)
            try:
                if candidate is not given and getattr(run(copy.deepcopy(twin)), "loss", None) is None:
                    continue
                ReferenceGradients.of(copy.deepcopy(twin), run).check_finite()
            except Exception:  # laid out for another model
                continue
            yield Further(run, names)
            return


def _stands_for_something(twin: nn.Module, given: Mapping[str, Tensor]) -> bool:
    """Whether a text has a token in it that stands for an image or a sound."""
    ids = [
        x for name, x in special_token_ids(getattr(twin, "config", None)).items() if name.startswith(tuple(MODALITIES))
    ]
    return MEDIA_TOKEN_FIELDS in given and bool(torch.isin(given[MEDIA_TOKEN_FIELDS], torch.tensor([*ids, -1])).any())


def _train(twin: nn.Module, run: Forward, reseeded: Forward) -> None:
    """Puts the twin in training mode without dropout; or in eval mode, where it is random even so, or fails."""
    disable_dropout(twin.train())
    try:
        first, again = copy.deepcopy(twin), copy.deepcopy(twin)
        reference = ReferenceGradients.of(first, run)
        reference.check_finite()
        is_random = any(probe_loss(call(again)).item() != reference.loss for call in (run, reseeded))
    except Exception:
        is_random = True
    twin.train(not is_random)
