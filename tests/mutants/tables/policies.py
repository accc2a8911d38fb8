"""Faults of policies: derivation and its validation, the registry, families, and refusals."""

from functools import partial

from tests.mutants.mutant import Mutant

mutant = partial(Mutant, "policies")

MUTANTS = [
    mutant(
        "llama-repeats-shared-heads",
        "shardformer/policies/families.py",
        'local_attrs={"num_key_value_groups": "groups"})',
        "local_attrs={})",
        "LLaMA with more tensor ranks than KV heads repeats KV heads as often as on one device.",
        first=(
            "tests/policies/test_heads.py::test_llama_with_shared_kv_heads_equals_one_process",
            "tests/verify/test_families.py::test_other_config_settings",
        ),
    ),
    mutant(
        "uneven-heads-in-a-fused-projection",
        "shardformer/policies/convert_roles.py",
        "if any(layout.get_local_kv_head_per_query(r) for r in range(layout.ranks)):",
        "if layout.ranks < 1:",
        "A fused projection whose KV heads do not divide is sharded wrongly instead of refused.",
        first=(
            "tests/policies/test_edges.py::test_uneven_kv_heads_in_a_fused_projection_are_refused",
            "tests/verify/test_families.py::test_other_config_settings",
            "tests/policies/test_heads.py",
        ),
    ),
    mutant(
        "bert-cross-attention-not-summed",
        "shardformer/policies/families.py",
        'out=".crossattention.output.dense"),\n                inputs=AttentionInputs(cross_attention=True),',
        'out=".crossattention.output.dense"),\n                inputs=AttentionInputs(),',
        "A BERT decoder passes its encoder a part of the gradient.",
        first=(
            "tests/verify/test_families.py::test_cross_attention",
            "tests/verify/test_families.py::test_cross_attention_on_states_of_the_batch",
        ),
    ),
    mutant(
        "falcon-mask-of-all-heads",
        "shardformer/policies/families.py",
        '"alibi": ("heads", 1),\n                    "attention_mask": ("heads", 1),\n',
        '"alibi": ("heads", 1),\n',
        "Falcon with ALiBi applies the slopes of the first heads to the heads of every rank.",
        first=(
            "tests/families/test_attention_kernels.py::test_other_settings_use_the_kernel",
            "tests/verify/test_families.py::test_other_config_settings",
        ),
    ),
    mutant(
        "falcon-joins-sequential-exits",
        "shardformer/policies/families.py",
        "return bool(self.model.config.new_decoder_architecture or self.model.config.parallel_attn)",
        "return True",
        "Falcon whose MLP follows its attention is computed as if both ran side by side.",
        first=("tests/policies/test_exits.py",),
    ),
    mutant(
        "gptj-drops-two-outputs-at-once",
        "shardformer/policies/families.py",
        "return bool(self.model.config.resid_pdrop == 0)",
        "return True",
        "GPT-J with residual dropout drops attention and MLP outputs together.",
        first=("tests/policies/test_exits.py",),
    ),
    mutant(
        "whisper-sums-layers-of-one-stage",
        "shardformer/policies/families.py",
        'return bool(getattr(self.model.config, "use_weighted_layer_sum", False))',
        "return False",
        "Whisper with a weighted sum of its layers is accepted in a pipeline.",
        first=("tests/verify/test_pipelines.py::test_models_that_read_between_layers_raise",),
    ),
    mutant(
        "bloom-multiplies-slices",
        "shardformer/policies/families.py",
        "if config.slow_but_exact and config.pretraining_tp > 1:",
        "if config.slow_but_exact and config.pretraining_tp < 1:",
        "BLOOM with slow_but_exact=True is sharded though its forward pass slices whole weights.",
        first=("tests/verify/test_families.py::test_models_that_slice_weights_in_the_forward_raise",),
    ),
    mutant(
        "t5-stage-without-positions",
        "shardformer/policies/families.py",
        "T5_STAGES = PipelineHints(num_outputs=3, shared_from_first=T5_BIAS_TABLE)",
        "T5_STAGES = PipelineHints(num_outputs=3)",
        "In a pipeline the later stages of T5 have no relative positions.",
        first=("tests/verify/test_pipelines.py::test_several_stacks_split_anywhere",),
    ),
    mutant(
        "albert-groups-in-turn",
        "shardformer/policies/families.py",
        'units = tuple(f"{groups}.{at * kinds // depth}" for at in range(depth))',
        'units = tuple(f"{groups}.{at % kinds}" for at in range(depth))',
        "In a pipeline ALBERT with several groups of layers runs them in another order.",
        first=("tests/pipeline/test_chain.py::test_layer_calls_are_in_execution_order",),
    ),
    mutant(
        "validation-sees-no-exchanged-outputs",
        "shardformer/discovery/reduced_model.py",
        "weights = torch.linspace(0.5, 1.5, shape.numel(), dtype=x.dtype, device=x.device).view(shape)",
        "weights = torch.ones(shape.numel(), dtype=x.dtype, device=x.device).view(shape)",
        "A derived policy that exchanges outputs of a model passes its validation.",
        first=("tests/policies/infer/test_sound.py::test_outputs_that_are_exchanged_have_another_loss",),
    ),
    mutant(
        "validation-ignores-missing-gradients",
        "shardformer/discovery/validation.py",
        "if (expected is None) != (param.grad is None):",
        "if expected is None and param.grad is not None:",
        "A policy under which a weight gets no gradient passes its validation.",
        first=(
            "tests/policies/infer/test_given.py::test_a_weight_that_gets_no_gradient_is_a_difference",
            "tests/policies/infer/test_given.py",
        ),
    ),
    mutant(
        "stage-validation-in-the-middle-only",
        "shardformer/discovery/validation.py",
        "ends = {1, count // 2, count - 1, *(at for start in chain.stack_starts for at in (start - 1, start))}",
        "ends = {count // 2}",
        "A model whose first or last layer differs is accepted in a pipeline.",
        first=(
            "tests/policies/infer/test_depth.py::test_stages_may_begin_between_the_first_and_the_last_layer",
            "tests/policies/infer/test_depth.py",
            "tests/policies/infer/test_pipelines.py",
        ),
    ),
    mutant(
        "replaced-forward-is-trusted",
        "shardformer/sharding/checks.py",
        'return "forward" not in vars(module) and _get_top_level_package(of_class) in LIBRARIES',
        "return _get_top_level_package(of_class) in LIBRARIES",
        "A layer whose forward was replaced is sharded by a policy that does not fit it.",
        first=("tests/policies/infer/test_trust.py",),
    ),
    mutant(
        "unknown-kind-of-layer-is-cut",
        "shardformer/discovery/derive_policy.py",
        "if get_layer_kind(self.model.get_submodule(path)) not in made:",
        "if not made:",
        "A derived policy shards layers of a kind that its validation never saw.",
        first=("tests/policies/infer/test_infer.py::test_a_layer_missing_in_the_reduced_model_is_refused",),
    ),
    mutant(
        "registered-policy-of-a-known-family",
        "shardformer/policies/policy.py",
        "    if family in _REGISTERED:\n        return _REGISTERED[family]()",
        "    if family in _REGISTERED and family not in FAMILIES:\n        return _REGISTERED[family]()",
        "A policy that the user registers for a known family is ignored.",
        first=(
            "tests/policies/test_registry.py::test_user_registration_replaces_the_built_in_policy",
            "tests/policies/test_registry.py",
        ),
    ),
    mutant(
        "optimizer-of-whole-parameters",
        "shardformer/sharding/checks.py",
        "            if name is not None:\n",
        "            if name is not None and stages is not None:\n",
        "An optimizer that was made before sharding goes on with the unsharded parameters.",
        first=("tests/policies/test_edges.py::test_optimizer_created_before_sharding_is_refused",),
    ),
    mutant(
        "tied-weight-in-one-place",
        "shardformer/sharding/plan.py",
        "or (id(module), name) in named",
        "or (id(module), name) not in named",
        "A policy that names one of two tied modules leaves the other with the whole weight.",
        first=("tests/sharding/test_plan.py::test_tied_weight_with_an_unnamed_owner_is_refused",),
    ),
]
