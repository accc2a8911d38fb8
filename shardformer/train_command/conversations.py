"""Tokenizes conversations with a chat template, and masks the labels of all tokens outside the answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from shardformer.errors import ConfigError, InputError, get_first_message_line
from shardformer.train_command.config_schema import DataOptions
from shardformer.train_command.tokenizer import TextTokenizer

IGNORED = -100
ANSWER = "assistant"
ROLES = {"human": "user", "gpt": ANSWER, "bot": ANSWER, "model": ANSWER}
"""Role of a message in ShareGPT data -> role in chat templates."""
PAIRS = (("prompt", "completion"), ("instruction", "output"), ("question", "answer"))
"""Usual names of the fields of a prompt and its answer."""
CONTEXT = "input"
"""Field of instruction data that contains the input of the instruction. It is appended to the prompt."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NONE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TEMPLATES = {"chatml": CHATML, "none": NONE}
"""Templates that ``data.chat_template`` can name. ``none`` concatenates the texts."""

SYSTEM, TOOLS, CALLS, WEIGHT = "system", "tools", "tool_calls", "weight"

Message = Mapping[str, Any]


def is_conversation(row: Mapping[str, Any], data_options: DataOptions) -> bool:
    """Return whether a data set row contains a conversation, or a prompt with an answer, rather than plain text."""
    if data_options.prompt is not None:
        return True
    if row.get(data_options.text) is not None:  # a table has every field in every row
        return False
    return (
        data_options.messages in row
        or _find_messages_field(row, data_options) is not None
        or _find_prompt_and_answer_fields(row, data_options) is not None
    )


def extract_messages(row: Mapping[str, Any], data_options: DataOptions) -> list[Message]:
    """Return the messages of a data set row that contains either a conversation or a prompt with an answer.

    Raises:
        InputError: The row has neither of them, or a message has no role or content.
    """
    field = None if data_options.prompt is not None else _find_messages_field(row, data_options)
    if field is not None:
        return _add_system_message(_normalize_messages(row[field], field), row)
    pair = _find_prompt_and_answer_fields(row, data_options)
    if pair is None and data_options.prompt is None and data_options.messages in row:
        value = row[data_options.messages]
        raise InputError(
            f"The field {data_options.messages!r} must be a list of messages, but got {value!r:.60}.",
            remedy='Write a list such as [{"role": "user", "content": "words"}], not a string that contains JSON.',
        )
    if pair is None:
        fields = ", ".join(map(repr, row))
        raise InputError(
            f"No conversation was found in a row with the fields {fields}.",
            remedy="Set data.messages to the field that contains the messages, or data.prompt and data.target to the "
            "fields that contain the prompt and the answer.",
        )
    return _extract_prompt_and_answer(row, pair)


def _find_messages_field(row: Mapping[str, Any], data_options: DataOptions) -> str | None:
    return next(
        (name for name in (data_options.messages, "conversations") if isinstance(row.get(name), (list, tuple))), None
    )


def _find_prompt_and_answer_fields(row: Mapping[str, Any], data_options: DataOptions) -> tuple[str, str] | None:
    pairs = PAIRS if data_options.prompt is None else ((data_options.prompt, data_options.target),)
    return next((pair for pair in pairs if all(row.get(name) is not None for name in pair)), None)


def _extract_prompt_and_answer(row: Mapping[str, Any], field_names: tuple[str, str]) -> list[Message]:
    prompt, answer = (row[name] for name in field_names)
    if isinstance(prompt, (list, tuple)):
        return _add_system_message(
            [*_normalize_messages(prompt, field_names[0]), *_convert_answer_to_messages(answer, field_names[1])], row
        )
    context = row.get(CONTEXT) if field_names[0] == "instruction" else None
    prompt = f"{prompt}\n\n{context}" if context else prompt
    return _add_system_message(
        [
            *_normalize_messages([{"role": "user", "content": prompt}], field_names[0]),
            *_convert_answer_to_messages(answer, field_names[1]),
        ],
        row,
    )


def _add_system_message(messages: list[Message], row: Mapping[str, Any]) -> list[Message]:
    """Insert the ``system`` field of a row as the first message, unless that is already a system message."""
    system = row.get(SYSTEM)
    if not isinstance(system, str) or not system:
        return messages
    if not messages or messages[0]["role"] != SYSTEM:
        return [{"role": SYSTEM, "content": system}, *messages]
    content = messages[0]["content"]
    if content != system:
        raise InputError(
            f"The row has two system messages: {content!r:.60} in its conversation, and {system!r:.60} in the field "
            "'system'.",
            remedy="Remove one of the two system messages.",
        )
    return messages


