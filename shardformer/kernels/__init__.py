"""Fused kernels for attention, norms and the activations of an MLP."""
