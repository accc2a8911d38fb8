"""Locks as other processes leave them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from shardformer import filesystem
from shardformer.filesystem import LOCK, ProcessIdentity


def parent() -> ProcessIdentity:
    """A running process other than this one."""
    return ProcessIdentity(
        ProcessIdentity.current().machine, os.getppid(), filesystem._get_process_start_time(os.getppid()) or 0
    )


def killed() -> ProcessIdentity:
    """A process that has exited and whose process id this process has now."""
    here = ProcessIdentity.current()
    return ProcessIdentity(here.machine, here.pid, here.start - 1)


def elsewhere() -> ProcessIdentity:
    return ProcessIdentity("0" * 12, 17, 1)


def lock_of(process: ProcessIdentity, folder: Path, **more: Any) -> Path:
    """Return the lock file of a process."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    content = {
        "token": "another", "user": "someone", "host": "a-host", "process": process.pid, "started": process.start,
        "machine": process.machine,
    }  # fmt: skip
    path.write_text(json.dumps(content | more))
    return path
