"""The tests that most likely detect a fault in a file. They run before the other tests of a tier."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OF_FOLDER = {
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
"""The longest matching folder is used."""


def related_tests(mutant: Mutant) -> list[str]:
    """Return the mutant's own tests, followed by those of its folder."""
    folders = [folder for folder in OF_FOLDER if mutant.file.startswith(f"{folder}/")]
    of_folder = OF_FOLDER[max(folders, key=len)] if folders else ()
    return list(dict.fromkeys((*mutant.first, *of_folder)))