def extract_prompt_with_answer(row: Mapping[str, Any], answer_field: str, data_options: DataOptions) -> list[Message]:
    """Return the prompt of a data set row and the answer in ``answer_field`` as a list of messages.

    Raises:
        InputError: The row has no such answer.
    """
    prompt, answer = row.get(data_options.prompt or PAIRS[0][0]), row.get(answer_field)
    messages = [] if answer is None else [*_convert_answer_to_messages(answer, answer_field)]
    if prompt is not None and messages:
        is_list = isinstance(prompt, (list, tuple))
        messages = [
            *_normalize_messages(prompt if is_list else [{"role": "user", "content": prompt}], "prompt"),
            *messages,
        ]
    if len(messages) < 2 or messages[-1]["role"] != ANSWER:
        raise InputError(
            f"The field {answer_field!r} must contain an answer to a prompt, but got {answer!r:.60}.",
            remedy="Write the answer as text with the prompt in the field 'prompt', or as a conversation that ends "
            "with the answer. For other field names, set data.prompt, data.chosen and data.rejected.",
        )
    return _add_system_message(messages, row)


def get_chat_template_kwargs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tools of a row as keyword arguments for the chat template. The tools may be JSON strings."""
    tools = _parse_json_if_valid(row.get(TOOLS) or [])
    if not isinstance(tools, (list, tuple)) or not all(
        isinstance(_parse_json_if_valid(tool), Mapping) for tool in tools
    ):
        raise InputError(
            f"The field 'tools' must be a list of functions, but got {tools!r:.60}.",
            remedy="Write the functions as a list of JSON schemas, or remove the field.",
        )
    return {TOOLS: [_parse_json_if_valid(tool) for tool in tools]} if tools else {}


def _parse_json_if_valid(maybe_json: Any) -> Any:
    """Parse a string that contains a JSON object or list, and return any other value unchanged."""
    if isinstance(maybe_json, str):
        with suppress(ValueError):
            found = json.loads(maybe_json)
            return found if isinstance(found, (dict, list)) else maybe_json
    return maybe_json


def drop_none_fields(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield rows without the None values that the ``datasets`` library inserts for missing fields."""
    return iter(rows) if isinstance(rows, list) else map(_drop_none_values, rows)


def _drop_none_values(nested: Any) -> Any:
    if isinstance(nested, Mapping):
        return {name: _drop_none_values(each) for name, each in nested.items() if each is not None}
    return [_drop_none_values(each) for each in nested] if isinstance(nested, (list, tuple)) else nested


def _convert_answer_to_messages(answer: Any, field_name: str) -> list[Message]:
    return _normalize_messages(
        answer if isinstance(answer, (list, tuple)) else [{"role": ANSWER, "content": answer}], field_name
    )


def _normalize_messages(messages: Sequence[Any], field_name: str) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        role = content = None
        if isinstance(message, Mapping):
            role = message.get("role", message.get("from"))
            content = message.get("content", message.get("value"))
        calls = message.get(CALLS) if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not (isinstance(content, (str, list)) or (content is None and calls)):
            raise InputError(
                f"Each message in the field {field_name!r} must have a role and a text, but got {message!r:.80}.",
                remedy='Write messages such as {"role": "user", "content": "words"}.',
            )
        assert isinstance(message, Mapping)
        content = _join_text_parts(content, message, field_name) if isinstance(content, list) else content
        others = {name: value for name, value in message.items() if name not in ("from", "value") and value is not None}
        if calls:
            others[CALLS] = [_parse_tool_call_arguments(call) for call in calls]
        weight = others.get(WEIGHT, 1)
        if weight not in (0, 1):
            raise InputError(
                f"The weight of each message in the field {field_name!r} must be 0 or 1, but got {weight!r}.",
                remedy="Use weight 1 to train on an answer, or weight 0 to exclude the answer from the loss.",
            )
        found.append({**others, "role": ROLES.get(role, role), "content": content})
    return found


def _parse_tool_call_arguments(tool_call: Any) -> Any:
    """Parse the JSON arguments of a tool call, because chat templates expect an object."""
    if not isinstance(tool_call, Mapping):
        return tool_call
    return {
        name: _parse_json_if_valid(v) if name == "arguments" else _parse_tool_call_arguments(v)
        for name, v in tool_call.items()
    }


