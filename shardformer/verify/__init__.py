"""Compares the losses, gradients and weights of a sharded model with those of the unsharded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardformer.public_names import make_lazy_getattr_and_all

if TYPE_CHECKING:
    from shardformer.verify.comparison import Report as Report
    from shardformer.verify.comparison import Tolerances as Tolerances
    from shardformer.verify.train_both import VerifyPipeline as VerifyPipeline
    from shardformer.verify.training_options import VerifyTraining as VerifyTraining
    from shardformer.verify.verification import verify as verify

__getattr__, __all__ = make_lazy_getattr_and_all(__name__)
