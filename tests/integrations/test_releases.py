"""Older releases than the tests of the integrations run with are refused."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from importlib import metadata

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import shardformer
from shardformer.errors import OLDEST_RELEASES, ConfigError, check_minimum_library_version
from tests.integrations.peft_models import config_of, llama
from tests.integrations.process import FOLDER, ROOT, IntegrationProcess

MODULES = {"accelerate": "accelerate", "trl": "trl", "lightning": "lightning.pytorch"}
"""Library -> the module that its integration imports."""


def test_the_lower_bounds_are_the_oldest_tested_releases() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pins = (ROOT / "constraints-integrations-oldest.txt").read_text(encoding="utf-8")
    for library, oldest in OLDEST_RELEASES.items():
        assert set(re.findall(rf'"{library}>=([\d.]+)"', project)) == {oldest}
        assert re.search(rf"^{library}=={re.escape(oldest)}(\.|$)", pins, re.MULTILINE)


def test_the_pinned_libraries_have_their_dependencies() -> None:
    """``make test`` installs them without resolving their dependencies."""
    libraries, missing = list(metadata.distributions(path=[str(FOLDER)])), []
    installed = {
        canonicalize_name(each.metadata["Name"]) for each in [*libraries, *metadata.distributions(path=sys.path)]
    }
    for library in libraries:
        for text in library.requires or []:
            need = Requirement(text)
            is_needed = need.marker is None or need.marker.evaluate({"extra": ""})
            if is_needed and canonicalize_name(need.name) not in installed:
                missing.append(f"{library.metadata['Name']} needs {need}")
    assert libraries and not missing


@pytest.mark.parametrize(
    ("library", "release"), [("peft", "0.18.0"), ("lightning", "2.5.0.post0"), ("trl", "1.16.0.dev0"), ("peft", "1.0")]
)
def test_supported_releases_are_accepted(library: str, release: str) -> None:
    check_minimum_library_version(library, release)


@pytest.mark.parametrize(("library", "release"), [("peft", "0.9.1"), ("lightning", "2.4.0"), ("trl", "1.15.9")])
def test_older_releases_are_refused(library: str, release: str) -> None:
    with pytest.raises(ConfigError, match=rf"{library} {release} is installed"):
        check_minimum_library_version(library, release)


def errors_of_old_releases() -> dict[str, str]:
    """Return the errors of the integrations when an older release is installed."""
    import peft

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for library, module in MODULES.items():
            spec = importlib.util.find_spec(f"shardformer.integrations.{library}")
            assert spec is not None and spec.loader is not None
            patch.setattr(importlib.import_module(module), "__version__", "0.1.2")
            with pytest.raises(ConfigError) as error:
                spec.loader.exec_module(importlib.util.module_from_spec(spec))
            found[library] = str(error.value)
        patch.setattr(peft, "__version__", "0.1.2")
        torch.manual_seed(0)
        sharded = shardformer.shard_model(llama(), context=shardformer.launch_from_torch())  # has no adapter
        for add in (lambda: shardformer.shard_model(peft.get_peft_model(llama(), config_of("LoRA"))),
                    lambda: peft.get_peft_model(sharded, config_of("LoRA"))):  # fmt: skip
            with pytest.raises(ConfigError) as error:
                add()
            found["peft"] = str(error.value)
    return found


def test_an_older_release_raises_and_names_the_oldest_supported_one(integrations: IntegrationProcess) -> None:
    (found,) = integrations(1).run(errors_of_old_releases)
    assert found.keys() == OLDEST_RELEASES.keys()
    for library, text in found.items():
        assert f"{library} 0.1.2 is installed" in text and f"'{library}>={OLDEST_RELEASES[library]}'" in text, text
