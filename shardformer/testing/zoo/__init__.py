"""Small random models of many families, every head class of each, and batches that fit them.

For ``verify``, the demo and the tests: sizes are odd on purpose (vocabulary 127, six heads, MLPs that do not divide).
"""

from shardformer.testing.zoo.batches import Batches
from shardformer.testing.zoo.heads import FAMILY_OF, HEADS, LANGUAGE_MODEL, MAIN, NEEDS, sees_alone
from shardformer.testing.zoo.loss import counts_by_sample, num_samples, sample_loss
from shardformer.testing.zoo.sample import Sample
from shardformer.testing.zoo.settings import SMALL

__all__ = [
    "FAMILY_OF", "HEADS", "LANGUAGE_MODEL", "MAIN", "NEEDS", "SMALL", "Batches", "Sample", "counts_by_sample",
    "num_samples", "sample_loss", "sees_alone",
]  # fmt: skip