def _join_text_parts(content_parts: Sequence[Any], message: Message, field_name: str) -> str:
    """Join the text parts of a message to one string. Raises InputError for other parts, such as images."""
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in content_parts]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(
            f"Conversations support only text, but a message in the field {field_name!r} has other parts: "
            f"{message!r:.80}.",
            remedy="Remove all parts that are not text, such as images.",
        )
    return "".join(cast(list[str], texts))


@dataclass(frozen=True, eq=False)
class TokenizedSample:
    """Token ids and labels of one training sample, as int32 tensors of shape (sequence length,)."""

    ids_S: torch.Tensor
    labels_S: torch.Tensor


@dataclass(frozen=True, eq=False)
class ConversationTokenizer:
    """Converts conversations to token ids and labels with a chat template.

    Args:
        text_tokenizer: Tokenizer.
        chat_template: Jinja template of a conversation.
        train_on: Tokens with labels. "answers": all messages of the assistant; "last": the last message, if it is an
            answer; "all": all tokens.
        max_length: Maximum number of tokens. Further tokens are dropped.
        checked: Sequences of roles that are known to be rendered completely by the template.
    """

    text_tokenizer: TextTokenizer
    chat_template: str
    train_on: str
    max_length: int
    checked: set[Any] = field(default_factory=set)

    @classmethod
    def from_options(cls, data_options: DataOptions, text_tokenizer: TextTokenizer) -> ConversationTokenizer:
        """Create a ConversationTokenizer with the configured chat template, or with that of the tokenizer."""
        template = _load_chat_template(data_options.chat_template) or getattr(
            text_tokenizer.hf_tokenizer, "chat_template", None
        )
        if isinstance(template, dict):
            template = template.get("default")
        if template is None and text_tokenizer.is_byte_level:
            template = CHATML
        if template is None:
            raise ConfigError(
                f"Conversations require a chat template, but the tokenizer {text_tokenizer.name!r} has none.",
                remedy="Set data.chat_template to 'chatml', to a file with a Jinja template, or to 'none' to join the "
                "messages without separators.",
            )
        if text_tokenizer.hf_tokenizer is not None:
            text_tokenizer.hf_tokenizer.chat_template = template
        return cls(text_tokenizer, template, data_options.train_on, data_options.sequence_length)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, **template_kwargs: Any
    ) -> str:
        """Render a conversation as text. If ``add_generation_prompt`` is True, the start of an answer is added."""
        try:
            if self.text_tokenizer.hf_tokenizer is None:
                compiled = _compile_chat_template(self.chat_template)
                return str(
                    compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **template_kwargs)
                )
            return str(
                self.text_tokenizer.hf_tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **template_kwargs
                )
            )
        except Exception as error:  # templates raise their own errors
            reason = get_first_message_line(error)
            raise InputError(
                f"The chat template cannot render the conversation {messages!r:.120}: {reason}.",
                remedy="Fix the data, for example the order of the roles, or set another data.chat_template.",
            ) from error

    def encode_with_labels(self, messages: Sequence[Message], **template_kwargs: Any) -> tuple[list[int], list[int]]:
        """Return the token ids and labels of a conversation. Labels are -100 outside the trained messages.

        Args:
            messages: Conversation.
            template_kwargs: Further variables of the template, such as ``tools``.

        Raises:
            InputError: The template does not render an answer as a continuation of its prompt.
        """
        text = self.render(messages, **template_kwargs)
        self._check_all_messages_rendered(messages, text, template_kwargs)
        if self.train_on == "all":
            ids = self.text_tokenizer.encode(text)
            is_trained = [True] * len(ids)
        else:
            ids, is_trained = self.text_tokenizer.encode_and_mark_tokens_in_spans(
                text, self._find_answer_char_spans(messages, text, template_kwargs)
            )
        if self.chat_template == NONE and self.text_tokenizer.eos_token_id is not None:
            ids, is_trained = [*ids, self.text_tokenizer.eos_token_id], [*is_trained, True]
        labels = [token if trained else IGNORED for token, trained in zip(ids, is_trained, strict=True)]
        return ids[: self.max_length], labels[: self.max_length]

    def _check_all_messages_rendered(
        self, messages: Sequence[Message], text: str, template_kwargs: dict[str, Any]
    ) -> None:
        """Raise InputError if the chat template does not render a message or the tools of a conversation."""
        key = (*((message["role"], bool(message.get(CALLS))) for message in messages), *template_kwargs)
        if key in self.checked:
            return
        ignored = next(
            (name for name in template_kwargs if self.render(messages, **{**template_kwargs, name: []}) == text), None
        )
        for index, message in enumerate(messages):
            content, calls = message["content"] or "", message.get(CALLS)
            other = {**message, CALLS: []} if calls else {**message, "content": f"{content} x"}
            first, second = (
                self.render(
                    [*messages[:index], {**each, "content": each["content"] or ""}, *messages[index + 1 :]],
                    **template_kwargs,
                )
                for each in (message, other)
            )
            if ignored is None and first == second:
                ignored = f"{f'the {CALLS} of' if calls else 'the role'} {message['role']!r} in message {index + 1}"
        if ignored is not None:
            raise InputError(
                f"The chat template does not render {ignored} of the conversation {messages!r:.100}.",
                remedy=f"Set data.chat_template to a template that renders {ignored}, or correct the data.",
            )
        self.checked.add(key)

    def _find_answer_char_spans(
        self, messages: Sequence[Message], text: str, template_kwargs: dict[str, Any]
    ) -> list[tuple[int, int]]:
        """Return the character spans of the answers in a rendered conversation, including their end markers."""
        answers = [index for index, message in enumerate(messages) if message["role"] == ANSWER]
        if self.train_on == "last":
            answers = answers[-1:] if answers and answers[-1] == len(messages) - 1 else []
        answers = [index for index in answers if _contributes_to_loss(messages[index])]
        spans = []
        for index in answers:
            prompt = self.render(messages[:index], add_generation_prompt=True, **template_kwargs)
            until = self.render(messages[: index + 1], **template_kwargs) if index + 1 < len(messages) else text
            if not (text.startswith(until) and until.startswith(prompt)):
                raise InputError(
                    f"The chat template changes earlier messages when it renders message {index + 1}, so that the "
                    f"answers cannot be found in the conversation {messages!r:.120}.",
                    remedy="Set data.train_on = 'last' or 'all', or use a data.chat_template that does not change "
                    "earlier messages.",
                )
            spans.append((len(prompt), len(until)))
        return spans


