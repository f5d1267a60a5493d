"""A cache of keys and values, and attention of new queries to it."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, reshard
from jaxtyping import Array, Bool, Float, Int

from jflash.api import flash_attention
from jflash.errors import ArgumentError, DtypeError, ShapeError
from jflash.masks import Causal, KeyRange, Mask
from jflash.masks.arrays import at_least_1, is_int
from jflash.scores import by_position


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of the tokens so far, in S slots for each batch row; each row has a length of its own.

    A pytree: pass it through `jax.jit` with its argument donated, and it is updated in place.

    Without a window, position p is in slot p, and a row that grows past S slots is lost: what `decode_attention` gives
    for it is NaN, since a length that is traced cannot raise. With a window the slots are a ring, position p in slot
    p % S, and rows grow without end.

    Attributes:
      k: keys, (B, S, K, H).
      v: values, (B, S, K, Hv); None where the keys are the values too, as in the absorbed form of MLA.
      length: tokens of each row so far, (B,) int32.
      window: how many tokens before its own position a query sees at most; None for all of them.

    Example:
      >>> from jflash.decode import KVCache, decode_attention
      >>> cache = KVCache.zeros(B=2, S=100, K=4, H=64)
      >>> k, v, q = jnp.ones((3, 2, 1, 4, 64))
      >>> cache = cache.append(k, v)
      >>> decode_attention(q, cache).shape, cache.length.tolist()
      ((2, 1, 4, 64), [1, 1])
    """

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K Hv"] | None
    length: Int[Array, " B"]
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def zeros(
        cls,
        *,
        B: int,
        S: int,
        K: int,
        H: int,
        Hv: int | None = None,
        dtype: Any = jnp.float32,
        window: int | None = None,
        step: int = 1,
        shares_values: bool = False,
    ) -> Self:
        """An empty cache.

        Args:
          B, K, H: batch rows, key/value heads, head dim.
          S: slots, the most tokens that a row has. With a window there are `window + step` of them instead.
          Hv: head dim of the values; None means H.
          dtype: of keys and values.
          window: distance to the first token that a query sees, 0 for itself alone; None means no limit.
          step: the most tokens that are appended at once where there is a window.
          shares_values: the keys are the values.

        Raises:
          ArgumentError: a size is no whole number of at least 1, or a window below 0.
        """
        sizes = {"B": B, "S": S, "K": K, "H": H, "Hv": H if Hv is None else Hv, "step": step}
        B, S, K, H, Hv, step = (at_least_1(name, size) for name, size in sizes.items())
        if window is not None:
            if not is_int(window) or window < 0:
                raise ArgumentError("window", found=repr(window), wanted="a distance of at least 0, or None")
            S = int(window) + step
        values = None if shares_values else jnp.zeros((B, S, K, Hv), dtype)
        return cls(k=jnp.zeros((B, S, K, H), dtype), v=values, length=jnp.zeros((B,), jnp.int32), window=window)

    def positions(self, T: int) -> Int[Array, "B T"]:
        """The positions of the next T tokens of each row."""
        return self.length[:, None] + jnp.arange(T, dtype=jnp.int32)

    def slot_positions(self) -> Int[Array, "B S"]:
        """The position of the token in each slot; of a slot that holds none yet, a number without meaning."""
        S = self.k.shape[1]
        slot = jnp.arange(S, dtype=jnp.int32)
        if self.window is None:
            return jnp.broadcast_to(slot, (self.length.shape[0], S))
        # In a ring the last token of a slot is the one that is there.
        last = self.length[:, None] - 1
        return last - (last - slot) % S

    def append(self, k: Float[Array, "B T K H"], v: Float[Array, "B T K Hv"] | None = None) -> Self:
        """The cache with T more tokens in each row.

        Raises:
          ShapeError, DtypeError: k or v do not fit the cache, which never narrows them.
        """
        return self._with(k, v, first=self.length, count=jnp.full_like(self.length, k.shape[1]))

    def fill(
        self,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K Hv"] | None = None,
        *,
        lengths: Int[Array, " B"] | None = None,
    ) -> Self:
        """The cache with these tokens and no others: what it held is forgotten.

        On a mesh with explicit axes the slots are then split as k and v are.

        Args:
          k, v: tokens from position 0 on. With a window there may be more than slots: the last ones stay.
          lengths: how many of the T tokens each row has, the rest being padding; None means T.

        Raises:
          ShapeError, DtypeError: k or v do not fit the cache.
        """
        T, S = k.shape[1], self.k.shape[1]
        if self.window is None and T > S:
            raise ShapeError("k", found=f"T={T} in shape {k.shape}", wanted=f"at most the S={S} slots of the cache")
        count = jnp.full_like(self.length, T) if lengths is None else jnp.minimum(jnp.asarray(lengths, jnp.int32), T)
        if count.shape != self.length.shape:
            raise ShapeError("lengths", found=f"shape {count.shape}", wanted=f"(B,) = {self.length.shape}")
        empty = self._beside(k, v)
        return empty._with(k, v, first=jnp.zeros_like(empty.length), count=count)

    def mask(self, T: int) -> Mask:
        """What the T last tokens of each row see of the slots: themselves and the tokens before, within the window.

        Raises:
          ShapeError: with a window, T tokens at once take more slots than there are.
        """
        if self.window is None:
            return Causal(offset=self.length - T)
        S = self.k.shape[1]
        if self.window + T > S:
            hint = f"Make the cache with step={T}, or `fill` it with the first tokens."
            raise ShapeError("q", found=f"T={T}", wanted=f"at most {S - self.window} at once", hint=hint)
        # The positions from `oldest` to `own` are an interval of the ring, which may reach over its end.
        own = self.length[:, None] + jnp.arange(-T, 0, dtype=jnp.int32)
        # Before position 0 there is nothing to see: that is so behind the end of a row that was filled with padding.
        first, last = jnp.maximum(own - self.window, 0) % S, jnp.where(own < 0, -1, own % S)
        wraps = (first > last) & (own >= 0)
        upper = KeyRange(jnp.where(wraps, first, 1), jnp.where(wraps, S - 1, 0))
        return KeyRange(jnp.where(wraps, 0, first), last) | upper

    @property
    def is_lost(self) -> Bool[Array, " B"]:
        """Rows that have grown past the slots of a cache without a window."""
        return (self.length > self.k.shape[1]) & (self.window is None)

    def _beside(self, k: Array, v: Array | None) -> Self:
        """The cache, on a mesh with explicit axes, where k and v are; elsewhere XLA chooses."""
        sharding = jax.typeof(k).sharding
        if not sharding.mesh.explicit_axes:
            return self
        rows = NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0]))
        placed = {"k": reshard(self.k, sharding), "length": reshard(self.length, rows)}
        if v is not None and self.v is not None:
            placed["v"] = reshard(self.v, jax.typeof(v).sharding)
        return dataclasses.replace(self, **placed)

    def _with(self, k: Array, v: Array | None, *, first: Array, count: Array) -> Self:
        if (v is None) != (self.v is None):
            wanted = "values" if v is None else "None: in this cache the keys are the values"
            raise ArgumentError("v", found="None" if v is None else "an array", wanted=wanted)
        self._check("k", k, self.k)
        keys, values = _written(self.k, k, first, count, is_ring=self.window is not None), None
        if v is not None:
            self._check("v", v, self.v)
            values = _written(self.v, v, first, count, is_ring=self.window is not None)
        return dataclasses.replace(self, k=keys, v=values, length=first + count)

    def _check(self, name: str, new: Array, slots: Array) -> None:
        B, _, *rest = slots.shape
        if new.ndim != 4 or (new.shape[0], *new.shape[2:]) != (B, *rest):
            wanted = f"(B, T, heads, head dim) with {(B, 'T', *rest)}, as the cache has"
            raise ShapeError(name, found=f"shape {new.shape}", wanted=wanted)
        if new.dtype != slots.dtype:
            hint = "Make the cache with that dtype, or cast on the caller's side."
            raise DtypeError(name, found=f"dtype {new.dtype}", wanted=f"{slots.dtype}, as the cache has", hint=hint)


