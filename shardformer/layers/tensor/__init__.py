"""Layers cut over the tensor axis."""
