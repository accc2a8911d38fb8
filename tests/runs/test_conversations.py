"""Conversations are tokenized with a chat template, with labels on the answers, and packed without mixing them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from shardformer.errors import ConfigError, InputError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.train_command.conversations import IGNORED
from shardformer.train_command.datasets import pack_documents
from shardformer.train_command.dry_run import make_dry_run_report
from shardformer.train_command.load_data import load_training_data
from shardformer.train_command.run import build_trainer_and_data, run_training
from tests.runs.files import config, save_word_tokenizer, write_rows, write_text
from tests.runs.test_run import losses_of

QUESTION, ANSWER = "How are you?", "Well, thanks."
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Still well."},
]
LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def conversations(count: int = 12) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": "q" * (1 + 7 * i % 11)}, {"role": "assistant", "content": f"{i}!"}]}
        for i in range(count)
    ]


def trained_text(sample: dict[str, Tensor]) -> str:
    """The text of the tokens that have labels, with a bar between separate spans."""
    found = bytearray()
    before = True
    for token, label in zip(sample["input_ids"].tolist(), sample["labels"].tolist(), strict=True):
        if label != IGNORED:
            found += b"" if before else b"|"
            found.append(token)
        before = label != IGNORED
    return found.decode().removeprefix("|")


def first_sample(folder: Path, row: dict[str, Any], **data: Any) -> dict[str, Tensor]:
    rows = write_rows(folder, [row, row])
    sample: dict[str, Tensor] = load_training_data(
        config(folder, "gpt2", {"train": rows, "sequence_length": 400, **data})
    ).train_dataset[0]
    return sample


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("answers", f"{ANSWER}<|im_end|>\n|Still well.<|im_end|>\n"),
        ("last", "Still well.<|im_end|>\n"),
    ],
)
def test_only_answers_have_labels(train_on: str, expected: str, tmp_path: Path) -> None:
    assert trained_text(first_sample(tmp_path, {"messages": CHAT}, train_on=train_on)) == expected


def test_all_tokens_may_have_labels(tmp_path: Path) -> None:
    sample = first_sample(tmp_path, {"messages": CHAT}, train_on="all")
    assert sample["labels"].tolist() == sample["input_ids"].tolist()


@pytest.mark.parametrize(
    ("row", "data"),
    [
        ({"messages": CHAT[1:3]}, {}),
        ({"dialogue": CHAT[1:3]}, {"messages": "dialogue"}),
        ({"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]}, {}),
        ({"prompt": QUESTION, "completion": ANSWER}, {}),
        ({"prompt": CHAT[1:2], "completion": CHAT[2:3]}, {}),
        ({"instruction": QUESTION, "input": "", "output": ANSWER}, {}),
        ({"q": QUESTION, "a": ANSWER, "text": "unused"}, {"prompt": "q", "target": "a"}),
    ],
    ids=str,
)
def test_rows_of_all_forms_are_the_same_conversation(row: dict[str, Any], data: dict[str, str], tmp_path: Path) -> None:
    sample = first_sample(tmp_path, row, **data)
    text = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{ANSWER}<|im_end|>\n"
    assert bytes(sample["input_ids"].tolist()).decode() == text
    assert trained_text(sample) == f"{ANSWER}<|im_end|>\n"


def test_the_input_of_an_instruction_follows_it(tmp_path: Path) -> None:
    sample = first_sample(tmp_path, {"instruction": "Add.", "input": "1 and 2", "output": "3", "system": "Count."})
    text = bytes(sample["input_ids"].tolist()).decode()
    assert "system\nCount.<|im_end|>" in text and "user\nAdd.\n\n1 and 2<|im_end|>" in text


def test_rows_without_an_answer_are_counted_in_all_sources(tmp_path: Path) -> None:
    short, long = conversations(2), [{"messages": [{**CHAT[1], "content": "q" * 200}, CHAT[2]]}]
    train = [write_rows(tmp_path, short + long, "a.jsonl"), write_rows(tmp_path, short, "b.jsonl")]
    data = {"train": train, "weights": [1, 1], "validation": write_rows(tmp_path, short + 2 * long, "c.jsonl")}
    found = load_training_data(config(tmp_path, "gpt2", {**data, "sequence_length": 90}))
    assert (
        "3 of 9 rows were skipped, because they have no answer in their first 90 tokens" in found.skipped_rows_message
    )


def test_without_a_template_the_texts_are_concatenated(tmp_path: Path) -> None:
    sample = first_sample(tmp_path, {"prompt": "2+2=", "completion": "4"}, chat_template="none")
    assert sample["input_ids"].tolist() == [*b"2+2=4", 256]
    assert sample["labels"].tolist() == [*[IGNORED] * 4, *b"4", 256]


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Any:
    return save_word_tokenizer(tmp_path / "tokenizer")


def test_labels_follow_the_template_of_the_tokenizer(word_tokenizer: Any, tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "hello there"}, {"role": "assistant", "content": "hello you"},
        {"role": "user", "content": "again"}, {"role": "assistant", "content": "you too"},
    ]  # fmt: skip
    sample = first_sample(tmp_path, {"messages": chat}, tokenizer=str(tmp_path / "tokenizer"))
    expected = word_tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    assert sample["input_ids"].tolist() == expected
    trained = [token for token, label in zip(expected, sample["labels"].tolist(), strict=True) if label != IGNORED]
    assert word_tokenizer.convert_ids_to_tokens(trained) == ["hello", "you", "</s>", "you", "too", "</s>"]


def test_a_template_that_changes_earlier_text_raises(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(
        InputError, match=r"Row 1 .*changes earlier messages when it renders.*train_on = 'last' or 'all'"
    ):
        first_sample(tmp_path, {"messages": CHAT}, chat_template=str(template))


@pytest.mark.parametrize(
    ("row", "data", "words"),
    [
        (
            {"messages": [{"role": "user"}]},
            {},
            r"Row 1 .*in the field 'messages' must have a role and a text, but got \{'role': 'user'\}",
        ),
        ({"messages": CHAT[:2]}, {}, r"No row has an answer within its first 400 tokens.*data.sequence_length"),
        ({"messages": CHAT}, {"sequence_length": 8}, r"No row has an answer within its first 8 tokens"),
        ({"body": "words"}, {}, r"Row 1 of the data has no field 'text'"),
        (
            {"messages": "[]"},
            {},
            r"Row 1 .*'messages' must be a list of messages, but got '\[\]'.*contains JSON",
        ),
        ({"messages": None, "text": None}, {}, r"Row 1 .*'messages' must be a list of messages, but got None"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            {},
            r"Row 1 .*has other parts",
        ),
        ({"q": "words"}, {"prompt": "q"}, r"No conversation was found in a row with the fields 'q'"),
    ],
    ids=str,
)
def test_rows_that_are_no_conversation_raise(row: Any, data: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        first_sample(tmp_path, row, **data)


def test_the_texts_of_a_message_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Well, "}, {"type": "text", "text": "thanks."}]
    row = {"messages": [CHAT[1], {"role": "assistant", "content": parts}], "text": None}
    assert trained_text(first_sample(tmp_path, row)) == f"{ANSWER}<|im_end|>\n"


def test_an_error_of_a_template_is_reported(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match=r"Row 1 .*cannot render the conversation .*: roles must alternate"):
        first_sample(tmp_path, {"messages": CHAT}, chat_template=str(template))


def test_a_tokenizer_without_a_template_raises(word_tokenizer: Any, tmp_path: Path) -> None:
    word_tokenizer.chat_template = None
    word_tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"require a chat template.*data.chat_template to 'chatml'"):
        first_sample(tmp_path, {"messages": CHAT}, tokenizer=str(tmp_path / "plain"))


def test_the_template_is_exported_with_the_tokenizer(word_tokenizer: Any, tmp_path: Path) -> None:
    rows = write_rows(tmp_path, [{"prompt": "hello there", "completion": "you too"}] * 4)
    data = {"train": rows, "tokenizer": str(tmp_path / "tokenizer"), "chat_template": "chatml", "sequence_length": 64}
    made = config(tmp_path, "gpt2", data, training={"steps": 1, "export": True})
    run_training(made)
    again = transformers.AutoTokenizer.from_pretrained(made.output_folder / "model")
    assert again.apply_chat_template(CHAT[1:2], tokenize=False).startswith("<|im_start|>user\n")


def test_rows_are_packed_into_the_fullest_row_that_has_space() -> None:
    lengths = [3, 6, 2, 5, 4, 1, 8]
    rows = pack_documents(lengths, 8)
    assert sorted(index for row in rows for index in row) == list(range(7))
    assert all(sum(lengths[index] for index in row) <= 8 for row in rows)
    assert len(rows) == 4


def loss_and_gradients(trainer: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model = trainer.engine.model.double().train()
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_packed_rows_have_the_loss_and_gradients_of_separate_rows(kind: str, tmp_path: Path) -> None:
    model = {"config": LLAMA} if kind == "llama" else {}
    data = {"train": write_rows(tmp_path, conversations()), "sequence_length": 160, "batch_size": 2}
    changes = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "gpt2" else {}
    small = {"n_embd": 16, "n_layer": 2, "n_head": 2, **changes} if kind == "gpt2" else LLAMA
    model = {"name": kind, "config": small}
    packed = config(tmp_path, "gpt2", {**data, "packing": True}, model=model)
    trainer, found = build_trainer_and_data(packed, packed.layout, ParallelContext.from_sizes({}))
    plain = load_training_data(config(tmp_path, "gpt2", data, model=model))
    assert len(found.train_dataset) < len(plain.train_dataset) == 12
    rows = found.collate_fn([found.train_dataset[index] for index in range(len(found.train_dataset))])
    loss, gradients = loss_and_gradients(trainer, rows)
    expected, expected_gradients = loss_and_gradients(
        trainer, plain.collate_fn([plain.train_dataset[i] for i in range(12)])
    )
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-7, atol=1e-9, msg=name)
    del rows["position_ids"]  # the comparison can fail
    assert abs(loss_and_gradients(trainer, rows)[0] - expected) > 1e-6


@pytest.mark.reduced(one_in=2, first=0, at_most=1)
@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 2},
        {"tensor": 2, "sequence_parallel": True},
        {"pipe": 2},
        {"data": 2, "zero_stage": 3},
        {"sequence": 2},
    ],
    ids=str,
)
def test_packed_conversations_train_equally_under_every_layout(
    parallel: dict[str, Any], pool2: WorkerPool, tmp_path: Path
) -> None:
    data = {"train": write_rows(tmp_path, conversations(20)), "sequence_length": 96, "batch_size": 4, "packing": True}
    hooks = {"progress": False, "throughput": False}
    model = {"name": "llama", "config": LLAMA}
    alone = losses_of(config(tmp_path, "gpt2", data, model=model, hooks=hooks, folder=str(tmp_path / "alone")))
    made = config(tmp_path, "gpt2", data, model=model, hooks=hooks, folder=str(tmp_path / "2"), parallel=parallel)
    for losses in pool2.run(losses_of, made):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_a_model_that_mixes_packed_documents_raises(tmp_path: Path) -> None:
    data = {"train": write_rows(tmp_path, conversations()), "sequence_length": 160, "packing": True}
    small = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1}
    made = config(tmp_path, "gpt2", data, model={"name": "mamba2", "config": small})
    with pytest.raises(ConfigError, match=r"data.packing = true is not supported for Mamba2ForCausalLM"):
        make_dry_run_report(made)


def test_packed_texts_are_split_and_end_with_an_end_token(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, [{"text": "a" * 20}, {"text": "bcd"}, {"text": "e"}])
    found = load_training_data(config(tmp_path, "gpt2", {"train": rows, "packing": True}))
    packed = [found.train_dataset[index] for index in range(len(found.train_dataset))]
    texts = [row["input_ids"].tolist() for row in packed]
    assert texts == [[*b"a" * 16], [*b"aaaa", 256, *b"bcd", 256, *b"e", 256]]
    assert packed[1]["labels"].tolist() == [IGNORED, *b"aaa", 256, IGNORED, *b"cd", 256, IGNORED, 256]
    assert packed[1]["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("data", [{"packing": True}, {"prompt": "text"}, {"train_on": "last"}], ids=str)
def test_options_of_causal_data_have_no_effect_on_other_tasks(data: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no effect without model.task = 'causal'"):
        config(tmp_path, "bert", {"train": write_text(tmp_path), **data}, model={"task": "masked"})
