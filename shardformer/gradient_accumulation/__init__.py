"""Gradient accumulation: splits a batch into micro-batches, and weights their losses. Pipelines use it, too."""
