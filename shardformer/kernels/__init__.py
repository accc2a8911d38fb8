"""Fused kernels for attention, for norms, and for the activation functions of an MLP."""
