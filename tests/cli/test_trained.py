"""``shardformer export``, ``generate`` and ``evaluate``: equal results under every layout, and as in transformers."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shardformer.cli import main
from shardformer.config import ParallelConfig
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.train_command.run import run_training
from shardformer.train_command.tokenizer import TextTokenizer, make_byte_tokenizer
from shardformer.train_command.trained_model import evaluate_model, find_saved_model
from shardformer.training.metrics_log import read_metrics_records
from tests.runs.files import SMALL, config, labelled, save_word_tokenizer, write_rows, write_text
from tests.scripts import SHARDFORMER

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
PROMPT = "the quick "


def make_run(folder: Path, kind: str, **tables: Any) -> Any:
    """A run whose validation data has an odd number of samples."""
    if kind == "bert":
        data = {"train": write_rows(folder, labelled(13))}
        data["validation"], task = data["train"], "classification"
    else:
        data = {"train": write_text(folder, times=40), "validation": write_text(folder, "validation.txt", 9)}
        task = "causal"
    model = {"task": task, "config": SMALL[kind] | (NO_DROPOUT if kind == "gpt2" else {})}
    training = {"steps": 12, "export": True}
    hooks = {"progress": False, "throughput": False, "metrics": {"names": ["accuracy"]}}
    schedule = {"warmup": 2.0}
    return config(folder, kind, data, model=model, training=training, hooks=hooks, schedule=schedule, **tables)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    run_training(make_run(folder, "gpt2"))
    return folder / "run"


def run(*words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0), " ".join(map(str, words))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_an_exported_checkpoint_equals_the_export_of_the_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, source in (("a", trained), ("b", trained / "checkpoints"), ("c", trained / "checkpoints/step-00000012")):
        assert run("export", source, tmp_path / name, "--json")[0] == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["output"] == str(tmp_path / name) and shown["checkpoint"].endswith("step-00000012")
        expected, found = weights(trained / "model"), weights(tmp_path / name)
        assert all(torch.equal(expected[key], found[key]) for key in expected | found)
        files = {file.name for file in (trained / "model").iterdir()}
        assert files == {file.name for file in (tmp_path / name).iterdir()} >= {"tokenizer.json", "config.json"}


def export_in(source: str, target: str, layout: dict[str, Any]) -> None:
    found = find_saved_model(source)
    found.load_engine(ParallelConfig(**layout)).export(target, found.load_processor())


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipe": 2}], ids=str)
def test_a_sharded_export_has_the_same_files(
    layout: dict[str, Any], trained: Path, pool2: WorkerPool, tmp_path: Path
) -> None:
    pool2.run(export_in, str(trained), str(tmp_path / "out"), layout)
    for file in (trained / "model").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_checkpoint_of_another_layout_is_exported_by_one_process(pool2: WorkerPool, tmp_path: Path) -> None:
    pool2.run(run_training, make_run(tmp_path, "gpt2", parallel={"tensor": 2, "zero_stage": 1}))
    assert run("export", tmp_path / "run", tmp_path / "out")[0] == 0
    expected, found = weights(tmp_path / "run/model"), weights(tmp_path / "out")
    assert all(torch.equal(expected[key], found[key]) for key in expected | found)


def generated(source: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run("generate", source, PROMPT, "--max-new-tokens", 20, "--json", *options)[0] == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.8}], ids=["greedy", "top_k", "top_p"]
)
def test_the_tokens_are_those_of_transformers(
    options: dict[str, float], trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained / "model")
    torch.manual_seed(3)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=bool(options), **options)[0, len(PROMPT) :]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    for source in (trained, trained / "model"):
        found = generated(source, "--seed=3", *words, capsys=capsys)
        assert found["tokens"] == expected.tolist()
        assert found["text"] == tokenizer.decode(expected, skip_special_tokens=True)


def tokens_in(source: str, layout: dict[str, Any], options: dict[str, Any]) -> list[int]:
    from shardformer.cli.generate import _generate_tokens

    found = find_saved_model(source)
    ids = found.load_processor()(PROMPT, return_tensors="pt")["input_ids"]
    return _generate_tokens(found.load_engine(ParallelConfig(**layout)), ids, 3, {"max_new_tokens": 20, **options})


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 9}], ids=["greedy", "sampled"])
def test_a_sharded_model_generates_the_same_tokens(options: dict[str, Any], trained: Path, pool2: WorkerPool) -> None:
    expected = tokens_in(str(trained), {}, options)
    assert pool2.run(tokens_in, str(trained), {"tensor": 2}, options) == [expected, expected]


def values_in(source: str, changes: list[str]) -> Any:
    return evaluate_model(find_saved_model(source).with_config_overrides(changes))


LAYOUTS = [["parallel.tensor=2"], ["parallel.pipe=2"], ["parallel.data=2"], ["data.batch_size=5"]]


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_all_layouts_give_the_values_of_the_run(
    kind: str, trained: Path, pool2: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained
    if kind == "bert":
        run_training(make_run(tmp_path, "bert"))
        capsys.readouterr()
        folder = tmp_path / "run"
    assert run("evaluate", folder, "--json")[0] == 0
    alone = json.loads(capsys.readouterr().out)
    record = [each.values for each in read_metrics_records(folder) if "validation/loss" in each.values][-1]
    assert alone["loss"] == record["validation/loss"] and alone["accuracy"] == record["validation/accuracy"]
    assert alone["samples"] == (13 if kind == "bert" else 35)
    for changes in LAYOUTS:
        values = (
            pool2.run(values_in, str(folder), changes)[0]
            if "parallel" in changes[0]
            else values_in(str(folder), changes)
        )
        assert values == pytest.approx(alone, rel=2e-6), changes


@pytest.mark.parametrize("kind", ["fraction", "stream"])
def test_other_validation_data_give_the_values_of_the_run(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path, [{"text": f"{number} words " * 9} for number in range(20)])
    forms: dict[str, dict[str, Any]] = {
        "fraction": {"validation_fraction": 0.3},
        "stream": {"validation": rows, "streaming": True},
    }
    data = {"train": rows, **forms[kind]}
    run_training(config(tmp_path, "gpt2", data, training={"steps": 2}, hooks={"progress": False}))
    capsys.readouterr()
    assert run("evaluate", tmp_path / "run", "--json")[0] == 0
    values = json.loads(capsys.readouterr().out)
    record = [each.values for each in read_metrics_records(tmp_path / "run") if "validation/loss" in each.values][-1]
    assert values["loss"] == record["validation/loss"]
    assert ("samples" in values) == (kind == "fraction")


def test_a_language_model_has_a_perplexity_without_a_hook(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("evaluate", trained, "--set", "hooks.metrics=false", "--json")[0] == 0
    values = json.loads(capsys.readouterr().out)
    assert values["perplexity"] == pytest.approx(math.exp(values["loss"]))
    assert run("evaluate", trained)[0] == 0
    assert capsys.readouterr().out.startswith("loss ")


def test_an_exported_model_is_evaluated_with_a_run_configuration(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("evaluate", trained, "--json")[0] == 0
    expected = json.loads(capsys.readouterr().out)
    file = trained.parent / "other.toml"
    data = trained.parent / "validation.txt"
    text = f"""
    model = {{ name = "none" }}
    data = {{ train = "{data}", validation = "{data}", sequence_length = 16, batch_size = 4 }}
    hooks = {{ metrics = {{ names = ["accuracy"] }} }}
    """
    file.write_text(text, encoding="utf-8")
    assert run("evaluate", trained / "model", "-c", file, "--json")[0] == 0
    assert json.loads(capsys.readouterr().out) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_the_command_starts_the_processes_of_its_layout(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = generated(trained, capsys=capsys)
    command = [*SHARDFORMER, "generate", str(trained), PROMPT, "--max-new-tokens", "20", "--json", "--tensor", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == expected


@pytest.mark.parametrize("text", ["plain", "grüße, 漢字 \x00 \n\t  two  spaces", "<|end|", " 🙂"])
@pytest.mark.parametrize("adds_end", [False, True])
def test_the_exported_byte_tokenizer_has_the_tokens_of_the_run(text: str, adds_end: bool, tmp_path: Path) -> None:
    make_byte_tokenizer(add_end_token=adds_end).save_pretrained(tmp_path)
    loaded, tokens = transformers.AutoTokenizer.from_pretrained(tmp_path), TextTokenizer()
    assert loaded(text, add_special_tokens=False)["input_ids"] == tokens.encode(text)
    assert loaded.decode(tokens.encode(text)) == text
    assert (len(loaded), loaded.pad_token_id, loaded.mask_token_id) == (
        tokens.vocab_size,
        tokens.pad_token_id,
        tokens.mask_token_id,
    )
    if adds_end:
        for pair in (None, "other"):
            expected = tokens.encode_with_special_tokens(text, pair, 99)["input_ids"]
            assert loaded(text, pair)["input_ids"] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate {run} ''", "The prompt '' is empty"),
        (
            "generate {run} hi --max-new-tokens 1023",
            "exceed the model's maximum sequence length of 1024 tokens. Use a shorter prompt, or --max-new-tokens 1022",
        ),
        ("generate {run} hi --top-p 1.5", "--top-p must be greater than 0 and at most 1, but got 1.5"),
        ("generate {run} hi --temperature 0", "--temperature must be greater than 0, but got 0.0"),
        ("generate {run}/none hi", "No trained model was found at"),
        ("export {run}/model out", "is already a model folder that from_pretrained can load"),
        ("export {run} {run}", "not an export of ShardFormer"),
        ("export {empty} out", "contains no checkpoint"),
        ("evaluate {run} --set data.validation=", "has no validation data"),
        ("evaluate {run} --set data.validationx=x", "Did you mean 'validation'"),
        ("evaluate {run} -c run.toml", "--config run.toml has no effect"),
        ("evaluate {run}/model", "has no run configuration"),
    ],
)
def test_invalid_uses_raise(
    words: str, message: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    filled = words.format(run=trained, empty=tmp_path / "empty").split()
    assert run(*("" if word == "''" else word for word in filled))[0] == 2
    assert message in " ".join(capsys.readouterr().err.split())


CONVERSATIONS = [
    {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
    for ask, answer in (("hello", "hello you"), ("again", "you too"))
]


def train_on_conversations(folder: Path, **data: Any) -> Path:
    hooks = {"progress": False, "throughput": False}
    data = {"train": write_rows(folder, CONVERSATIONS * 8), "sequence_length": 64, **data}
    model = {"config": SMALL["gpt2"] | NO_DROPOUT}
    made = config(folder, "gpt2", data, model=model, hooks=hooks, training={"steps": 60, "export": True})
    run_training(made)
    return made.output_folder


def answer(source: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(source, *options, "--json", capsys=capsys))
    return found


def shown(source: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert run("generate", source, "again", "--max-new-tokens", 40, *options)[0] == 0
    output = capsys.readouterr()
    return output.err + output.out


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_word_tokenizer(folder / "words")
    return train_on_conversations(folder, tokenizer=str(folder / "words"))


NOTE = "The prompt was inserted into the chat template as a user message. Use --raw to continue it unchanged.\n"


def test_a_run_on_conversations_answers_in_its_chat_template(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(chat, capsys=capsys)
    assert (found["chat_template"], found["input"], found["text"]) == (True, "<s>[u] again [a] ", "you too")
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat / "model")
    assert tokenizer.convert_ids_to_tokens(found["tokens"]) == ["you", "too", "</s>"]
    assert shown(chat, capsys=capsys) == f"{NOTE}you too\n"
    assert answer(chat, "--system", "hello", capsys=capsys)["input"] == "<s>[a] hello [u] again [a] "
    found = answer(chat, "--raw", capsys=capsys)
    assert (found["chat_template"], found["input"]) == (False, "again")
    assert shown(chat, "--raw", capsys=capsys) == f"again{found['text']}\n"


def test_an_answer_in_bytes_ends_at_the_marker_of_the_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train_on_conversations(tmp_path, chat_template="chatml", sequence_length=128)
    found = answer(folder, capsys=capsys)
    assert found["input"] == "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    assert found["text"] == "you too"
    assert run("export", folder, tmp_path / "out")[0] == 0
    tokenizers = [transformers.AutoTokenizer.from_pretrained(each) for each in (folder / "model", tmp_path / "out")]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate {run} hi --system x", "--system 'x' has no effect, because the model has no chat template"),
        ("generate {chat} hi --raw --system x", "--system 'x' has no effect, because --raw skips the chat template"),
        ("generate {chat} ''", "The prompt '' is empty"),
    ],
)
def test_invalid_uses_of_a_template_raise(
    words: str, message: str, trained: Path, chat: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = words.format(run=trained, chat=chat).split()
    assert run(*("" if word == "''" else word for word in filled))[0] == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_classifier_does_not_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_training(make_run(tmp_path, "bert"))
    assert run("generate", tmp_path / "run", "hi")[0] == 2
    assert "cannot generate text" in capsys.readouterr().err
