"""The blockwise forward pass and its derivative.

Forward (FlashAttention-2, arXiv:2307.08691, algorithm 1): for each block of queries, a scan over the blocks of keys
that the mask lets it see carries (m, l, acc).

Derivative. With p = exp(s - lse), the tangent of the result is a sum over keys without any order among them,

    d_lse = sum p · ds            d_out = sum (p · ds) v + sum p · dv - out · d_lse

so it needs q, k, v, out and lse and nothing else of the forward pass. Of sinks it is that of a step after this one, on
the lse of the keys alone: with w the share of the keys, `share_of_keys`, and total the lse with the sink in it,

    d_out = w (sum (p · ds) v + sum p · dv) - out · d_total

With dropout some p are 0 and the others larger wherever they weigh values, and in no other place.

The tangent is stated once, as a JVP rule: JAX transposes it to the backward pass of algorithm 2 there, and since the
rule is itself plain JAX, differentiates it again as often as asked. `jax.checkpoint` around a row and around a tile
keeps p from being stored.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from jflash.backends.protocol import Operands, name_residuals
from jflash.backends.xla.tiles import XlaTiles
from jflash.masks.mask import Mask, TileKind
from jflash.masks.tile_map import TileMap, lists_of, union
from jflash.numerics.logits import logits
from jflash.numerics.online_softmax import (
    Attended,
    Carry,
    add_sink,
    attend_to,
    empty,
    finish,
    finite,
    merge,
    share_of_keys,
)
from jflash.numerics.precision import compute_dtype, matmul_precision
from jflash.numerics.varying import like
from jflash.problem import Problem
from jflash.scores import Dropout, ScoreFunction, at_pairs


class Arrays(NamedTuple):
    """What a derivative may be asked of, or tangents of that.

    Attributes:
      q, k, v, bias, sinks: of the operands.
      args: the floating point arrays of the score functions, one after the other.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None
    sinks: Array | None
    args: tuple[Array, ...]


