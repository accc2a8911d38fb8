"""Layers and blocks on a tensor axis that is a grid: 2D, 2.5D and 3D tensor parallelism."""
