"""Runs all hostile cases: ``python -m tests.hostile --seed 7``."""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections import Counter, defaultdict

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from tests.hostile import arguments, divergence, faults, mutations
from tests.hostile.net import EQUAL, FINDINGS, NOTICED, REFUSED, drawn, outcome

KINDS = {
    "argument": arguments.cases,
    "divergence": divergence.cases,
    "mutation": mutations.cases,
    "fault": faults.cases,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Tries what hostile users would, and counts what comes of it.")
    parser.add_argument("--seed", type=int, help="by default a new one, which is printed")
    parser.add_argument("--count", type=int, help="so many cases of each kind; by default all")
    parser.add_argument("--only", choices=KINDS, action="append", help="a kind of cases; by default all of them")
    parser.add_argument("--match", default="", help="only cases with these words in their names")
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed
    torch.set_num_threads(1)
    # Ranks are threads that compute in turn. If Python switches between them freely, torch.compile may deadlock:
    # one thread holds the lock of its captured tracebacks and waits for the GIL, and another one does the opposite.
    sys.setswitchinterval(30)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch._logging.set_logs(dynamo=logging.CRITICAL)
    console = Console()
    console.print(f"seed {seed}")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for kind in asked.only or KINDS:
        tried = drawn((case for case in KINDS[kind]() if asked.match in case.name), asked.count, seed)
        for case in track(tried, kind, console=console, disable=not console.is_terminal):
            found = outcome(case)
            counts[kind][found.what] += 1
            if found.what in FINDINGS:
                console.print(str(found), highlight=False, markup=False)
    console.print(_table(counts))
    return int(any(count[what] for count in counts.values() for what in FINDINGS))


def _table(counts: dict[str, Counter[str]]) -> Table:
    table = Table(Column("", no_wrap=True), "cases", EQUAL, REFUSED, NOTICED, *FINDINGS)
    for kind, count in counts.items():
        shown = [str(count[what]) for what in (EQUAL, REFUSED, NOTICED, *FINDINGS)]
        table.add_row(kind, str(sum(count.values())), *shown)
    return table


if __name__ == "__main__":
    sys.exit(main())