def _contributes_to_loss(message: Message) -> bool:
    """Return whether an answer is part of the loss, because it is not empty and its weight is not 0."""
    return message.get(WEIGHT, 1) != 0 and bool(message.get(CALLS) or (message["content"] or "").strip())


def _load_chat_template(name_or_path: str | None) -> str | None:
    if name_or_path is None or name_or_path in TEMPLATES:
        return None if name_or_path is None else TEMPLATES[name_or_path]
    try:
        return Path(name_or_path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"The chat template {name_or_path!r} cannot be read: {reason}.",
            remedy="Set data.chat_template to 'chatml', 'none', or the path of a file with a Jinja template.",
        ) from error


@cache
def _compile_chat_template(template_source: str) -> Any:
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception  # as in transformers
    return environment.from_string(template_source)


def encode_conversations(
    rows: Iterable[Mapping[str, Any]], data_options: DataOptions, conversation_tokenizer: ConversationTokenizer
) -> Iterator[TokenizedSample]:
    """Tokenize conversations, and skip those without labels in the first ``data_options.sequence_length`` tokens.

    Raises:
        InputError: No row has a label.
    """
    has_any = False
    for number, row in enumerate(drop_none_fields(rows), start=1):
        try:
            ids, labels = conversation_tokenizer.encode_with_labels(
                extract_messages(row, data_options), **get_chat_template_kwargs(row)
            )
        except InputError as error:
            raise InputError(
                f"Row {number} of the data is invalid: {error.what}.", rule=error.rule, remedy=error.remedy
            ) from error
        if any(label != IGNORED for label in labels[1:]):
            has_any = True
            yield TokenizedSample(torch.tensor(ids, dtype=torch.int32), torch.tensor(labels, dtype=torch.int32))
    if not has_any and torch.utils.data.get_worker_info() is None:  # a data loading process reads a part of a stream
        raise InputError(
            f"No row has an answer within its first {data_options.sequence_length} tokens.",
            remedy="Increase data.sequence_length, or set data.train_on = 'all' to train on all tokens.",
        )
