"""What is trained on: English text as a row of tokens, and batches of stretches of it."""

# B batch, S sequence

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

from shardformer.errors import InputError

VOCAB_SIZE = 258
"""A token is a byte; beside the 256 there are a token for nothing (padding, start) and one for what is masked."""
NOTHING, MASK = 256, 257
MOST_BYTES = 8_000_000
MASKED_SHARE = 0.15
IGNORED = -100
SEED = 1000


@dataclass(frozen=True, eq=False)
class Text:
    """A text of ``num_bytes``, where it came from, and its tokens in a row."""

    title: str
    num_bytes: int
    tokens: Tensor


def read_text(path: str | None) -> tuple[str, bytes]:
    """A title and the bytes of a file, or of Python's own help texts where no file is given.

    Raises InputError for a file that cannot be read.
    """
    if path is None:
        return "English text that Python carries (pydoc_data.topics)", _text_of_python()
    try:
        if Path(path).is_fifo():  # whose end may never come
            raise OSError("it is a pipe")
        with Path(path).open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"The text {path!r} cannot be read: {error.strerror or error}",
            rule="--data names a text file",
            remedy="Correct the path, or leave --data out to train on text that Python carries",
        ) from error
    return (f"the first {MOST_BYTES:,} bytes of {path}", raw[:-1]) if len(raw) > MOST_BYTES else (path, raw)


def _text_of_python() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InputError(
            "This Python comes without pydoc_data.topics, the text of its own help",
            rule="The demo trains on that text where no other is given",
            remedy="Give a text file of some 100 kB: --data FILE",
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def bytes_as_tokens(raw: bytes) -> Tensor:
    """Each byte is a token."""
    return torch.from_numpy(numpy.frombuffer(raw, dtype=numpy.uint8).astype(numpy.int32))


def check_length(text: Text, batch: int, sequence: int) -> None:
    """Raises InputError for a text shorter than one batch."""
    if len(text.tokens) <= batch * sequence:
        longest = max((len(text.tokens) - 1) // batch, 0)
        remedy = f", or --batch {batch} --sequence {longest}" if longest >= 8 else ""
        raise InputError(
            f"The text has {len(text.tokens):,} tokens ({text.title}, {text.num_bytes:,} bytes)",
            rule=f"A batch is {batch} stretches of {sequence} tokens, and the text is longer than that",
            remedy=f"Give a longer text{remedy}",
        )


@dataclass(frozen=True, eq=False)
class Windows:
    """step -> a batch: stretches of the text from random places, the same ones in every run. Picklable.

    Args:
        tokens: the text.
        task: "causal" (the next token), "masked" (those that were masked), or "continue" (the second half of a stretch,
            which the decoder writes, from the first, which the encoder reads).
        batch, sequence: how many stretches, and how many tokens in each.
        mask: the token that stands for a masked one.
        flipped: the same stretches in reverse order, which changes nothing but the rounding.
    """

    tokens: Tensor
    task: str
    batch: int
    sequence: int
    mask: int = MASK
    flipped: bool = False

    def __call__(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(SEED + step)
        starts = torch.randint(len(self.tokens) - self.sequence, (self.batch, 1), generator=generator)
        ids_BS = self.tokens[starts + torch.arange(self.sequence)].long()
        masked_BS = torch.rand(ids_BS.shape, generator=generator) < MASKED_SHARE
        masked_BS[:, 0] = True  # a batch without a masked token would have no loss
        if self.flipped:
            ids_BS, masked_BS = ids_BS.flip(0), masked_BS.flip(0)
        if self.task == "causal":
            return {"input_ids": ids_BS, "labels": ids_BS}
        if self.task == "masked":
            labels_BS = ids_BS.masked_fill(~masked_BS, IGNORED)
            return {"input_ids": ids_BS.masked_fill(masked_BS, self.mask), "labels": labels_BS}
        half = self.sequence // 2
        return {"input_ids": ids_BS[:, :half].contiguous(), "labels": ids_BS[:, half:].contiguous()}
