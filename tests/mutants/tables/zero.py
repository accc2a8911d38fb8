"""Faults of ZeRO: shards, precision, offload, stage 3, clipping, and optimizers that need whole matrices."""

from functools import partial

from tests.mutants.mutant import Mutant

mutant = partial(Mutant, "ZeRO")

MUTANTS = [
    mutant(
        "norm-counts-whole-matrices-twice",
        "shardformer/zero/optimizer_step.py",
        "own = {*reduction.norm_over} - {*reduction.sum_over, *cut}",
        "own = {*reduction.norm_over}",
        "LAMB and Muon with stage 0 and tensor parallelism clip by a norm that is too large.",
        first=(
            "tests/optim/test_owners.py::test_sharded_matrices_are_gathered",
            "tests/optim/test_zero.py::test_full_gradient_and_global_norm",
        ),
    ),
    mutant(
        "norm-counts-tied-weights-on-each-stage",
        "shardformer/zero/optimizer_step.py",
        'elif reduction.stages and coords["pipe"] != reduction.stages[0]:',
        'elif reduction.stages and coords["pipe"] < 0:',
        "With stage 0 and a pipeline, a weight that two stages share counts twice in the norm.",
        first=(
            "tests/optim/test_zero.py::test_over_stages_and_data_ranks",
            "tests/optim/test_zero.py::test_full_gradient_and_global_norm",
        ),
    ),
    mutant(
        "masters-replaced-by-rounded-weights",
        "shardformer/zero/flat_shards.py",
        "value.copy_(torch.where(value.to(self.dtype) == written, value, written.to(self.wide_dtype)))",
        "value.copy_(written.to(self.wide_dtype))",
        "load_state_dict with the weights that are there already rounds the fp32 masters to 16 bits.",
        first=("tests/optim/test_zero.py::test_writes_to_parameters_between_steps_take_effect",),
    ),
    mutant(
        "loss-scale-grows-after-gaps",
        "shardformer/zero/mixed_precision.py",
        "self.good, self.bad = 0, self.bad + 1",
        "self.bad = self.bad + 1",
        "The fp16 loss scale grows though its good steps were not in a row.",
        first=("tests/optim/test_precision.py::test_loss_scale_follows_its_options",),
    ),
    mutant(
        "offload-keeps-scaled-gradients",
        "shardformer/offload/host.py",
        "            part = part.to(self.dtype) / scale\n",
        "            part = part.to(self.dtype)\n",
        "fp16 with offload steps with gradients that are still multiplied by the loss scale.",
        first=("tests/optim/test_offload.py::test_offload_gives_bitwise_equal_weights",),
    ),
    mutant(
        "offload-forgets-earlier-backwards",
        "shardformer/offload/host.py",
        "self._sum = self._sum.add_(part) if self._has_sum else self._sum.copy_(part)",
        "self._sum = self._sum.copy_(part)",
        "Gradient accumulation with offload steps with the last backward pass alone.",
        first=("tests/optim/test_offload.py::test_offload_gives_bitwise_equal_weights",),
    ),
    mutant(
        "failed-write-keeps-the-step-count",
        "shardformer/offload/disk.py",
        "            state.clear()\n            state.update(small)\n",
        "            state.update({})\n",
        "After a disk was full, Adam's step count is one ahead of the weights.",
        first=("tests/optim/test_offload.py::test_full_disk_restores_the_previous_step",),
    ),
    mutant(
        "kahan-rest-not-added",
        "shardformer/zero/mixed_precision.py",
        "                self._values += self.rest\n",
        "                pass\n",
        'masters="kahan" loses small updates, as plain bf16 does.',
        first=(
            "tests/optim/test_rounding.py::test_small_updates_are_not_lost",
            "tests/optim/test_rounding.py",
        ),
    ),
    mutant(
        "rounding-depends-on-the-layout",
        "shardformer/zero/mixed_precision.py",
        "generate_random_bits(wide, param_slice.start_index, param_slice.seed, self.step)",
        "generate_random_bits(wide, param_slice.at.start, param_slice.seed, self.step)",
        'masters="stochastic" rounds the same weight differently on another number of data ranks.',
        first=(
            "tests/optim/test_rounding.py::test_tensor_ranks_round_replicated_parameters_identically",
            "tests/optim/test_rounding.py",
        ),
    ),
    mutant(
        "paused-backwards-never-summed",
        "shardformer/zero/zero_optimizer.py",
        "        self.reduce_pending_grads()\n        problem = self._apply_grad_edits()\n        for",
        "        problem = self._apply_grad_edits()\n        for",
        "Where all backward passes of a step ran in no_sync, their gradients are not used.",
        first=(
            "tests/optim/test_zero.py::test_step_reduces_gradients_accumulated_in_no_sync",
            "tests/optim/test_zero.py",
        ),
    ),
    mutant(
        "stage-3-keeps-old-parameters",
        "shardformer/zero/zero_optimizer.py",
        "            if self._scheduler is not None:\n"
        "                self._scheduler.free_gathered_params()\n            with",
        "            with",
        "Stage 3 that keeps layers after their use (a pipeline, reshard_after_forward=False) trains on stale weights.",
        first=(
            "tests/optim/test_stage3.py::test_over_stages_and_data_ranks",
            "tests/optim/test_stage3_memory.py::test_kept_layers_are_not_gathered_again",
        ),
    ),
    mutant(
        "stage-3-drops-writes",
        "shardformer/zero/stage3_parameters.py",
        "        if before != self._versions:\n",
        "        if before is self._versions:\n",
        "Under stage 3 a parameter that the model writes to loses what was written, without an error.",
        first=("tests/optim/test_stage3.py::test_model_that_writes_to_a_parameter_raises",),
    ),
    mutant(
        "owner-keeps-one-ranks-slices",
        "shardformer/gradients/buckets.py",
        "box.view_in_full(full).add_(box.view_in_local(local))",
        "box.view_in_full(full).copy_(box.view_in_local(local))",
        "LAMB and Muon over tensor and data ranks step with the gradient of one data rank.",
        first=("tests/optim/test_owners.py::test_sharded_matrices_are_gathered",),
    ),
    mutant(
        "owner-gets-a-sum-for-a-mean",
        "shardformer/gradients/buckets.py",
        "return torch.div(grad.reshape(-1), grad_slot.divisor).to(like.dtype)",
        "return grad.reshape(-1).to(like.dtype)",
        "Muon over tensor and data ranks gets gradients that are not divided by the number of data ranks.",
        first=("tests/optim/test_owners.py::test_sharded_matrices_are_gathered",),
    ),
    mutant(
        "whole-matrices-are-flat",
        "shardformer/zero/flat_shards.py",
        "value = value.view(grad_slot.shape) if grad_slot.is_full else value",
        "value = value.reshape(-1)",
        "LARS and Muon see every matrix as a vector.",
        first=("tests/optim/test_owners.py::test_matrix_optimizers_over_data_ranks_equal_one_process_bitwise",),
    ),
    mutant(
        "shared-heads-added-up",
        "shardformer/zero/flat_shards.py",
        "full = full / (copies.to(full) if isinstance(copies, Tensor) else copies)",
        "full = full * 1.0",
        "ZeRO with more tensor ranks than KV heads multiplies the weights of shared KV heads.",
        first=(
            "tests/optim/test_zero.py::test_weights_equal_one_process",
            "tests/verify/test_zero.py::test_over_data_and_tensor_ranks",
        ),
    ),
    mutant(
        "shared-gradient-divided-twice",
        "shardformer/gradients/buckets.py",
        "divisor = 1.0 if grad is None or grad_slot.is_shared else grad_slot.divisor",
        "divisor = grad_slot.divisor",
        "ZeRO with data ranks and shared KV heads divides some gradients twice.",
        first=(
            "tests/optim/test_zero.py::test_weights_equal_one_process",
            "tests/verify/test_zero.py::test_over_data_and_tensor_ranks",
        ),
    ),
    mutant(
        "fp32-gradients-ignored",
        "shardformer/zero/mixed_precision.py",
        "return torch.float32 if self.gradients else None",
        "return None",
        'MixedPrecision("bf16", gradients="fp32") sums gradients in bf16.',
        first=("tests/optim/test_precision.py::test_16_bit_training_with_master_weights_equals_one_process_bitwise",),
    ),
    mutant(
        "loaded-state-has-no-loss-scale",
        "shardformer/zero/zero_optimizer.py",
        "            setattr(self._precision.loss_scale, name, value)\n",
        "            pass\n",
        "An fp16 optimizer that loads its state_dict starts again with the first loss scale.",
        first=(
            "tests/optim/test_precision.py::test_state_dict_contains_the_loss_scale_and_its_counters",
            "tests/optim/test_precision.py",
            "tests/optim/test_zero.py::test_schedulers_closures_and_saved_states",
        ),
    ),
]
