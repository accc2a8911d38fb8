"""Optimizers, loss scaling and the gradient norm of sharded models."""
