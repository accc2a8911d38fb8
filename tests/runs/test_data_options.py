"""Tables, mixtures, streams, splits and further tasks, and their equality under every layout."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
import transformers

from shardformer.errors import ConfigError, InputError, ShardFormerError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.train_command.config_schema import TrainConfig
from shardformer.train_command.conversations import IGNORED
from shardformer.train_command.datasets import MixedDataset
from shardformer.train_command.dry_run import make_dry_run_report
from shardformer.train_command.load_data import load_training_data
from shardformer.train_command.run import build_trainer_and_data, run_training
from tests.runs.files import SMALL, config, labelled, write_rows, write_text
from tests.runs.test_run import losses_of

TAGS = ("O", "NAME", "PLACE")
QUIET = {"progress": False, "throughput": False}
BERT = {**SMALL["bert"], "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tagged(count: int = 8) -> list[dict[str, Any]]:
    return [
        {"tokens": ["Ann", "is", "in", "Rome"][: 2 + i % 3], "tags": ["NAME", "O", "O", "PLACE"][: 2 + i % 3]}
        for i in range(count)
    ]


def scored(count: int = 8) -> list[dict[str, Any]]:
    return [{"text": "x" * (i + 1), "label": 0.25 * i, "topics": ["a", "b", "c"][: i % 4]} for i in range(count)]


def classified(where: Path, data: dict[str, Any], task: str = "classification", **tables: Any) -> TrainConfig:
    return config(where, "bert", data, model={"task": task, "config": BERT}, hooks=QUIET, **tables)


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.parquet"])
def test_tables_equal_json_lines(name: str, tmp_path: Path) -> None:
    frame = pandas.DataFrame(labelled())
    if name.endswith("parquet"):
        frame.to_parquet(tmp_path / name)
    else:
        frame.to_csv(tmp_path / name, index=False, sep="\t" if name.endswith("tsv") else ",")
    found = load_training_data(classified(tmp_path, {"train": str(tmp_path / name)}))
    expected = load_training_data(classified(tmp_path, {"train": write_rows(tmp_path, labelled())}))
    assert found.classes == expected.classes == ["bad", "good"]
    for index in range(len(expected.train_dataset)):
        assert found.train_dataset[index] == expected.train_dataset[index]


# the library leaves a csv file open when its stream is not read to the end
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_the_delimiter_reaches_the_reader_of_a_stream(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("text;other\n" + "word word word;x\n" * 9, encoding="utf-8")
    data = {"train": str(file), "delimiter": ";", "streaming": True}
    (sample,) = load_training_data(config(tmp_path, "gpt2", data)).get_first_samples(1)
    assert bytes(sample["input_ids"][:14].tolist()) == b"word word word"
    gc.collect()  # closes the file


def test_options_reach_the_library(tmp_path: Path) -> None:
    pandas.DataFrame(labelled()).to_parquet(tmp_path / "rows.parquet")
    data = {"train": str(tmp_path / "rows.parquet"), "options": {"columns": ["text"]}}
    with pytest.raises(InputError, match=r"no field 'label'"):
        load_training_data(classified(tmp_path, data))
    with pytest.raises(ConfigError, match=r"data.options = .* has no effect"):
        classified(tmp_path, {"train": write_text(tmp_path), "options": {"columns": ["text"]}})


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_fraction_of_the_rows_is_used_for_validation(task: str, tmp_path: Path) -> None:
    rows = labelled(10) if task == "classification" else scored(10)
    data = {"train": write_rows(tmp_path, rows), "validation_fraction": 0.3}
    found = load_training_data(classified(tmp_path, data, task))
    train, validation = set(found.train_dataset.texts), set(found.validation_dataset.texts)
    assert (len(train), len(validation)) == (7, 3)
    assert train | validation == {row["text"] for row in rows}
    other = load_training_data(classified(tmp_path, data, task, seed=1))
    assert set(other.validation_dataset.texts) != validation


def test_the_end_of_a_text_is_used_for_validation(tmp_path: Path) -> None:
    data = {"train": write_text(tmp_path), "validation_fraction": 0.25}
    found = load_training_data(config(tmp_path, "gpt2", data))
    tokens = torch.cat([found.train_dataset.token_ids, found.validation_dataset.token_ids]).tolist()
    assert bytes(tokens).decode() == Path(data["train"]).read_text()
    assert len(found.validation_dataset.token_ids) == pytest.approx(0.25 * len(tokens), abs=10)
    assert bytes(found.train_dataset.token_ids.tolist()).decode().endswith(" ")


def test_sources_are_mixed_by_their_weights(tmp_path: Path) -> None:
    names = [
        write_rows(tmp_path, [{"text": kind * 15}] * count, f"{kind}.jsonl") for kind, count in (("a", 4), ("b", 6))
    ]
    data = {"train": names, "weights": [3.0, 1.0], "packing": True}
    found = load_training_data(config(tmp_path, "gpt2", data))
    letters = [chr(int(found.train_dataset[index]["input_ids"][0])) for index in range(len(found.train_dataset))]
    assert letters.count("b") == 6 and letters.count("a") == 18
    assert "b" in letters[:4] and "b" in letters[-4:]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0]], ids=str)
def test_weights_that_do_not_fit_raise(weights: list[float], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.weights must contain one positive number for each of"):
        config(tmp_path, "gpt2", {"train": [write_text(tmp_path), write_text(tmp_path, "b.txt")], "weights": weights})


def test_every_sample_of_a_mixture_occurs() -> None:
    mixed = MixedDataset([range(7), range(100, 103)], [1.0, 2.0])
    found = [mixed[index] for index in range(len(mixed))]
    assert set(found) == {*range(7), *range(100, 103)}
    assert (sum(each < 100 for each in found), sum(each >= 100 for each in found)) == (7, 14)


def test_one_number_per_text_is_learned(tmp_path: Path) -> None:
    made = classified(
        tmp_path, {"train": write_rows(tmp_path, scored())}, "regression", training={"steps": 2, "export": True}
    )
    run_training(made)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(made.output_folder / "model")
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")
    data = load_training_data(made)
    batch = data.collate_fn([data.train_dataset[3], data.train_dataset[1]])
    output = model(**batch)
    torch.testing.assert_close(
        output.loss, torch.nn.functional.mse_loss(output.logits[:, 0], torch.tensor([0.75, 0.25]))
    )


def test_any_number_of_classes_per_text_is_learned(tmp_path: Path) -> None:
    data = {"train": write_rows(tmp_path, scored()), "label": "topics"}
    made = classified(tmp_path, data, "multi_label_classification", training={"steps": 2, "export": True})
    run_training(made)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(made.output_folder / "model")
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}
    found = load_training_data(made)
    assert [found.train_dataset[index]["labels"] for index in (0, 2)] == [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    batch = found.collate_fn([found.train_dataset[0], found.train_dataset[2]])
    output = model(**batch)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(output.logits, batch["labels"])
    torch.testing.assert_close(output.loss, expected)


def test_the_first_token_of_each_word_has_its_class(tmp_path: Path) -> None:
    data = {"train": write_rows(tmp_path, tagged()), "text": "tokens", "label": "tags"}
    made = classified(tmp_path, data, "token_classification", training={"steps": 2, "export": True})
    run_training(made)
    model = transformers.AutoModelForTokenClassification.from_pretrained(made.output_folder / "model")
    assert model.config.id2label == {0: "NAME", 1: "O", 2: "PLACE"}
    sample = load_training_data(made).train_dataset[2]
    assert bytes(sample["input_ids"]) == b"Ann is in Rome"
    labels = {position: label for position, label in enumerate(sample["labels"]) if label != IGNORED}
    assert labels == {0: 0, 3: 1, 6: 1, 9: 2}


def test_words_and_classes_of_different_number_raise(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, [*tagged(3), {"tokens": ["a"], "tags": ["O", "O"]}])
    with pytest.raises(InputError, match=r"Row 4 of the data has 1 words, but 2 labels"):
        load_training_data(
            classified(tmp_path, {"train": rows, "text": "tokens", "label": "tags"}, "token_classification")
        )


@pytest.mark.parametrize(
    ("task", "rows", "words"),
    [
        (
            "regression",
            [{"text": "a", "label": "high"}],
            r"'label' must be a finite number, but row . of .* has 'high'",
        ),
        (
            "multi_label_classification",
            labelled(),
            r"'label' must be a list of labels, but row . of the data has 'bad'.*'classification'",
        ),
        ("classification", [{"text": "a", "label": ["x"]}], r"types list.*'multi_label_classification'"),
        ("token_classification", labelled(), r"must be a list of labels|must be a list of words"),
    ],
)
def test_labels_of_another_task_raise(task: str, rows: list[dict[str, Any]], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        load_training_data(classified(tmp_path, {"train": write_rows(tmp_path, rows)}, task))


@pytest.mark.reduced(one_in=3, first=0, at_most=1)
@pytest.mark.parametrize("task", ["regression", "multi_label_classification", "token_classification"])
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"data": 2, "zero_stage": 2}], ids=str)
def test_the_layout_does_not_change_the_new_tasks(
    task: str, parallel: dict[str, Any], pool2: WorkerPool, tmp_path: Path
) -> None:
    rows = tagged(12) if task.startswith("token") else scored(12)
    fields = {
        "multi_label_classification": {"label": "topics"},
        "token_classification": {"text": "tokens", "label": "tags"},
    }
    data = {"train": write_rows(tmp_path, rows), "group_by_length": True, **fields.get(task, {})}
    alone = losses_of(classified(tmp_path, data, task, folder=str(tmp_path / "alone")))
    made = classified(tmp_path, data, task, folder=str(tmp_path / "split"), parallel=parallel)
    for losses in pool2.run(losses_of, made):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_batches_contain_samples_of_similar_length(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, [{"text": "x" * (1 + 5 * i % 97), "label": i % 2} for i in range(96)])
    data = {"train": rows, "sequence_length": 128, "batch_size": 8}

    def padding(**changes: Any) -> int:
        made = classified(tmp_path, {**data, **changes})
        trainer, _ = build_trainer_and_data(made, made.layout, ParallelContext.from_sizes({}))
        return sum(int((batch["attention_mask"] == 0).sum()) for batch in trainer.engine.data)

    assert padding(group_by_length=True) < 0.5 * padding()


def test_grouping_samples_of_one_length_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"group_by_length = true has no effect"):
        load_training_data(config(tmp_path, "gpt2", {"train": write_text(tmp_path), "group_by_length": True}))


@pytest.mark.reduced(one_in=2, first=0)
# the library leaves a csv file open when its stream is not read to the end
@pytest.mark.reduced(at_most=1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("form", ["jsonl", "csv", "saved", "conversations"])
def test_a_stream_resumes_and_equals_every_layout(form: str, pool2: WorkerPool, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": f"row {i} {'word ' * (i % 7)}"} for i in range(60)]
    if form == "conversations":
        rows = [{"prompt": row["text"][:9], "completion": f"{i}"} for i, row in enumerate(rows)]
    file = write_rows(tmp_path, rows)
    data: dict[str, Any] = {"train": file, "streaming": True}
    if form == "csv":
        pandas.DataFrame(rows).to_csv(tmp_path / "rows.csv", index=False)
        data["train"] = str(tmp_path / "rows.csv")
    if form == "saved":
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
        data |= {"train": str(tmp_path / "saved"), "format": "datasets"}
    data["sequence_length"] = 64 if form == "conversations" else 16

    def made(name: str, steps: int, **tables: Any) -> TrainConfig:
        changes = {**SMALL["gpt2"], "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return config(
            tmp_path, "gpt2", data, folder=str(tmp_path / name), training={"steps": steps}, hooks=QUIET,
            model={"config": changes}, **tables,
        )  # fmt: skip

    alone = losses_of(made("alone", 6))
    run_training(made("cut", 4))
    assert losses_of(made("cut", 6)) == alone
    for losses in pool2.run(losses_of, made("split", 6, parallel={"data": 2})):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_weighted_streams_contain_all_sources(tmp_path: Path) -> None:
    names = [write_rows(tmp_path, [{"text": kind * 16}] * 200, f"{kind}.jsonl") for kind in "ab"]
    data = {"train": names, "weights": [3.0, 1.0], "streaming": True, "sequence_length": 17}
    found = load_training_data(config(tmp_path, "gpt2", data))
    letters = "".join(chr(int(sample["input_ids"][0])) for sample in found.get_first_samples(200))
    assert 100 < letters.count("a") < 180 and letters.count("a") + letters.count("b") == 200


@pytest.mark.parametrize(
    ("data", "training", "words"),
    [
        ({"packing": True}, {"steps": 1}, r"data.streaming = true and data.packing = true cannot both be set"),
        ({}, {"epochs": 1}, r"data.streaming = true requires training.steps"),
    ],
)
def test_streams_that_cannot_be_read_raise(data: Any, training: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, "gpt2", {"train": write_text(tmp_path), "streaming": True, **data}, training=training)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "contains no rows"),
        ('{"text": "a"}\n{"text": "b"\n', "cannot be read as jsonl"),
        ('{"text": "words"}\n{"text": null}\n', "'text' must be a string, but row 2 of the data has None"),
        (
            '{"messages": [{"role": "user", "content": "a"}]}\n',
            "No row has an answer within its first .*data.sequence_length",
        ),
    ],
    ids=["empty", "broken", "null", "no answer"],
)
def test_rows_of_a_stream_that_cannot_be_read_raise(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    data = {"train": str(tmp_path / "rows.jsonl"), "streaming": True, "shuffle": False}
    with pytest.raises(InputError, match=words):
        list(load_training_data(config(tmp_path, "gpt2", data)).train_dataset)


def test_a_text_is_not_streamed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.streaming = true does not support .*the format text"):
        load_training_data(config(tmp_path, "gpt2", {"train": write_text(tmp_path), "streaming": True}))


def test_a_dry_run_describes_a_stream(tmp_path: Path) -> None:
    data = {"train": write_rows(tmp_path, [{"text": "words " * 9}] * 20), "streaming": True}
    report = make_dry_run_report(config(tmp_path, "gpt2", data))
    assert report.summary.num_samples is None and report.rank_estimates[0].step_peak_bytes


@pytest.mark.reduced(one_in=2, first=1, at_most=1)
@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}, {"pipe": 2}, {"data": 2, "zero_stage": 3}], ids=str)
def test_frozen_parameters_do_not_change(parallel: dict[str, Any], pool2: WorkerPool, tmp_path: Path) -> None:
    changes = {**SMALL["gpt2"], "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = {"freeze": ["transformer.wte.*", "*.h.0.*"], "config": changes}
    data = {"train": write_text(tmp_path)}

    def made(name: str, **tables: Any) -> TrainConfig:
        training = {"steps": 3, "export": True}
        folder = str(tmp_path / name)
        return config(tmp_path, "gpt2", data, model=model, training=training, folder=folder, hooks=QUIET, **tables)

    alone = losses_of(made("alone"))
    run = pool2.run if parallel else lambda function, *args: [function(*args)]
    for losses in run(losses_of, made("split", parallel=parallel)):
        assert losses == pytest.approx(alone, rel=1e-5)
    trainer, _ = build_trainer_and_data(first := made("first"), first.layout, ParallelContext.from_sizes({}))
    before = dict(trainer.engine.model.state_dict())
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "split" / "model").state_dict()
    for name, value in after.items():
        is_frozen = "wte" in name or ".h.0." in name or name == "lm_head.weight"
        assert torch.equal(value, before[name]) == is_frozen, name


@pytest.mark.parametrize(
    ("freeze", "words"),
    [
        (["transformer.wpe.weigh"], r"matches no parameter. Fix the pattern. Did you mean"),
        (["*"], r"freezes all parameters"),
    ],
)
def test_freezing_nothing_or_everything_raises(freeze: list[str], words: str, tmp_path: Path) -> None:
    made = config(tmp_path, "gpt2", {"train": write_text(tmp_path)}, model={"freeze": freeze})
    with pytest.raises(ShardFormerError, match=words):
        make_dry_run_report(made)


def test_a_pattern_is_the_list_of_its_files(tmp_path: Path) -> None:
    for name, rows in (("b", labelled(4)), ("a", labelled(6)), ("c", labelled(2))):
        write_rows(tmp_path, rows, f"part-{name}.jsonl")
    found = load_training_data(classified(tmp_path, {"train": str(tmp_path / "part-[ab].jsonl")}))
    files = [str(tmp_path / f"part-{name}.jsonl") for name in "ab"]
    assert found.train_dataset.texts == load_training_data(classified(tmp_path, {"train": files})).train_dataset.texts
    assert len(found.train_dataset) == 10
    with pytest.raises(InputError, match=r"'.*part-x\*.jsonl' cannot be read"):
        load_training_data(classified(tmp_path, {"train": str(tmp_path / "part-x*.jsonl")}))
