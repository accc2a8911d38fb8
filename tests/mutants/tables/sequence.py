"""Faults of sequence parallelism, and of logits whose vocabulary is sharded."""

from functools import partial

from tests.mutants.mutant import Mutant

mutant = partial(Mutant, "sequence")

MUTANTS = [
    mutant(
        "overlap-joins-in-ring-order",
        "shardformer/tensor_parallel/linear_communication.py",
        "columns = zip(*(products[start] for start in sorted(products)), strict=True)",
        "columns = zip(*(products[start] for start in products), strict=True)",
        "With sequence_overlap, every rank but the first has its positions in a wrong order.",
        first=("tests/layers/tensor/test_block.py::test_block_equals_the_plain_module_for_every_forward_pass",),
    ),
    mutant(
        "recomputation-with-another-length",
        "shardformer/tensor_parallel/sequence_parallel.py",
        "near = [n for n in self._lengths if abs(n - self.full) < self.axis.size]",
        "near = [n for n in self._lengths if abs(n - self.full) < 1]",
        "With activation checkpointing, a sequence one token longer than an earlier one is recomputed as that one.",
        first=(
            "tests/sharding/test_regions.py::test_additional_arguments_are_sharded_with_checkpointing_too",
            "tests/test_training.py::test_features",
        ),
    ),
    mutant(
        "samples-dropped-by-each-rank",
        "shardformer/random_state.py",
        "seed, rank = self._share(seed.to(input_tensor.device)), -1",
        "rank = -1",
        "Stochastic depth drops different samples on ranks that hold parts of the same sequence.",
        first=("tests/timm/test_timm.py::test_ranks_drop_the_same_samples",),
    ),
    mutant(
        "router-gradient-summed",
        "shardformer/sharding/apply_tensor_parallel.py",
        "return layout, ModelRegion.GATHERED if param_name.startswith(self._gathered) else ModelRegion.STACK",
        "return layout, ModelRegion.STACK",
        "A module that is given the whole sequence (a router) gets its gradient once for each tensor rank.",
        first=(
            "tests/sharding/test_regions.py::test_experts_receive_the_tokens_of_all_ranks",
            "tests/policies/infer/test_infer.py::test_sequence_parallel_hints_are_inferred",
        ),
    ),
    mutant(
        "final-norm-not-summed",
        "shardformer/sharding/apply_tensor_parallel.py",
        'for prefix in map(_with_trailing_dot, (stack.layers, stack.final_norm or ""))',
        "for prefix in map(_with_trailing_dot, (stack.layers,))",
        "With sequence parallelism the final norm is trained by each rank on its own positions.",
        first=("tests/verify/test_families.py::test_sequence_parallel",),
    ),
    mutant(
        "smoothing-over-own-columns",
        "shardformer/tensor_parallel/vocab_parallel_loss.py",
        "(options.label_smoothing / options.bounds[-1]) if options.label_smoothing else None",
        "(options.label_smoothing / max(logits_Tv.shape[1], 1)) if options.label_smoothing else None",
        "Label smoothing on sharded logits has a wrong gradient; the loss is right.",
        first=("tests/layers/vocab/test_loss.py::test_loss_equals_cross_entropy_of_the_full_logits",),
    ),
    mutant(
        "smoothing-of-an-uneven-vocabulary",
        "shardformer/tensor_parallel/vocab_parallel_loss.py",
        "spread_T = spread_T + (options.bounds[rank + 1] - options.bounds[rank]) * offset_T",
        "spread_T = spread_T + options.bounds[1] * offset_T",
        "Label smoothing gives a wrong loss where the vocabulary does not divide by the ranks.",
        first=(
            "tests/layers/vocab/test_loss.py::test_loss_equals_cross_entropy_of_the_full_logits",
            "tests/layers/vocab/test_loss.py::test_loss_with_uneven_vocabulary_bounds",
        ),
    ),
    mutant(
        "ignored-labels-have-gradients",
        "shardformer/tensor_parallel/vocab_parallel_loss.py",
        "weight_T1 = torch.where(valid_T, grad_output, 0.0)[:, None]",
        "weight_T1 = grad_output.expand(len(valid_T))[:, None]",
        "Tokens with the label -100 change the weights.",
        first=("tests/layers/vocab/test_loss.py::test_loss_equals_cross_entropy_of_the_full_logits",),
    ),
    mutant(
        "rank-whose-logits-are-all-masked",
        "shardformer/tensor_parallel/vocab_parallel_loss.py",
        "shifted_tv = torch.sub(x_tv, clamp_neg_inf(max_t)[:, None])",
        "shifted_tv = torch.sub(x_tv, max_t[:, None])",
        "The loss is NaN where a mask hides all of one rank's vocabulary.",
        first=("tests/layers/vocab/test_loss.py::test_rank_with_masked_columns_adds_nothing",),
    ),
    mutant(
        "transposed-logits",
        "shardformer/comm/sharded_tensor.py",
        "return {a: b, b: a}.get(sharded_dim, sharded_dim), args",
        "return {a: b}.get(sharded_dim, sharded_dim), args",
        "logits.transpose(1, 2), as F.cross_entropy takes them, is read as if its last dim were the vocabulary.",
        first=("tests/layers/vocab/test_logits.py::test_operation_equals_that_of_the_plain_tensor",),
    ),
    mutant(
        "written-logits-stay-stale-in-views",
        "shardformer/tensor_parallel/vocab_parallel_logits.py",
        "        self._writes[0] += 1\n",
        "",
        "A view of sharded logits keeps its old values after the logits were written to.",
        first=(
            "tests/layers/vocab/test_logits.py::test_operation_equals_that_of_the_plain_tensor",
            "tests/layers/vocab/test_sharded_tensor.py::test_sampling_that_writes_to_the_last_logits",
        ),
    ),
    mutant(
        "written-embeddings-ignored",
        "shardformer/comm/deferred_tensor.py",
        "return not self._is_watched and not is_written",
        "return not self._is_watched",
        "A model that changes its embeddings in place before the first layer trains on the unchanged ones.",
        first=(
            "tests/layers/tensor/test_pending.py::test_a_written_tensor_is_not_pending",
            "tests/layers/tensor/test_pending.py",
        ),
    ),
    mutant(
        "experts-see-own-tokens",
        "shardformer/tensor_parallel/block.py",
        "        tokens = activation_sharding.view_as_local_tokens(arg)\n",
        "        tokens = None\n",
        "With sequence parallelism the experts sum the results of different tokens.",
        first=(
            "tests/sharding/test_regions.py::test_experts_receive_the_tokens_of_all_ranks",
            "tests/sharding/test_regions.py",
        ),
    ),
]
