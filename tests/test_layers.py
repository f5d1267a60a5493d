"""Imports inside jflash go one way, and optional packages load late. The table below is the one place that says how.

Every import counts, wherever it stands: inside a function, under `if TYPE_CHECKING`, relative, or by a name given to
`importlib.import_module`.
"""

import ast
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# From the bottom up. A unit is a module or a package with all that is in it. It imports from the layers above its own
# line here, and within itself; the units of one line do not import each other.
# `jflash.backends` and `jflash.parallel` stand for their `__init__.py` alone: what they hold is spread over layers.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("jflash.errors",),
    ("jflash.options", "jflash.structure"),
    ("jflash.hardware", "jflash.masks", "jflash.numerics"),
    ("jflash.scores",),
    ("jflash.problem",),
    ("jflash.backends.protocol", "jflash.tuning.key"),
    ("jflash.tuning.table",),
    ("jflash.backends",),
    (
        "jflash.backends.reference",
        "jflash.backends.xla",
        "jflash.backends.cudnn",
        "jflash.backends.mosaic_gpu",
        "jflash.backends.triton",
    ),
    ("jflash.backends.platforms", "jflash.backends.registry"),
    ("jflash.plan",),
    ("jflash.parallel.partition",),
    ("jflash.parallel",),
    ("jflash.vjp",),
    ("jflash.api",),
    ("jflash.testing",),
    ("jflash.decode", "jflash.parallel.ring", "jflash.tuning"),
    ("jflash.nn",),
    ("jflash",),
    ("jflash.cli",),
)
INIT_ONLY = {"jflash", "jflash.backends", "jflash.parallel"}
HEIGHT = {unit: height for height, units in enumerate(LAYERS) for unit in units}

# The reference is what the others are checked against, so none of them may be built on it. The registry loads it late.
REFERENCE = "jflash.backends.reference"
REGISTRY = "jflash.backends.registry"

# Packages that a user need not have, each with the one module or package that may import it at module level, if any.
OPTIONAL = {
    "triton": "jflash.backends.triton.kernels",
    "jax_triton": None,
    "flax": "jflash.nn",
    "matplotlib": None,
    "optax": None,
    "chex": None,
}


class Import(NamedTuple):
    """One name that a module imports: `target` is dotted, and may end in a name inside a module."""

    target: str
    line: int
    late: bool
    by_string: bool


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def unit_of(module: str) -> str | None:
    """The unit of the table that a module belongs to, or None where the table lacks it."""
    fitting = [unit for unit in HEIGHT if (module == unit if unit in INIT_ONLY else is_within(module, unit))]
    return max(fitting, key=len, default=None)


