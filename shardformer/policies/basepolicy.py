"""The names under which the first form of a policy was published."""

from shardformer.sharding.policy import Argument, Col_Layer, Layer, Policy, Row_Layer

__all__ = ["Argument", "Col_Layer", "Layer", "Policy", "Row_Layer"]
