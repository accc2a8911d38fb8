"""How many processes a command may start on one machine."""

from __future__ import annotations

import os

from shardformer.errors import LaunchError

EACH = 128
"""A core: far more than train well, and no machine is brought to its knees by a digit too many."""


def check_count(asked: str, count: int) -> None:
    """Raises LaunchError for more processes than a machine of this size can start."""
    cores = os.cpu_count() or 1
    if count > EACH * cores:
        raise LaunchError(
            f"{asked} gives {count} processes" if len(str(count)) < 20 else f"{asked:.60} gives too many processes",
            rule=f"A machine starts {EACH} processes a core at the most, and this one has {cores}",
            remedy=f"Use {EACH * cores} or fewer, best no more than it has devices or cores",
        )
