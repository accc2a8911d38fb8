"""Loads the tokenizer of a training run, which is either a transformers tokenizer or a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from shardformer.errors import ConfigError, get_first_message_line
from shardformer.train_command.config_schema import suggest_trust_remote_code
from shardformer.transformers_compat import import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES = "bytes"
PAD_TOKEN, MASK, NUM_BYTES = 256, 257, 258
"""Token ids that follow the 256 byte tokens: padding, which also ends a text, and mask."""
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")

GPT2_FILES = ("encoder.json", "vocab.bpe")
"""Names of the files vocab.json and merges.txt in OpenAI's release of GPT-2."""


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """Wraps a transformers tokenizer, or uses each byte of the text as a token if ``hf_tokenizer`` is None.

    ``eos_token_id``, ``pad_token_id`` and ``mask_token_id`` are token ids.
    """

    name: str = BYTES
    vocab_size: int = NUM_BYTES
    eos_token_id: int | None = PAD_TOKEN
    pad_token_id: int = PAD_TOKEN
    mask_token_id: int | None = MASK
    hf_tokenizer: PreTrainedTokenizerBase | None = None

    def encode(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens or truncating it."""
        if self.hf_tokenizer is None:
            return list(text.encode())
        found: list[int] = self.hf_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def encode_with_special_tokens(self, text: str, text_pair: str | None, max_length: int) -> dict[str, list[int]]:
        """Tokenize a text or a pair of texts, add special tokens, and truncate the result to ``max_length`` tokens."""
        if self.hf_tokenizer is None:
            joined = text if text_pair is None else f"{text}\0{text_pair}"
            return {"input_ids": [*joined.encode()[: max_length - 1], PAD_TOKEN]}
        return dict(self.hf_tokenizer(text, text_pair, truncation=True, max_length=max_length))

    def encode_words_with_indices(self, words: Sequence[str], max_length: int) -> tuple[list[int], list[int | None]]:
        """Tokenize a list of words, add special tokens, and truncate the result to ``max_length`` tokens.

        Returns:
            The token ids, and for each token the index of its word, or None for a special token.
        """
        if self.hf_tokenizer is None:
            pieces = [
                (byte, index) for index, word in enumerate(words) for byte in f"{' ' * (index > 0)}{word}".encode()
            ]
            pieces = pieces[:max_length]
            return [byte for byte, _ in pieces], [index for _, index in pieces]
        self._check_is_fast_tokenizer("model.task = 'token_classification'")
        found = self.hf_tokenizer(list(words), is_split_into_words=True, truncation=True, max_length=max_length)
        return found["input_ids"], found.word_ids()

    def encode_and_mark_tokens_in_spans(
        self, text: str, character_spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[bool]]:
        """Tokenize a text without special tokens, and mark the tokens that start inside one of the character spans.

        Args:
            text: Text.
            character_spans: Start and end of each span of characters, in ascending order.
        """
        if self.hf_tokenizer is None:
            bounds = [0, *(bound for span in character_spans for bound in span), len(text)]
            pieces = [text[start:end].encode() for start, end in pairwise(bounds)]  # inside a span at odd positions
            ids = [byte for piece in pieces for byte in piece]
            return ids, [bool(number % 2) for number, piece in enumerate(pieces) for _ in piece]
        self._check_is_fast_tokenizer("Training on the answers of conversations")
        found = self.hf_tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in found["offset_mapping"]]
        return found["input_ids"], [any(a <= start < b for a, b in character_spans) for start in starts]

    def _check_is_fast_tokenizer(self, feature: str) -> None:
        if not getattr(self.hf_tokenizer, "is_fast", False):
            raise ConfigError(
                f"{feature} requires a fast tokenizer, but {self.name!r} is a {type(self.hf_tokenizer).__name__}.",
                remedy="Set data.tokenizer to a folder that contains a tokenizer.json.",
            )

    @property
    def is_byte_level(self) -> bool:
        return self.hf_tokenizer is None

    def to_transformers_tokenizer(
        self, *, add_end_token: bool, chat_template: str | None = None
    ) -> PreTrainedTokenizerBase:
        """Convert to an equivalent transformers tokenizer, which can be saved with the model.

        ``add_end_token`` must be True if the run tokenizes texts with ``encode_with_special_tokens``.
        """
        found = make_byte_tokenizer(add_end_token=add_end_token) if self.hf_tokenizer is None else self.hf_tokenizer
        if chat_template is not None:
            found.chat_template = chat_template
        return found


def make_byte_tokenizer(*, add_end_token: bool) -> PreTrainedTokenizerBase:
    """Create a byte-level transformers tokenizer with the same token ids as ``TextTokenizer``.

    Args:
        add_end_token: Whether the tokenizer adds the padding token after a text, and a zero byte between a pair
            of texts.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()  # of each byte, because the vocabulary of a file consists of letters
    end, mask = "<|end|>", "<|mask|>"
    made = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters.items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(end, normalized=False), AddedToken(mask, normalized=False)])
    if add_end_token:
        made.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", pair=f"$A {letters[0]} $B {end}", special_tokens=[(end, PAD_TOKEN), (letters[0], 0)]
        )
    names = {"pad_token": end, "eos_token": end, "mask_token": mask}
    return import_transformers().PreTrainedTokenizerFast(tokenizer_object=made, **names)


def load_tokenizer(
    tokenizer_name: str | None, model_name: str, *, has_random_weights: bool, trust_remote_code: bool = False
) -> TextTokenizer:
    """Load a tokenizer by name. Without a name, load the tokenizer of the model, or use bytes for random weights."""
    if tokenizer_name == BYTES or (tokenizer_name is None and has_random_weights):
        return TextTokenizer()
    source = model_name if tokenizer_name is None else tokenizer_name
    transformers = import_transformers()

    folder = Path(source)
    files = [folder / name for name in GPT2_FILES]
    original = files if all(file.is_file() for file in files) else None
    if original is None and folder.is_dir() and not any((folder / file).is_file() for file in FILES):
        raise ConfigError(
            f"The folder {source!r} contains no tokenizer.",
            remedy="Save the tokenizer in this folder, or set data.tokenizer to another folder or to 'bytes'.",
        )
    try:
        if original is None:
            found = transformers.AutoTokenizer.from_pretrained(
                source, trust_remote_code=trust_remote_code and source == model_name
            )
        else:
            found = transformers.GPT2Tokenizer(*map(str, original))
    except Exception as error:  # files and their code may raise any error
        reason, remedy = get_first_message_line(error), "Set data.tokenizer to the folder or hub name of a tokenizer"
        raise ConfigError(
            f"The tokenizer {source!r} cannot be loaded: {reason}.",
            remedy=suggest_trust_remote_code(remedy, error) if source == model_name else remedy,
        ) from error
    pad = next((t for t in (found.pad_token_id, found.eos_token_id, found.unk_token_id) if t is not None), 0)
    end = found.eos_token_id if found.eos_token_id is not None else found.sep_token_id
    return TextTokenizer(source, len(found), end, pad, found.mask_token_id, found)
