"""Cases of hostile use, their outcomes, and which outcomes are findings.

Ranks are threads. A case passes if every rank raises a ShardFormerError with all of its parts. It also passes if the
model trains like the plain one and replicated values are bitwise identical on all ranks.
"""

from __future__ import annotations

import copy
import random
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import ShardFormerError, WorkerError
from shardformer.layout.sharding_metadata import get_sharding_metadata
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory
from shardformer.weights.state_dict import full_state_dict

STEPS = 3
RATE = 0.1
LIMIT_S = 30.0
NEAR = 2e-4
FAMILIES = ("llama", "gpt2", "bert", "t5")

EQUAL, REFUSED, NOTICED = "equal", "refused", "noticed"
WRONG, RAW, HANGS = "silently wrong", "raw error", "hang"
FINDINGS = (WRONG, RAW, HANGS)


@dataclass
class Trace:
    """Record of a run: losses of its steps, weights under the plain model's names, and observations of users' hooks."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)
    replicas: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A case.

    Args:
        kind: the generator that made it.
        name: a description that identifies it.
        run: the function that each rank calls. Returns a trace, or None if there is nothing to compare.
        plain: the trace on one device.
        how: returns the outcome of a case that does not run on threads.
    """

    kind: str
    name: str
    sizes: dict[str, int]
    run: Callable[[ParallelContext], Trace | None]
    plain: Callable[[], Trace | None] = lambda: None
    how: Callable[[Case], Outcome] | None = None


class Unnoticed(AssertionError):
    """A run continued although it should have raised."""


@dataclass(frozen=True)
class Outcome:
    case: Case
    what: str
    detail: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.case.sizes.items())
        return f"{self.what}: {self.case.kind}: {self.case.name} ({axes})" + (
            f"\n    {self.detail}" if self.detail else ""
        )


@cache
def original(family: str) -> nn.Module:
    """Build the model with weights that differ from their initialization, so that no bias is 0."""
    generator = torch.Generator().manual_seed(7)
    model = SmallModelFactory(family)().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=generator))
    return model


def fresh(family: str = "llama") -> Any:
    return copy.deepcopy(original(family))


def batch(family: str = "llama", step: int = 0) -> dict[str, Any]:
    return RandomBatchFactory(DEFAULT_HEAD[family])(step)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def trained(
    model: Any,
    family: str = "llama",
    *,
    optimizer: Any = None,
    step: Callable[[int, dict[str, Any]], Any] | None = None,
    before: Callable[[int], None] = lambda step: None,
    between: Callable[[], None] = lambda: None,
) -> Trace:
    """Train for some steps.

    Args:
        optimizer: SGD by default.
        step: runs a step and returns the loss of a batch. By default the usual loop.
        before: called before each step.
        between: called between the backward pass and the optimizer step.
    """
    trace = Trace()
    optimizer = optimizer or sgd(model)
    for number in range(STEPS):
        before(number)
        given = batch(family, number)
        if step is not None:
            loss = step(number, given)
        else:
            loss = model(**given).loss
            loss.backward()
            between()
            optimizer.step()
            optimizer.zero_grad()
        trace.losses.append(float(loss))
    return closed(trace, model)


def closed(trace: Trace, model: nn.Module) -> Trace:
    """Return the trace with the current weights of the model."""
    try:
        state = get_sharding_metadata(model)
    except ShardFormerError:
        trace.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return trace
    trace.weights = full_state_dict(model)
    if state.parameter_owner is None:
        trace.replicas = {e.name: e.param.detach().clone() for e in state.entries if not e.spec.axes}
    return trace


def outcome(case: Case) -> Outcome:
    if case.how is not None:
        return case.how(case)
    start = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traces = run_as_threads(case.run, timeout_s=LIMIT_S, one_at_a_time=True, **case.sizes)
            what, detail = compared(traces, case.plain())
    except WorkerError as error:
        what, detail = HANGS, str(error)[:600]
    except ShardFormerError as error:
        refused = NOTICED if case.kind == "divergence" else REFUSED
        what, detail = (refused, "") if error.what and error.remedy else (RAW, str(error))
    except Unnoticed:
        what, detail = WRONG, "no rank noticed"
    except Exception as error:
        what, detail = RAW, f"{type(error).__name__}: {str(error)[:400]}\n    {_where(error)}"
    return Outcome(case, what, detail, time.monotonic() - start)


def compared(traces: Sequence[Trace | None], plain: Trace | None) -> tuple[str, str]:
    """Compare the ranks with one device. Return the outcome and the differences."""
    for rank, trace in enumerate(traces):
        if trace is None or plain is None:
            continue
        for step, (loss, expected) in enumerate(zip(trace.losses, plain.losses, strict=False)):
            if not abs(loss - expected) <= NEAR * max(1.0, abs(expected)):
                return WRONG, f"rank {rank}, step {step}: a loss of {loss:.6f}, and {expected:.6f} on one device"
        pairs = [(name, value, plain.weights[name]) for name, value in trace.weights.items() if name in plain.weights]
        if differ := [_differs(*pair) for pair in pairs if pair[1].shape != pair[2].shape or not _near(*pair[1:])]:
            return WRONG, f"rank {rank}: {len(differ)} of {len(pairs)} tensors differ: {'; '.join(differ[:4])}"
        if trace.seen != plain.seen:
            return WRONG, f"rank {rank}: a hook saw {str(trace.seen)[:150]}, and {str(plain.seen)[:150]} on one device"
    return _replicas_of([trace for trace in traces if trace is not None])


def _replicas_of(traces: Sequence[Trace]) -> tuple[str, str]:
    for rank, trace in enumerate(traces):
        for name, value in trace.replicas.items():
            first = next(t.replicas[name] for t in traces if name in t.replicas)
            if not torch.equal(value, first):
                return WRONG, f"rank {rank} has other bits of the replicated {name}"
    return EQUAL, ""


def _differs(name: str, value: Tensor, want: Tensor) -> str:
    if value.shape != want.shape:
        return f"{name} has the shape {tuple(value.shape)}, and {tuple(want.shape)} on one device"
    apart = (value.double() - want.double()).abs()
    return f"{name} in {int((apart > NEAR).sum())} of {apart.numel()} numbers, by at most {apart.max().item():.3g}"


def _near(value: Tensor, want: Tensor) -> bool:
    if not value.is_floating_point():
        return torch.equal(value, want)
    return bool(((value.float() - want.float()).abs() <= NEAR * (1 + want.float().abs())).all())


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""


def drawn(cases: Iterable[Case], count: int | None, seed: int) -> list[Case]:
    """Return ``count`` random cases, or all of them in random order."""
    every = list(cases)
    random.Random(seed).shuffle(every)
    return every[:count]
