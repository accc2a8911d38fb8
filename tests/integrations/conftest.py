"""Worker pools that can import PEFT, accelerate, TRL, Lightning and Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.process import FOLDER, IntegrationProcess


@pytest.fixture(scope="session")
def integrations() -> Iterator[IntegrationProcess]:
    """``integrations(n).run(fn, *args)`` calls ``fn`` on n ranks in which the libraries can be imported."""
    if not FOLDER.is_dir():
        pytest.fail(f"The folder {FOLDER} does not exist; make test-integrations creates it")
    with IntegrationProcess() as process:
        yield process
