"""docs/versions.md: a row for each environment, a column for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardformer.errors import OLDEST_RELEASES
from tests.versions.rows import ROOT, Environment, lower_bound
from tests.versions.steps import STEPS, Outcome

PAGE = "docs/versions.md"
NOT_RUN = "–"
OLDEST_PINS, NEWEST_PINS = "constraints-integrations-oldest.txt", "constraints-integrations.txt"
"""Files with the releases that the integrations are tested with."""


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
        f"ShardFormer supports Python 3.11, torch {lower_bound('torch')}, transformers {lower_bound('transformers')} "
        "and newer versions. To find out whether we have tested your versions, run `shardformer check`.\n",
        "If possible, use one of the tested combinations of versions in this table. Each row is a combination, and "
        f"each column is a test. The sign {NOT_RUN} means that we haven't run the test.\n",
        "To repeat the tests, run `make test-versions`. The command creates an environment for each row, runs all "
        "tests in it, and writes this page.\n",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
    ]
    lines += [f"| {' | '.join([*versions, *(said.get(name, NOT_RUN) for name in names)])} |" for versions, said in rows]
    lines += ["", "| column | tested |", "|---|---|", *(f"| {step.name} | {step.about} |" for step in STEPS), ""]
    return "\n".join([*lines, *_libraries()])


def _libraries() -> list[str]:
    """Return the table of the libraries of shardformer/integrations."""
    oldest, newest = (_pins(name) for name in (OLDEST_PINS, NEWEST_PINS))
    return [
        "## Other libraries\n",
        "We test the [integrations](integrations.md) with the oldest and the newest supported release of each library. "
        "If your release is too old, you get an error that names the oldest supported one. To repeat the tests, run "
        "`make test-oldest` and `make test-integrations`.\n",
        "| library | oldest | newest |",
        "|---|---|---|",
        *(f"| {library} | {oldest[library]} | {newest[library]} |" for library in OLDEST_RELEASES),
        "",
        "If you call transformers' `model.add_adapter`, you may need a newer PEFT release than the oldest one in the "
        "table, because transformers has its own minimum release.",
        "",
        "You can't use an older TRL release than the one in the table, because older releases compute "
        "log-probabilities in a way that doesn't work with a sharded output layer.",
        "",
    ]


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
