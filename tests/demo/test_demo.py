"""The parts of the demo: its text and batches, its memory, its journal, and when it says that somebody could tell."""

from __future__ import annotations

import dataclasses
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from shardformer.cli import demo as cli_demo
from shardformer.demo.comparison import BOUND, Outcome
from shardformer.demo.journal import Note, follow, write_note
from shardformer.demo.memory import measure_peak
from shardformer.demo.models import TASK, SmallModel, choose
from shardformer.demo.settings import FAMILIES, Settings
from shardformer.demo.text import IGNORED, MASK, MOST_BYTES, VOCAB_SIZE, Windows, bytes_as_tokens, read_text
from shardformer.demo.training import DemoRun as Run
from shardformer.demo.training import warm_up_and_fall
from shardformer.errors import ConfigError, InputError
from shardformer.testing.zoo import LANGUAGE_MODEL, Sample

TOKENS = bytes_as_tokens(bytes(range(256)) * 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor": 1}, r"tensor=1.*from 2"),
        ({"pipe": 1}, r"pipe=1.*from 2.*--pipe 2 or more"),
        ({"micro_batches": 2}, r"--micro-batches 2 without --pipe.*Add --pipe 2"),
        ({"pipe": 2, "micro_batches": 0}, r"--micro-batches 1 or more"),
        ({"pipe": 2, "micro_batches": 9}, r"--batch 9 or more, or --micro-batches 8 or less"),
        ({"steps": 0}, r"--steps 1 or more"),
        ({"hidden": 100}, r"--hidden 96 or --hidden 128"),
        ({"family": "bret"}, r"Did you mean 'bert'"),
        ({"model": "bert", "layers": 2, "family": "bert"}, r"--model bert beside --family bert --layers 2"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**changes)


def test_a_pipeline_leaves_each_layer_whole_unless_it_is_asked_for_more() -> None:
    assert (Settings().tensor_size, Settings().num_processes, Settings().num_parts) == (2, 2, 1)
    alone, mixed = Settings(pipe=2), Settings(pipe=2, tensor=2, batch=3)
    assert (alone.tensor_size, alone.num_processes, alone.num_parts) == (1, 2, 4)
    assert (mixed.tensor_size, mixed.num_processes, mixed.num_parts) == (2, 4, 3)


# ----------------------------------------------------------------------------------------------------------------- text


def test_python_carries_enough_english_text() -> None:
    chosen = choose(Settings())
    assert chosen.text.num_bytes == len(chosen.text.tokens) > 100_000
    assert " the " in bytes(chosen.text.tokens[:2000].to(torch.uint8).tolist()).decode(errors="replace")


def test_a_long_file_is_cut_and_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(b"x" * (MOST_BYTES + 1))
    title, raw = read_text(str(path))
    assert len(raw) == MOST_BYTES and title == f"the first {MOST_BYTES:,} bytes of {path}"


@pytest.mark.parametrize(
    ("size", "remedy"), [(0, "Give a longer text."), (100, "--batch 8 --sequence 12"), (1024, "127")]
)
def test_a_text_shorter_than_a_batch_is_refused(tmp_path: Path, size: int, remedy: str) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * size)
    with pytest.raises(InputError, match=rf"has {size:,} tokens.*{remedy}"):
        choose(Settings(data=str(path)))


def test_a_text_of_a_batch_and_a_token_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"x" * 1025)
    assert len(choose(Settings(data=str(path))).text.tokens) == 1025


def test_batches_are_the_same_in_every_run_and_differ_by_step() -> None:
    windows = Windows(TOKENS, "causal", 3, 16)
    again = pickle.loads(pickle.dumps(windows))
    assert torch.equal(windows(1)["input_ids"], again(1)["input_ids"])
    assert not torch.equal(windows(1)["input_ids"], windows(2)["input_ids"])


@pytest.mark.parametrize("task", sorted(set(TASK.values())))
def test_a_flipped_batch_holds_the_same_samples(task: str) -> None:
    windows = Windows(TOKENS, task, 3, 16)
    plain, flipped = windows(0), dataclasses.replace(windows, flipped=True)(0)
    assert plain.keys() == flipped.keys() == {"input_ids", "labels"}
    assert all(torch.equal(plain[name].flip(0), flipped[name]) for name in plain)


def test_what_is_masked_is_to_be_guessed_and_nothing_else() -> None:
    batch = Windows(TOKENS, "masked", 8, 100)(0)
    masked = batch["input_ids"] == MASK
    assert torch.equal(batch["labels"] != IGNORED, masked) and 0.1 < masked.float().mean() < 0.2
    assert not (batch["labels"] == MASK).any()


def test_the_second_half_is_written_from_the_first() -> None:
    batch = Windows(TOKENS, "continue", 2, 16)(0)
    stretch = torch.cat([batch["input_ids"], batch["labels"]], dim=1)
    assert stretch.shape == (2, 16) and ((stretch[:, 1:] - stretch[:, :-1]) % 256 == 1).all()


