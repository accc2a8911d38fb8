"""The rows of docs/versions.md, and their environments."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLDEST, NEWEST = "oldest", "newest"


@dataclass(frozen=True)
class Row:
    """One environment.

    Args:
        python: the version of Python, as ``3.12``.
        torch, transformers: ``oldest``, the lower bound of pyproject.toml, or ``newest``, the version that pip finds.
    """

    python: str
    torch: str
    transformers: str

    @property
    def name(self) -> str:
        return f"python{self.python}-torch-{self.torch}-transformers-{self.transformers}"


ROWS = (
    Row("3.11", OLDEST, NEWEST),
    Row("3.11", NEWEST, OLDEST),
    Row("3.12", OLDEST, OLDEST),
    Row("3.12", NEWEST, NEWEST),
    Row("3.13", OLDEST, OLDEST),
    Row("3.13", NEWEST, NEWEST),
    Row("3.14", NEWEST, NEWEST),
)
"""They cover each pair of a Python up to 3.13, an oldest or newest torch, and an oldest or newest transformers."""


@dataclass(frozen=True)
class Environment:
    """A row with the folder of its virtual environment and the installed versions."""

    row: Row
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def work(self) -> Path:
        """The working directory of its steps, with logs, checkpoints and outcomes."""
        return self.folder.with_name(f"{self.folder.name}-steps")

    @property
    def is_complete(self) -> bool:
        return (self.folder / ".complete").is_file()

    def versions(self) -> tuple[str, str, str]:
        """The versions of Python, torch and transformers, without the build of torch."""
        code = "import platform, importlib.metadata as m; print(platform.python_version(), m.version('torch'), "
        code += "m.version('transformers'))"
        python, torch, transformers = subprocess.check_output([self.python, "-c", code], text=True).split()
        return python, torch.partition("+")[0], transformers

    def make(self) -> None:
        """Create the virtual environment and install the packages. A complete environment is not changed.

        Raises RuntimeError if the Python of the row is not found, CalledProcessError if pip fails.
        """
        if self.is_complete:
            return
        interpreter = interpreter_of(self.row.python)
        if interpreter is None:
            raise RuntimeError(f"Python {self.row.python} is not found. Install it, or leave out row {self.row.name}.")
        if not self.python.exists():
            subprocess.run([interpreter, "-m", "venv", self.folder], check=True)
        pinned = [requirement(name, getattr(self.row, name)) for name in ("torch", "transformers")]
        pip = [self.python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-cache-dir"]
        subprocess.run([*pip, *pinned, "--editable", f"{ROOT}[test,plot]"], check=True)
        (self.folder / ".complete").touch()


def requirement(name: str, end: str) -> str:
    """Return the requirement for pip: the lowest minor version that pyproject.toml allows, or any newer one."""
    least = lower_bound(name)
    return f"{name}=={least}.*" if end == OLDEST else f"{name}>={least}"


def lower_bound(name: str) -> str:
    found = re.search(rf'"{name}>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found is not None, f"pyproject.toml has no lower bound of {name}"
    return found[1]


@cache
def interpreter_of(version: str) -> str | None:
    """Find a Python of this version in PATH or pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"versions/{version}*/bin/python")))]
    for candidate in filter(None, candidates):
        said = subprocess.run([candidate, "--version"], capture_output=True, text=True)  # a shim of pyenv may fail
        if said.returncode == 0 and said.stdout.startswith(f"Python {version}."):
            return candidate
    return None
