"""Oldest supported releases of the libraries of this package, and an error for older ones.

The tests of the integrations run with these releases (constraints-integrations-oldest.txt) and with the newest ones.
"""

from __future__ import annotations

import re

from shardformer.errors import ConfigError

OLDEST = {"accelerate": "1.12", "lightning": "2.5", "peft": "0.18", "trl": "1.16"}
"""Library -> its oldest supported release, the lower bound of its extra in pyproject.toml."""


def check_release(library: str, installed: str) -> None:
    """Raise ConfigError if the installed release of a library is older than the oldest supported one."""
    if is_too_old(library, installed):
        raise ConfigError(
            f"{library} {installed} is installed, but ShardFormer needs {library} {OLDEST[library]} or newer",
            remedy=f"Run pip install --upgrade '{library}>={OLDEST[library]}'",
        )


def is_too_old(library: str, installed: str) -> bool:
    """Whether a release of a library is older than the oldest supported one."""
    return library in OLDEST and _numbers(installed) < _numbers(OLDEST[library])


def _numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a release, such as (2, 5, 0) for ``2.5.0.post0``."""
    return tuple(int(number) for number in re.findall(r"\d+", release)[:3])
