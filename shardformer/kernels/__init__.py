"""Attention on fused kernels."""
