"""Mutants: small faults in the package, and the tests that detect each of them.

    python -m tests.mutants                          all mutants
    python -m tests.mutants --area context           those of one area
    python -m tests.mutants --names padding-token-0-trains overlap-joins-in-ring-order

Each mutant is a single edit that a programmer could make by mistake. ``tables/`` has a file of mutants for each area.
"""
