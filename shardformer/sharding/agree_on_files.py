"""Ranks that would read different weights: which rank, which file, and in what it differs."""

from __future__ import annotations

from collections import Counter

from torch import nn

from shardformer.comm.agree import gather_all
from shardformer.errors import ConfigError
from shardformer.lazy.files import Contents
from shardformer.lazy.source import files_of
from shardformer.mesh.context import ParallelContext

Files = list[tuple[str, Contents]]


def tell_of_files(model: nn.Module, context: ParallelContext) -> None:
    """Raises ConfigError, on every rank, where ranks would read files with other contents. Where they lie may differ.

    The files that most ranks have are taken for the right ones. Communicates one gather of paths and checksums.
    """
    every: dict[int, Files] = dict(gather_all([(f.path, f.contents) for f in files_of(model)], context))
    if not all(every.values()):
        return  # some rank reads nothing, which is another difference
    held = {rank: tuple(contents for _, contents in files) for rank, files in every.items()}
    usual = Counter(held.values()).most_common(1)[0][0]
    others = [rank for rank in held if held[rank] != usual]
    if not others:
        return
    rank, first = others[0], next(rank for rank in held if held[rank] == usual)
    asked = {bool(contents.whole) for contents in (held[rank][0], usual[0])}
    if len(asked) > 1:
        raise ConfigError(
            f"Rank {rank} loaded its weights with all_bytes={bool(held[rank][0].whole)}, rank {first} with "
            f"all_bytes={bool(usual[0].whole)}",
            rule="All ranks compare the same checksums",
            remedy="Give all of them the same",
        )
    raise ConfigError(
        f"Ranks disagree on the weights: {_difference(rank, first, every)}"
        + (f"; rank {', '.join(map(str, others[1:]))} differs too" if len(others) > 1 else ""),
        rule="All ranks read files with the same bytes, each from wherever it has them",
        remedy=f"Give rank {rank} the folder that rank {first} reads, or a copy of it",
    )


def _difference(rank: int, first: int, every: dict[int, Files]) -> str:
    theirs, usual = every[rank], every[first]
    pairs = list(zip(theirs, usual, strict=False))
    (path, contents), (other, right) = next((pair for pair in pairs if pair[0][1] != pair[1][1]), pairs[0])
    if len(theirs) != len(usual):
        return f"rank {rank} reads {len(theirs)} files, such as {path!r}, rank {first} {len(usual)}, such as {other!r}"
    return f"rank {rank} reads {path!r}, rank {first} {other!r}, and they differ in their {contents.difference(right)}"
