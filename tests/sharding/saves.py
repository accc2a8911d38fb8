"""Interrupt a save at each of its disk operations, by a kill or a full disk, and load the result.

    python tests/sharding/saves.py FOLDER --every 1

A sharded model with several files replaces an older model of another config, next to a tokenizer file. After each
interruption the folder loads the old model, the new model or nothing, and the tokenizer file is unchanged.
"""

from __future__ import annotations

import argparse
import builtins
import errno
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from transformers import modeling_utils

import shardformer
from shardformer import filesystem
from shardformer.mesh.parallel_context import Axis, ParallelContext

NAMES = ("rename", "replace", "link", "unlink", "mkdir", "rmdir", "remove")
Do = Callable[[], None]


def model_of(value: float, layers: int) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2, vocab_size=50,
        rms_norm_eps=value * 1e-6,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model


def end_at(at: int, before: bool, kills: bool) -> list[int]:
    """Make the ``at``-th operation end this process or fail. Returns the list of operations made so far."""
    made: list[int] = []

    def wrapped(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(1)
            if len(made) == at and before:
                end()
            found = real(*args, **kwargs)
            if len(made) == at and not before:
                end()
            return found

        return call

    def end() -> None:
        if kills:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, "No space left on device")

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        make = wrapped(real_open) if set(mode) & set("wax") else real_open
        return make(file, mode, *args, **kwargs)

    real_open = builtins.open
    for name in NAMES:
        setattr(os, name, wrapped(getattr(os, name)))
    setattr(builtins, "open", opened)  # noqa: B010  # mypy knows its overloads
    saver: Any = modeling_utils
    saver.safe_save_file = wrapped(safetensors.torch.save_file)
    return made


def save(folder: Path, at: int = -1, before: bool = True, kills: bool = False) -> int:
    """Save the new model over the old one in a child process. Returns the operation count, -1 if it did not end."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        context = ParallelContext.from_group(Axis("tensor"))
        model: Any = shardformer.shard_model(model_of(2.0, 3), context=context)
        made = end_at(at, before, kills)
        try:
            model.save_pretrained(folder, max_shard_size="4KB")
        except OSError:
            os._exit(3)
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(4)
        os.write(writer, str(len(made)).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    said = os.read(reader, 20)
    os.close(reader)
    assert os.waitstatus_to_exitcode(status) in (0, 3, -signal.SIGKILL), status
    return int(said) if said else -1


def what_loads(folder: Path) -> str:
    """Return "old", "new" or "nothing". Raises AssertionError for a mixture."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        return "nothing"
    values = {float(p.detach().flatten()[i]) for p in model.parameters() for i in (0, -1)}
    assert len(values) == 1, f"a mixture of {values}"
    (value,) = values
    assert model.config.rms_norm_eps == value * 1e-6, "a config of another model"
    assert model.config.num_hidden_layers == (2 if value == 1.0 else 3)
    return "old" if value == 1.0 else "new"


def tries(root: Path, every: int, mounted: bool) -> Counter[str]:
    found: Counter[str] = Counter()
    old = root / "old"
    model_of(1.0, 2).save_pretrained(old, max_shard_size="4KB")
    (old / "tokenizer.json").write_text("{}")
    folder = root / "model"
    if mounted:  # a folder that cannot be renamed
        filesystem._can_be_renamed = lambda target: False
    shutil.copytree(old, folder)
    count = save(folder)
    assert what_loads(folder) == "new"
    for number, at in enumerate(range(1, count + 1)):
        for way, (before, kills) in enumerate([(True, True), (False, True), (True, False)]):
            if (number + way) % every:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(old, folder)
            save(folder, at, before, kills)
            loads = what_loads(folder)
            found[loads] += 1
            assert loads != "nothing" or kills or mounted, "a full disk leaves what was there"
            save(folder)
            assert what_loads(folder) == "new", "the next save is whole"
            assert (folder / "tokenizer.json").read_text() == "{}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1, help="of so many operations one")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    total: Counter[str] = Counter()
    for mounted in (False, True):
        root = asked.folder / str(mounted)
        root.mkdir(parents=True)
        total += tries(root, asked.every, mounted)
    said = ", ".join(f"{total[name]} {name}" for name in ("old", "new", "nothing"))
    print(f"{sum(total.values())} saves were ended: {said}, 0 mixtures")


if __name__ == "__main__":
    main()
