"""Faults of tensor parallelism: linear layers, embeddings, norms, random numbers, gradients, grids."""

from functools import partial

from tests.mutants.mutant import Mutant

mutant = partial(Mutant, "tensor")

MUTANTS = [
    mutant(
        "row-bias-on-each-rank",
        "shardformer/tensor_parallel/layers.py",
        "return y if bias is None else y + bias",
        "return y if bias is None else y + self.axis.size * bias",
        "A row-parallel linear layer adds its bias once for each rank: GPT-2, BERT and OPT give other outputs.",
        first=("tests/layers/tensor/test_linear.py::test_sharded_linear_equals_the_plain_linear",),
    ),
    mutant(
        "row-bias-gradient-summed",
        "shardformer/sharding/apply_tensor_parallel.py",
        "if param_name not in self._biases and param_name.startswith(self._inside):",
        "if param_name.startswith(self._inside):",
        "The bias of GPT-2's output projections gets its gradient once for each tensor rank.",
        first=("tests/policies/test_forms.py::test_roles_shard_gpt2",),
    ),
    mutant(
        "gradient-of-a-norm-behind-the-exit",
        "shardformer/sharding/apply_tensor_parallel.py",
        "multiplicity = 1 if self.block.is_open else self.block.axis.size",
        "multiplicity = 1",
        "Attention that applies its norm after its output projection trains it with a multiple of its gradient.",
        first=(
            "tests/policies/test_forms.py::test_norm_after_the_exit_of_a_block_trains_correctly",
            "tests/sharding/test_shared.py::test_norms_in_a_layer_that_is_an_attention_train_correctly",
        ),
    ),
    mutant(
        "shared-heads-not-summed",
        "shardformer/layout/sharding_metadata.py",
        'summed = {"data", *partial, *activations.input_axes, *spec.shared_axes}',
        'summed = {"data", *partial, *activations.input_axes}',
        "With more tensor ranks than KV heads, the copies of a KV head get different gradients and diverge.",
        first=(
            "tests/policies/test_heads.py::test_llama_with_shared_kv_heads_equals_one_process",
            "tests/policies/test_forms.py::test_five_heads_over_four_tensor_ranks_and_data_ranks",
            "tests/verify/test_families.py::test_other_config_settings",
        ),
    ),
    mutant(
        "norm-counts-shared-heads-twice",
        "shardformer/gradients/clipping.py",
        "return (powers / num_copies.to(powers) if isinstance(num_copies, Tensor) else powers).sum()",
        "return powers.sum()",
        "With more tensor ranks than KV heads, clipping sees a norm that is too large.",
        first=("tests/optim/test_grad_norm.py::test_clipping_equals_torch_on_the_plain_model",),
    ),
    mutant(
        "split-norm-counts-shared-heads-twice",
        "shardformer/tensor_parallel/layers.py",
        "summed = (x if self.share is None else x * self.share.to(x.dtype)).sum(-1, keepdim=True)",
        "summed = x.sum(-1, keepdim=True)",
        "A norm over all KV heads is wrong where several ranks hold one head (OLMo 2 with few KV heads).",
        first=(
            "tests/layers/tensor/test_split_norm.py::test_norm_over_kv_heads_equals_the_plain_norm",
            "tests/timm/test_timm.py::test_sharded_model_equals_plain_model",
            "tests/policies/test_parts.py::test_norm_over_all_heads_sums_its_statistics",
        ),
    ),
    mutant(
        "split-norm-backward-not-summed",
        "shardformer/tensor_parallel/layers.py",
        "return copy_to_tp_region(reduce_from_tp_region(summed, self.axis), self.axis) / self.full",
        "return reduce_from_tp_region(summed, self.axis) / self.full",
        "A norm over all heads of q or k has wrong gradients; its outputs are right.",
        first=(
            "tests/layers/tensor/test_split_norm.py::test_norm_over_kv_heads_equals_the_plain_norm",
            "tests/policies/test_parts.py::test_norm_over_all_heads_sums_its_statistics",
            "tests/policies/test_parts.py::test_direct_parameters_train_as_in_one_process",
        ),
    ),
    mutant(
        "same-dropout-in-each-block",
        "shardformer/random_state.py",
        "SPLITMIX64[0] * (rank + 1)",
        "SPLITMIX64[0]",
        "All tensor ranks drop the same places of their heads and features, as one device never would.",
        first=("tests/layers/test_dropout.py::test_masks_in_a_block_differ_by_rank",),
    ),
    mutant(
        "padding-token-0-trains",
        "shardformer/tensor_parallel/layers.py",
        "if padding is not None and start <= padding < end else None",
        "if padding is not None and start < padding < end else None",
        "The embedding of the padding token gets a gradient where its number is 0 (BERT, T5).",
        first=("tests/layers/tensor/test_embedding.py::test_sharded_embedding_equals_the_plain_embedding",),
    ),
    mutant(
        "row-takes-its-part-without-a-sum",
        "shardformer/tensor_parallel/layers.py",
        "return copy_to_tp_region(x, self.axis).index_select(-1, self.split.indices(self.axis.rank).to(x.device))",
        "return x.index_select(-1, self.split.indices(self.axis.rank).to(x.device))",
        "A row-parallel linear layer with parallel_input=False and its own split passes back a part of the gradient.",
        first=("tests/layers/tensor/test_linear.py::test_row_parallel_input_follows_a_custom_split",),
    ),
    mutant(
        "autocast-row-bias-in-fp32",
        "shardformer/tensor_parallel/layers.py",
        "bias = bias.to(torch.get_autocast_dtype(y.device.type))",
        "bias = bias.to(torch.float32)",
        "Under autocast a row-parallel linear layer with a bias returns fp32 where the plain one returns bf16.",
        first=("tests/layers/tensor/test_linear.py::test_autocast_computes_and_communicates_in_16_bits",),
    ),
    mutant(
        "expert-bias-on-each-rank",
        "shardformer/tensor_parallel/block.py",
        "vars(module).update({name: module.get_parameter(name) / axis.size for name in own_params})",
        "vars(module).update({name: module.get_parameter(name) for name in own_params})",
        "The bias of experts is added once for each tensor rank (gpt-oss).",
        first=(
            "tests/sharding/test_regions.py::test_expert_bias_is_added_once",
            "tests/sharding/test_regions.py::test_experts_work_with_sequence_parallelism",
            "tests/policies/infer/test_infer.py::test_unregistered_families_are_sharded",
        ),
    ),
    mutant(
        "grid-norm-without-the-spread-of-means",
        "shardformer/tensor_parallel/grid_layers.py",
        "variance = (sums + counts * (means - mean).square()).sum(0) / full",
        "variance = sums.sum(0) / full",
        "On a tensor grid a layer norm takes the variance within each rank for the variance of all features.",
        first=("tests/layers/grid/test_summa.py::test_grid_layer_norm_equals_the_plain_layer_norm",),
    ),
    mutant(
        "ranks-keep-their-own-weights",
        "shardformer/consistency/initial_weights.py",
        "if axis.size > 1 and tensors and differs_across_ranks([compute_numel_and_hash(t) for t in tensors], axis):",
        "if axis.size > 1 and not tensors and "
        "differs_across_ranks([compute_numel_and_hash(t) for t in tensors], axis):",
        "Ranks that built their models from different seeds train parts of different models.",
        first=("tests/test_bad_input.py::test_different_initial_weights_are_replaced_by_those_of_rank_0",),
    ),
]
