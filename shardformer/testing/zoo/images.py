"""Batches of images, alone, with points to segment, or with text."""

# B batch, C channels, P patches, Q points' groups, K points, S sequence, H hidden
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

IGNORED = 255


def image_batch(
    head: str, generator: Generator, settings: Mapping[str, Any], batch: int, num_labels: int
) -> dict[str, Tensor]:
    """Images, and what the head takes: a class, masked patches, or a class for each pixel."""
    images_BCss = pixels(generator, settings, batch)
    if head.endswith("ForImageClassification"):
        labels_B = torch.randint(num_labels, (batch,), generator=generator)
        return {"pixel_values": images_BCss, "labels": labels_B}
    if head.endswith("ForSemanticSegmentation"):
        size = settings["image_size"]
        labels_Bss = torch.randint(num_labels, (batch, size, size), generator=generator)
        labels_Bss[:, :3] = settings.get("semantic_loss_ignore_index", IGNORED)
        return {"pixel_values": images_BCss, "labels": labels_Bss}
    if head.endswith("ForMaskedImageModeling"):
        return {"pixel_values": images_BCss, **_masked(head, generator, settings, batch)}
    return {"pixel_values": images_BCss}


def pixels(generator: Generator, settings: Mapping[str, Any], batch: int) -> Tensor:
    size = settings["image_size"]
    return torch.randn(batch, settings.get("num_channels", 3), size, size, generator=generator)


def _masked(head: str, generator: Generator, settings: Mapping[str, Any], batch: int) -> dict[str, Tensor]:
    num_patches = (settings["image_size"] // settings["patch_size"]) ** 2
    order_BP = torch.rand(batch, num_patches, generator=generator).argsort(dim=1)
    if head != "BeitForMaskedImageModeling":
        return {"bool_masked_pos": order_BP < num_patches // 3}
    # BEiT's labels are those of the masked patches of all images in a row: with one in each image, a label a row
    labels_B = torch.randint(settings["vocab_size"], (batch,), generator=generator)
    return {"bool_masked_pos": order_BP == 0, "labels": labels_B}


def sam_batch(generator: Generator, settings: Mapping[str, Any], batch: int) -> dict[str, Tensor]:
    """Images with two prompts each: points of all kinds (on it, off it, none, padding), a box, a mask to begin with."""
    vision = settings["vision_config"]
    size, grid = vision["image_size"], vision["image_size"] // vision["patch_size"]
    kinds_BQK = torch.tensor([1, 0, -1, -10]).expand(batch, 2, 4).clone()
    return {
        "pixel_values": pixels(generator, vision, batch),
        "input_points": size * torch.rand(batch, 2, 4, 2, generator=generator),
        "input_labels": kinds_BQK,
        "input_boxes": size * torch.rand(batch, 2, 4, generator=generator),
        "input_masks": torch.randn(batch, 1, 4 * grid, 4 * grid, generator=generator),
    }


def blip_batch(
    head: str, generator: Generator, settings: Mapping[str, Any], text: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """An image before a text, or what one of BLIP-2's parts takes."""
    if head == "Blip2TextModelWithProjection":
        return dict(text)
    ids_BS, mask_BS = text["input_ids"], text["attention_mask"]
    batch = len(ids_BS)
    if head == "Blip2QFormerModel":
        states = torch.randn(batch, 17, settings["encoder_hidden_size"], generator=generator)
        queries = torch.randn(batch, ids_BS.shape[1], settings["hidden_size"], generator=generator)
        # transformers takes no padding there beside a text, which does not attend to these states
        mask = torch.ones(batch, 17, dtype=torch.long)
        return {
            "query_embeds": queries, "attention_mask": mask_BS, "encoder_hidden_states": states,
            "encoder_attention_mask": mask, "query_length": torch.tensor(5),
        }  # fmt: skip
    images = pixels(generator, settings["vision_config"], batch)
    if head.startswith("Blip2Vision"):
        return {"pixel_values": images}
    places = torch.full((batch, settings["num_query_tokens"]), settings["image_token_index"])
    out = {
        "pixel_values": images,
        "input_ids": torch.cat([places, ids_BS], dim=1),
        "attention_mask": torch.cat([torch.ones_like(places), mask_BS], dim=1),
    }
    if head == "Blip2ForImageTextRetrieval":
        # the other way compares each image with each text of the batch: no mean over rows
        return {**out, "use_image_text_matching_head": torch.tensor(True)}
    labels_BS = ids_BS.roll(1, dims=0)
    labels_BS[:, :3] = -100
    return {**out, "labels": torch.cat([torch.full_like(places, -100), labels_BS], dim=1)}
