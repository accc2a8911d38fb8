"""Architecture rules, checked in the source: import order, sizes, private names, import time."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

PACKAGE = Path(__file__).resolve().parents[1] / "shardformer"
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# Packages from top to bottom. A package imports only from those above it. A nested package may have its own position.
FLOORS = [
    "errors",
    "public_names",
    "torch_compat",
    "torch_patches",
    "transformers_compat",
    "module_paths",
    "forward_hooks",
    "filesystem",
    "random_state",
    "mesh",
    "launcher",
    "layout",
    "local_ranks",
    "comm",
    "meta_init",
    "gradients",
    "kernels",
    "consistency",
    "tensor_parallel",
    "context_parallel",
    "offload",
    "gradient_accumulation",
    "pipeline",
    "zero",
    "checkpoint",
    "config",
    "policies",
    "weights",
    "sharding",
    "integrations.peft_adapters",  # shard_model calls these four for a model with adapters
    "integrations.shard_peft_model",
    "integrations.peft_models",
    "integrations.peft",
    "discovery",  # derives a policy by sharding small models
    "shard_model_api",
    "training",
    "integrations",
    "verify",
    "train_command",
    "cli",
    "testing",
    "hooks",
    "compat",
    "__main__",
]
FLOOR = {part: floor for floor, part in enumerate(FLOORS)}
LATE_ONLY = {
    "transformers",
    "timm",
    "torchvision",
    "triton",
    "flash_attn",
    "matplotlib",
    "tensorboard",
    "sklearn",
    "torchmetrics",
    "datasets",
    "PIL",
    "lightning",
    "pytorch_lightning",
    "peft",
    "accelerate",
    "bitsandbytes",
}


def name_of(path: Path) -> str:
    """Return ``shardformer.comm.functions`` for ``shardformer/comm/functions.py``."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path) for path in FILES} | {f"shardformer.{part}" for part in FLOOR}