# --------------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_reads_bytes_and_has_no_dropout(family: str) -> None:
    model = SmallModel(family, 1, 64, 16)().train()
    assert type(model).__name__ == LANGUAGE_MODEL[family]
    batch = Windows(TOKENS, TASK[family], 2, 16)(0)
    losses = {float(model(**batch).loss.detach()) for _ in range(2)}
    assert len(losses) == 1 and max(losses) < 8
    assert max(int(ids.max()) for ids in batch.values()) < VOCAB_SIZE


def test_a_given_model_without_a_tokenizer_reads_bytes(tmp_path: Path) -> None:
    Sample("bert", "BertForMaskedLM", {"vocab_size": 300})().save_pretrained(tmp_path)
    for where, weights in ((tmp_path, "its own weights"), (tmp_path / "config.json", "random weights")):
        chosen = choose(Settings(model=str(where), sequence=64))
        assert (chosen.token, chosen.family) == ("a byte", "bert") and weights in chosen.title
    with pytest.raises(ConfigError, match="64 positions"):
        choose(Settings(model=str(tmp_path), sequence=65))


def test_a_given_model_without_a_tokenizer_and_too_few_tokens_is_refused(tmp_path: Path) -> None:
    Sample("gpt2")().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no tokenizer, and a vocabulary of 127"):
        choose(Settings(model=str(tmp_path), sequence=64))


def test_a_given_model_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"The demo trains language models of bert.*verify"):
        choose(Settings(model="torch.nn:Identity"))


# ------------------------------------------------------------------------------------------------------------- measures


def test_the_peak_holds_weights_gradients_and_the_state_of_the_optimizer() -> None:
    model = nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with measure_peak(model, optimizer) as peak:
        step()
    weight_bytes = 4 * 1000 * 1000
    # the weights, AdamW's two averages and the gradient, and what AdamW has on its hands while it works
    assert 4 * weight_bytes <= peak.num_bytes <= 7 * weight_bytes


def test_a_journal_is_told_to_its_last_line(tmp_path: Path) -> None:
    notes = [Note(step, 1 / step, 10.0 * step) for step in range(1, 50)]
    told: list[Note] = []
    journal = str(tmp_path / "journal")
    with follow(journal, told.append):
        for note in notes:
            write_note(journal, note)
    assert told == notes


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [warm_up_and_fall(step, 100) for step in range(100)]
    assert rates.index(max(rates)) == 9 and rates[0] == 0.1 and 0.1 < rates[-1] < 0.12


# -------------------------------------------------------------------------------------------------------------- verdict


def ended(*losses: float) -> Run:
    return Run(list(losses), 1000, 2_000_000, 3_000_000, 20, 0.1)


def test_losses_within_the_bound_cannot_be_told_apart() -> None:
    outcome = Outcome(ended(5.0, 4.0), [ended(5.0, 4.0 * (1 + BOUND / 2))] * 2)
    assert outcome.passed and outcome.differences[0] == 0


@pytest.mark.parametrize("loss", [4.0 * (1 + 2 * BOUND), float("nan"), float("inf")])
def test_losses_beyond_the_bound_can_be_told_apart(loss: float) -> None:
    assert not Outcome(ended(5.0, 4.0), [ended(5.0, loss)] * 2).passed
    assert "SOMEBODY CAN TELL" in cli_demo._verdict(Settings(), Outcome(ended(5.0, 4.0), [ended(5.0, loss)] * 2))


@pytest.mark.parametrize(("drift", "passed"), [(None, False), (1e-6, False), (1e-3, True), (float("inf"), False)])
def test_a_model_that_drifts_by_itself_is_given_room(drift: float | None, passed: bool) -> None:
    outcome = Outcome(ended(5.0, 4.0), [ended(5.0, 4.01)] * 2, drift)
    assert outcome.passed is passed
    assert ("differs from itself" in cli_demo._verdict(Settings(), outcome)) is (drift is not None)


def test_runs_that_both_break_down_do_not_pass() -> None:
    nan = float("nan")
    assert not Outcome(ended(nan), [ended(nan)], drift=float("inf")).passed


# -------------------------------------------------------------------------------------------------------------- picture


def test_a_terminal_of_80_columns_shows_moving_bars() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80, height=25)
    with cli_demo._watch(console, 40) as watch:
        tell = watch("one process")
        tell(Note(20, 3.1234, 12_345.6))
        tell(Note(40, 2.5678, 12_345.6))
    shown = text.getvalue()
    assert "\x1b[" in shown and "40/40" in shown and "loss 2.5678   12,346 tokens/s" in shown


def test_the_table_fits_80_columns_for_long_numbers() -> None:
    text = io.StringIO()
    console = Console(file=text, width=80)
    run = Run([2.0] * 100, 123_456_789, 12_345_678_900, 99_000_000_000, 1234, 0.001)
    console.print(cli_demo._table(Settings(steps=100, tensor=16), Outcome(run, [run] * 16)))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and sum("loss, step" in line for line in lines) == 11
    assert all(line[-1] in " ╮┤│╯" for line in lines if line.strip() != "side by side")
