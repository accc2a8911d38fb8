"""The names under which the first form of a policy was published."""

from __future__ import annotations

from shardformer.policies.legacy import Argument, Col_Layer, Layer, Row_Layer
from shardformer.policies.policy import Policy

__all__ = [
    "Argument",
    "Col_Layer",
    "Layer",
    "Policy",
    "Row_Layer",
]
