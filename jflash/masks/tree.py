"""Trees of tokens: a token sees its ancestors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jflash.errors import ArgumentError, ShapeError
from jflash.masks.arrays import at_batch_and_token, int32, is_int, shown
from jflash.masks.mask import Interval, Mask, Value, is_traced, kind_of, pattern


@pattern
class Tree(Mask):
    """Query q is a node of a tree, and sees itself, its ancestors and the `prefix` keys before the tree.

    As a language model checks many continuations at once (speculative decoding). Key `prefix + i` is node i; what lies
    behind the last node, as in a cache with room left, is not seen.

    Args:
      parents: the parent of each node, which comes before it, or -1; (T,) or (B, T) whole numbers.
      prefix: how many keys come before the tree, a whole number or one per batch row.
      keys: S, where `prefix` is an array; the keys behind the last node are otherwise added when the mask is used.

    Raises:
      ArgumentError: an argument is no whole number, of the wrong shape, or a parent comes after its child.

    Source: tree attention, SpecInfer (arXiv:2305.09781), section 4.

    Example:
      >>> print(Tree(np.array([-1, 0, 0, 1]), prefix=1).draw(4, 5))
      ##...
      ###..
      ##.#.
      ###.#
    """

    # In an order in which the descendants of a node follow it without a gap, the number of each query, and of each key
    # the numbers of itself and its last descendant.
    q_order: Int[Array, "*B T"]
    k_order: Int[Array, "*B S"]
    k_last: Int[Array, "*B S"]

    def __init__(self, parents: Any, *, prefix: Any = 0, keys: int | None = None):
        parents = int32("parents", parents)
        if parents.ndim == 0:
            raise ShapeError("parents", found=f"shape {parents.shape}", wanted="(T,) or (B, T)")
        T = parents.shape[-1]
        if isinstance(parents, np.ndarray) and not ((parents >= -1) & (parents < np.arange(T))).all():
            wanted = "of each node an earlier one, or -1"
            raise ArgumentError("parents", found="a node with a parent that is not before it", wanted=wanted)
        if keys is None:
            if not is_int(prefix):
                raise ArgumentError("keys", found="None with an array for `prefix`", wanted="the number of keys, S")
            keys = int(prefix) + T
        prefix = np.asarray(prefix, np.int32) if is_int(prefix) else int32("prefix", prefix)
        self._set(*_numbers(parents, prefix, keys))

    def _set(self, q_order: Any, k_order: Any, k_last: Any) -> None:
        for name, array in (("q_order", q_order), ("k_order", k_order), ("k_last", k_last)):
            object.__setattr__(self, name, array)

    def values(self) -> tuple[Value, ...]:
        arrays = (self.q_order, "BT"), (self.k_order, "BS"), (self.k_last, "BS")
        return tuple(Value(array, axes[-array.ndim :]) for array, axes in arrays)

    def evaluate(self, q, k, q_order, k_order, k_last):
        return (k_order <= q_order) & (q_order <= k_last)

    def tile_kind(self, queries: Interval, keys: Interval, q: Interval, first: Interval, last: Interval) -> Any:
        full = (first.last <= q.first) & (q.last <= last.first)
        return kind_of(full=full, empty=(q.last < first.first) | (last.last < q.first))

    def bind(self, *, B: int, N: int, T: int, S: int) -> "Tree":
        behind = S - self.k_order.shape[-1]
        if behind < 0:
            found = f"{self.k_order.shape[-1]} keys of prefix and tree"
            raise ShapeError("mask", found=found, wanted=f"at most S={S}")
        bound = object.__new__(Tree)
        bound._set(
            at_batch_and_token("parents", self.q_order, "T", T, B=B),
            *(
                at_batch_and_token("parents", _padded(array, behind, number), "S", S, B=B)
                for array, number in ((self.k_order, 1), (self.k_last, 0))
            ),
        )
        return bound

    def __repr__(self) -> str:
        return f"Tree({shown(self.q_order)}, {shown(self.k_order)})"


def _numbers(parents: Any, prefix: Any, keys: int) -> tuple[Any, Any, Any]:
    """The numbers of the queries, of the keys, and of each key's last descendant."""
    xp = jnp if is_traced(parents, prefix) else np
    T = parents.shape[-1]
    order, last = _depth_first(parents)
    node = np.arange(keys, dtype=np.int32) - prefix[..., None]
    shape = np.broadcast_shapes(node.shape[:-1], order.shape[:-1])
    node, order_of, last_of = (xp.broadcast_to(x, (*shape, x.shape[-1])) for x in (node, order, last))
    inside = xp.clip(node, 0, T - 1)
    # All see the prefix, and nobody what lies behind the tree.
    k_order = xp.where(node < 0, 0, xp.where(node < T, xp.take_along_axis(order_of, inside, -1), 1))
    k_last = xp.where(node < 0, T, xp.where(node < T, xp.take_along_axis(last_of, inside, -1), 0))
    return order, k_order.astype(np.int32), k_last.astype(np.int32)