def imports(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[str]:
    """Return the full names of all imports in a tree, also in functions. ``from x import y`` gives ``x.y``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                kept = len(parents) - node.level + is_package
                base = ".".join([*parents[:kept], *filter(None, [base])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


def part_of(name: str) -> str | None:
    """Return the entry of the package order that a module belongs to, or None for the package itself."""
    parts = name.split(".")[1:]
    if not parts:
        return None
    return ".".join(parts[:2]) if ".".join(parts[:2]) in FLOOR else parts[0]


def broken_rule(source: str, target: str) -> str | None:
    """Return the rule that an import of ``target`` in ``source`` breaks, or None."""
    if target.partition(".")[0] != "shardformer" or part_of(source) is None:
        return None  # another library, or the package's own __init__
    here, there = part_of(source), part_of(target)
    if here not in FLOOR:
        return f"the package of {source} has no place in the order: add {here!r} to FLOORS"
    if there is None:
        return None if here == "cli" else f"{source} imports the whole package: name the module"
    if here == there or FLOOR.get(there, len(FLOORS)) < FLOOR[here]:
        return None
    return f"{source} may not import {target}"


def test_a_module_imports_only_from_packages_above_it() -> None:
    broken = [
        rule
        for path in FILES
        for target in imports(parsed(path), name_of(path), path.name == "__init__.py")
        if (rule := broken_rule(name_of(path), target))
    ]
    assert broken == []


def test_every_module_has_a_place_in_the_order_and_every_place_a_module() -> None:
    assert {part for path in FILES if (part := part_of(name_of(path)))} == FLOOR.keys()


def test_files_have_no_import_cycles() -> None:
    ours = {name_of(path): path for path in FILES if part_of(name_of(path)) is not None}
    arrows = {name: {t for t in imports(parsed(path), name) if t in ours and t != name} for name, path in ours.items()}
    assert circle_in(arrows) == []


def circle_in(arrows: dict[str, set[str]]) -> list[str]:
    """Return the modules of one import cycle, or an empty list."""
    done: set[str] = set()

    def look(name: str, way: list[str]) -> list[str]:
        if name in way:
            return way[way.index(name) :]
        if name in done:
            return []
        for target in sorted(arrows.get(name, ())):
            if found := look(target, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(arrows) if (found := look(name, []))), [])


def test_an_import_cycle_is_detected() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    ("source", "line", "allowed"),
    [
        ("shardformer.comm.collectives", "from shardformer.mesh.parallel_context import ParallelContext", True),
        (
            "shardformer.comm.collectives",
            "def f():\n    from shardformer.tensor_parallel.layers import Linear1D_Col",
            False,
        ),
        ("shardformer.mesh.parallel_context", "from shardformer.layout import shard_spec", False),
        ("shardformer.tensor_parallel.layers", "from ..kernels.fused_ops import FusedLayerNorm", True),
        ("shardformer.tensor_parallel.layers", "from ..pipeline import x", False),
        ("shardformer.discovery.validation", "import shardformer.sharding.apply", True),
        ("shardformer.policies.policy", "import shardformer.discovery.derive_policy", False),
        ("shardformer.verify", "from shardformer.pipeline.pipeline import Pipeline", True),
        ("shardformer.training", "from shardformer import shard_model", False),
        ("shardformer.errors", "import shardformer.unheard_of", False),
    ],
)
def test_allowed_and_forbidden_imports_are_distinguished(source: str, line: str, allowed: bool) -> None:
    rules = [broken_rule(source, target) for target in imports(ast.parse(line), source)]
    assert (rules == [None]) == allowed


def test_optional_and_slow_libraries_are_imported_when_used() -> None:
    early = {}
    for path in FILES:
        nodes = at_import_time(parsed(path))
        found = {name.partition(".")[0] for node in nodes for name in imports(node, name_of(path))}
        own = {path.stem} if path.parent.name == "integrations" else set()  # itself imported when used
        early[name_of(path)] = found & LATE_ONLY - own
    assert {module: names for module, names in early.items() if names} == {}


def at_import_time(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Return the import statements that run at import time: outside functions and ``if TYPE_CHECKING``."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return
    children: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        children = list(node.orelse)
    for child in children:
        yield from at_import_time(child)


CACHES = re.compile(r"past_key_values?\b|cache_params|\bmems\b|past_buckets_states")
"""Arguments and fields with different names in different versions of transformers."""


def test_version_dependent_names_of_transformers_are_in_one_module() -> None:
    for path in FILES:
        if path.name != "transformers_compat.py":
            assert CACHES.findall(path.read_text(encoding="utf-8")) == [], path
            loads = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import)]
            named = {alias.name for node in loads for alias in node.names}
            assert "transformers" not in named, f"{path}: load_transformers() works where docstrings are missing"


ALLOWED_PRIVATE = {
    "_parameters": "of nn.Module",
    "_buffers": "of nn.Module",
    "_modules": "of nn.Module",
    "_version": "of tensors; torch's documentation names it",
    "_forward_hooks": "of nn.Module",
    "_forward_pre_hooks": "of nn.Module",
    "_backward_hooks": "of nn.Module",
    "_non_persistent_buffers_set": "of nn.Module",
    "_replace": "of named tuples",
    "_global_mapping": "of transformers' interfaces",
    "_current_frames": "of sys",
    "_getframe": "of sys",
    "_exit": "of os",
}
"""Private attributes of other libraries that any file may use. The tables of nn.Module have no public names."""
OPERATORS = re.compile(r"(torch\.ops\.)?aten\.", re.IGNORECASE)
_WEIGHT = torch.nn.Parameter(torch.zeros(1))
PRIVATE_IN_TORCH = {
    name
    for x in (_WEIGHT, _WEIGHT.untyped_storage(), torch.nn.Linear(1, 1), torch.optim.Adam([_WEIGHT]), DataLoader([1]))
    for name in dir(x)
    if re.match(r"_[^_]", name)
}
"""Private attributes of torch's objects. The package may define attributes of the same name for its own objects."""


def private_names_of_torch(source: str, own: set[str]) -> Iterator[str]:
    """Return imports of private names and modules of torch, and private attributes not defined in the package.

    Args:
        own: the private names that the package defines. One that torch defines, too, is the package's own only as an
            attribute of ``self`` in a file that defines it.
    """
    tree = ast.parse(source)
    own_here = {f"self.{name}" for name in defined_private_names(tree)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name for name in names if name.partition(".")[0] == "torch" and "._" in name)
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            text = ast.unparse(node)
            is_own = text in own_here if node.attr in PRIVATE_IN_TORCH else node.attr in own
            is_of_torch = text.startswith("torch.") or not (is_own or node.attr in ALLOWED_PRIVATE)
            if is_of_torch and not OPERATORS.match(text):
                yield text


def defined_private_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def test_private_names_of_torch_are_in_one_module() -> None:
    own = {name for path in FILES for name in defined_private_names(parsed(path))}
    found = {name_of(p): sorted(set(private_names_of_torch(p.read_text(encoding="utf-8"), own))) for p in FILES}
    assert found.pop("shardformer.torch_compat")
    assert found.pop("shardformer.integrations.lightning") == ["trainer.fit_loop._data_source"]  # has no public name
    assert found.pop("shardformer.kernels.model_specific_attention") == ["self._reshape"]  # of the attention of BLOOM
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("torch._C._current_graph_task_id() >= 0", ["torch._C", "torch._C._current_graph_task_id"]),
        ("x.untyped_storage()._cdata", ["x.untyped_storage()._cdata"]),
        ("from torch.nn import Module\nself._own\nmodel._forward_hooks\nATEN._to_copy.default", []),
        ("x._base", ["x._base"]),
        ("self._base = 1\nx._base", ["x._base"]),
        ("self._base = 1\nself._base", []),
        ("self._base", ["self._base"]),
    ],
)
def test_private_names_are_detected(code: str, names: list[str]) -> None:
    assert sorted(private_names_of_torch(code, {"_own", "_base"})) == names


