"""Public names are few and typed, can be imported by earlier names, and are suggested for misspelled ones."""

from __future__ import annotations

import ast
import importlib
import sys
from inspect import getsource
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch

import shardformer
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import Q_K_V_O, Attention

PACKAGE = Path(shardformer.__file__).parent
PACKAGES = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def public(module: ModuleType) -> list[str]:
    return [name for name in getattr(module, "__all__", ()) if name != "__version__"]


@pytest.mark.parametrize("name", ["", "compat", "hooks", *PACKAGES])
def test_every_public_name_can_be_imported(name: str) -> None:
    module = importlib.import_module(f"shardformer.{name}".rstrip("."))
    for each in public(module):
        assert getattr(module, each) is not None


@pytest.mark.parametrize("name", PACKAGES)
def test_no_public_name_is_a_module(name: str) -> None:
    """Importing ``shardformer.x.y`` would bind the module to the name ``y`` of the package."""
    modules = {path.stem for path in (PACKAGE / name).glob("*.py")} | {p.name for p in (PACKAGE / name).glob("*/")}
    assert modules & set(public(importlib.import_module(f"shardformer.{name}"))) == set()


def test_the_top_level_has_few_names() -> None:
    modules = [name for name in public(shardformer) if isinstance(getattr(shardformer, name), ModuleType)]
    assert len(public(shardformer)) - len(modules) <= 31


@pytest.mark.parametrize("old", sorted(shardformer._RENAMED))
def test_an_earlier_name_warns_and_returns_the_new_one(old: str) -> None:
    new = shardformer._RENAMED[old]
    with pytest.warns(DeprecationWarning, match=rf"shardformer\.{old} is deprecated. Use {new} instead.$"):
        value = getattr(shardformer, old)
    module, _, name = new.rpartition(".")
    assert value is getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("old", sorted(shardformer._RENAMED_MODULES))
def test_a_module_is_imported_by_its_earlier_name(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated"):
        module = importlib.import_module(old)
    new = importlib.import_module(shardformer._RENAMED_MODULES[old])
    names = public(new) or [node.name for node in ast.parse(getsource(new)).body if isinstance(node, ast.ClassDef)]
    assert names and all(getattr(module, name) is getattr(new, name) for name in names)


def test_zero_can_still_be_called() -> None:
    warned = pytest.warns(
        DeprecationWarning, match=r"shardformer\.zero is deprecated. Use shardformer\.shard_optimizer instead"
    )
    with warned, pytest.raises(shardformer.ConfigError):
        shardformer.zero(1, 2)  # type: ignore[operator]


def test_dir_lists_the_public_names_and_no_helpers() -> None:
    assert [name for name in dir(shardformer) if not name.startswith("__")] == sorted(public(shardformer))
    assert "Progress" in dir(shardformer.hooks) and "TYPE_CHECKING" not in dir(shardformer.hooks)


def test_the_docstring_of_the_package_lists_its_functions() -> None:
    functions = [name for name in public(shardformer) if isinstance(getattr(shardformer, name), FunctionType)]
    assert [name for name in functions if name not in (shardformer.__doc__ or "")] == []


def test_a_name_of_a_subpackage_is_suggested() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Progress'\. Use shardformer\.hooks\.Progress"):
        shardformer.Progress  # type: ignore[attr-defined]  # noqa: B018


def test_a_misspelt_name_gets_a_suggestion() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'shard_modle'\. Did you mean 'shard_model'"):
        shardformer.shard_modle  # type: ignore[attr-defined]  # noqa: B018


def test_earlier_argument_names_and_order_still_work(tmp_path: Path) -> None:
    context = shardformer.ParallelContext.from_sizes({})
    model = shardformer.shard_model(torch.nn.Linear(2, 2), context=context)
    with pytest.warns(DeprecationWarning, match="shard_optimizer now takes the model as its first argument"):
        optimizer = shardformer.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=0)  # type: ignore[arg-type]
    with pytest.warns(DeprecationWarning, match="save_checkpoint now takes the model as its first argument"):
        path = shardformer.save_checkpoint(tmp_path, model, optimizer, step=3)  # type: ignore[arg-type]
    assert path == tmp_path / "step-00000003"
    with pytest.warns(DeprecationWarning, match=r"load_checkpoint\(folder=\) is deprecated. Use directory= instead"):
        assert shardformer.load_checkpoint(model=model, folder=tmp_path, optimizer=optimizer).step == 3  # type: ignore[call-arg]
    assert shardformer.load_checkpoint(model, tmp_path, optimizer).step == 3
    with pytest.raises(shardformer.ConfigError, match="received both folder and its new name directory"):
        shardformer.load_checkpoint(model, folder=tmp_path, directory=tmp_path)  # type: ignore[call-arg]


def test_policy_methods_with_earlier_names_are_used() -> None:
    """Methods with these names would otherwise be ignored silently."""
    with pytest.warns(DeprecationWarning, match="Mine.whole is deprecated. Use keep_replicated instead"):

        class Mine(RolePolicy):
            whole = ("positions",)

    assert Mine.keep_replicated == ("positions",)
    policy = Mine()
    with pytest.warns(DeprecationWarning, match="Use validate instead"):
        policy.prove = False  # type: ignore[attr-defined]
    assert not policy.validate
    with pytest.warns(DeprecationWarning, match=r"Attention\(counts=\) is deprecated. Use local_attrs= instead"):
        made = Attention("attn", Q_K_V_O, counts={"num_heads": "heads"})  # type: ignore[call-arg]
    assert made.local_attrs == {"num_heads": "heads"}
