"""Split a batch into micro-batches, and scale their losses for gradient accumulation and pipelines."""