class Blocks(NamedTuple):
    """Arrays cut into blocks, of a whole problem, of one row of tiles, or of one tile.

    Axes of the whole: b batch, k key/value head, g query head of its group, h and d head dims.

    Attributes:
      q: (rows, b, k, g, block_q, h).
      k, v: (columns, b, k, block_k, h or d).
      bias: (rows, columns, b, k, g, block_q, block_k), each axis possibly 1; or None.
      args: of the score functions, not cut.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None
    args: tuple[Array, ...]


class Pairs(NamedTuple):
    """The pairs of one tile.

    Attributes:
      q, k: (block_q, 1) and (block_k,), which queries and keys.
      allowed: which of the pairs attend, (b, k, g, block_q, block_k), the first three possibly 1; None on FULL tiles.
    """

    q: Array
    k: Array
    allowed: Bool[Array, "..."] | None


def attend(problem: Problem, tiles: XlaTiles, operands: Operands) -> Attended:
    """Attention of one problem; see the top of this module."""
    q, k, v, _, mask = operands
    args, functions = _take_floats(operands.functions)
    arrays = Arrays(q, k, v, operands.bias, operands.sinks, args)
    out, lse = name_residuals(_attend(problem, tiles, (mask, functions, operands.dropout), arrays))
    if operands.sinks is not None:
        lse = add_sink(lse, operands.sinks[..., None])
    return Attended(out.astype(problem.out_dtype), lse)


def _out_dtype(problem: Problem, arrays: Arrays) -> np.dtype:
    """In which dtype the derivative has out.

    Where there are terms with derivatives, it is the one computed in: see `Problem.out_dtype`. Here whoever asks for
    them is not known.
    """
    has_terms = bool(arrays.args) or arrays.bias is not None or arrays.sinks is not None
    return compute_dtype(problem.dtype) if has_terms else problem.dtype


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _attend(
    problem: Problem,
    tiles: XlaTiles,
    fixed: tuple[Mask, tuple[ScoreFunction, ...], Dropout | None],
    arrays: Arrays,
) -> Attended:
    """Out, and the lse of the keys alone, without the sinks."""
    grid = _Grid(problem, tiles, _out_dtype(problem, arrays), *fixed)
    sink = grid.split_sinks(arrays.sinks)

    def row(i: Array, sides: tuple[Blocks], _) -> tuple[Array, Array]:
        def column(carry: Carry, pairs: Pairs, block: Blocks) -> Carry:
            s, value = grid.logits(pairs, block)
            return merge(carry, attend_to(s, lambda p: grid.weigh(pairs, p, value)))

        rows = sides[0].q.shape[:-1]
        out, lse = finish(grid.fold(column, empty(rows, problem.Hv, grid.dtype), i, sides))
        return out if sink is None else out * share_of_keys(lse, sink)[..., None], lse

    return grid.join(*grid.map_rows(row, (grid.split(arrays),)))


@_attend.defjvp
def _attend_jvp(problem: Problem, tiles: XlaTiles, primals: tuple, tangents: tuple) -> tuple[Attended, Attended]:
    fixed, arrays = primals
    _, array_tangents = tangents
    # Named here too: what the derivative uses must be the value that a policy of jax.checkpoint saves.
    attended = name_residuals(_attend(problem, tiles, fixed, arrays))
    grid = _Grid(problem, tiles, _out_dtype(problem, arrays), *fixed)
    sink, d_sink = grid.split_sinks(arrays.sinks), grid.split_sinks(array_tangents.sinks)

    def row(i: Array, sides: tuple[Blocks, Blocks], result: tuple[Array, Array]) -> tuple[Array, Array]:
        out, lse = result
        shift = finite(lse)[..., None]

        def column(sums: tuple[Array, Array], pairs: Pairs, block: Blocks, tangent: Blocks) -> tuple[Array, Array]:
            (s, value), (ds, d_value) = jax.jvp(functools.partial(grid.logits, pairs), (block,), (tangent,))
            p = jnp.exp(s - shift)
            d_lse, d_acc = sums
            return d_lse + (p * ds).sum(-1), d_acc + grid.weigh(pairs, p * ds, value) + grid.weigh(pairs, p, d_value)

        d_lse, d_acc = grid.fold(column, (jnp.zeros_like(lse), jnp.zeros_like(out)), i, sides)
        d_total = d_lse
        if sink is not None:
            d_acc = d_acc * share_of_keys(lse, sink)[..., None]
            sink_of_rows, d_sink_of_rows = (jnp.broadcast_to(x, lse.shape) for x in (sink, d_sink))
            _, d_total = jax.jvp(add_sink, (lse, sink_of_rows), (d_lse, d_sink_of_rows))
        dead = lse == -jnp.inf
        d_out = jnp.where(dead[..., None], 0, d_acc - out * d_total[..., None])
        return d_out, jnp.where(dead, 0, d_lse)

    sides = grid.split(arrays), grid.split(array_tangents)
    return attended, grid.join(*grid.map_rows(row, sides, grid.split_result(attended)))


def _take_floats(functions: tuple[ScoreFunction, ...]) -> tuple[tuple[Array, ...], tuple[ScoreFunction, ...]]:
    """The floating point arrays of the functions, and the functions with None in their places."""
    is_float = [[jnp.issubdtype(array.dtype, jnp.floating) for array in function.arrays] for function in functions]
    args = tuple(
        array for function, own in zip(functions, is_float) for array, taken in zip(function.arrays, own) if taken
    )
    rest = (
        dataclasses.replace(
            function, arrays=tuple(None if taken else array for array, taken in zip(function.arrays, own))
        )
        for function, own in zip(functions, is_float)
    )
    return args, tuple(rest)


def _put_floats(functions: tuple[ScoreFunction, ...], args: tuple[Array, ...]) -> Iterator[ScoreFunction]:
    """The functions with their floating point arrays; the opposite of `_take_floats`."""
    remaining = iter(args)
    for function in functions:
        arrays = tuple(next(remaining) if array is None else array for array in function.arrays)
        yield dataclasses.replace(function, arrays=arrays)


class _Grid:
    """The tiles of one problem: how arrays are cut into them, and how a function is carried over the visited ones."""

    def __init__(
        self,
        problem: Problem,
        tiles: XlaTiles,
        out_dtype: np.dtype,
        mask: Mask,
        functions: tuple[ScoreFunction, ...],
        dropout: Dropout | None,
    ):
        self.dtype, self._out_dtype = compute_dtype(problem.dtype), out_dtype
        self._problem, self._tiles, self._mask, self._functions = problem, tiles, mask, functions
        self._dropout = dropout
        # P has more than 16 bits: what TF32 leaves of out is too little where it is wanted in float32.
        self._einsum = functools.partial(jnp.einsum, precision=matmul_precision(out_dtype))

        tile_map = TileMap(mask=mask, T=problem.T, S=problem.S, block_q=tiles.block_q, block_k=tiles.block_k)
        self._rows, self._columns = tile_map.rows, tile_map.columns
        self._mask_values = [self._split_pairs(value.expanded()) for value in mask.values()]
        kinds = union(tile_map.kinds())
        self._possible_kinds = tuple(TileKind)
        self._column, self._kind, self._in_order = None, kinds, True
        if isinstance(kinds, np.ndarray):
            # Known when tracing: leave out the columns beyond the longest row, and the branches that no tile takes.
            lists = lists_of(kinds)
            longest = max(1, int(lists.count.max()))
            if longest < self._columns:
                self._column, self._kind, self._in_order = lists.column[:, :longest], lists.kind[:, :longest], False
            self._possible_kinds = tuple(TileKind(kind) for kind in np.unique(self._kind))
        else:
            self._kind = _shared_by_vmap(kinds)

    # Cutting and joining ----------------------------------------------------------------------------------------------

    def split(self, arrays: Arrays) -> Blocks:
        """Cuts operands, or tangents of operands, into blocks of the dtype computed in."""
        return Blocks(
            q=self._split_rows(arrays.q.astype(self.dtype)),
            k=self._split_columns(arrays.k.astype(self.dtype)),
            v=self._split_columns(arrays.v.astype(self.dtype)),
            bias=None if arrays.bias is None else self._split_bias(arrays.bias),
            args=arrays.args,
        )

    def split_sinks(self, sinks: Array | None) -> Array | None:
        """Sinks, or tangents of sinks, against the rows of queries (b, k, g, block_q)."""
        return None if sinks is None else self._by_head(sinks)[..., None]

    def split_result(self, attended: Attended) -> tuple[Array, Array]:
        """Cuts out and lse into the blocks of the rows: (rows, b, k, g, block_q, d) and the same without d."""
        lse = self._split_rows(attended.lse.swapaxes(1, 2)[..., None])[..., 0]
        return self._split_rows(attended.out.astype(self.dtype)), lse

    def join(self, out: Array, lse: Array) -> Attended:
        """Puts the blocks of the rows together; the opposite of `split_result`."""
        problem = self._problem
        # (rows, b, k, g, t, d) to (b, rows, t, k, g, d): the rows of a batch row one after the other.
        out = out.transpose(1, 0, 4, 2, 3, 5).reshape(problem.B, -1, problem.N, problem.Hv)[:, : problem.T]
        lse = lse.transpose(1, 2, 3, 0, 4).reshape(problem.B, problem.N, -1)[..., : problem.T]
        return Attended(out.astype(self._out_dtype), lse)

    def _split_rows(self, x: Float[Array, "B T N d"]) -> Float[Array, "rows B K G block_q d"]:
        problem = self._problem
        x = _pad(x, 1, self._rows * self._tiles.block_q)
        x = x.reshape(problem.B, self._rows, self._tiles.block_q, problem.K, problem.group, x.shape[-1])
        return x.transpose(1, 0, 3, 4, 2, 5)

    def _split_columns(self, x: Float[Array, "B S K d"]) -> Float[Array, "columns B K block_k d"]:
        problem = self._problem
        x = _pad(x, 1, self._columns * self._tiles.block_k)
        x = x.reshape(problem.B, self._columns, self._tiles.block_k, problem.K, x.shape[-1])
        return x.transpose(1, 0, 3, 2, 4)

    def _split_bias(self, bias: Array) -> Array:
        if 1 in bias.shape[2:]:
            # Its cotangent is summed over rows or columns: in the dtype computed in, not in a narrow one of the bias.
            bias = bias.astype(self.dtype)
        return self._split_pairs(bias)

    def _split_pairs(self, x: Array) -> Array:
        """Cuts what broadcasts to (B, N, T, S) into (rows, columns, b, k, g, block_q, block_k), each possibly 1."""
        problem, tiles = self._problem, self._tiles
        B, N, T, S = x.shape
        rows, block_q = (self._rows, tiles.block_q) if T > 1 else (1, 1)
        columns, block_k = (self._columns, tiles.block_k) if S > 1 else (1, 1)
        K, group = (problem.K, problem.group) if N > 1 else (1, 1)
        x = _pad(_pad(x, 2, rows * block_q), 3, columns * block_k)
        x = x.reshape(B, K, group, rows, block_q, columns, block_k)
        return x.transpose(3, 5, 0, 1, 2, 4, 6)

    def _by_head(self, x: Array) -> Array:
        """(B, N, ...) to (b, k, g, ...), with each axis possibly 1."""
        K, group = (self._problem.K, self._problem.group) if x.shape[1] > 1 else (1, 1)
        return x.reshape(x.shape[0], K, group, *x.shape[2:])

    def _place(self, pairs: Pairs, x: Array, axes: str) -> Array:
        """What an array by axes has at pairs, against a tile (b, k, g, block_q, block_k), with each axis possibly 1."""
        by_head = self._by_head(x if axes.startswith("BN") else x[:, None])
        return at_pairs(by_head, axes.lstrip("BN"), q=pairs.q, k=pairs.k[None], S=self._problem.S)

    # Over rows and columns --------------------------------------------------------------------------------------------

    def map_rows(self, function: Callable, sides: tuple[Blocks, ...], per_row: Any = ()) -> Any:
        """Stacks `function(i, blocks of row i of each side, per_row[i])` over the rows of tiles."""
        by_row = [side.bias is not None and side.bias.shape[0] == self._rows for side in sides]

        def row(xs):
            i, q_blocks, biases, own = xs
            blocks = tuple(
                side._replace(q=q, bias=bias if by_row_ else _first(side.bias))
                for side, q, bias, by_row_ in zip(sides, q_blocks, biases, by_row)
            )
            return function(i, blocks, own)

        q_blocks = tuple(side.q for side in sides)
        biases = tuple(side.bias if by_row_ else None for side, by_row_ in zip(sides, by_row))
        index = jnp.arange(self._rows, dtype=jnp.int32)
        return lax.map(jax.checkpoint(row, prevent_cse=False), (index, q_blocks, biases, per_row))

    def fold(self, function: Callable, init: Any, i: Array, sides: tuple[Blocks, ...]) -> Any:
        """Carries `function(carry, pairs, *blocks of a tile)` over the tiles that row i visits."""
        by_column = [side.bias is not None and side.bias.shape[0] == self._columns for side in sides]
        columns = [(side.k, side.v, side.bias if by_column_ else None) for side, by_column_ in zip(sides, by_column)]
        column = jnp.arange(self._columns, dtype=jnp.int32)
        if not self._in_order:
            column = jnp.asarray(self._column)[i]
            columns = jax.tree.map(lambda blocks: blocks[column], columns)

        def step(carry, xs):
            j, kind, blocks = xs
            tile = [
                Blocks(side.q, k, v, bias if by_column_ else _first(side.bias), side.args)
                for side, (k, v, bias), by_column_ in zip(sides, blocks, by_column)
            ]
            branches = {
                TileKind.EMPTY: lambda carry: carry,
                TileKind.PARTIAL: lambda carry: function(carry, self._pairs(i, j, is_full=False), *tile),
                TileKind.FULL: lambda carry: function(carry, self._pairs(i, j, is_full=True), *tile),
            }
            possible = [branches[kind] for kind in self._possible_kinds]
            which = jnp.searchsorted(jnp.asarray(self._possible_kinds, jnp.int8), kind)
            return lax.switch(which, possible, carry), None

        init = like(init, (sides, self._mask, self._functions, self._dropout))
        kinds = jnp.asarray(self._kind)[i]
        carry, _ = lax.scan(jax.checkpoint(step, prevent_cse=False), init, (column, kinds, columns))
        return carry

    # On one tile ------------------------------------------------------------------------------------------------------

    def logits(self, pairs: Pairs, tile: Blocks) -> tuple[Array, Array]:
        """The logits of a tile, (b, k, g, block_q, block_k), and its values."""
        q, k, v, bias, args = tile
        allowed = pairs.allowed
        if allowed is not None:
            # Whoever sees nothing in this tile may hold anything, NaN too: 0 times that must not reach a sum.
            q = jnp.where(allowed.any(4)[..., None], q, 0)
            live_key = allowed.any((2, 3))[..., None]
            k, v = jnp.where(live_key, k, 0), jnp.where(live_key, v, 0)
        qk = self._einsum("bkgth,bksh->bkgts", q, k)
        bias = None if bias is None else bias.astype(self.dtype)
        functions = tuple(_put_floats(self._functions, args))
        place = functools.partial(self._place, pairs)

        def steps(s: Array, counts: Array | None) -> Array:
            for function in functions:
                s = function.apply(s, pairs.q, pairs.k, allowed=counts, place=place)
            return s

        problem = self._problem
        s = logits(
            qk, scale=problem.scale, bias=bias, cap=problem.softcap, steps=steps if functions else None, allowed=allowed
        )
        return s, v

    def weigh(self, pairs: Pairs, p: Array, v: Array) -> Array:
        """The sum of values of a tile, weighted for each query, after dropout."""
        if self._dropout is not None:
            p = self._dropout.apply(p, pairs.q, pairs.k, place=functools.partial(self._place, pairs))
        return self._einsum("bkgts,bksd->bkgtd", p, v)

    def _pairs(self, i: Array, j: Array, *, is_full: bool) -> Pairs:
        """The pairs of tile (i, j)."""
        tiles, problem = self._tiles, self._problem
        t = (i * tiles.block_q + jnp.arange(tiles.block_q, dtype=jnp.int32))[:, None]
        s = j * tiles.block_k + jnp.arange(tiles.block_k, dtype=jnp.int32)
        if is_full:
            return Pairs(t, s, None)
        values = [_at(_at(value, i), j) for value in self._mask_values]
        allowed = self._mask.evaluate(t, s, *values) & (t < problem.T) & (s < problem.S)
        return Pairs(t, s, allowed.reshape((1,) * (5 - allowed.ndim) + allowed.shape))


@jax.custom_batching.custom_vmap
def _shared_by_vmap(kinds: Array) -> Array:
    """The kinds themselves; under `jax.vmap` their union, so that a mapped call still skips the tiles that none visits.

    A kind that differs along the mapped axis would make `lax.switch` run every branch, and JAX cannot transpose that
    (0.11.2 and 0.12.0: "Transpose rule for 'stop_gradient' not implemented").
    """
    return kinds


@_shared_by_vmap.def_vmap
def _union_over_mapped_axis(size: int, is_mapped: list[bool], kinds: Array) -> tuple[Array, bool]:
    return _shared_by_vmap(union(kinds, axes=(0,))), False


def _at(x: Array, i: Array) -> Array:
    """Element i of the first axis, or the only one where it has size 1."""
    return lax.dynamic_index_in_dim(x, jnp.minimum(i, x.shape[0] - 1), keepdims=False)


def _first(x: Array | None) -> Array | None:
    return None if x is None else x[0]


def _pad(x: Array, axis: int, size: int) -> Array:
    if x.shape[axis] == size:
        return x
    return jnp.pad(x, [(0, size - x.shape[axis] if position == axis else 0) for position in range(x.ndim)])
