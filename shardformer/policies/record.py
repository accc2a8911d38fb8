"""What was done to a model: kept beside it, and printed by ``describe``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardformer.comm.gradients import GradientAverager
from shardformer.comm.params import param_specs
from shardformer.context import ParallelContext
from shardformer.errors import ConfigError

ATTRIBUTE = "_shardformer_record"


@dataclass(frozen=True)
class Replacement:
    """One thing that was replaced: where, what stood there, what stands there now."""

    path: str
    before: str
    after: str
    kind: str = "module"


@dataclass
class ShardRecord:
    """Everything about how a model was sharded.

    Args:
        context: the grid it lives on.
        source: which link of the chain gave the policy.
        options: the options of the config.
        replacements: in the order in which they were made.
        notes: things worth knowing, such as which attention kernel was chosen.
    """

    context: ParallelContext
    source: str
    options: dict[str, bool | str]
    replacements: list[Replacement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    averager: GradientAverager | None = None

    def add(self, path: str, before: Any, after: Any, kind: str = "module") -> None:
        self.replacements.append(Replacement(path, _name(before), _name(after), kind))


def record_of(model: nn.Module) -> ShardRecord:
    """The record of a sharded model. Raises ConfigError for one that is not."""
    record = model.__dict__.get(ATTRIBUTE)
    if not isinstance(record, ShardRecord):
        raise ConfigError(
            f"This {type(model).__name__} is not sharded",
            rule="What was done to a model is kept by the model that shard_model returned",
            remedy="Call shardformer.shard_model(model) first, and give the model itself, not a wrapper of it",
        )
    return record


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward in here accumulates gradients without agreeing on them with other ranks; the first one after it does.

    For all but the last of the backwards of one optimizer step. Leaving it out is right too, and only costs traffic.

    >>> with no_sync(model):                    # doctest: +SKIP
    ...     model(**first_half).loss.backward()
    >>> model(**second_half).loss.backward()    # doctest: +SKIP
    """
    averager = record_of(model).averager
    with averager.paused() if averager is not None else nullcontext():
        yield


@dataclass(frozen=True)
class Description:
    """What ``describe`` gives: print it, or read its rows.

    ``rows`` hold (path pattern, before, after, full shape, local shape, how many); ``whole`` (path pattern, shape, how
    many, share of all parameters).
    """

    title: str
    rows: list[tuple[str, str, str, str, str, int]]
    changes: list[tuple[str, str, str, int]]
    whole: list[tuple[str, str, int, float]]
    notes: list[str]

    def __str__(self) -> str:
        lines = [self.title, ""]
        head = ("module", "was", "is", "full shape", "on this rank", "times")
        lines += _table([head, *[(*row[:5], str(row[5])) for row in self.rows]])
        if self.changes:
            lines += [
                "",
                *_table([("also changed", "was", "is", "times"), *[(*r[:3], str(r[3])) for r in self.changes]]),
            ]
        if self.whole:
            rows = [(path, shape, str(n), f"{share:.1%}") for path, shape, n, share in self.whole]
            lines += ["", *_table([("whole on every rank", "shape", "times", "of all parameters"), *rows])]
        return "\n".join([*lines, *[f"\n{note}" for note in self.notes]])


def describe(model: nn.Module) -> Description:
    """What was replaced by what, with full and local shapes, what stayed whole, and who said so.

    Raises ConfigError for a model that is not sharded.
    """
    record = record_of(model)
    specs, params = param_specs(model), dict(model.named_parameters(remove_duplicate=False))
    total = sum(_numel(specs[n].shape) for n, _ in model.named_parameters())
    local = sum(p.numel() for p in model.parameters())
    grid = str(record.context)
    options = ", ".join(n.removeprefix("enable_") for n, on in record.options.items() if on is True) or "none"
    title = (
        f"{type(model).__name__} over {grid}, by {record.source}\n"
        f"{total:,} parameters, {local:,} of them on this rank ({local / max(total, 1):.1%}); on: {options}"
    )
    rows: dict[tuple[str, str, str, str, str], int] = {}
    changes: dict[tuple[str, str, str], int] = {}
    for r in record.replacements:
        weight = f"{r.path}.weight"
        if r.kind == "module" and weight in params and specs[weight].is_sharded:
            shapes = (_shape(specs[weight].shape), _shape(params[weight].shape))
            row = (_pattern(r.path), r.before, r.after, *shapes)
            rows[row] = rows.get(row, 0) + 1
        else:
            change = (_pattern(r.path), r.before, r.after)
            changes[change] = changes.get(change, 0) + 1
    whole: dict[tuple[str, str], tuple[int, int]] = {}
    for name, p in model.named_parameters():
        if not specs[name].is_sharded:
            key = (_pattern(name), _shape(p.shape))
            count, size = whole.get(key, (0, 0))
            whole[key] = (count + 1, size + p.numel())
    return Description(
        title,
        [(*row, n) for row, n in rows.items()],
        [(*change, n) for change, n in changes.items()],
        [(*key, n, size / max(total, 1)) for key, (n, size) in whole.items()],
        list(record.notes),
    )


def _name(thing: Any) -> str:
    if isinstance(thing, str):
        return thing
    if isinstance(thing, nn.Module):
        return type(thing).__name__
    return getattr(thing, "__name__", repr(thing))


def _pattern(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _shape(shape: Any) -> str:
    return " x ".join(str(n) for n in shape) or "scalar"


def _numel(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
