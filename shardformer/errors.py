"""Error classes, and checks of arguments that raise them.

An error states what happened, with the value that was passed, and what to do about it. It adds the rule that was broken
where that is not obvious.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from textwrap import indent

TRACEBACK_VARIABLE = "SHARDFORMER_TRACEBACK"


def wants_traceback() -> bool:
    """Whether the user asks for everything that was said of an error, with ``SHARDFORMER_TRACEBACK=1``."""
    return os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0")


class ShardFormerError(Exception):
    """Base of every error that ShardFormer raises on purpose.

    >>> print(ShardFormerError("tensor=3 does not divide 4 processes", rule="Axes multiply to the number of processes",
    ...     remedy="Use a tensor size of 1, 2 or 4"))
    tensor=3 does not divide 4 processes. Axes multiply to the number of processes. Use a tensor size of 1, 2 or 4.
    """

    def __init__(self, what: str, *, remedy: str, rule: str = "") -> None:
        self.what, self.rule, self.remedy = what, rule, remedy
        super().__init__(" ".join(_ended(part) for part in (what, rule, remedy) if part))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.rule, self.remedy))


def _rebuild(kind: type[ShardFormerError], what: str, rule: str, remedy: str) -> ShardFormerError:
    return kind(what, rule=rule, remedy=remedy)


class ConfigError(ShardFormerError):
    """An option, or a combination of options, that cannot be."""


class LaunchError(ShardFormerError):
    """The processes, their environment or their groups are not what the layout needs."""


class PolicyError(ShardFormerError):
    """A policy and a model do not fit: a rule without a match, a module that does not exist, an unexplained weight."""


class InputError(ShardFormerError):
    """A batch that cannot be trained on: labels or tokens out of the vocabulary, ranks that were fed different data."""


class WorkerError(ShardFormerError):
    """A worker process died, hung or raised."""


def check_argument(name: str, value: object, is_right: bool, rule: str, remedy: str) -> None:
    """Raises ConfigError where what came for an argument is not of its kind.

    >>> check_argument("stage", "x", isinstance("x", int), "A stage is a number", "Write stage=1")
    Traceback (most recent call last):
    shardformer.errors.ConfigError: stage='x'. A stage is a number. Write stage=1.
    """
    if not is_right:
        owner, _, argument = name.rpartition(".")
        shown = f"{argument}={value!r:.80}"
        raise ConfigError(f"{owner}({shown})" if owner else shown, rule=rule, remedy=remedy)


def check_int(name: str, value: object, least: int = 1, *, unit: str = "", example: int | None = None) -> None:
    """Raises ConfigError for what is no whole number, or is below ``least``.

    Args:
        name: of the argument, after the class that takes it and a point.
        unit: what is counted.

    >>> check_int("Throughput.window", 0, unit="steps", example=20)
    Traceback (most recent call last):
    shardformer.errors.ConfigError: Throughput(window=0). It is a whole number of steps, at least 1. Write window=20.
    """
    is_right = isinstance(value, int) and not isinstance(value, bool) and value >= least
    rule = f"It is a whole number{unit and f' of {unit}'}, at least {least}"
    check_argument(name, value, is_right, rule, f"Write {_argument(name)}={example or max(least, 1)}")


def check_number(
    name: str, value: object, *, least: float | None = None, below: float | None = None, unit: str = "", example: float
) -> None:
    """Raises ConfigError for what is no number, or is not in its range: above 0, or from ``least`` on.

    >>> check_number("timeout_s", 0, unit="seconds", example=600)
    Traceback (most recent call last):
    shardformer.errors.ConfigError: timeout_s=0. It is a number of seconds above 0. Write timeout_s=600.
    """
    is_right = isinstance(value, int | float) and not isinstance(value, bool)
    is_right = is_right and (value > 0 if least is None else value >= least)  # type: ignore[operator]
    is_right = is_right and (below is None or value < below)  # type: ignore[operator]
    limits = "above 0" if least is None else f"from {least:g} on"
    limits += "" if below is None else f", below {below:g}"
    rule = f"It is a number{unit and f' of {unit}'} {limits}"
    check_argument(name, value, is_right, rule, f"Write {_argument(name)}={example:g}")


def check_choice(name: str, value: object, choices: Iterable[object], rule: str = "") -> None:
    """Raises ConfigError, which has the nearest of them, for what is none of ``choices``.

    >>> check_choice("schedule", "1f1d", ["gpipe", "1f1b"])
    Traceback (most recent call last):
    shardformer.errors.ConfigError: schedule='1f1d'. It is one of 'gpipe', '1f1b'. Did you mean '1f1b'?
    """
    known = list(choices)
    is_bool = isinstance(value, bool)
    is_right = any(isinstance(value, type(n)) and is_bool == isinstance(n, bool) and value == n for n in known)
    rule = rule or f"It is one of {', '.join(map(repr, known))}"
    near = did_you_mean(value, map(str, known))
    check_argument(
        name, value, is_right, rule, near if near.startswith("Did") else f"Write {_argument(name)}={known[0]!r}"
    )


def check_bool(name: str, value: object) -> None:
    """Raises ConfigError for what is neither True nor False."""
    check_argument(name, value, isinstance(value, bool), "It is True or False", f"Write {_argument(name)}=True")


def check_names(given: Iterable[object], known: Iterable[str], what: str, rule: str) -> None:
    """Raises ConfigError, which has the nearest known names, for the first name that is not known.

    >>> check_names(["tensr"], ["tensor", "data"], "There is no axis", "A grid has axes")
    Traceback (most recent call last):
    shardformer.errors.ConfigError: There is no axis 'tensr'. A grid has axes. Did you mean 'tensor'?
    """
    names = list(known)
    for name in given:
        if name not in names:
            raise ConfigError(f"{what} {name!r}", rule=rule, remedy=did_you_mean(name, names))


def check_callable(name: str, value: object, rule: str) -> None:
    """Raises ConfigError for what is neither a function nor None."""
    check_argument(name, value, value is None or callable(value), rule, f"Give a function, or leave {name} out")


def _argument(name: str) -> str:
    return name.rpartition(".")[2]


def first_line(error: BaseException) -> str:
    """What an error of another library says first, to be said in the middle of a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def did_you_mean(name: object, known: Iterable[str], count: int = 3) -> str:
    """The known names nearest to ``name``, as a sentence: ``Did you mean 'a'?``, or a short listing."""
    names, said = sorted(set(known)), str(name)
    same = [n for n in names if n.lower() == said.lower()]
    close = same or get_close_matches(said, names, n=count, cutoff=0.4)
    if close:
        return "Did you mean " + " or ".join(repr(c) for c in close) + "?"
    shown = ", ".join(repr(n) for n in names[:8])
    return f"There is {shown}{', ...' if len(names) > 8 else ''}." if names else "There is none."


_HINT = re.compile(r"Did you mean [^?]*\?\s*")


def format_exception(error: ShardFormerError) -> str:
    """The kind of error and what went wrong; then, indented, what may have been meant, the rule and the remedy."""
    return format_error(type(error).__name__, error.what, error.rule, error.remedy)


def format_error(kind: str, what: str, rule: str, remedy: str) -> str:
    """As ``format_exception``, of the parts."""
    hint = _HINT.search(remedy)
    meant = hint[0].strip() if hint else ""
    rest = _HINT.sub("", remedy, count=1).strip(" ")
    below = [_ended(part) for part in (meant, rule, rest) if part.strip()]
    return "\n".join([f"{kind}: {_ended(what)}", *(indent(part, "  ") for part in below)])


def _ended(part: str) -> str:
    return part if part.endswith((".", "\n", "!", "?")) else f"{part}."
