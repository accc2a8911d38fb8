"""Loads the training and validation data of a run, and converts its rows to data sets of training samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from shardformer.errors import ConfigError, InputError
from shardformer.train_command.config_schema import DataOptions, TrainConfig
from shardformer.train_command.conversations import (
    ConversationTokenizer,
    TokenizedSample,
    encode_conversations,
    is_conversation,
)
from shardformer.train_command.datasets import (
    ImageDataset,
    ImageTransform,
    LengthGroupedSampler,
    MixedDataset,
    PackedDataset,
    PaddingCollator,
    StreamedDataset,
    TextDataset,
    TokenBlockDataset,
    TokenClassificationDataset,
    TokenizedDataset,
    encode_label_lists,
    encode_labels,
    infer_label_classes,
    stream_token_blocks,
    tokenize_and_concatenate,
)
from shardformer.train_command.preference import (
    DPOLoss,
    PreferenceCollator,
    PreferenceDataset,
    build_preference_dataset,
    count_batch_samples,
)
from shardformer.train_command.read_rows import (
    DatasetRows,
    convert_image_to_path_or_pil,
    get_column_values,
    get_data_source_names,
    get_label_column,
    get_number_column,
    get_text_column,
    get_word_list_column,
    infer_data_format,
    interleave_streams,
    read_data_sources,
)
from shardformer.train_command.tokenizer import TextTokenizer, load_tokenizer
from shardformer.training.sample_order import get_length_or_none

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBLEM_TYPES = {"regression": "regression", "multi_label_classification": "multi_label_classification"}
"""Task -> ``problem_type`` in transformers' configs."""


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Training and validation data of a run, with its tokenizer or image transform.

    Args:
        title: Description for reports.
        train_dataset: Data set of training samples.
        validation_dataset: Data set of validation samples, or None.
        collate_fn: Function that collates samples into a batch, or None for the default of ``ShardedDataLoader``.
        tokenizer: Tokenizer, or None for images.
        classes: Class names, or None.
        problem_type: ``problem_type`` in the model's config, which selects its loss, or None.
        sampler: Sampler that determines the order of an epoch, or None for a random or sequential order.
        skipped_rows_message: Text that reports how many rows are left out, or "".
        loss_fn: Loss function of the task, or None for the loss of the model.
        loss_weight: Function that returns the weight of a micro-batch for ``loss_fn``, or None.
        preference_datasets: Data sets whose reference log-probabilities are computed before training.
        add_end_token: Whether texts are tokenized one by one with special tokens.
        chat_template: Template of the conversations, or None.
    """

    title: str
    train_dataset: Any
    validation_dataset: Any = None
    collate_fn: Callable[[Sequence[Any]], Any] | None = None
    tokenizer: TextTokenizer | None = None
    classes: Sequence[Any] | None = None
    transform: ImageTransform | None = None
    problem_type: str | None = None
    sampler: LengthGroupedSampler | None = None
    skipped_rows_message: str = ""
    loss_fn: DPOLoss | None = None
    loss_weight: Callable[[Mapping[str, torch.Tensor]], float] | None = None
    preference_datasets: Sequence[PreferenceDataset] = ()
    add_end_token: bool = False
    chat_template: str | None = None

    @property
    def num_samples(self) -> int | None:
        """Number of training samples per epoch, or None for a stream."""
        return get_length_or_none(self.train_dataset)

    def get_first_samples(self, num_first_samples: int) -> list[Any]:
        """Return the first ``num_first_samples`` training samples, and repeat samples if the data set has fewer."""
        if self.num_samples is None:
            return list(islice(iter(self.train_dataset), num_first_samples))
        return [self.train_dataset[index % len(self.train_dataset)] for index in range(num_first_samples)]

    @property
    def processor(self) -> PreTrainedTokenizerBase | ImageTransform | None:
        """Tokenizer or image transform to export with the model."""
        if self.tokenizer is None:
            return self.transform
        return self.tokenizer.to_transformers_tokenizer(
            add_end_token=self.add_end_token, chat_template=self.chat_template
        )


def load_training_data(
    config: TrainConfig, image_size: int | None = None, model_class_names: Sequence[str] = ()
) -> TrainingData:
    """Load the training and validation data that a run configuration specifies.

    Args:
        config: Run configuration.
        image_size: Height and width of an image in the model's config, or None.
        model_class_names: Class names of the model in order of their indices. Labels keep these indices if the data has
            no other classes.

    Raises:
        ConfigError: The data does not exist, or is not suitable for the task.
        InputError: The content of the data is invalid.
    """
    model, data = config.model, config.data
    tokens = transform = None
    if model.task == "image_classification":
        transform = ImageTransform.from_pretrained(model.name, image_size)
    else:
        tokens = load_tokenizer(
            data.tokenizer, model.name, has_random_weights=model.random, trust_remote_code=model.trust_remote_code
        )
        if model.task == "masked" and tokens.mask_token_id is None:
            raise ConfigError(
                f"model.task = 'masked' requires a mask token, but the tokenizer {tokens.name!r} has none.",
                remedy="Set data.tokenizer to the tokenizer of a masked language model or to 'bytes'.",
            )
    rows = read_data_sources(config, is_validation=False)
    classes = _find_label_classes(config, rows, model_class_names) if model.task.endswith("classification") else None
    builder = _DatasetBuilder(config, tokens, transform, classes)
    train = _mix_datasets_by_weight(config, [builder.build_dataset(each, False) for each in rows])
    validation = _load_validation_data(config, builder)
    is_padded = tokens is not None and not isinstance(train, TokenBlockDataset)
    is_preference = model.task == "preference"
    return TrainingData(
        title=", ".join(get_data_source_names(data)),
        train_dataset=train,
        validation_dataset=validation,
        collate_fn=_make_collator(model.task, tokens) if tokens is not None and is_padded else None,
        tokenizer=tokens,
        classes=classes,
        transform=transform,
        problem_type=PROBLEM_TYPES.get(model.task),
        sampler=_make_length_grouped_sampler(data, train) if data.group_by_length else None,
        skipped_rows_message=builder.skipped_rows_message,
        loss_fn=DPOLoss(config.preference) if is_preference else None,
        loss_weight=count_batch_samples if is_preference else None,
        preference_datasets=builder.preference_datasets,
        add_end_token=tokens is not None and should_add_end_token(config),
        chat_template=builder.chat_template,
    )


def _load_validation_data(config: TrainConfig, dataset_builder: _DatasetBuilder) -> Any:
    """Load the validation data of a run, or return None if the run has none. Errors name the validation data."""
    if not config.data.has_validation_data:
        return None
    try:
        sources = [dataset_builder.build_dataset(each, True) for each in read_data_sources(config, is_validation=True)]
    except InputError as error:
        what = error.what if "validation" in error.what else f"In the validation data: {error.what}"
        raise InputError(what, rule=error.rule, remedy=error.remedy) from error
    is_stream = get_length_or_none(sources[0]) is None
    return sources[0] if len(sources) == 1 or is_stream else torch.utils.data.ConcatDataset(sources)


def _make_collator(task: str, tokenizer: TextTokenizer) -> PaddingCollator:
    return (
        PreferenceCollator(tokenizer.pad_token_id) if task == "preference" else PaddingCollator(tokenizer.pad_token_id)
    )


def should_add_end_token(config: TrainConfig) -> bool:
    """Return whether the tokenizer adds special tokens, such as an end token, to each text of a run."""
    names, task = get_data_source_names(config.data), config.model.task
    is_row = task == "sequence_to_sequence" and infer_data_format(config.data, names) != "text"
    return is_row or task in ("classification", "multi_label_classification", "regression")


def _mix_datasets_by_weight(config: TrainConfig, datasets: list[Any]) -> Any:
    weights = config.data.weights
    if weights is None:
        return datasets[0]
    if get_length_or_none(datasets[0]) is None:
        return StreamedDataset(
            interleave_streams([source.rows for source in datasets], weights, config.seed), datasets[0].make
        )
    return MixedDataset(datasets, weights)


def _make_length_grouped_sampler(data_options: DataOptions, train_dataset: Any) -> LengthGroupedSampler:
    if isinstance(train_dataset, (TokenBlockDataset, ImageDataset)):
        raise ConfigError(
            "data.group_by_length = true has no effect, because all samples have the same length.",
            remedy="Remove data.group_by_length.",
        )
    return LengthGroupedSampler(
        [len(train_dataset[index]["input_ids"]) for index in range(len(train_dataset))], data_options.batch_size
    )


def _find_label_classes(
    config: TrainConfig, row_sources: Sequence[DatasetRows], model_class_names: Sequence[str]
) -> list[Any]:
    """Collect the classes in the training data, in the order of their indices."""
    labels: list[Any] = []
    names: list[str] = []
    for rows in row_sources:
        found, names_of_source = get_label_column(rows, config.data.label)
        labels += found
        names = names or names_of_source
    if config.model.task in ("token_classification", "multi_label_classification"):
        labels = _flatten_label_lists(labels, config.data.label)
    return infer_label_classes(labels, model_class_names if set(names) <= set(model_class_names) else names)


def _flatten_label_lists(labels: Sequence[Any], field_name: str) -> list[Any]:
    for number, label in enumerate(labels, start=1):
        if not isinstance(label, (list, tuple)):
            raise InputError(
                f"The field {field_name!r} must be a list of labels, but row {number} of the data has {label!r:.60}.",
                remedy="Fix the data, or set model.task = 'classification' for one label per row.",
            )
    return [each for label in labels for each in label]


@dataclass(eq=False)
class _DatasetBuilder:
    """Converts rows of data to data sets of training samples for the task of a run."""

    config: TrainConfig
    tokenizer: TextTokenizer | None
    transform: ImageTransform | None
    classes: Sequence[Any] | None
    num_skipped: int = 0
    num_rows: int = 0
    preference_datasets: list[PreferenceDataset] = field(default_factory=list)
    chat_template: str | None = None

    def build_dataset(self, rows: DatasetRows, is_validation: bool) -> Any:
        """Convert rows of the training or validation data to a data set of samples."""
        data, task = self.config.data, self.config.model.task
        if self.transform is not None:
            images = [convert_image_to_path_or_pil(each) for each in get_column_values(rows, data.image)]
            return ImageDataset(images, self._get_class_indices(rows, is_validation), self.transform)
        assert self.tokenizer is not None
        if data.streaming:
            return self._build_streamed_dataset(rows, self.tokenizer)
        if task == "preference":
            preferences = build_preference_dataset(rows, data, self._make_conversation_tokenizer(self.tokenizer))
            self._record_num_skipped_rows(preferences, rows)
            self.preference_datasets.append(preferences)
            return preferences
        is_text = infer_data_format(data, get_data_source_names(data, is_validation=is_validation)) == "text"
        if task in ("causal", "masked") or is_text:
            return self._build_language_modeling_dataset(rows, self.tokenizer)
        if task == "token_classification":
            words = get_word_list_column(rows, data.text, "data.text")
            indices = self._get_class_index_lists(rows, is_validation)
            return TokenClassificationDataset(words, indices, self.tokenizer, data.sequence_length)
        texts = get_text_column(rows, data.text, "data.text")
        pairs = get_text_column(rows, data.pair, "data.pair") if data.pair is not None else None
        return TextDataset(texts, self._get_labels(rows, is_validation), self.tokenizer, data.sequence_length, pairs)

    def _get_labels(self, rows: DatasetRows, is_validation: bool) -> Sequence[Any]:
        data, task = self.config.data, self.config.model.task
        if task == "sequence_to_sequence":
            return get_text_column(rows, data.target, "data.target")
        if task == "regression":
            return get_number_column(rows, data.label, "data.label")
        if task == "multi_label_classification":
            assert self.classes is not None
            indices = self._get_class_index_lists(rows, is_validation)
            return [[float(number in row) for number in range(len(self.classes))] for row in indices]
        return self._get_class_indices(rows, is_validation)

    def _get_class_indices(self, rows: DatasetRows, is_validation: bool) -> list[int]:
        assert self.classes is not None
        return encode_labels(get_label_column(rows, self.config.data.label)[0], self.classes, is_validation)

    def _get_class_index_lists(self, rows: DatasetRows, is_validation: bool) -> list[list[int]]:
        assert self.classes is not None
        labels = get_label_column(rows, self.config.data.label)[0]
        _flatten_label_lists(labels, self.config.data.label)
        return encode_label_lists(labels, self.classes, is_validation)

    def _build_language_modeling_dataset(self, rows: DatasetRows, tokenizer: TextTokenizer) -> Any:
        data, task = self.config.data, self.config.model.task
        if task == "causal" and is_conversation(rows[0], data):
            samples = list(encode_conversations(rows, data, self._make_conversation_tokenizer(tokenizer)))
            self._record_num_skipped_rows(samples, rows)
        elif data.packing:
            samples = _tokenize_and_split_texts(
                get_text_column(rows, data.text, "data.text"), tokenizer, data.sequence_length
            )
        else:
            return self._build_token_block_dataset(rows, tokenizer)
        return PackedDataset.from_samples(samples, data.sequence_length) if data.packing else TokenizedDataset(samples)

    def _make_conversation_tokenizer(self, tokenizer: TextTokenizer) -> ConversationTokenizer:
        chat = ConversationTokenizer.from_options(self.config.data, tokenizer)
        self.chat_template = chat.chat_template
        return chat

    def _record_num_skipped_rows(self, samples: Sized, rows: DatasetRows) -> None:
        self.num_skipped += len(rows) - len(samples)
        self.num_rows += len(rows)

    @property
    def skipped_rows_message(self) -> str:
        """Warning about rows that have no answer within the sequence length, or an empty string."""
        length = self.config.data.sequence_length
        text = f"{self.num_skipped} of {self.num_rows} rows were skipped, because they have no answer in their first"
        return f"{text} {length} tokens. Increase data.sequence_length to use these rows." if self.num_skipped else ""

    def _build_token_block_dataset(self, rows: DatasetRows, tokenizer: TextTokenizer) -> TokenBlockDataset:
        data = self.config.data
        row = tokenize_and_concatenate(get_text_column(rows, data.text, "data.text"), tokenizer)
        if len(row) < data.sequence_length:
            raise InputError(
                f"The text has only {len(row)} tokens, fewer than data.sequence_length = {data.sequence_length}.",
                remedy="Use a longer text, or decrease data.sequence_length.",
            )
        return TokenBlockDataset(
            torch.tensor(row, dtype=torch.int32), data.sequence_length, self.config.model.task, tokenizer
        )

    def _build_streamed_dataset(self, rows: Any, tokenizer: TextTokenizer) -> StreamedDataset:
        data, task = self.config.data, self.config.model.task
        first = next(iter(rows), None)
        if first is None:
            names = ", ".join(get_data_source_names(data))
            raise InputError(f"The data {names} contains no rows.", remedy="Set data.train to data that contains rows.")
        make: Callable[[Iterable[Mapping[str, Any]]], Iterable[Any]]
        if task == "causal" and is_conversation(first, data):
            make = partial(
                _stream_tokenized_conversations, data=data, chat=self._make_conversation_tokenizer(tokenizer)
            )
        else:
            get_text_column([first], data.text, "data.text")
            make = partial(
                stream_token_blocks, field=data.text, length=data.sequence_length, task=task, tokens=tokenizer
            )
        shuffled = rows.shuffle(seed=self.config.seed) if data.shuffle else rows
        return StreamedDataset(shuffled, make)


def _stream_tokenized_conversations(
    rows: Iterable[Mapping[str, Any]], *, data: DataOptions, chat: ConversationTokenizer
) -> Any:
    for sample in encode_conversations(rows, data, chat):
        yield TokenizedDataset([sample])[0]


def _tokenize_and_split_texts(texts: Sequence[str], tokenizer: TextTokenizer, max_length: int) -> list[TokenizedSample]:
    """Tokenize texts, add an end-of-sequence token to each, and split texts with more than ``max_length`` tokens."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = [torch.tensor([*tokenizer.encode(text), *end], dtype=torch.int32) for text in texts]
    pieces = [piece for row in rows for piece in row.split(max_length) if len(piece) > 1]
    if not pieces:
        raise InputError(
            "All texts in the training data are empty.", remedy="Set data.text to the field that contains the text."
        )
    return [TokenizedSample(piece, piece) for piece in pieces]
