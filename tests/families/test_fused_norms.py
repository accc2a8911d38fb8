"""Fused norms in every family: all supported norms are replaced, and gradients are equal."""

from __future__ import annotations

import pytest

from shardformer.kernels.fused_ops import FusedLayerNorm, FusedRMSNorm, make_fused_norm
from tests.families.option import CASTS, EXACT, FAMILIES, assert_same, build, plain, sharded

OPTION = "enable_fused_normalization"
# Families that always compute RMS norms, attention or rotations in fp32.
IN_FP64 = ("bert", "roberta", "albert", "ernie", "whisper", "vit", "beit", "swin", "swinv2", "sam")
KIND = {"t5": "t5", "llama": "llama", "qwen2": "llama", "qwen3": "llama", "mistral": "llama", "chatglm": "torch"}


@pytest.mark.slow
@pytest.mark.feature("fused norm")
@pytest.mark.parametrize("family", FAMILIES)
def test_all_supported_norms_are_fused(family: str) -> None:
    ours = sharded(family, OPTION)
    assert_same(ours, plain(family), EXACT if family in IN_FP64 else CASTS)
    norms = [m for m in build(family, {}).modules() if "norm" in type(m).__name__.lower()]
    left = [m for m in norms if type(m).__name__ == "SamLayerNorm"]
    replaced = FusedRMSNorm if family in KIND else FusedLayerNorm
    assert {replaced.__name__: len(norms) - len(left)}.items() <= ours.replaced().items()
    assert ("Norms that are not fused" in ours.notes) == bool(left)
    assert family not in KIND or {make_fused_norm(m).kind for m in norms} == {KIND[family]}


def test_channels_first_norm_of_sam_is_not_fused_and_reported() -> None:
    ours = sharded("sam", OPTION)
    assert "Norms that are not fused: 5 SamLayerNorm (not a layer norm or RMS norm over the last dim)" in (ours.notes)
