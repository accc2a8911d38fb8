"""The grid of processes: axes, contexts, launching."""
