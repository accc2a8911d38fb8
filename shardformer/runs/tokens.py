"""Tokens of texts: those of a tokenizer, or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardformer.errors import ConfigError, first_line
from shardformer.runs.config import consent_or
from shardformer.transformers_compat import load_transformers

BYTES = "bytes"
NOTHING, MASK, NUM_BYTES = 256, 257, 258
"""Beside the 256 bytes: what stands for nothing (padding, the end of a text) and for what is masked."""
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")


@dataclass(frozen=True, eq=False)
class Tokens:
    """A tokenizer of transformers, or bytes where there is none.

    Args:
        name: for people.
        size: of the vocabulary.
        end, pad, mask: behind a text, beside it, and in the place of what is masked; None: there is no such token.
        tokenizer: None: bytes.
    """

    name: str = BYTES
    size: int = NUM_BYTES
    end: int | None = NOTHING
    pad: int = NOTHING
    mask: int | None = MASK
    tokenizer: Any = None

    def plain(self, text: str) -> list[int]:
        """A text as it is, however long."""
        if self.tokenizer is None:
            return list(text.encode())
        found: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def marked(self, text: str, pair: str | None, most: int) -> dict[str, list[int]]:
        """A text, or two, as the model wants to see them: with tokens before and behind, and ``most`` in all."""
        if self.tokenizer is None:
            whole = text if pair is None else f"{text}\0{pair}"
            return {"input_ids": [*whole.encode()[: most - 1], NOTHING]}
        return dict(self.tokenizer(text, pair, truncation=True, max_length=most))

    @property
    def is_bytes(self) -> bool:
        return self.tokenizer is None


def tokens_of(name: str | None, model: str, *, random: bool, trust: bool = False) -> Tokens:
    """The tokenizer of this name; None: the model's own, and bytes where its weights are random.

    ``trust``: whether Python that lies beside the model may run, for its own tokenizer.

    Raises ConfigError where there is none.
    """
    if name == BYTES or (name is None and random):
        return Tokens()
    where = model if name is None else name
    transformers = load_transformers()

    folder = Path(where)
    if folder.is_dir() and not any((folder / file).is_file() for file in FILES):
        raise ConfigError(
            f"{where!r} has no tokenizer",
            rule=f"A tokenizer is a folder with one of {', '.join(FILES)}, or a name on the hub",
            remedy="Save the tokenizer beside the model, or write data.tokenizer = 'bytes' or another folder",
        )
    try:
        found = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=trust and where == model)
    except Exception as error:  # a file may hold anything, and so may its code
        raise ConfigError(
            f"The tokenizer {where!r} cannot be loaded: {first_line(error)}",
            rule="It is a folder that save_pretrained of a tokenizer wrote, a name on the hub, or 'bytes'",
            remedy=consent_or("Correct data.tokenizer", error) if where == model else "Correct data.tokenizer",
        ) from error
    pad = next((t for t in (found.pad_token_id, found.eos_token_id, found.unk_token_id) if t is not None), 0)
    end = found.eos_token_id if found.eos_token_id is not None else found.sep_token_id
    return Tokens(where, len(found), end, pad, found.mask_token_id, found)


def joined(texts: Sequence[str], tokens: Tokens) -> list[int]:
    """All texts in a row, with the token for an end behind each but the last."""
    row: list[int] = []
    for number, text in enumerate(texts):
        if number and tokens.end is not None:
            row.append(tokens.end)
        row.extend(tokens.plain(text))
    return row
