"""Which keys somebody sees. A key that nobody sees may hold anything, NaN too, and a kernel multiplies it by 0."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from jflash.masks.combine import Or
from jflash.masks.mask import Interval, Mask, Value, is_traced, maximum, minimum
from jflash.masks.tile_map import TileMap

_BLOCK = 128


def zero_dead_keys(*arrays: Float[Array, "B S K _"], mask: Mask, T: int, S: int) -> tuple[Float[Array, "B S K _"], ...]:
    """The arrays with 0 at the keys that no query sees, or as they are where there are known to be none of these."""
    live = live_keys(mask, T=T, S=S)
    if not is_traced(live) and live.all():
        return arrays
    return tuple(jnp.where(jnp.asarray(live)[..., None, None], x, 0) for x in arrays)


def live_keys(mask: Mask, *, T: int, S: int) -> Bool[Array, "#B S"]:
    """Whether some query sees each key, for a mask after `bind`; numpy where that is known when tracing.

    Work and memory are in proportion to the tiles that the mask visits, and never T x S; to S where it is enough to
    look at each query and the key of its index.
    """
    if S <= T and mask.is_live_on_diagonal:
        keys = np.arange(S, dtype=np.int32)[None]
        if mask.has_diagonal:
            return keys >= 0
        return mask.evaluate(keys, keys, *_by_token(mask, S))
    if isinstance(mask, Or):  # Who sees a key by one of the masks sees it; of an AND the like does not hold.
        return functools.reduce(operator.or_, (live_keys(part, T=T, S=S) for part in mask.masks))
    if mask.has_spans:
        keys = np.arange(S, dtype=np.int32)[None]
        values = (value.expanded().reshape(-1, 1) for value in mask.values())
        hull = mask.query_span(Interval(keys, keys), *values).hull
        first, last = maximum(hull.first, 0), minimum(hull.last, T - 1)
        return (first <= last) & (keys >= 0)
    if T <= _BLOCK:
        return _live_by_pairs(mask, T, S)
    interval = mask.interval(np.arange(T, dtype=np.int32)[None], *_by_token(mask, T))
    return _live_by_tiles(mask, T, S) if interval is None else _live_by_intervals(interval, S)


def _by_token(mask: Mask, length: int) -> list[Any]:
    """The values of a mask without those per head or per pair, at the first queries and keys: (B or 1, length or 1)."""
    arrays = (value.array for value in mask.values())
    return [x[:, None] if x.ndim == 1 else x[:, :length] for x in arrays]


def _live_by_pairs(mask: Mask, T: int, S: int) -> Bool[Array, "#B S"]:
    """One reduction over the pairs of few queries, as of decoding steps."""
    q, k = np.ix_(np.arange(T, dtype=np.int32), np.arange(S, dtype=np.int32))
    pairs = mask.evaluate(q, k, *(value.expanded() for value in mask.values()))
    return pairs.reshape((1,) * (4 - pairs.ndim) + pairs.shape).any((1, 2))


def _live_by_intervals(interval: Interval, S: int) -> Bool[Array, "#B S"]:
    """A key is seen where a query whose keys begin there or before it sees as far."""
    first, last = jnp.broadcast_arrays(jnp.maximum(interval.first, 0), jnp.minimum(interval.last, S - 1))
    # How far those queries see that begin at each key; those that see nothing begin behind the last.
    tiles = -(-S // _BLOCK)
    rows = np.arange(first.shape[0])[:, None]
    reach = jnp.full((first.shape[0], tiles * _BLOCK), -1, jnp.int32)
    reach = reach.at[rows, jnp.where(first <= last, first, S)].max(last, mode="drop")

    # The largest up to each key, in two steps: `lax.cummax` is dozens of kernels on a GPU (JAX 0.11.2).
    inside = _largest_before(reach.reshape(len(rows), tiles, _BLOCK), _BLOCK, itself=True)
    before = _largest_before(inside[..., -1], tiles, itself=False)
    reach = jnp.maximum(inside, before[..., None]).reshape(reach.shape)[:, :S]
    return reach >= np.arange(S, dtype=np.int32)


def _largest_before(x: Array, length: int, *, itself: bool) -> Array:
    """For each element of the last axis the largest of those before it, or of them and itself; otherwise -1."""
    counts = np.tri(length, k=0 if itself else -1, dtype=bool)
    return jnp.where(counts, x[..., None, :], -1).max(-1, initial=-1)


def _live_by_tiles(mask: Mask, T: int, S: int) -> Bool[Array, "#B S"]:
    """Visit by visit, each tile of keys asks the next tile of queries that it may see."""
    tile_map = TileMap(mask=mask, T=T, S=S, block_q=_BLOCK, block_k=_BLOCK, transpose=True)
    lists = jax.tree.map(jnp.asarray, tile_map.lists())
    values = [_tiles(value, T, S) for value in mask.values()]
    inside = jnp.arange(_BLOCK, dtype=jnp.int32)
    k = (jnp.arange(tile_map.rows, dtype=jnp.int32)[:, None] * _BLOCK + inside)[..., None, :]

    def step(i, live):
        # (B or 1, N or 1, tiles of keys): the i-th tile of queries of each.
        tile = lax.dynamic_index_in_dim(lists.column, i, axis=-1, keepdims=False)
        q = (tile[..., None] * _BLOCK + inside)[..., None]
        pairs = mask.evaluate(q, k, *(_gather(value, tile) for value in values)) & (q < T) & (k < S)
        return live | (pairs.any(-2) & (i < lists.count)[..., None])

    # The first visit stands before the loop, so that the carry has its shape, and in `shard_map` its type.
    live = lax.fori_loop(1, lists.count.max(), step, step(0, False))
    return live.any(1).reshape(live.shape[0], -1)[:, :S]


def _tiles(value: Value, T: int, S: int) -> Array:
    """(B or 1, N or 1, tiles of queries or 1, tiles of keys or 1, _BLOCK or 1, _BLOCK or 1)."""
    array = jnp.asarray(value.expanded())
    for axis, length in ((2, T), (3, S)):
        if array.shape[axis] > 1:
            array = jnp.pad(array, [(0, -length % _BLOCK if axis == a else 0) for a in range(4)])
    B, N, rows, columns = array.shape
    q_block, k_block = (_BLOCK if size > 1 else 1 for size in (rows, columns))
    array = array.reshape(B, N, rows // q_block, q_block, columns // k_block, k_block)
    return array.transpose(0, 1, 2, 4, 3, 5)


def _gather(value: Array, tile: Array) -> Array:
    """The value at each tile of keys and its tile of queries: (B, N, tiles of keys, _BLOCK or 1, _BLOCK or 1)."""
    B, N, rows, columns, *_ = value.shape
    if rows == 1:
        return value[:, :, 0]
    b, n = np.ix_(np.arange(B), np.arange(N))
    column = np.arange(tile.shape[-1]) if columns > 1 else 0
    return value[b[..., None], n[..., None], tile, column]


def every_query_sees_a_key(mask: Mask, *, T: int, S: int) -> bool:
    """Whether it is known when tracing that each query sees some key, for a mask after `bind`."""
    if T <= S and mask.has_diagonal:
        return True
    if isinstance(mask, Or):
        return any(every_query_sees_a_key(part, T=T, S=S) for part in mask.masks)
    if not mask.has_spans or mask.values():
        return False
    queries = np.arange(T, dtype=np.int32)
    hull = mask.key_span(Interval(queries, queries)).hull
    return bool(np.all(np.maximum(hull.first, 0) <= np.minimum(hull.last, S - 1)))


def every_key_is_seen(mask: Mask, *, T: int, S: int) -> bool:
    """Whether it is known when tracing that some query sees each key, for a mask after `bind`, of shapes alone too."""
    if S <= T and mask.has_diagonal:
        return True
    if isinstance(mask, Or):
        return any(every_key_is_seen(part, T=T, S=S) for part in mask.masks)
    return mask.has_spans and not mask.values() and bool(np.all(live_keys(mask, T=T, S=S)))
