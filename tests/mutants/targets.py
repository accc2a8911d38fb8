"""The tests that most likely detect a fault in a file. They run before the other tests of a tier."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TESTS_BY_PREFIX = {
    "shardformer/tensor_parallel": ("tests/layers/tensor", "tests/layers/vocab", "tests/policies/test_forms.py"),
    "shardformer/tensor_parallel/grid": ("tests/layers/grid", "tests/sharding/test_grid.py"),
    "shardformer/context_parallel": ("tests/layers/context", "tests/sharding/test_context.py"),
    "shardformer/kernels": ("tests/layers",),
    "shardformer/layout": ("tests/layout", "tests/reduce"),
    "shardformer/pipeline": ("tests/pipeline", "tests/engine/test_pipeline.py"),
    "shardformer/zero": ("tests/optim",),
    "shardformer/offload": ("tests/optim", "tests/activations"),
    "shardformer/gradients": ("tests/reduce", "tests/optim"),
    "shardformer/consistency": ("tests/reduce", "tests/sharding"),
    "shardformer/checkpoint": ("tests/checkpoint",),
    "shardformer/filesystem": ("tests/disk", "tests/checkpoint"),
    "shardformer/training": ("tests/engine", "tests/trainer"),
    "shardformer/train_command": ("tests/runs",),
    "shardformer/discovery": ("tests/policies/infer",),
    "shardformer/policies": ("tests/policies", "tests/verify/test_families.py"),
    "shardformer/sharding": ("tests/sharding", "tests/policies"),
}
"""Start of a file path -> its tests. The longest matching start is used."""


def related_tests(mutant: Mutant) -> list[str]:
    """Return the mutant's own tests, followed by those of the longest prefix."""
    folders = [folder for folder in TESTS_BY_PREFIX if mutant.file.startswith(folder)]
    of_folder = TESTS_BY_PREFIX[max(folders, key=len)] if folders else ()
    return list(dict.fromkeys((*mutant.first, *of_folder)))
