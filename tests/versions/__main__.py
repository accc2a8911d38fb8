"""Tests with the versions that users have: ``python -m tests.versions`` (``make test-versions``).

Makes a virtual environment for each row of ``rows.py``, runs each step of ``steps.py`` in it, prints a table and writes
docs/versions.md. An environment that exists is used again, with the versions that it has; delete its folder to install
newer ones. Each takes about 6 GB where pip finds a CUDA build of torch.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.versions.page import PAGE, Found, page
from tests.versions.rows import ROOT, ROWS, Environment, Row, interpreter_of
from tests.versions.steps import STEPS, Step, prepare


def main() -> int:
    asked = _arguments()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)  # whole rows in a log
    rows = [row for row in ROWS if not asked.rows or any(words in row.name for words in asked.rows)]
    steps = [step for step in STEPS if not asked.only or step.name in asked.only]
    found = [row for row in rows if Environment(row, asked.envs / row.name).is_complete or interpreter_of(row.python)]
    for row in rows:
        if row not in found:
            console.print(f"{row.name}: Python {row.python} is not found, the row is left out", style="yellow")
    with tempfile.TemporaryDirectory(prefix="shardformer-versions-") as temporary:
        results = run_rows(found, steps, asked.envs, Path(temporary), console)
    console.print(_table(results, steps))
    if set(rows) == set(ROWS) and len(steps) == len(STEPS):
        (ROOT / PAGE).write_text(page(results), encoding="utf-8")
        console.print(f"{PAGE} is written")
    return int(any(outcome.problem for each in results for outcome in each.outcomes.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tests the package with the versions that users have.")
    parser.add_argument(
        "--rows", action="append", metavar="WORDS", help="rows with these words in their names; repeatable"
    )
    parser.add_argument("--envs", type=Path, default=ROOT / ".venvs", metavar="FOLDER", help="where environments are")
    parser.add_argument("--only", action="append", choices=[step.name for step in STEPS], help="a step; repeatable")
    return parser.parse_args()


def run_rows(rows: Sequence[Row], steps: Sequence[Step], envs: Path, temporary: Path, console: Console) -> list[Found]:
    """Step by step, so that each row has saved its checkpoint before another one reads it."""
    results = []
    for row in rows:
        environment = Environment(row, (envs / row.name).absolute())
        environment.make()
        results.append(Found(environment, environment.versions(), {}))
        prepare(temporary / row.name)
    for step in steps:
        for before, each in zip([*results[-1:], *results[:-1]], results):
            folder, other = temporary / each.name, temporary / before.name
            outcome = each.outcomes[step.name] = step.run(each.environment, folder, other)
            console.print(f"{each.name}  {step.name}: {outcome.word} in {outcome.seconds:.0f} s")
            if outcome.problem:
                kept = envs / f"{each.name}-{step.name.replace(' ', '-')}.log"
                shutil.copy(folder / f"{step.name.replace(' ', '-')}.log", kept)
                console.print(f"  {outcome.problem}\n  see {kept}", markup=False)
    return results


def _table(results: Sequence[Found], steps: Sequence[Step]) -> Table:
    table = Table("Python", "torch", "transformers", *(step.name for step in steps))
    for each in results:
        table.add_row(*each.versions, *(each.outcomes[step.name].word for step in steps))
    return table


if __name__ == "__main__":
    sys.exit(main())