def decode_attention(
    q: Float[Array, "B T N H"],
    cache: KVCache,
    *,
    softcap: float | None = None,
    alibi_slopes: Float[Array, " N"] | Float[Array, "B N"] | None = None,
    score_fn: Callable[..., Array] | None = None,
    score_args: tuple[Any, ...] = (),
    sinks: Float[Array, " N"] | Float[Array, "B N"] | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Array, "B T N Hv"]:
    """`flash_attention` of the T last tokens of each row to all that they see in the cache, which holds them already.

    Args:
      q: queries of the T tokens that were appended last.
      cache: what `append` or `fill` gave.
      alibi_slopes, score_fn, score_args: as of `flash_attention`, where q and k are the positions of the tokens, in
        whatever slots they are.
      softcap, sinks, scale, backend: as of `flash_attention`.

    Returns:
      (B, T, N, Hv) in the dtype of q; NaN in rows that have grown past the slots of a cache without a window.

    Raises:
      ShapeError, DtypeError, ArgumentError, UnsupportedError: as `flash_attention` and `KVCache.mask`.

    Example:
      >>> from jflash.decode import KVCache, decode_attention
      >>> cache = KVCache.zeros(B=1, S=10, K=2, H=8, window=3, step=2)
      >>> k, v, q = jnp.ones((3, 1, 2, 2, 8))
      >>> decode_attention(q, cache.append(k, v)).shape
      (1, 2, 2, 8)
    """
    values = cache.k if cache.v is None else cache.v
    T = q.shape[1]
    positions = {"q_positions": cache.positions(T) - T, "k_positions": cache.slot_positions()}
    scores = {"alibi_slopes": alibi_slopes, "score_fn": score_fn, "score_args": score_args}
    out = flash_attention(
        q, cache.k, values,
        mask=cache.mask(T), softcap=softcap, sinks=sinks, scale=scale, backend=backend,
        **by_position(q, cache.k, **positions, **scores),
    )  # fmt: skip
    return jnp.where(cache.is_lost[:, None, None, None], jnp.nan, out)


def _written(slots: Array, new: Array, first: Array, count: Array, *, is_ring: bool) -> Array:
    """The slots with `count` tokens of `new` from position `first` on; of more than there are slots the last ones."""
    slot = _slots(first, count, T=new.shape[1], S=slots.shape[1], is_ring=is_ring)

    # One scatter for each row, along which batch and heads stay split over devices.
    def write_row(row: Array, tokens: Array, slot: Array) -> Array:
        return row.at[slot].set(tokens, mode="drop", unique_indices=True)

    return jax.vmap(write_row)(slots, new, slot)


def _slots(first: Array, count: Array, *, T: int, S: int, is_ring: bool) -> Int[Array, "B T"]:
    """Where each token of each row goes, no two to the same; from S on for those that go nowhere."""
    token = jnp.arange(T, dtype=jnp.int32)
    position = first[:, None] + token
    slot = position % S if is_ring else position
    stays = (token < count[:, None]) & (token >= count[:, None] - S) & (slot < S)
    return jnp.where(stays, slot, S + token)
