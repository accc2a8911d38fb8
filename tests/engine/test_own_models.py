"""Models, rows and loss functions of a user: equal to one process, or an error with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardformer
from shardformer.cli import main
from shardformer.discovery.derive_policy import format_policy_source_with_notes
from shardformer.errors import InputError, PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.shard_model_api import resolve_policy_and_origin
from shardformer.verify.verification import verify

WIDTH, WORDS = 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Takes ``words``, an argument for which no example can be generated."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Plain(nn.Module):
    """Has no stack of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.two(self.one(values).relu())  # type: ignore[no-any-return]


def make_model() -> nn.Module:
    return Model()


def make_plain() -> nn.Module:
    return Plain()


def make_batch(step: int) -> dict[str, Tensor]:
    return {"words": torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(step))}


def make_values(step: int) -> dict[str, Tensor]:
    return {"values": torch.randn(4, 8, generator=torch.Generator().manual_seed(step))}


def square(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(**batch).square().mean()  # type: ignore[no-any-return]


def next_word(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def losses(context: Any, rows: Any, loss_fn: Any = next_word, **sizes: int) -> list[float]:
    torch.manual_seed(0)
    model = Model()
    engine = shardformer.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        train_data=rows,
        batch_size=4,
        loss_fn=loss_fn,
        parallel=sizes,
        context=context,
    )
    assert engine.data is not None
    return [float(engine.train_step(batch)) for batch in engine.data]


WORD_ROWS = make_batch(0)["words"].repeat(3, 1)


@pytest.mark.slow
def test_a_policy_is_derived_from_the_training_data() -> None:
    rows = [(row, row) for row in WORD_ROWS]
    alone = losses(None, rows)
    found = run_as_threads(lambda context: losses(context, rows, tensor=2), tensor=2, one_at_a_time=True)
    assert found == [pytest.approx(alone, rel=1e-5)] * 2


def test_a_row_may_have_its_inputs_by_name() -> None:
    expected = losses(None, [(row, row) for row in WORD_ROWS])
    assert losses(None, [({"words": row}, row) for row in WORD_ROWS]) == expected
    with pytest.raises(InputError, match=r"A batch must be .*, but got list of dict, Tensor"):
        losses(None, [({"words": row}, row) for row in WORD_ROWS], loss_fn=None)


def test_a_loss_function_of_verify_raises_with_the_signature() -> None:
    with pytest.raises(InputError, match=r"loss_fn\(output, target\) raised TypeError.*Fix loss_fn"):
        losses(None, [(row, row) for row in WORD_ROWS], loss_fn=square)
    with pytest.raises(InputError, match=r"loss_fn\(output, batch\) raised TypeError"):
        losses(None, [{"words": row} for row in WORD_ROWS], loss_fn=square)


def square_of_output(output: Any, batch: Any) -> Any:
    return output.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [square_of_output, pytest.param(square, marks=pytest.mark.full)])
def test_verify_derives_a_policy_from_its_batches(loss_fn: Any, pool2: Any) -> None:
    report = verify(make_model, make_batch, 2, steps=1, loss_fn=loss_fn, pool=pool2)
    assert report.passed and "all_reduce over tensor (block)" in report.collectives, report.collectives


@pytest.mark.slow
def test_a_loss_function_that_fails_in_verify_raises_with_both_signatures() -> None:
    words = r"loss_fn\(output, batch\) raised TypeError: .*, and loss_fn\(model, batch\) raised TypeError: "
    with pytest.raises(InputError, match=words):
        verify(make_model, make_batch, 1, steps=1, loss_fn=len)


@pytest.mark.slow
def test_a_model_without_layers_names_what_works() -> None:
    with pytest.raises(PolicyError, match=r"use launch_from_torch\(data=2\)"):
        verify(make_plain, make_values, 2, steps=1, loss_fn=square)
    with pytest.raises(PolicyError, match=r"Use data parallelism and ZeRO"):
        shardformer.derive_policy(Plain(), next(iter(make_values(0).values())))


@pytest.mark.slow
def test_derive_policy_takes_the_targets_of_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = f"from {__name__} import make_batch, make_model\ndef both(): return make_model, make_batch\n"
    (tmp_path / "own_targets.py").write_text(
        text + "def named(): return {'model_fn': make_model, 'batch_fn': make_batch}\n", encoding="utf-8"
    )
    for name in ("both", "named"):
        with pytest.raises(SystemExit) as ended:
            main(["derive-policy", f"own_targets:{name}"])
        assert ended.value.code == 0
        assert 'MLP("up"' in capsys.readouterr().out


@pytest.mark.slow
def test_a_derived_policy_is_described_as_such_and_fits_into_100_columns() -> None:
    policy = shardformer.derive_policy(Model(), make_batch(0))
    policy.notes = ["a long note " * 20]
    policy.keep_replicated = tuple(f"blocks.{number}.up" for number in range(20))
    source = format_policy_source_with_notes(policy)
    assert max(map(len, source.splitlines())) <= 100
    names: dict[str, Any] = {}
    exec(source, names)
    assert names["MyPolicy"].keep_replicated == policy.keep_replicated
    assert resolve_policy_and_origin(Model(), policy) == (policy, "a derived and validated policy")
