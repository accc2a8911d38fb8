"""Direct preference optimization equals its formula on separate rows, and is equal under every layout."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardformer.errors import ConfigError, InputError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.train_command.conversations import IGNORED
from shardformer.train_command.dry_run import make_dry_run_report
from shardformer.train_command.load_data import load_training_data
from shardformer.train_command.run import build_trainer_and_data, run_training
from tests.runs.files import config, write_rows, write_text
from tests.runs.test_conversations import LLAMA
from tests.runs.test_run import losses_of

QUIET = {"progress": False, "throughput": False}


def pairs(count: int = 8) -> list[dict[str, Any]]:
    return [
        {"prompt": f"question {i}" + "?" * (i % 3), "chosen": "yes" + "!" * (i % 4), "rejected": f"no {i * i}"}
        for i in range(count)
    ]


def made(where: Path, rows: list[dict[str, Any]] | None = None, **tables: Any) -> Any:
    data = {"train": write_rows(where, rows or pairs()), "sequence_length": 96, "batch_size": 4, "shuffle": False}
    model = {"name": "llama", "config": LLAMA, "task": "preference"}
    return config(where, "gpt2", {**data, **tables.pop("data", {})}, model=model, hooks=QUIET, **tables)


def plain_loss(model: nn.Module, reference: nn.Module, rows: list[Any], beta: float, smoothing: float) -> Tensor:
    """The loss of the paper, with each answer in a row of its own."""

    def logp(of: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        values = of(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        target = labels[1:]
        return values.gather(1, target.clamp(min=0)[:, None])[:, 0][target != IGNORED].sum()

    losses = []
    for chosen, rejected in rows:
        gains = []
        for answer in (chosen, rejected):
            ids, labels = answer.ids_S.long(), answer.labels_S.long()
            with torch.no_grad():
                before = logp(reference, ids, labels)
            gains.append(logp(model, ids, labels) - before)
        margin = beta * (gains[0] - gains[1])
        losses.append(-(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_losses_and_weights_equal_those_of_the_formula(smoothing: float, tmp_path: Path) -> None:
    table = {"beta": 0.3, "label_smoothing": smoothing}
    run = made(tmp_path, preference=table, optimizer={"name": "SGD", "lr": 0.5}, training={"steps": 4})
    trainer, found = build_trainer_and_data(run, run.layout, ParallelContext.from_sizes({}))
    model = copy.deepcopy(trainer.engine.model)
    reference = copy.deepcopy(model).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for step in range(4):
        rows = found.train_dataset.pairs[4 * (step % 2) : 4 * (step % 2) + 4]
        loss = plain_loss(model, reference, rows, 0.3, smoothing)
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert expected[0] == pytest.approx(0.6931472, rel=1e-5) and abs(expected[3] - expected[0]) > 1e-2
    losses = []
    for _ in range(2):
        losses += [trainer.engine.train_step(batch).item() for batch in trainer.engine.data]
    assert losses == pytest.approx(expected, rel=1e-5)
    for (name, weight), other in zip(trainer.engine.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.reduced(one_in=2, first=0, at_most=1)
@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 2},
        {"pipe": 2},
        {"data": 2, "zero_stage": 3},
        {"tensor": 2, "sequence_parallel": True},
        {"sequence": 2},
    ],
    ids=str,
)
def test_the_layout_does_not_change_the_loss(parallel: dict[str, Any], pool2: WorkerPool, tmp_path: Path) -> None:
    alone = losses_of(made(tmp_path, pairs(11), folder=str(tmp_path / "alone")))
    split = made(tmp_path, pairs(11), folder=str(tmp_path / "split"), parallel=parallel)
    for losses in pool2.run(losses_of, split):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_a_resumed_run_keeps_its_reference(tmp_path: Path) -> None:
    whole = losses_of(made(tmp_path, folder=str(tmp_path / "whole"), training={"steps": 5}))
    run_training(made(tmp_path, folder=str(tmp_path / "cut"), training={"steps": 3}))
    assert losses_of(made(tmp_path, folder=str(tmp_path / "cut"), training={"steps": 5})) == whole


def test_pairs_may_be_conversations(tmp_path: Path) -> None:
    question = {"role": "user", "content": "question 0"}
    answers = [{"role": "assistant", "content": text} for text in ("yes", "no 0")]
    forms = [
        {"chosen": [question, answers[0]], "rejected": [question, answers[1]]},
        {"prompt": [question], "chosen": [answers[0]], "rejected": [answers[1]]},
        pairs(1)[0],
    ]
    found = [load_training_data(made(tmp_path, [row, row])).train_dataset[0] for row in forms]
    for other in found[1:]:
        assert other["input_ids"].tolist() == found[0]["input_ids"].tolist()
    trained = found[0]["answer_ids"][found[0]["answer_ids"] != IGNORED].tolist()
    assert bytes(trained).decode() == "yes<|im_end|>\nno 0<|im_end|>\n"


def test_wrong_pairs_raise(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"Row 1 of the data is invalid: The field 'chosen' must contain .* but got None"
    ):
        load_training_data(made(tmp_path, [{"prompt": "a", "rejected": "b"}]))
    with pytest.raises(InputError, match=r"No row has both answers within its first 8 tokens.*data.sequence_length"):
        load_training_data(made(tmp_path, data={"sequence_length": 8}))
    with pytest.raises(ConfigError, match=r"preference.beta = 0.5 has no effect without model.task = 'preference'"):
        config(tmp_path, "gpt2", {"train": write_text(tmp_path)}, preference={"beta": 0.5})


def test_a_dry_run_estimates_the_memory(tmp_path: Path) -> None:
    report = make_dry_run_report(made(tmp_path, parallel={"tensor": 2}))
    assert report.summary.num_samples == 8 and report.rank_estimates[0].step_peak_bytes, report.untraced_reason
