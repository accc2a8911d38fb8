"""Which tests are the likeliest to find a fault in a file: those run before the rest of a tier."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OF_FOLDER = {
    "shardformer/layers/tensor": ("tests/layers/tensor", "tests/policies/test_forms.py"),
    "shardformer/layers/grid": ("tests/layers/grid", "tests/sharding/test_grid.py"),
    "shardformer/layers/vocab": ("tests/layers/vocab",),
    "shardformer/layers/context": ("tests/layers/context", "tests/sharding/test_context.py"),
    "shardformer/layers": ("tests/layers",),
    "shardformer/layout": ("tests/layout", "tests/reduce"),
    "shardformer/pipeline": ("tests/pipeline", "tests/engine/test_pipeline.py"),
    "shardformer/optim": ("tests/optim",),
    "shardformer/reduce": ("tests/reduce", "tests/optim"),
    "shardformer/checkpoint": ("tests/checkpoint",),
    "shardformer/disk": ("tests/disk", "tests/checkpoint"),
    "shardformer/engine": ("tests/engine",),
    "shardformer/trainer": ("tests/trainer",),
    "shardformer/runs": ("tests/runs",),
    "shardformer/policies/infer": ("tests/policies/infer",),
    "shardformer/policies": ("tests/policies", "tests/verify/test_families.py"),
    "shardformer/sharding": ("tests/sharding", "tests/policies"),
}
"""The longest folder that a file is in counts."""


def related_tests(mutant: Mutant) -> list[str]:
    """The mutant's own tests, then those of its folder."""
    folders = [folder for folder in OF_FOLDER if mutant.file.startswith(f"{folder}/")]
    of_folder = OF_FOLDER[max(folders, key=len)] if folders else ()
    return list(dict.fromkeys((*mutant.first, *of_folder)))
