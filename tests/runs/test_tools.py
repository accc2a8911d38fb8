"""Calls of tools, system messages, weights and empty answers reach the chat template, or raise an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardformer.errors import InputError
from shardformer.train_command.load_data import TrainingData, load_training_data
from tests.runs.files import config, write_rows
from tests.runs.test_conversations import ANSWER, CHAT, QUESTION, first_sample, trained_text
from tests.runs.test_preference import made

TEMPLATE = """{% if tools %}[tools]{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}
{%- for m in messages %}[{{ m.role }}]{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}
{%- if m.role == 'assistant' %}.{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ARGUMENTS = {"city": "Oslo"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
USER, ASSISTANT = CHAT[1], {"role": "assistant", "content": ANSWER}
RENDERED = f'[tools]weather[user]{QUESTION}[assistant]<weather {{"city": "Oslo"}}>.[tool]21[assistant]{ANSWER}.'


def with_calls(call: dict[str, Any] = CALL, tools: Any = TOOLS) -> dict[str, Any]:
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "21"}]
    return {"messages": [*messages, ASSISTANT], "tools": tools}


def template(folder: Path) -> str:
    (folder / "template.jinja").write_text(TEMPLATE)
    return str(folder / "template.jinja")


def text_of(sample: Any) -> str:
    return bytes(sample["input_ids"].tolist()).decode()


@pytest.mark.parametrize(
    "row",
    [
        with_calls(),
        with_calls(tools=json.dumps(TOOLS)),
        with_calls(tools=[json.dumps(tool) for tool in TOOLS]),
        with_calls({**CALL, "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}),
    ],
)
def test_calls_of_tools_are_trained(row: dict[str, Any], tmp_path: Path) -> None:
    sample = first_sample(tmp_path, row, chat_template=template(tmp_path))
    assert text_of(sample) == RENDERED
    assert trained_text(sample) == f'<weather {{"city": "Oslo"}}>.|{ANSWER}.'


def test_fields_of_other_rows_of_a_table_do_not_reach_the_template(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    other = {**CALL, "function": {"name": "weather", "arguments": {"day": "today"}}}
    rows = datasets.Dataset.from_list([with_calls(), with_calls(other)])
    rows.to_parquet(tmp_path / "rows.parquet")
    data = {"train": str(tmp_path / "rows.parquet"), "sequence_length": 400, "chat_template": template(tmp_path)}
    assert text_of(load_training_data(config(tmp_path, "gpt2", data)).train_dataset[0]) == RENDERED


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (with_calls(), r"Row 1 .*template does not render tools of"),
        ({"messages": with_calls()["messages"]}, r"does not render the tool_calls of 'assistant' in message 2"),
        (with_calls(tools="weather"), r"'tools' must be a list of functions, but got 'weather'"),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            r"Each message in the field 'messages' must have a role and a text",
        ),
        ({"messages": [USER, {**ASSISTANT, "weight": 0.5}]}, r"must be 0 or 1, but got 0.5"),
        ({"system": "Sing.", "messages": CHAT}, r"'Be brief.' in its conversation, and 'Sing.' in the field 'system'"),
    ],
)
def test_what_the_template_would_drop_raises(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        first_sample(tmp_path, row)


def test_a_template_that_drops_a_role_raises(tmp_path: Path) -> None:
    file = tmp_path / "two_roles.jinja"
    file.write_text("{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    with pytest.raises(InputError, match=r"does not render the role 'system' in message 1"):
        first_sample(tmp_path, {"messages": CHAT}, chat_template=str(file), train_on="all")


@pytest.mark.parametrize(
    "row",
    [
        {"system": "Sing.", "messages": [USER, ASSISTANT]},
        {"system": "Sing.", "conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]},
        {"system": "Sing.", "prompt": [USER], "completion": [ASSISTANT]},
        {"system": "Sing.", "question": QUESTION, "answer": ANSWER},
    ],
)
def test_the_system_message_of_a_row_comes_first(row: dict[str, Any], tmp_path: Path) -> None:
    sample = first_sample(tmp_path, row, chat_template=template(tmp_path))
    assert text_of(sample) == f"[system]Sing.[user]{QUESTION}[assistant]{ANSWER}."


def test_answers_that_are_empty_or_have_the_weight_0_are_not_trained(tmp_path: Path) -> None:
    messages = [USER, {**ASSISTANT, "weight": 0}, USER, {**ASSISTANT, "weight": 1}, USER, {**ASSISTANT, "content": ""}]
    sample = first_sample(tmp_path, {"messages": messages}, chat_template=template(tmp_path))
    assert trained_text(sample) == f"{ANSWER}."
    rows = [{"instruction": QUESTION, "output": answer} for answer in (ANSWER, "", " ")]
    data: TrainingData = load_training_data(
        config(tmp_path, "gpt2", {"train": write_rows(tmp_path, rows), "sequence_length": 99})
    )
    assert len(data.train_dataset) == 1
    assert data.skipped_rows_message.startswith("2 of 3 rows were skipped")


def test_preferences_have_the_system_message_and_the_tools_of_their_row(tmp_path: Path) -> None:
    rows = [{"system": "Sing.", "question": QUESTION, "chosen": "la", "rejected": "no", "tools": TOOLS}] * 2
    data = {"prompt": "question", "chat_template": template(tmp_path)}
    chosen, rejected = load_training_data(made(tmp_path, rows, data=data)).train_dataset.pairs[0]
    start = f"[tools]weather[system]Sing.[user]{QUESTION}[assistant]"
    assert [bytes(each.ids_S.tolist()).decode() for each in (chosen, rejected)] == [f"{start}la.", f"{start}no."]
