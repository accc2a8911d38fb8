"""Images with their classes, as a model takes them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardformer.errors import InputError
from shardformer.runs.sources import IMAGES

HALF = (0.5, 0.5, 0.5)
FILE, PROCESSOR = "preprocessor_config.json", "ViTImageProcessor"
"""What transformers reads an image processor from, and the class that does no more than ``Look``."""
BICUBIC = 3
"""As PIL resizes an image that is not told how."""


@dataclass(frozen=True)
class Look:
    """How an image becomes numbers: its side in pixels, and the mean and deviation that its colours are scaled by."""

    size: int
    mean: Sequence[float] = HALF
    std: Sequence[float] = HALF

    @classmethod
    def of(cls, model: str, size: int) -> Look:
        """As a model's folder says in its preprocessor_config.json, where there is one."""
        file = Path(model) / FILE
        if not file.is_file():
            return cls(size)
        said = json.loads(file.read_text(encoding="utf-8"))
        return cls(size, said.get("image_mean") or HALF, said.get("image_std") or HALF)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes it for an image processor of transformers: without the file, an exported model takes no image."""
        side = {"height": self.size, "width": self.size}
        said = {
            "image_processor_type": PROCESSOR, "do_resize": True, "size": side, "resample": BICUBIC,
            "do_rescale": True, "rescale_factor": 1 / 255,
            "do_normalize": True, "image_mean": list(self.mean), "image_std": list(self.std),
        }  # fmt: skip
        Path(folder, FILE).write_text(json.dumps(said, indent=2), encoding="utf-8")

    def __call__(self, image: Any) -> Tensor:
        """(channel, height, width) of an image of PIL."""
        pixels_HWC = numpy.asarray(image.convert("RGB").resize((self.size, self.size)), dtype=numpy.float32) / 255
        scaled_HWC = (pixels_HWC - numpy.asarray(self.mean, numpy.float32)) / numpy.asarray(self.std, numpy.float32)
        return torch.from_numpy(scaled_HWC.transpose(2, 0, 1).copy())


class Images(Dataset[dict[str, Any]]):
    """Images of files or of PIL, each with its class."""

    def __init__(self, images: Sequence[Any], labels: Sequence[int], look: Look) -> None:
        self._images, self._labels, self._look = images, labels, look

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self._images[index]
        if not isinstance(image, Path):
            return {"pixel_values": self._look(image), "labels": self._labels[index]}
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(image) as opened:
                pixels = self._look(opened)
        except (OSError, UnidentifiedImageError) as error:
            raise InputError(
                f"The image {str(image)!r} cannot be read: {error}",
                rule=f"A folder of images holds files of {', '.join(sorted(IMAGES))}",
                remedy="Take the file out of the folder",
            ) from error
        return {"pixel_values": pixels, "labels": self._labels[index]}


def as_image(value: Any) -> Any:
    """The image in a row: one of PIL, or the path of a file. Raises InputError for anything else."""
    if isinstance(value, str):
        return Path(value).expanduser()
    if not hasattr(value, "convert"):
        raise InputError(
            f"A row has {value!r:.60} as its image",
            rule="An image is a file, named by its path, or one that the library datasets has decoded",
            remedy="Correct data.image, or the rows",
        )
    return value


def images_in(names: Sequence[str]) -> tuple[list[Path], list[str]]:
    """(files, the class of each): a folder holds a folder for each class.

    Raises InputError where there is none.
    """
    files = sorted(
        file for name in names for file in Path(name).glob("*/*") if file.suffix.lower() in IMAGES and file.is_file()
    )
    if not files:
        raise InputError(
            f"There is no image in {', '.join(map(repr, names))}",
            rule="A folder of images holds a folder for each class, with its images",
            remedy="Correct data.train; or write data.format where it is of another form",
        )
    return files, [file.parent.name for file in files]