def _depth_first(parents: Int[Array, "*B T"]) -> tuple[Any, Any]:
    """The number of each node in depth-first order, and that of its last descendant.

    Work in T log T, under numpy as under JAX: each round looks twice as far up.
    """
    xp = jnp if is_traced(parents) else np
    *shape, T = parents.shape
    parents = parents.reshape(-1, T)
    # Node T is the root of all, and its own parent.
    rows = parents.shape[0]
    parent = xp.concatenate([xp.where(parents < 0, T, parents), xp.full((rows, 1), T, np.int32)], 1)
    rounds = T.bit_length()

    # Descendants, themselves included: those at most d above, and those that these reach in as many steps.
    size, far = xp.ones((rows, T + 1), np.int32), parent
    for _ in range(rounds):
        size = size + _sums(xp.where(far == T, 0, size), far)
        far = xp.take_along_axis(far, far, 1)

    # A node's number is one more than its parent's, and the sizes of its earlier siblings.
    by_parent = xp.argsort(parent[:, :T], axis=1, stable=True)
    of_parent, sizes = (xp.take_along_axis(x[:, :T], by_parent, 1) for x in (parent, size))
    before = xp.cumsum(sizes, axis=1) - sizes
    is_first = xp.concatenate([xp.ones((rows, 1), bool), of_parent[:, 1:] != of_parent[:, :-1]], 1)
    start = xp.where(is_first, before, 0)
    start = lax.cummax(start, 1) if xp is jnp else np.maximum.accumulate(start, 1)
    step = 1 + xp.take_along_axis(before - start, xp.argsort(by_parent, axis=1), 1)

    # The sum of the steps of a node and of its ancestors.
    order, far = xp.concatenate([step, xp.zeros((rows, 1), step.dtype)], 1), parent
    for _ in range(rounds):
        order = order + xp.take_along_axis(order, far, 1)
        far = xp.take_along_axis(far, far, 1)
    order, size = (x[:, :T].astype(np.int32).reshape(*shape, T) for x in (order - 1, size))
    return order, order + size - 1


def _sums(values: Any, at: Any) -> Any:
    """In each row, the sum of the values that go to each place."""
    rows, width = values.shape
    places = (at + np.arange(rows, dtype=np.int32)[:, None] * width).reshape(-1)
    if is_traced(values, places):
        return jnp.zeros(rows * width, values.dtype).at[places].add(values.reshape(-1)).reshape(rows, width)
    return np.bincount(places, values.reshape(-1), rows * width).astype(values.dtype).reshape(rows, width)


def _padded(array: Any, behind: int, number: int) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((*array.shape[:-1], array.shape[-1] + behind), array.dtype)
    if not behind:
        return array
    xp = jnp if is_traced(array) else np
    return xp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, behind)], constant_values=number)
