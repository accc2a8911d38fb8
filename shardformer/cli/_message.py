"""An error of ours on the command line: its parts on lines of their own, the nearest names first."""

from __future__ import annotations

import re
from textwrap import indent

from shardformer.errors import ShardFormerError

_HINT = re.compile(r"Did you mean [^?]*\?\s*")


def message(error: ShardFormerError) -> str:
    """The kind of error and what went wrong; then, indented, what may have been meant, the rule and the remedy."""
    return in_lines(type(error).__name__, error.what, error.rule, error.remedy)


def in_lines(kind: str, what: str, rule: str, remedy: str) -> str:
    """As ``message``, of the parts."""
    hint = _HINT.search(remedy)
    meant = hint[0].strip() if hint else ""
    rest = _HINT.sub("", remedy, count=1).strip(" ")
    below = [_ended(part) for part in (meant, rule, rest) if part.strip()]
    return "\n".join([f"{kind}: {_ended(what)}", *(indent(part, "  ") for part in below)])


def _ended(part: str) -> str:
    return part if part.endswith((".", "\n", "!", "?")) else f"{part}."
