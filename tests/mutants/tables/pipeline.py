"""Faults of pipelines: schedules, weights of micro-batches, hand-over between stages, split backward passes."""

from functools import partial

from tests.mutants.mutant import Mutant

mutant = partial(Mutant, "pipeline")

MUTANTS = [
    mutant(
        "loss-weight-without-data-ranks",
        "shardformer/gradient_accumulation/micro_batch_loss.py",
        "return [weight * self._num_ranks / total for weight in weights]",
        "return [weight / total for weight in weights]",
        "With loss_weight= and several data ranks, gradients are too small by the number of ranks.",
        first=("tests/pipeline/test_average_over_data.py",),
    ),
    mutant(
        "summed-loss-without-data-ranks",
        "shardformer/gradient_accumulation/micro_batch_loss.py",
        "return loss * self._num_ranks if self._data_axis is not None else loss",
        "return loss",
        'A loss with reduction="sum" is averaged over the data ranks instead of summed.',
        first=("tests/pipeline/test_average_over_data.py",),
    ),
    mutant(
        "micro-batch-without-labels-is-nan",
        "shardformer/gradient_accumulation/micro_batch_loss.py",
        '        if not n:\n            return loss_call.compute_loss_with_reduction("sum") * 0.0\n',
        "",
        "The loss is NaN where all labels of one micro-batch are ignored.",
        first=("tests/pipeline/test_loss.py::test_micro_batch_without_labels_adds_zero",),
    ),
    mutant(
        "class-weights-do-not-count",
        "shardformer/gradient_accumulation/micro_batch_loss.py",
        "        if weight is None:\n            return counted.sum()\n",
        "        if weight is None or self.is_mean:\n            return counted.sum()\n",
        "A cross entropy with class weights gives another loss with micro-batches than without.",
        first=("tests/pipeline/test_loss.py::test_common_user_losses_equal_full_batch",),
    ),
    mutant(
        "stages-send-slices-of-other-positions",
        "shardformer/pipeline/runtime.py",
        'return [name != "hidden" or not is_sharded for name in activations]',
        "return [True for name in activations]",
        "With tensor, pipeline and sequence parallelism, the next stage joins slices of different positions.",
        first=("tests/verify/test_pipelines.py::test_sequence_parallel_times_pipe",),
    ),
    mutant(
        "stages-ignore-the-loss-scale",
        "shardformer/pipeline/runtime.py",
        "[torch.full_like(loss, self._step.loss_scale) for loss in outputs]",
        "[torch.ones_like(loss) for loss in outputs]",
        "In fp16 a pipeline divides gradients by a loss scale that was never applied.",
        first=("tests/optim/test_precision.py::test_pipeline_scales_the_loss_only_for_the_backward_pass",),
    ),
    mutant(
        "micro-batches-share-a-dropout-mask",
        "shardformer/pipeline/pipeline.py",
        "seeds = [(seed + 7919 * i) % 2**62 if seed else None for i in range(len(parts))]",
        "seeds = [seed % 2**62 if seed else None for i in range(len(parts))]",
        "Every micro-batch of a step drops the same places.",
        first=("tests/engine/test_pipeline.py::test_each_micro_batch_has_its_own_dropout_mask",),
    ),
    mutant(
        "split-backward-loses-the-first-stage",
        "shardformer/pipeline/split_backward.py",
        "return input_grads, WeightBackward(other_outputs)",
        "return input_grads, WeightBackward([])",
        "With a zero-bubble schedule the first stage does not train.",
        first=("tests/pipeline/test_backward.py",),
    ),
    mutant(
        "split-backward-loses-other-outputs",
        "shardformer/pipeline/split_backward.py",
        "return _run_full_backward(output_grads + other_outputs, inputs), WeightBackward([])",
        "return _run_full_backward(output_grads, inputs), WeightBackward([])",
        "With a zero-bubble schedule and checkpointing, an output that reads no input of the stage passes no gradient.",
        first=(
            "tests/pipeline/test_backward.py::test_input_and_weight_parts_equal_one_backward_bitwise",
            "tests/pipeline/test_backward.py",
        ),
    ),
    mutant(
        "norm-of-one-stage",
        "shardformer/layout/sharding_metadata.py",
        'pipe = ("pipe",) if axis_sizes.get("pipe", 1) > 1 else ()',
        "pipe = ()",
        "Each stage clips by the norm of its own gradients.",
        first=("tests/optim/test_torch_clipping.py::test_all_stages_get_the_same_norm",),
    ),
    mutant(
        "stages-do-not-compare-batches",
        "shardformer/pipeline/pipeline.py",
        "if any(row[:-2] != rows[0][:-2] for row in rows):",
        "if any(row[1] != rows[0][1] for row in rows):",
        "Stages that are given different batches train on a mixture of both, without an error.",
        first=(
            "tests/engine/test_pipeline.py::test_errors_are_raised_on_every_stage",
            "tests/engine/test_pipeline.py::test_a_batch_that_differs_between_stages_raises_without_hanging",
        ),
    ),
    mutant(
        "layers-dropped-by-each-stage",
        "shardformer/pipeline/stage_manager.py",
        'if name.endswith("layerdrop") and isinstance(value, float) and value > 0:',
        'if name.endswith("layerdrop") and isinstance(value, float) and value > 1:',
        "A model with layer drop is accepted in a pipeline whose stages draw which layers to skip separately.",
        first=("tests/engine/test_pipeline.py::test_errors_are_raised_on_every_stage",),
    ),
    mutant(
        "one-row-for-all-samples-is-cut",
        "shardformer/gradient_accumulation/micro_batches.py",
        "        if tensor.dim() == 0 or tensor.shape[0] == 1:\n            return [tensor for _ in "
        "self._micro_batch_indices]\n",
        "        if tensor.dim() == 0:\n            return [tensor for _ in self._micro_batch_indices]\n",
        "A batch with one row of positions for all samples is refused with micro-batches.",
        first=("tests/pipeline/test_microbatches.py",),
    ),
]