def test_forward_hooks_have_one_written_order() -> None:
    """``discovery`` uses hooks of torch on its own copies of a model, which no other feature changes."""
    text = {name_of(path): path.read_text(encoding="utf-8") for path in FILES}
    found = {
        name for name, code in text.items() if re.search(r"\.register_(full_)?(forward|backward)_(pre_)?hook", code)
    }
    assert {name for name in found if not name.startswith("shardformer.discovery.")} == {"shardformer.forward_hooks"}


MAY_BE_SHORT = re.compile(r"(.*/)?__\w+__\.py|training/hooks/\w+\.py|cli/[a-z]\w*\.py|compat\.py|hooks\.py")
"""Package files, hooks, commands, and modules of public names."""


def test_the_package_has_few_files_of_one_concept_each() -> None:
    lines = {path.relative_to(PACKAGE).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert len(lines) <= 230
    assert sum(lines.values()) <= 71_841  # lower this when the package gets smaller
    assert [path for path, count in lines.items() if count < 60 and not MAY_BE_SHORT.fullmatch(path)] == []


def test_files_functions_and_signatures_stay_short() -> None:
    assert {name_of(path): found for path in FILES if (found := list(too_long(path)))} == {}


def too_long(path: Path) -> Iterator[str]:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > 800:
        yield f"{lines} lines"
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if num_lines >= 60:
            yield f"{node.name}: {num_lines} lines"
        names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        num_arguments = len([name for name in names if name not in ("self", "cls")])
        if num_arguments > 12:  # constructors of layers have torch's arguments, and verify those of a comparison
            yield f"{node.name}: {num_arguments} arguments"


def test_policy_dataclasses_have_few_fields() -> None:
    """Dataclasses of policies group related fields into values of their own."""
    for file in ("policies/roles.py", "policies/module_descriptions.py", "pipeline/layer_sequence.py"):
        for node in ast.walk(parsed(PACKAGE / file)):
            if isinstance(node, ast.ClassDef):
                fields = [line for line in node.body if isinstance(line, ast.AnnAssign)]
                assert len(fields) < 10, node.name


def test_family_tables_are_short() -> None:
    for path in sorted((PACKAGE / "policies").glob("*families.py")):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "stack":
                assert (node.end_lineno or node.lineno) - node.lineno < 25, path.name


def test_there_are_no_todo_comments() -> None:
    words = re.compile(r"\b(?:TODO|FIXME|XXX|HACK|NotImplementedError)\b")
    assert [name_of(path) for path in FILES if words.search(path.read_text(encoding="utf-8"))] == []


SHARED = {
    "checkpoint.directory._SAVED": "by the first rank's model, which it alone asks for",
    "kernels.fused_ops._KNOWN_KINDS": "by the class and settings of a norm, which determine the value",
    "launcher.shutdown.STUCK_PROCESSES": "of a process that ends",
    "launcher.shutdown.STACK_LOCATIONS": "of a process that ends",
    "layout.sharding_metadata._TABLES": "read under a lock, and by the rank that asks alone",
    "layout.sharding_metadata._OWNERS": "by the identity of a parameter, which only its own rank reads",
    "mesh.parallel_context._LOGS": "by process group; ranks that are threads have none",
    "mesh.deadlock_detection._OF_PROCESS": "by process id; ranks that are threads have no presence",
    "discovery.user_policy_validation._RESULTS": "findings about classes and configs, made under a lock",
    "discovery.validation._CONTEXT_RESULTS": "findings about classes and configs, made under a lock",
    "discovery.validation._GRID_RESULTS": "findings about classes and configs, made under a lock",
    "public_names.cls.__init__": "set once, when the class is defined",
    "zero.elementwise_trial._RESULTS": "results that depend only on the class of an optimizer and its settings",
    "policies.policy._REGISTERED": "what the user registers for the process",
    "consistency.rank_divergence._SIGNS": "constants, which are equal on all ranks",
    "torch_patches._INSTALLED": "changed under a lock; other libraries are the same for all ranks",
    "torch_patches._BLOCKS": "counted under a lock",
    "verify.small_models.LIBRARIES": "what a library of models registers for the process",
    "mesh.parallel_context._AXES": "each axis has a key of its own, whichever rank it belongs to",
    "training.preemption._REPLACED": "handlers of signals, which a process has once, and its main thread sets",
}
"""Names that change at module level, and why ranks that are threads may share them."""
COLLECTIONS = re.compile(r"(dict|list|set|OrderedDict|defaultdict|Counter|deque|Weak\w+)")


def shared_state(tree: ast.Module) -> Iterator[str]:
    """Return names of shared state: collections that start empty, ``global``, class attributes that methods assign."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and begins_empty(node.value):
            yield from (ast.unparse(t) for t in (node.targets if isinstance(node, ast.Assign) else [node.target]))
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Global):
            yield from inner.names
        elif isinstance(inner, ast.Assign):
            names = map(ast.unparse, inner.targets)
            yield from (name for name in names if re.match(r"(cls|type\(self\)|self\.__class__)\.\w", name))


def begins_empty(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        makes = COLLECTIONS.fullmatch(ast.unparse(value.func).rpartition(".")[2])
        return makes is not None and (makes[0] == "defaultdict" or not (value.args or value.keywords))
    return (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)


def test_module_level_state_is_listed() -> None:
    """Ranks may be threads. State is stored in the model, its optimizer, or the thread."""
    found = {
        f"{name_of(path).removeprefix('shardformer.')}.{name}" for path in FILES for name in shared_state(parsed(path))
    }
    assert found == SHARED.keys()


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("_LIVE: WeakSet[int] = WeakSet()\nA = weakref.WeakKeyDictionary()", ["_LIVE", "A"]),
        ("a, b = {}, 1\nC: dict[int, int] = {}\nD = []\nE = defaultdict(list)", ["C", "D", "E"]),
        ("def f():\n    global x\n    x = 1", ["x"]),
        ("class A:\n    def f(self):\n        type(self).g = 1\n        self.h = {}", ["type(self).g"]),
        ("TABLE = {'a': 1}\nLOCAL = threading.local()", []),
    ],
)
def test_module_level_state_is_detected(code: str, names: list[str]) -> None:
    assert list(shared_state(ast.parse(code))) == names


def import_seconds(statement: str) -> float:
    """Return the CPU seconds of an import after torch, the minimum of two new interpreters."""
    code = f"import time, torch; start = time.process_time(); {statement}; print(time.process_time() - start)"
    command = [sys.executable, "-W", "ignore", "-c", code]
    return min(float(subprocess.check_output(command, text=True, timeout=120)) for _ in range(2))


# public names are loaded lazily, so all of them are requested
ALL_NAMES = "import shardformer; [getattr(shardformer, name) for name in getattr(shardformer, '__all__', ())]"


@pytest.mark.slow
def test_importing_shardformer_takes_less_than_a_second_after_torch() -> None:
    assert import_seconds(ALL_NAMES) < 1.0


@pytest.mark.slow
def test_importing_shardformer_imports_no_slow_libraries() -> None:
    code = f"import sys, torch; before = set(sys.modules); {ALL_NAMES}; "
    code += f"print(sorted((set(sys.modules) - before) & {LATE_ONLY!r}))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120).strip() == "[]"


@pytest.mark.slow
def test_the_command_line_help_does_not_import_torch() -> None:
    code = "import sys, shardformer.cli as cli; cli.build_app(); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120).strip() == "False"


def test_the_oldest_tested_transformers_is_the_lower_bound() -> None:
    root = PACKAGE.parent
    allowed = re.search(r'"transformers>=([\d.]+)"', (root / "pyproject.toml").read_text(encoding="utf-8"))
    tested = re.search(r"^transformers==([\d.]+)$", (root / "constraints-oldest.txt").read_text(encoding="utf-8"), re.M)
    assert allowed is not None and tested is not None and tested[1].startswith(f"{allowed[1]}.")
