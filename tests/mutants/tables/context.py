"""Faults of context parallelism: ring attention, Ulysses, masks, and tensors whose sequence is sharded."""

from functools import partial

from tests.mutants.mutant import Mutant

mutant = partial(Mutant, "context")

MUTANTS = [
    mutant(
        "sink-gradient-with-the-wrong-sign",
        "shardformer/context_parallel/ring_attention.py",
        "sinks_grad = -(weight * (grad_output.to(acc_dtype) * out.to(acc_dtype)).sum(-1))",
        "sinks_grad = (weight * (grad_output.to(acc_dtype) * out.to(acc_dtype)).sum(-1))",
        "Attention sinks (gpt-oss) are trained in the wrong direction.",
        first=("tests/layers/context/test_ring.py",),
    ),
    mutant(
        "bias-gradient-of-the-last-chunk",
        "shardformer/context_parallel/ring_attention.py",
        "bias_grad += block_bias_grad",
        "bias_grad = block_bias_grad",
        "The table of relative positions (T5) is trained on the keys that arrive last.",
        first=("tests/layers/context/test_ring.py",),
    ),
    mutant(
        "gathered-keys-lose-own-gradient",
        "shardformer/context_parallel/ring_attention.py",
        "        self._dkv += local\n",
        "",
        'With context_parallel="gather", keys and values get no gradient from the queries of their own rank.',
        first=("tests/layers/context/test_ring.py",),
    ),
    mutant(
        "queries-that-see-nothing",
        "shardformer/context_parallel/ring_attention.py",
        "if sees_nothing is not None:  # torch returns",
        "if sees_nothing is not None and sinks is not None:  #",
        "A padded position returns the mean of hidden values instead of zero.",
        first=(
            "tests/layers/context/test_ring.py::test_ring_attention_equals_attention_on_one_rank",
            "tests/sharding/test_context.py::test_padding_packed_documents_and_windows_work",
        ),
    ),
    mutant(
        "shared-key-heads-not-added-up",
        "shardformer/context_parallel/ulysses.py",
        "full.index_add_(1, torch.tensor(heads",
        "full.index_copy_(1, torch.tensor(heads",
        "Under Ulysses with few KV heads, a KV head gets the gradient of one of the ranks that read it.",
        first=(
            "tests/layers/context/test_heads.py::test_ulysses_exchange_and_its_gradients",
            "tests/sharding/test_context.py",
        ),
    ),
    mutant(
        "same-attention-dropout-in-each-group",
        "shardformer/context_parallel/attention_kernels.py",
        "x = _hash_integers(x * 31 + self.heads.to(device)[None, :])[:, :, None, None]",
        "x = _hash_integers(x * 31 + torch.arange(len(self.heads), device=device)[None, :])[:, :, None, None]",
        "Under Ulysses, heads on different ranks drop the same attention weights.",
        first=("tests/sharding/test_context.py::test_attention_dropout_is_independent_of_the_ranks",),
    ),
    mutant(
        "attention-dropout-not-in-the-backward",
        "shardformer/context_parallel/attention_kernels.py",
        "            weights_grad = weights_grad * kept\n",
        "            pass\n",
        "With attention dropout over a sequence axis, dropped weights pass gradients to queries and keys.",
        first=(
            "tests/sharding/test_context.py::test_attention_dropout_is_independent_of_the_ranks",
            "tests/layers/context/test_ring.py",
        ),
    ),
    mutant(
        "biased-attention-sees-the-future",
        "shardformer/context_parallel/attention_kernels.py",
        "    if block_mask.is_causal:\n        return added.masked_fill(\n",
        "    if block_mask.is_causal and block_mask.mask is not None:\n        return added.masked_fill(\n",
        "T5's decoder sees later tokens of its own chunk.",
        first=("tests/layers/context/test_ring.py",),
    ),
    mutant(
        "slice-keeps-its-old-positions",
        "shardformer/context_parallel/sequence_layout.py",
        "parts = tuple((part[keep] - start) // step for part, keep in zip(self.parts, kept, strict=True))",
        "parts = tuple(part[keep] // step for part, keep in zip(self.parts, kept, strict=True))",
        "A loss on logits[:, 1:] compares with labels one position off.",
        first=(
            "tests/layers/context/test_sequence_cut.py::test_slices_equal_those_of_the_full_tensor",
            "tests/sharding/test_context.py::test_sharded_logits_behave_like_full_logits",
        ),
    ),
    mutant(
        "gathered-states-lose-gradients",
        "shardformer/context_parallel/sequence_sharded_tensor.py",
        "return summands.view(index_shards.axis.size, *local.shape).sum(0)",
        "return summands.view(index_shards.axis.size, *local.shape)[index_shards.axis.rank]",
        "What is computed of a gathered sequence (a pooled classifier) passes back a fraction of its gradient.",
        first=(
            "tests/layers/context/test_sequence_cut.py::test_gathered_rows_get_the_summed_gradients",
            "tests/sharding/test_context.py::test_sharded_logits_behave_like_full_logits",
            "tests/sharding/test_context.py::test_context_parallel_training_equals_one_process",
        ),
    ),
    mutant(
        "class-weights-not-in-the-mean",
        "shardformer/context_parallel/sequence_sharded_tensor.py",
        "return total / (counted.sum() if weight is None else weight[target[counted]].sum())",
        "return total / counted.sum()",
        "A cross entropy with class weights over a sequence axis is divided by the wrong number.",
        first=(
            "tests/layers/context/test_sequence_cut.py::test_cross_entropy_equals_that_of_the_full_tensor",
            "tests/sharding/test_context.py::test_sharded_logits_behave_like_full_logits",
        ),
    ),
    mutant(
        "windows-of-two-sizes-are-one",
        "shardformer/context_parallel/masks.py",
        "[mask_component.__code__, *cells, *(mask_component.__defaults__ or ())",
        "[mask_component.__code__, *(mask_component.__defaults__ or ())",
        "The second sliding window that a process meets sees what the first one saw.",
        first=(
            "tests/layers/context/test_ring.py::test_windows_of_different_sizes_are_cached_separately",
            "tests/layers/context/test_ring.py",
            "tests/sharding/test_context.py::test_padding_packed_documents_and_windows_work",
        ),
    ),
    mutant(
        "gradients-of-a-cut-sequence-not-averaged",
        "shardformer/layout/sharding_metadata.py",
        'divisor = float(axis_sizes.get("data", 1) * activation_layout.get_num_input_shards(axis_sizes))',
        'divisor = float(axis_sizes.get("data", 1))',
        "Over a sequence axis of P ranks all gradients are P times too large.",
        first=("tests/layout/test_toy_stream.py",),
    ),
    mutant(
        "first-chunk-of-a-long-mask-decides",
        "shardformer/context_parallel/masks.py",
        "any_, all_ = any_ or bool(visible.any()), all_ and bool(visible.all())",
        "any_, all_ = any_ or bool(visible.any()), bool(visible.all())",
        "Of a mask that is looked at in several parts, the last part decides whether all is seen.",
        first=(
            "tests/layers/context/test_ring.py::test_mask_evaluated_in_chunks_is_the_same",
            "tests/layers/context/test_ring.py",
            "tests/sharding/test_context.py::test_padding_packed_documents_and_windows_work",
        ),
    ),
]