def imports_of(tree: ast.AST, package: str, *, late: bool = False) -> Iterator[Import]:
    """All imports below a node of a module; `package` is what its relative imports start from."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, late, False)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, late, False)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield Import(node.args[0].value, node.lineno, late, True)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "jax._src":
            yield Import("jax._src", node.lineno, late, False)
        in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports_of(node, package, late=late or in_function)


def resolve(target: str, modules: set[str]) -> str:
    """The module that an import loads: `jflash.masks.Causal` is a name in `jflash.masks`."""
    while target not in modules and "." in target:
        target = target.rpartition(".")[0]
    return target


def violations(module: str, source: str, *, is_package: bool, modules: set[str]) -> list[str]:
    """What is wrong with the imports of one module, a line each."""
    unit = unit_of(module)
    if unit is None:
        return [f"{module} is in no layer: add it to LAYERS in tests/test_layers.py, below all that it imports"]
    found = []
    package = module if is_package else module.rpartition(".")[0]
    for target, line, late, by_string in imports_of(ast.parse(source), package):
        where = f"{module}, line {line}"
        if is_within(target, "jax._src"):
            found.append(f"{where}: imports jax._src, which may change in any release of JAX")
        optional = next((name for name in OPTIONAL if is_within(target, name)), None)
        if optional and not late:
            home = OPTIONAL[optional]
            if home is None or not is_within(module, home):
                found.append(f"{where}: imports {optional} at module level; it is optional, import it where it is used")
        if not is_within(target, "jflash"):
            continue
        loaded = resolve(target, modules)
        target_unit = unit_of(loaded)
        if target_unit is None:
            found.append(f"{where}: imports {loaded}, which is in no layer of tests/test_layers.py")
        elif target_unit == REFERENCE and unit != REFERENCE and not (by_string and module == REGISTRY):
            found.append(f"{where}: imports {REFERENCE}, which only the registry loads")
        elif target_unit != unit and HEIGHT[target_unit] >= HEIGHT[unit]:
            found.append(f"{where}: {unit} imports {loaded}, which is not in a layer below it")
    return found


def module_sources() -> dict[str, pathlib.Path]:
    """Every module of the package, by its dotted name."""
    paths = {}
    for path in sorted((ROOT / "jflash").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


MODULES = module_sources()


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_from_layers_below(module):
    path = MODULES[module]
    is_package = path.name == "__init__.py"
    found = violations(module, path.read_text("utf-8"), is_package=is_package, modules=set(MODULES))
    assert not found, "\n".join(found)


def door_violations(source: str) -> list[str]:
    """What `jflash/__init__.py` holds besides its docstring, `__version__` and `from jflash.x import y as y`."""
    found = []
    docstring, *statements = ast.parse(source).body
    if not (isinstance(docstring, ast.Expr) and isinstance(getattr(docstring.value, "value", None), str)):
        found.append("line 1: no docstring")
        statements.insert(0, docstring)
    for statement in statements:
        match statement:
            case ast.ImportFrom(level=0, module=str(source_module), names=names):
                plain = is_within(source_module, "jflash") and all(alias.asname == alias.name for alias in names)
            case ast.Assign(targets=[ast.Name(id="__version__")], value=ast.Constant(value=str())):
                plain = True
            case _:
                plain = False
        if not plain:
            found.append(f"line {statement.lineno}: `{ast.unparse(statement)}`")
    return found


def test_the_door_only_re_exports():
    found = door_violations((ROOT / "jflash" / "__init__.py").read_text("utf-8"))
    assert not found, "jflash/__init__.py holds more than re-exports:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""Doc."""\nimport jax',
        '"""Doc."""\nfrom jflash.api import flash_attention',
        '"""Doc."""\nfrom jflash.api import flash_attention as attention',
        '"""Doc."""\nfrom .api import flash_attention as flash_attention',
        '"""Doc."""\nfrom jax import jit as jit',
        '"""Doc."""\n__version__ = ".".join("010")',
        '"""Doc."""\n__all__ = ["flash_attention"]',
        "from jflash.api import flash_attention as flash_attention",
    ],
)
def test_the_door_check_finds(source):
    assert len(door_violations(source)) == 1


def test_the_door_check_passes_what_is_allowed():
    source = (
        '"""Doc."""\nfrom jflash import masks as masks\nfrom jflash.api import explain as explain\n__version__ = "1"'
    )
    assert not door_violations(source)


# What the checker is tried on: modules that stand in for the package, whatever is in the tree.
SOME_MODULES = {unit for units in LAYERS for unit in units} | {
    "jflash.masks.tile_map",
    "jflash.backends.xla.attention",
    "jflash.backends.triton.kernels",
}


def check(module: str, source: str, *, is_package: bool = False) -> list[str]:
    return violations(module, source, is_package=is_package, modules=SOME_MODULES)


