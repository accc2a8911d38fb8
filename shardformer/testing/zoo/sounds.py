"""Batches of sounds and of the words in them."""

# B batch, M mel bins, F frames, T target tokens, H hidden
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor


def sound_batch(
    head: str, generator: Generator, settings: Mapping[str, Any], text: Mapping[str, Tensor], num_labels: int
) -> dict[str, Tensor]:
    """What Whisper's heads take: a spectrogram of full length, and words or a class."""
    ids_BT, mask_BT = text["input_ids"], text["attention_mask"]
    batch, frames = len(ids_BT), 2 * settings["max_source_positions"]
    labels_BT = ids_BT.roll(-1, dims=1)
    labels_BT[:, :3] = -100
    if head == "WhisperForCausalLM":
        heard_BFH = torch.randn(batch, 7, settings["d_model"], generator=generator)
        return {**text, "encoder_outputs": heard_BFH, "labels": labels_BT}
    sounds = {"input_features": torch.randn(batch, settings["num_mel_bins"], frames, generator=generator)}
    if head == "WhisperForAudioClassification":
        return {**sounds, "labels": torch.randint(num_labels, (batch,), generator=generator)}
    if head == "WhisperModel":
        return {**sounds, "decoder_input_ids": ids_BT, "decoder_attention_mask": mask_BT}
    return {**sounds, "decoder_attention_mask": mask_BT, "labels": labels_BT}
