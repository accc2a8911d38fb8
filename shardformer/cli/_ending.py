"""How ``shardformer run`` ends the processes that are left: soon, and with a note of what each of them was at."""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

ENDS_S = 8
"""That processes have to end in. A script that needs longer for its own SIGTERM says so: --shutdown-timeout 60."""
LOOKS_BEFORE_S = 0.5
"""It kills them: what ends by itself until then, such as a script that saves, is no news."""
VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

STUCK: dict[int, str] = {}
"""pid -> in words what it did, of processes that had not ended when the launcher looked."""
PLACES: dict[int, str] = {}
"""rank -> the line of the user's own code that it was at, of processes that did not fail before they were ended."""


def end_soon(options: argparse.Namespace) -> None:
    """From now on torch's launcher waits for its processes as long as asked, by default ``ENDS_S``, not 30 s."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    asked = getattr(options, "shutdown_timeout", None) or os.environ.get(VARIABLE)
    seconds = int(asked) if asked is not None else ENDS_S
    plain = PContext.close

    def close(self: PContext, death_sig: object = None, timeout: int = 0) -> None:
        looks = threading.Timer(max(seconds - LOOKS_BEFORE_S, seconds / 2), _look, [list(self.pids().values())])
        looks.daemon = True
        looks.start()
        try:
            plain(self, death_sig, seconds)  # type: ignore[arg-type]  # a signal, or None
        finally:
            looks.cancel()
            _read_places(self.error_files.values())

    PContext.close = close  # type: ignore[method-assign]


def _read_places(notes: Iterable[str]) -> None:
    PLACES.clear()  # of an earlier attempt
    for path in notes:
        with suppress(OSError, ValueError, LookupError, TypeError):
            extra = json.loads(Path(path).read_text(encoding="utf-8"))["message"]["extraInfo"]
            PLACES[extra["rank"]] = extra["at"]


def places() -> list[str]:
    """Each place with the ranks that were there, those of most ranks last."""
    ranks: dict[str, list[int]] = {}
    for rank, place in sorted(PLACES.items()):
        ranks.setdefault(place, []).append(rank)
    # a rank that does something else than all others is what one looks for
    return [
        f"{listed(of)} {'was' if len(of) == 1 else 'were'} at\n{place}"
        for place, of in sorted(ranks.items(), key=lambda item: len(item[1]))
        if place
    ]


def listed(ranks: Sequence[int]) -> str:
    """As "rank 3", or "ranks 0, 2 and 5 more"."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _look(pids: list[int]) -> None:
    for pid in pids:
        state = _state_of(pid)
        if state in ("T", "t"):
            STUCK[pid] = "it was stopped (SIGSTOP, Ctrl-Z, a debugger), and the launcher killed it"
        elif state not in ("", "Z"):
            STUCK[pid] = (
                "it did not end on SIGTERM (a handler of its own, or a call of C++), and the launcher killed it"
            )


def _state_of(pid: int) -> str:
    """The letter of ``ps``; empty for a process that is gone, or where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
