"""All mutants, by area."""

from __future__ import annotations

from tests.mutants.mutant import Mutant
from tests.mutants.tables import checkpoints, context, engine, pipeline, policies, sequence, tensor, zero


def all_mutants() -> list[Mutant]:
    tables = (tensor, sequence, context, pipeline, zero, checkpoints, engine, policies)
    return [mutant for table in tables for mutant in table.MUTANTS]
