"""The example scripts of the integrations log the same losses as the scripts for one device that they came from."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.process import ROOT, IntegrationProcess, environment

EXAMPLES = ROOT / "examples" / "integrations"
CHANGED = {
    "from shardformer.integrations.transformers import Trainer": "from transformers import Trainer",
    "from shardformer.integrations.accelerate import Accelerator": "from accelerate import Accelerator",
    "from shardformer.integrations.trl import": "from trl import",
    '        parallel={"tensor": 2},\n': "",
    '        parallel={"data": 2, "zero_stage": 1},\n': "",
    ', parallel={"tensor": 2}': "",
}
"""Text of the example -> text of the script for one device."""
WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "one", "dog", "ran", "over", "two", "hills", "and", "saw"]


def make_files(folder: str) -> None:
    """Create a tokenizer, a tiny language model, a tiny classifier, and data."""
    import random

    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    place, random_words = Path(folder), random.Random(0)
    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    from tests.integrations.small_models import bert, llama

    for name, model in (("lm", llama()), ("classifier", bert())):
        model.save_pretrained(place / name)
        fast.save_pretrained(place / name)
    from tests.integrations.trl_cases import data_set, tokenizer

    llama().save_pretrained(place / "chat")
    tokenizer().save_pretrained(place / "chat")
    for name, kind in (("prompts", "completion"), ("pairs", "pairs")):
        for seed, split in enumerate(("train", "test")):
            data_set(kind, 24, seed).to_json(place / name / f"{split}.jsonl")
    lines = [" ".join(random_words.choices(WORDS, k=random_words.randint(5, 12))) for _ in range(64)]
    (place / "text.txt").write_text("\n".join(lines))
    rows = [f"{line},{n % 3}" for n, line in enumerate(lines)]
    (place / "rows.csv").write_text("\n".join(["sentence,label", *rows]))


def run_script(path: str, arguments: list[str]) -> None:
    from tests.integrations.trainer_cases import reset_accelerate

    reset_accelerate()
    before, sys.argv = sys.argv, [path, *arguments]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before


def losses(output: Path) -> list[float]:
    if (file := output / "losses.json").exists():
        found: list[float] = json.loads(file.read_text())
        return found
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in history for name in ("loss", "eval_loss", "grad_norm") if name in entry]


TRAINER = ["--do_train", "--do_eval", "--max_steps=3", "--logging_steps=1", "--report_to=none", "--use_cpu"]
TRAINER += ["--eval_strategy=steps", "--eval_steps=2", "--learning_rate=1e-2", "--disable_tqdm=true"]
TRL = [*(each for each in TRAINER if not each.startswith("--do_")), "--bf16=false"]
SCRIPTS: dict[str, tuple[int, Any]] = {
    "run_clm": (1, lambda files, size: [
        f"--model_name_or_path={files}/lm", f"--train_file={files}/text.txt", f"--validation_file={files}/text.txt",
        "--block_size=16", f"--per_device_train_batch_size={size}", f"--per_device_eval_batch_size={size}", *TRAINER,
    ]),
    "run_glue": (2, lambda files, size: [
        f"--model_name_or_path={files}/classifier", f"--train_file={files}/rows.csv",
        f"--validation_file={files}/rows.csv", f"--per_device_train_batch_size={size}",
        f"--per_device_eval_batch_size={size}", *TRAINER,
    ]),
    "accelerate_loop": (1, lambda files, size: [
        f"--model={files}/lm", f"--text={files}/text.txt", f"--batch_size={size}", "--block_size=16",
    ]),
    "sft": (1, lambda files, size: [
        f"--model_name_or_path={files}/chat", f"--dataset_name={files}/prompts", "--dtype=float32",
        f"--per_device_train_batch_size={size}", f"--per_device_eval_batch_size={size}", *TRL,
    ]),
    "dpo": (2, lambda files, size: [
        f"--model_name_or_path={files}/chat", f"--dataset_name={files}/pairs", "--dtype=float32",
        f"--per_device_train_batch_size={size}", f"--per_device_eval_batch_size={size}", *TRL,
    ]),
}  # fmt: skip
"""Script -> data-parallel ranks, and its arguments from the folder of files and the batch size per rank."""


@pytest.mark.slow
@pytest.mark.above_budget("runs five scripts with two ranks and in one process")
def test_example_scripts_log_what_they_log_on_one_device(integrations: IntegrationProcess, tmp_path: Path) -> None:
    integrations(1).run(make_files, str(tmp_path))
    for name, (data, arguments) in SCRIPTS.items():
        text = (EXAMPLES / f"{name}.py").read_text()
        plain = text
        for ours, theirs in CHANGED.items():
            plain = plain.replace(ours, theirs)
        changed = [line for line in text.splitlines() if line not in plain.splitlines()]
        assert 2 <= len(changed) <= 3 and "shardformer" not in plain.partition('"""\n\n')[2]
        (tmp_path / f"{name}_plain.py").write_text(plain)
        option = "--output" if name == "accelerate_loop" else "--output_dir"
        for ranks, path in ((1, tmp_path / f"{name}_plain.py"), (2, EXAMPLES / f"{name}.py")):
            output = [f"{option}={tmp_path}/{name}_{ranks}"]
            size = 8 // data if ranks == 2 else 8
            integrations(ranks).run(run_script, str(path), [*arguments(str(tmp_path), size), *output])
        alone, sharded = (losses(tmp_path / f"{name}_{ranks}") for ranks in (1, 2))
        assert len(alone) >= 3
        assert sharded == pytest.approx(alone, rel=1e-4), name


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.above_budget("starts two processes")
def test_the_benchmark_of_trainer_compares_equal_losses(tmp_path: Path) -> None:
    size = ["--hidden", "32", "--layers", "1", "--vocabulary", "64", "--batch", "2", "--sequence", "16"]
    command = [sys.executable, str(ROOT / "benchmarks" / "trainer.py"), "--json", "--repetitions", "2", *size]
    done = subprocess.run(
        [*command, "--layouts", "tensor 2", "data 2, ZeRO 2"], env=environment(), capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for variants in json.loads(done.stdout)["results"].values():
        expected = variants["loop"]["losses"]
        assert variants["Trainer"]["losses"] == pytest.approx(expected, rel=1e-5)
        assert set(variants["cpu_ms"]) == {"loop", "Trainer", "Trainer again", "loop again"}
