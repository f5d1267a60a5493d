"""The static part of a pytree of arrays: what of it belongs to the compiled program."""

import dataclasses
from typing import Any, Self

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Structure:
    """All of a pytree but the contents of its arrays: hashable, so that it can be part of a `Problem`."""

    tree: jax.tree_util.PyTreeDef
    arrays: tuple[tuple[tuple[int, ...], np.dtype], ...]

    @classmethod
    def of(cls, value: Any) -> Self:
        leaves, tree = jax.tree.flatten(value)
        return cls(tree, tuple((tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves))

    @property
    def value(self) -> Any:
        """The pytree with `jax.ShapeDtypeStruct` for arrays."""
        return jax.tree.unflatten(self.tree, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.arrays])
