"""Image patches are split where the images of a sample end, or the batch raises."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from torch import Tensor

from shardformer.errors import InputError
from shardformer.gradient_accumulation import micro_batches as flat
from shardformer.gradient_accumulation.micro_batches import get_batch_size, split_batch
from shardformer.training.sample_order import DataParallelPosition, IterableDataSource

IMAGE, VIDEO = 90, 91
GRID = torch.tensor([[1, 2, 4], [1, 4, 4], [1, 2, 2]])
PATCHES = [8, 16, 4]


def batch_of(images: list[list[int]], word: int = 5) -> dict[str, Any]:
    """Samples with these images, one token per four patches, and a word between two images."""
    rows = [[word] + [t for i in each for t in [IMAGE] * (PATCHES[i] // 4) + [word]] for each in images]
    longest = max(map(len, rows))
    order = [i for each in images for i in each]
    patches = torch.cat([torch.full((PATCHES[i], 2), float(i)) for i in order])
    ids = torch.tensor([row + [word] * (longest - len(row)) for row in rows])
    return {"pixel_values": patches, "image_grid_thw": GRID[order], "input_ids": ids, "labels": ids}


def images_in(part: dict[str, Any]) -> list[int]:
    rows = part["image_grid_thw"].prod(-1).tolist()
    assert sum(rows) == len(part["pixel_values"]), "patches are those of the images"
    return [int(piece[0, 0]) for piece in part["pixel_values"].split(rows)]


def test_image_split_doctests() -> None:
    assert doctest.testmod(flat).failed == 0


@pytest.mark.parametrize(
    "images", [[[0, 1], [2]], [[0], [1, 2]], [[0, 1, 2], []], [[], [2, 1], [0]], [[2], [1], [0]], [[1], [], [0, 2]]]
)
def test_each_sample_keeps_its_images(images: list[list[int]]) -> None:
    batch = batch_of(images)
    assert get_batch_size(batch) == len(images)
    parts = split_batch(batch, [1] * len(images), media_token_ids={"image_token_id": IMAGE})
    assert [images_in(part) for part in parts] == images
    assert [len(part["input_ids"]) for part in parts] == [1] * len(images)


def test_unnamed_token_is_inferred_if_only_one_split_matches() -> None:
    assert [images_in(part) for part in split_batch(batch_of([[0, 1], [2]]), [1, 1])] == [[0, 1], [2]]


def test_ambiguous_split_raises_without_token_types() -> None:
    batch = {**batch_of([[1], []]), "image_grid_thw": torch.tensor([[1, 2, 4], [1, 2, 4]])}
    batch["input_ids"] = torch.tensor([[5, 6, 90, 90, 90, 90], [5, 6, 7, 7, 7, 7]])  # by 5: an image each
    with pytest.raises(InputError, match=r"image_grid_thw.*Several tokens could be.*mm_token_type_ids"):
        split_batch(batch, [1, 1])
    kinds = (batch["input_ids"] == IMAGE).long()
    first, second = split_batch({**batch, "mm_token_type_ids": kinds}, [1, 1])
    assert [len(part["image_grid_thw"]) for part in (first, second)] == [2, 0] and not len(second["pixel_values"])


def test_images_and_videos_are_split_by_their_own_tokens() -> None:
    ids = torch.tensor([[VIDEO, VIDEO, VIDEO, IMAGE, 5], [IMAGE, IMAGE, 5, 5, 5]])
    batch = {
        "input_ids": ids, "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4]]), "pixel_values": torch.arange(12),
        "video_grid_thw": torch.tensor([[3, 2, 2]]), "pixel_values_videos": 100 + torch.arange(12),
        "second_per_grid_ts": [0.5], "position_ids": torch.arange(30).view(3, 2, 5),
    }  # fmt: skip
    known = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    first, second = split_batch(batch, [1, 1], "input_ids", known)
    assert first["pixel_values"].tolist() == [0, 1, 2, 3] and second["pixel_values"].tolist() == list(range(4, 12))
    assert len(first["pixel_values_videos"]) == 12 and not len(second["pixel_values_videos"])
    assert (first["second_per_grid_ts"], second["second_per_grid_ts"]) == ([0.5], [])
    assert torch.equal(second["position_ids"], batch["position_ids"][:, 1:])


def test_count_inputs_define_rows_per_sample() -> None:
    batch = {"input_ids": torch.zeros(2, 3), "targets": torch.arange(5), "target_lengths": torch.tensor([2, 3])}
    first, second = split_batch(batch, [1, 1])
    assert first["targets"].tolist() == [0, 1] and second["targets"].tolist() == [2, 3, 4]
    rows = split_batch({**batch, "targets": torch.arange(2), "target_lengths": torch.tensor([2, 0])}, [1, 1])
    assert rows[0]["targets"].tolist() == [0], "with a row for each sample, lengths are of something else"


SQUARE = torch.zeros(3, 3, 4, dtype=torch.long)


IDS = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"input_ids": IDS, "pixel_values": torch.zeros(12, 3)}, r"pixel_values .*\(12, 3\) has 12 rows"),
        ({"input_ids": IDS, "images": [torch.zeros(3, 8, 8)] * 3}, r"images\[0\] .* has 3 rows"),
        ({"input_ids": IDS, "deep": {"x": torch.zeros(5)}}, r"deep\.x .* has 5 rows"),
        ({"input_ids": IDS, "cache_position": torch.arange(4)}, r"cache_position.*x\[None\]"),
        ({"input_ids": torch.zeros(3, 4), "position_ids": SQUARE}, "first two dimensions have the batch size"),
        ({"inputs_embeds": torch.zeros(3, 4, 8), "position_ids": SQUARE}, "first two dimensions have the batch size"),
        ({**batch_of([[0, 1], [2]]), "input_ids": torch.tensor([[90] * 5, [5] * 5])}, "do not match"),
        ({**batch_of([[0, 1], [2]]), "mm_token_type_ids": torch.zeros(2, 5)}, "do not match"),
        ({"input_ids": IDS.T, "image_grid_thw": GRID[2:], "pixel_values": torch.zeros(4, 3)}, "describes 4 rows"),
        ({"inputs_embeds": torch.zeros(2, 4, 8), "image_grid_thw": GRID, "pixel_values": torch.zeros(28)}, "no tokens"),
    ],
)  # fmt: skip
def test_tensor_with_unexplained_rows_raises(batch: dict[str, Tensor], words: str) -> None:
    samples = get_batch_size(batch, "input_ids")
    known = {"image_token_id": IMAGE}
    with pytest.raises(InputError, match=words):
        split_batch(batch, [1] * samples, "input_ids", known)
    assert split_batch(batch, [samples], "input_ids", known) == [batch], "where nothing is cut all is as it came"


def test_data_loader_batches_are_split_by_images() -> None:
    batches = [batch_of([[0, 1], [2]])]
    source = IterableDataSource(batches, None)
    shards = [DataParallelPosition(rank, 2) for rank in range(2)]
    parts = [part for s in shards for _, part in source.iter_batch_shards(0, 0, None, s, 0, False, False)]
    assert [images_in(part) for part in parts] == [[0, 1], [2]]
