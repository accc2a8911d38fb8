"""Error classes. Each error has four parts: what went wrong, the value that was passed, the rule, and the remedy.

Every error has four parts: what went wrong, the value that came, the rule it breaks, and the remedy.
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

    def __init__(self, what: str, *, rule: str, remedy: str) -> None:
        self.what, self.rule, self.remedy = what, rule, remedy
        super().__init__(
            " ".join(part if part.endswith((".", "\n", "!", "?")) else f"{part}." for part in (what, rule, remedy))
        )

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
        raise ConfigError(f"{name}={value!r:.80}", rule=rule, remedy=remedy)


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
