"""The data of a run: samples to train on, samples to try it on, and how they become a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardformer.errors import ConfigError
from shardformer.runs.config import RunConfig
from shardformer.runs.images import Images, Look, as_image, images_in
from shardformer.runs.samples import Classified, Padded, Stretches, Written, as_numbers, check_mask, classes_of
from shardformer.runs.sources import column, format_of, labels_in, names_of, read_rows, read_texts, texts_in
from shardformer.runs.tokens import Tokens, joined, tokens_of

IMAGE_SIZE = 224
"""Of a model whose config does not say."""


@dataclass(frozen=True, eq=False)
class RunData:
    """What a run is trained on.

    Args:
        title: for people.
        collate: samples -> batch; None: as ``Batches`` does it.
        tokens: None for images.
        classes: their names, where there are some.
        look: of images.
    """

    title: str
    train: Any
    validation: Any = None
    collate: Callable[[Sequence[Any]], Any] | None = None
    tokens: Tokens | None = None
    classes: Sequence[Any] | None = None
    look: Look | None = None

    @property
    def beside(self) -> Any:
        """What an export has beside the model, to turn texts or images into its inputs; None for bytes."""
        return self.look if self.tokens is None else self.tokens.tokenizer


def data_of(config: RunConfig, image_size: int | None = None, names: Sequence[str] = ()) -> RunData:
    """Reads the data that a config names.

    Args:
        image_size: the side of an image, if the model's config has it.
        names: of the model's classes, in its order. If the data has no others, they keep their numbers.

    Raises ConfigError and InputError for data that there are not, or that do not fit the task.
    """
    if config.model.task == "image_classification":
        return _image_data(config, image_size or IMAGE_SIZE, names)
    model = config.model
    tokens = tokens_of(config.data.tokenizer, model.name, random=model.random, trust=model.trust_remote_code)
    check_mask(config.model.task, tokens)
    if config.model.task == "classification":
        return _classified(config, tokens, names)
    made = [_language(config, tokens, validation=which) for which in _parts(config)]
    collate = Padded(tokens.pad) if isinstance(made[0], Written) else None
    return RunData(_title(config), made[0], made[1] if len(made) > 1 else None, collate, tokens)


def _parts(config: RunConfig) -> list[bool]:
    """Training data, and validation data where there are some."""
    has_validation = config.data.validation is not None or config.data.validation_split is not None
    return [False, True] if has_validation else [False]


def _title(config: RunConfig) -> str:
    return ", ".join(names_of(config.data))


def _rows(config: RunConfig, validation: bool) -> Any:
    data = config.data
    names = names_of(data, validation=validation)
    split = data.validation_split or data.split if validation else data.split
    kind = format_of(data, names)
    if kind in ("text", "images") and not (kind == "images" and config.model.task == "image_classification"):
        raise _no_rows(config.model.task, kind, names)
    return read_rows(data, kind, names, split)


def _no_rows(task: str, kind: str, names: Sequence[str]) -> ConfigError:
    what = f"model.task = {task!r} with {', '.join(map(repr, names))}, which is read as {kind}"
    if kind == "images":
        return ConfigError(
            what,
            rule="A folder is read as images, unless data.format says otherwise",
            remedy="Name the files in it, or write data.format = 'datasets' for a folder that save_to_disk wrote, or "
            "model.task = 'image_classification'",
        )
    if task == "image_classification":
        return ConfigError(
            what,
            rule="Images are in a folder with a folder for each class, or in rows that name their files and classes",
            remedy="Give such a folder, or rows in JSON lines or a data set",
        )
    return ConfigError(
        what,
        rule="This task needs rows with fields: a text and its class, or a text and its target",
        remedy="Give JSON lines or a data set; or, for plain text, use model.task = 'causal' or 'masked'",
    )


def _language(config: RunConfig, tokens: Tokens, *, validation: bool) -> Any:
    data, task = config.data, config.model.task
    names = names_of(data, validation=validation)
    if format_of(data, names) == "text":
        texts = read_texts(names)
    else:
        rows = _rows(config, validation)
        texts = texts_in(rows, data.text, "data.text")
        if task == "sequence_to_sequence":
            return Written(texts, texts_in(rows, data.target, "data.target"), tokens, data.sequence)
    return Stretches(joined(texts, tokens), data.sequence, task, tokens)


def _classified(config: RunConfig, tokens: Tokens, names: Sequence[str]) -> RunData:
    data = config.data
    made: list[Classified] = []
    classes: list[Any] = []
    for validation in _parts(config):
        rows = _rows(config, validation)
        labels, own = labels_in(rows, data.label)
        classes = classes or classes_of(labels, _order(own, names))
        pairs = texts_in(rows, data.pair, "data.pair") if data.pair is not None else None
        numbers = as_numbers(labels, classes, "validation" if validation else "training")
        made.append(Classified(texts_in(rows, data.text, "data.text"), pairs, numbers, tokens, data.sequence))
    validation_data = made[1] if len(made) > 1 else None
    return RunData(_title(config), made[0], validation_data, Padded(tokens.pad), tokens, classes)


def _order(own: Sequence[str], names: Sequence[str]) -> Sequence[str]:
    """That of the data set's own classes, unless all of them are classes of the model, whose outputs have an order."""
    return names if not own or set(own) <= set(names) else own


def _image_data(config: RunConfig, size: int, known: Sequence[str]) -> RunData:
    data, look = config.data, Look.of(config.model.name, size)
    made: list[Images] = []
    classes: list[Any] = []
    for validation in _parts(config):
        names = names_of(data, validation=validation)
        if data.format == "datasets" or not Path(names[0]).is_dir():
            rows = _rows(config, validation)
            images: Sequence[Any] = [as_image(each) for each in column(rows, data.image, "data.image")]
            labels, own = labels_in(rows, data.label)
        else:
            images, labels = images_in(names)
            own = []
        classes = classes or classes_of(labels, _order(own, known))
        made.append(Images(images, as_numbers(labels, classes, "validation" if validation else "training"), look))
    return RunData(_title(config), made[0], made[1] if len(made) > 1 else None, None, None, classes, look)
