"""docs/versions.md: a row for each environment, a column for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.versions.rows import Environment, lower_bound
from tests.versions.steps import STEPS, Outcome

PAGE = "docs/versions.md"
NOT_RUN = "–"


@dataclass(frozen=True)
class Found:
    """The results of a row.

    Args:
        versions: of Python, torch and transformers.
        outcomes: name of a step -> its outcome.
    """

    environment: Environment
    versions: tuple[str, str, str]
    outcomes: dict[str, Outcome]

    @property
    def name(self) -> str:
        return self.environment.row.name


def page(results: Sequence[Found]) -> str:
    """Render the page with all rows."""
    return page_of([(each.versions, {name: o.word for name, o in each.outcomes.items()}) for each in results])


def page_of(rows: Sequence[tuple[tuple[str, str, str], Mapping[str, str]]]) -> str:
    """Render the page from (versions, name of a step -> its word)."""
    names = [step.name for step in STEPS]
    heads = ["Python", "torch", "transformers", *names]
    lines = [
        "# Versions\n",
        "ShardFormer is tested with these versions of Python, torch and transformers. `make test-versions` makes an "
        "environment for each row, runs the tests and writes this page.\n",
        f"The oldest versions that are supported are torch {lower_bound('torch')} and transformers "
        f"{lower_bound('transformers')}, on Python 3.11 or newer. `shardformer check` reports whether yours are among "
        f"those tested. {NOT_RUN}: the step was not run in this row.\n",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
    ]
    lines += [f"| {' | '.join([*versions, *(said.get(name, NOT_RUN) for name in names)])} |" for versions, said in rows]
    lines += ["", "| column | what runs |", "|---|---|", *(f"| {step.name} | {step.about} |" for step in STEPS), ""]
    return "\n".join(lines)
