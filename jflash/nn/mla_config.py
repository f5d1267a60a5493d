"""`MLAConfig`: multi-head latent attention without its weights, and what it computes between its projections."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jflash.api import flash_attention
from jflash.decode import KVCache, decode_attention
from jflash.errors import ArgumentError
from jflash.masks import Causal, Lengths, Mask
from jflash.masks.arrays import at_least_1
from jflash.nn.config import LECUN_NORMAL
from jflash.nn.rope import RoPE
from jflash.scores import dropout_rate_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """A layer of multi-head latent attention without its weights; the sizes given here are those of DeepSeek-V2.

    Args:
      num_heads: N.
      head_dim: of the part of queries and keys that knows no position, H.
      rope_dim: of the part that does, which all heads of the keys share; it is rotated by `rope`. R.
      value_head_dim: Hv.
      latent_dim: of the vector that keys and values come from, L.
      query_latent_dim: of the vector that queries come from; None for none, as in DeepSeek-V2-Lite.
      scale: of the logits; None means 1 / sqrt(head_dim + rope_dim).
      rope, dropout_rate, dtype, param_dtype, kernel_init, logical_axes, backend: as of `AttentionConfig`; the axes of
        the latent vectors are named "latent" and "query_latent".

    Raises:
      ArgumentError: a size is no whole number of at least 1, rope_dim is odd, or a rate is none.
    """

    num_heads: int
    head_dim: int = 128
    rope_dim: int = 64
    value_head_dim: int = 128
    latent_dim: int = 512
    query_latent_dim: int | None = None
    rope: RoPE = dataclasses.field(default_factory=RoPE)
    scale: float | None = None
    dropout_rate: float = 0.0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Array] = LECUN_NORMAL
    logical_axes: bool = False
    backend: str = "auto"

    causal: ClassVar[bool] = True

    def __post_init__(self):
        for name in ("num_heads", "head_dim", "rope_dim", "value_head_dim", "latent_dim", "query_latent_dim"):
            if (size := getattr(self, name)) is not None:
                at_least_1(name, size)
        if self.rope_dim % 2:
            raise ArgumentError("rope_dim", found=repr(self.rope_dim), wanted="an even number: elements turn in pairs")
        if self.scale is None:
            object.__setattr__(self, "scale", (self.head_dim + self.rope_dim) ** -0.5)
        dropout_rate_of(self.dropout_rate)

    @property
    def projections(self) -> dict[str, tuple[Any, Any, tuple[str, ...]]]:
        """Of each projection but those from and to the tokens' own features: sizes in, sizes out, names of axes.

        None stands for the features of the tokens.
        """
        N, query, heads = self.num_heads, self.query_latent_dim, ("heads", "head_dim")
        return {
            **({"query_down": (None, query, ("embed", "query_latent"))} if query else {}),
            "query": (query, (N, self.head_dim + self.rope_dim), ("query_latent" if query else "embed", *heads)),
            "latent": (None, self.latent_dim, ("embed", "latent")),
            "key_rope": (None, self.rope_dim, ("embed", "head_dim")),
            "key_up": (self.latent_dim, (N, self.head_dim), ("latent", *heads)),
            "value_up": (self.latent_dim, (N, self.value_head_dim), ("latent", *heads)),
            "out": ((N, self.value_head_dim), None, (*heads, "embed")),
        }

    def empty_cache(self, *, B: int, S: int, step: int = 1, dtype: Any = None) -> KVCache:
        """An empty cache of `latent_dim + rope_dim` numbers for each token, which are its key and its value.

        Args:
          B, S, step: as of `KVCache.zeros`.
          dtype: as of `AttentionConfig.empty_cache`.
        """
        dtype = self.dtype if dtype is None else dtype
        dtype = self.param_dtype if dtype is None else dtype
        sizes = {"B": B, "S": S, "K": 1, "H": self.latent_dim + self.rope_dim, "step": step}
        return KVCache.zeros(**sizes, dtype=dtype, shares_values=True)

    def attend(
        self,
        q: Float[Array, "B T N H+R"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N Hv"],
        key_rope: Float[Array, "B T R"],
        *,
        mask: Mask | None,
        positions: Int[Array, "*B T"] | None,
        dropout_key: Array | None,
    ) -> Float[Array, "B T N Hv"]:
        """Causal attention with the key and the value of every head."""
        positions = jnp.arange(q.shape[1], dtype=jnp.int32) if positions is None else positions
        sharding = jax.typeof(k).sharding
        shared = jnp.broadcast_to(
            self._rotated(key_rope, positions),
            (*k.shape[:-1], self.rope_dim),
            out_sharding=sharding if sharding.mesh.explicit_axes else None,
        )
        mask = Causal() if mask is None else Causal() & mask
        q = jnp.concatenate(self._split(q, positions), axis=-1)
        k = jnp.concatenate([k, shared], axis=-1)
        dropout = {} if dropout_key is None else {"dropout_rate": self.dropout_rate, "dropout_key": dropout_key}
        return flash_attention(q, k, v, mask=mask, scale=self.scale, backend=self.backend, **dropout)

    def prefill(
        self,
        q: Float[Array, "B T N H+R"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N Hv"],
        key_rope: Float[Array, "B T R"],
        latent: Float[Array, "B T L"],
        cache: KVCache,
        *,
        lengths: Int[Array, " B"] | None,
    ) -> tuple[Float[Array, "B T N Hv"], KVCache]:
        """Attention among the first tokens of each row, and the cache of what keys and values come from."""
        mask = None if lengths is None else Lengths(q=lengths, kv=lengths)
        out = self.attend(q, k, v, key_rope, mask=mask, positions=None, dropout_key=None)
        positions = jnp.arange(q.shape[1], dtype=jnp.int32)
        return out, cache.fill(self._cached(latent, key_rope, positions), lengths=lengths)

    def decode(
        self,
        q: Float[Array, "B T N H+R"],
        key_rope: Float[Array, "B T R"],
        latent: Float[Array, "B T L"],
        cache: KVCache,
        *,
        key_up: Float[Array, "L N H"],
        value_up: Float[Array, "L N Hv"],
    ) -> tuple[Float[Array, "B T N Hv"], KVCache]:
        """Attention of the next tokens of each row to all before, without forming the key or value of any head.

        q · (key_up c) is (key_up^T q) · c, and a sum of value_up c is value_up of the sum of c.
        """
        positions = cache.positions(q.shape[1])
        cache = cache.append(self._cached(latent, key_rope, positions))
        plain, rotated = self._split(q, positions)
        absorbed = jnp.einsum("btnh,lnh->btnl", plain, key_up.astype(q.dtype))
        attended = decode_attention(
            jnp.concatenate([absorbed, rotated], axis=-1), cache, scale=self.scale, backend=self.backend
        )
        # What the shared key holds behind the latent vector is no value.
        out = jnp.einsum("btnl,lnh->btnh", attended[..., : self.latent_dim], value_up.astype(q.dtype))
        return out, cache

    def _split(self, q: Array, positions: Array) -> tuple[Array, Array]:
        plain, rotated = jnp.split(q, [self.head_dim], axis=-1)
        return plain, self.rope(rotated, positions)

    def _rotated(self, key_rope: Array, positions: Array) -> Float[Array, "B T 1 R"]:
        return self.rope(key_rope[:, :, None], positions)

    def _cached(self, latent: Array, key_rope: Array, positions: Array) -> Float[Array, "B T 1 L+R"]:
        return jnp.concatenate([latent[:, :, None], self._rotated(key_rope, positions)], axis=-1)
