"""Device mesh of data, pipeline, sequence and tensor parallel ranks, and setup of torch.distributed."""

from __future__ import annotations
