"""Every patch of another library is listed and documented, and can be removed."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

import shardformer
from shardformer import torch_patches
from shardformer.context_parallel.attention import register_context_parallel_attention
from shardformer.errors import ConfigError
from shardformer.kernels.attention_registration import ATTENTION_NAME, attention, register_attention
from shardformer.local_ranks.fake_rank import enable_fake_tensors
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.meta_init.lazy_init import LazyInit
from shardformer.torch_patches import LibraryPatch
from shardformer.transformers_compat import DOCSTRING_PATCH
from shardformer.verify.train_both import ForceFp64Mode
from tests.policies.toy import ToyLM, ToyPolicy

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"


def replaced() -> dict[str, Any]:
    """Return all objects of torch and transformers that the package replaces, and the tables it extends."""
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    tables: dict[str, Any] = {
        "step pre": vars(sys.modules["torch.optim.optimizer"])["_global_optimizer_pre_hooks"],
        "step post": vars(sys.modules["torch.optim.optimizer"])["_global_optimizer_post_hooks"],
        "registration": vars(torch.nn.modules.module)["_global_parameter_registration_hooks"],
        "attention": vars(AttentionInterface)["_global_mapping"],
        "attention mask": vars(AttentionMaskInterface)["_global_mapping"],
    }
    functions: tuple[Any, ...] = clip_grad._get_total_norm, torch.nn.utils.clip_grad_norm_
    objects = {
        "norm": torch.nn.utils.get_total_norm,
        "scaler": vars(torch.amp.GradScaler)["_unscale_grads_"],
        "state_dict": Optimizer.state_dict,
        "load_state_dict": Optimizer.load_state_dict,
        "backward": vars(torch.autograd)["_engine_run_backward"],
        "sdpa_mask": masking_utils.sdpa_mask,
        "packed": masking_utils.find_packed_sequence_indices,
        **{f"{f.__name__} {i}": cell.cell_contents for f in functions for i, cell in enumerate(f.__closure__)},
        **{f"{f.__name__} wrapped": f.__wrapped__ for f in functions},
    }
    return {name: id(value) for name, value in objects.items()} | {n: list(t.values()) for n, t in tables.items()}


def shard() -> None:
    def rank(context: ParallelContext) -> None:
        shardformer.shard_model(ToyLM(), ToyPolicy(), context=context)

    run_as_threads(rank, tensor=2)


def install_all() -> set[LibraryPatch]:
    """Install every patch. Return them, and those that are installed for the duration of a block."""
    shard()
    register_attention(ATTENTION_NAME, attention, None)
    register_context_parallel_attention()
    with LazyInit(), enable_fake_tensors():
        during = set(torch_patches.installed())
    with ForceFp64Mode():
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda grad: during.update(torch_patches.installed()))
        x.sum().backward()
    return during


@pytest.fixture
def nothing_installed() -> Iterator[dict[str, Any]]:
    """Return the libraries' objects without patches. Patches are restored afterwards for other tests."""
    torch_patches.uninstall()
    yield replaced()
    install_all()


def test_uninstall_restores_all_original_objects(nothing_installed: dict[str, Any]) -> None:
    install_all()
    changed = replaced()
    for name in nothing_installed.keys() - {"backward", "sdpa_mask", "packed"}:  # these are replaced for a block
        is_outer = name in ("norm",) or name.endswith(" 1")
        assert is_outer or changed[name] != nothing_installed[name], name
    torch_patches.uninstall()
    assert replaced() == nothing_installed
    assert torch_patches.installed() == ()


def test_sharding_a_model_installs_patches_again(nothing_installed: dict[str, Any]) -> None:
    shard()
    first = torch_patches.installed()
    shard()
    assert torch_patches.installed() == first != ()
    torch_patches.uninstall()
    shard()
    assert torch_patches.installed() == first


def test_the_documentation_lists_all_patches(nothing_installed: dict[str, Any]) -> None:
    patches = sorted({*install_all(), DOCSTRING_PATCH}, key=lambda patch: patch.name)
    table = "".join(f"| `{patch.name}` | `{patch.by}` | {patch.reason} |\n" for patch in patches)
    assert table in PAGE.read_text(encoding="utf-8"), f"write this table into {PAGE.name}:\n{table}"


def test_later_patches_of_other_libraries_are_not_overwritten() -> None:
    library, patch = SimpleNamespace(function=max), LibraryPatch("library.function", "test", "a test")
    torch_patches.install_patch(patch, lambda: torch_patches.replace_attribute(library, "function", min))
    library.function = sum
    with pytest.raises(
        ConfigError,
        match=r"function cannot be restored, because another library has patched it .*built-in function sum",
    ):
        torch_patches.uninstall()
    assert patch in torch_patches.installed()
    library.function = min
    torch_patches.uninstall()
    assert library.function is max
    install_all()


def test_blocks_of_several_threads_share_a_patch_and_the_last_one_removes_it() -> None:
    library, patch = SimpleNamespace(function=max), LibraryPatch("library.function", "test", "a test")
    inside, leave = threading.Event(), threading.Event()

    def block() -> torch_patches.Undo:
        return torch_patches.replace_attribute(library, "function", min)

    def other() -> None:
        with torch_patches.temporary_patch(patch, block):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with torch_patches.temporary_patch(patch, block):
        torch_patches.uninstall()
        assert library.function is min
    assert library.function is min and patch in torch_patches.installed()
    leave.set()
    thread.join()
    assert library.function is max and patch not in torch_patches.installed()
    install_all()


def test_an_undecorated_function_is_replaced_in_its_library() -> None:
    here, there = SimpleNamespace(f=len), SimpleNamespace(g=len)
    undo = torch_patches.replace_decorated_function(len, lambda f: min, (here, "f"), (there, "g"))
    assert here.f is there.g is min
    undo()
    assert here.f is there.g is len


def test_a_function_is_called_after_the_import_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    calls: list[int] = []
    patch = LibraryPatch("sys.meta_path", "test", "a test")

    def call() -> None:
        calls.append(sys.modules["imported_later"].value)

    torch_patches.call_after_import("imported_later", patch, call)
    assert importlib.util.find_spec("imported_later") is not None and calls == []  # only asks whether it exists
    importlib.import_module("imported_later")
    assert calls == [1]
    torch_patches.call_after_import("imported_later", patch, call)
    assert calls == [1, 1]
    torch_patches.uninstall()
    assert not any(isinstance(finder, torch_patches.PostImportHook) for finder in sys.meta_path)
    install_all()
