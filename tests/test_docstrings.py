"""The examples in the docstrings run and print what they say."""

import doctest
import importlib
import pathlib
import pkgutil
import types
from collections.abc import Iterable, Iterator

import jax.numpy as jnp
import numpy as np
import pytest

import jflash
import jflash.masks
from jflash.masks import Mask

# Packages that a user need not have; a module that imports one is tried where it is installed.
OPTIONAL = {"triton", "jax_triton", "flax", "matplotlib", "optax", "chex"}

# What an example may use without importing it.
NAMES = {name: value for name, value in vars(jflash.masks).items() if isinstance(value, type)}
MASKS = [name for name, value in NAMES.items() if issubclass(value, Mask) and value is not Mask]
NAMES |= {"jflash": jflash, "np": np, "jnp": jnp}


def modules(folders: Iterable[str], prefix: str) -> Iterator[str]:
    """Every module below the folders, found without importing any; to import a `__main__` would run it."""
    for found in pkgutil.iter_modules(folders, prefix):
        if not found.name.endswith(".__main__"):
            yield found.name
        if found.ispkg:
            folder = pathlib.Path(found.module_finder.path) / found.name.rpartition(".")[2]
            yield from modules([str(folder)], found.name + ".")


MODULES = ["jflash", *modules(jflash.__path__, "jflash.")]


def examples(module: types.ModuleType) -> list[doctest.DocTest]:
    """The docstrings of a module that hold examples."""
    return [test for test in doctest.DocTestFinder().find(module, globs=dict(NAMES)) if test.examples]


def failures(module: types.ModuleType) -> str:
    """What the examples of a module got wrong, as doctest reports it."""
    report: list[str] = []
    for test in examples(module):
        doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    return "".join(report)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
    report = failures(module)
    assert not report, report


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_has_an_example(name):
    module = NAMES[name].__module__
    assert f"{module}.{name}" in {test.name for test in examples(importlib.import_module(module))}


def test_a_wrong_example_is_found():
    module = types.ModuleType("wrong")
    module.__doc__ = ">>> print(Causal().draw(2, 2))\n##\n##\n>>> 1 + 1\n2\n"
    assert "Expected:\n    ##\n    ##\nGot:\n    #.\n    ##" in failures(module)


def test_the_modules_are_those_of_the_package():
    assert {"jflash", "jflash.masks", "jflash.masks.patterns", "jflash.api"} <= set(MODULES)
