"""Gradient accumulation: splits a batch into micro-batches, and weights their losses. Also used by pipelines."""