@pytest.mark.parametrize(
    ("module", "source", "wanted"),
    [
        # Upwards, in each of the ways to write an import.
        ("jflash.plan", "from jflash.api import flash_attention", "jflash.plan imports jflash.api"),
        ("jflash.plan", "import jflash.api", "jflash.plan imports jflash.api"),
        ("jflash.plan", "from jflash import api", "jflash.plan imports jflash.api"),
        ("jflash.plan", "from . import api", "jflash.plan imports jflash.api"),
        ("jflash.plan", "from .api import flash_attention", "jflash.plan imports jflash.api"),
        ("jflash.backends.xla.attention", "from ...api import explain", "jflash.backends.xla imports jflash.api"),
        ("jflash.plan", "def f():\n    import jflash.api", "line 2: jflash.plan imports jflash.api"),
        ("jflash.plan", "if TYPE_CHECKING:\n    import jflash.api", "line 2: jflash.plan imports jflash.api"),
        ("jflash.plan", "importlib.import_module('jflash.api')", "jflash.plan imports jflash.api"),
        ("jflash.masks.tile_map", "from jflash import flash_attention", "jflash.masks imports jflash, which"),
        # Sideways.
        ("jflash.masks.tile_map", "import jflash.numerics", "jflash.masks imports jflash.numerics"),
        ("jflash.hardware", "import jflash.masks", "jflash.hardware imports jflash.masks"),
        ("jflash.backends.reference", "import jflash.backends.xla", "reference imports jflash.backends.xla"),
        ("jflash.backends.triton.kernels", "from ..xla import attention", "triton imports jflash.backends.xla"),
        ("jflash.tuning", "import jflash.decode", "jflash.tuning imports jflash.decode"),
        # The reference, from above it too; and by string from elsewhere than the registry.
        ("jflash.testing", "import jflash.backends.reference", "which only the registry loads"),
        ("jflash.backends.registry", "from jflash.backends import reference", "which only the registry loads"),
        ("jflash.cli", "import_module('jflash.backends.reference')", "which only the registry loads"),
        # Modules that the table lacks.
        ("jflash.novelty", "", "jflash.novelty is in no layer: add it to LAYERS in tests/test_layers.py"),
        ("jflash.backends.tpu", "", "jflash.backends.tpu is in no layer"),
        ("jflash.parallel.ulysses", "", "jflash.parallel.ulysses is in no layer"),
        # Packages that may be absent or may change.
        ("jflash.cli", "import matplotlib.pyplot as plt", "imports matplotlib at module level"),
        ("jflash.cli", "try:\n    import optax\nexcept ImportError:\n    pass", "imports optax at module level"),
        ("jflash.cli", "class A:\n    from chex import dataclass", "imports chex at module level"),
        ("jflash.api", "from flax import nnx", "imports flax at module level"),
        ("jflash.backends.triton", "import triton", "imports triton at module level"),
        ("jflash.backends.triton.kernels", "import jax_triton", "imports jax_triton at module level"),
        ("jflash.vjp", "from jax._src import core", "imports jax._src"),
        ("jflash.vjp", "from jax import _src", "imports jax._src"),
        ("jflash.vjp", "def f():\n    import jax._src.core", "imports jax._src"),
        ("jflash.vjp", "tracer = jax._src.core.Tracer", "imports jax._src"),
    ],
)
def test_the_checker_finds(module, source, wanted):
    (found,) = check(module, source)
    assert wanted in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jflash.options", "from jflash.errors import ArgumentError"),
        ("jflash.numerics", "from jflash.options import current_options"),
        ("jflash.masks.tile_map", "from jflash.masks import Causal"),
        ("jflash.backends.xla.attention", "from jflash.numerics.logits import scaled"),
        ("jflash.backends.xla.attention", "from jflash.backends import protocol"),
        ("jflash.backends.registry", "import_module('jflash.backends.reference')"),
        ("jflash.backends.registry", "def load():\n    from jflash.backends.xla import BACKEND"),
        ("jflash.api", "from jflash.parallel.partition import partitioned"),
        ("jflash.testing", "from jflash.numerics import precision"),
        ("jflash.nn", "from flax import nnx\nfrom jflash.decode import KVCache"),
        ("jflash.backends.triton.kernels", "import triton\nimport triton.language as tl"),
        ("jflash.cli", "def plot():\n    import matplotlib.pyplot as plt"),
        ("jflash.cli", "from jflash import __version__"),
        ("jflash.cli", "import jaxtyping, flaxen"),
    ],
)
def test_the_checker_passes(module, source):
    assert not check(module, source)


def test_relative_imports_of_a_package_start_from_itself():
    assert not check("jflash.masks", "from .tile_map import TileMap", is_package=True)
    (found,) = check("jflash.masks", "from .. import api", is_package=True)
    assert "jflash.masks imports jflash.api" in found
