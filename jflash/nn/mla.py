"""Multi-head latent attention for NNX: keys and values come from one small vector for each token, which is cached."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jflash.api import flash_attention
from jflash.decode import KVCache, decode_attention
from jflash.errors import ArgumentError
from jflash.masks import Causal, Lengths, Mask
from jflash.masks.arrays import at_least_1
from jflash.nn.config import LECUN_NORMAL
from jflash.nn.rope import RoPE


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """A layer of multi-head latent attention without its weights; the sizes given here are those of DeepSeek-V2.

    Args:
      num_heads: N.
      head_dim: of the part of queries and keys that knows no position.
      rope_dim: of the part that does, which all heads of the keys share; it is rotated by `rope`.
      value_head_dim: Hv.
      latent_dim: of the vector that keys and values come from.
      query_latent_dim: of the vector that queries come from; None for none, as in DeepSeek-V2-Lite.
      scale: of the logits; None means 1 / sqrt(head_dim + rope_dim).
      rope, dtype, param_dtype, kernel_init, logical_axes, backend: as of `AttentionConfig`; the axes of the latent
        vectors are named "latent" and "query_latent".

    Raises:
      ArgumentError: a size is no whole number of at least 1, or rope_dim is odd.
    """

    num_heads: int
    head_dim: int = 128
    rope_dim: int = 64
    value_head_dim: int = 128
    latent_dim: int = 512
    query_latent_dim: int | None = None
    rope: RoPE = dataclasses.field(default_factory=RoPE)
    scale: float | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Array] = LECUN_NORMAL
    logical_axes: bool = False
    backend: str = "auto"

    def __post_init__(self):
        for name in ("num_heads", "head_dim", "rope_dim", "value_head_dim", "latent_dim", "query_latent_dim"):
            if (size := getattr(self, name)) is not None:
                at_least_1(name, size)
        if self.rope_dim % 2:
            raise ArgumentError("rope_dim", found=repr(self.rope_dim), wanted="an even number: elements turn in pairs")
        if self.scale is None:
            object.__setattr__(self, "scale", (self.head_dim + self.rope_dim) ** -0.5)

    def empty_cache(self, *, B: int, S: int, dtype: Any = None) -> KVCache:
        """An empty cache of `latent_dim + rope_dim` numbers for each token, which are its key and its value.

        Args:
          B, S: as of `KVCache.zeros`.
          dtype: as of `AttentionConfig.empty_cache`.
        """
        dtype = self.dtype if dtype is None else dtype
        dtype = self.param_dtype if dtype is None else dtype
        return KVCache.zeros(B=B, S=S, K=1, H=self.latent_dim + self.rope_dim, dtype=dtype, shares_values=True)


class MultiHeadLatentAttention(nnx.Module):
    """Causal multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

    From a token x comes a latent vector c, which is normalised; key and value of each head are linear in it:

        k[n] = [key_up[n] c, RoPE(key_rope x)],   v[n] = value_up[n] c,   q[n] = [query x or query_up query_down x]

    where the last `rope_dim` elements of q are rotated as well (equations 37 to 47). So attention runs at
    H = head_dim + rope_dim and Hv = value_head_dim, 192 and 128.

    `decode` caches [c, RoPE(key_rope x)] alone, and takes `key_up` to the side of the query and `value_up` to that of
    the output: attention of all heads to one shared key of latent_dim + rope_dim elements, which is the value too. That
    is the same sum in another order, and no key of any head is ever formed.

    Args:
      config: what it computes.
      features: of the tokens, in and out.
      rngs: for the parameters.

    Example:
      >>> from flax import nnx
      >>> from jflash.nn import MLAConfig, MultiHeadLatentAttention
      >>> config = MLAConfig(num_heads=2, head_dim=16, rope_dim=8, value_head_dim=16, latent_dim=24)
      >>> layer = MultiHeadLatentAttention(config, 40, rngs=nnx.Rngs(0))
      >>> out, cache = layer.prefill(jnp.ones((1, 5, 40)), config.empty_cache(B=1, S=9))
      >>> out.shape, cache.k.shape
      ((1, 5, 40), (1, 9, 1, 32))
    """

    def __init__(self, config: MLAConfig, features: int, *, rngs: nnx.Rngs):
        self.config = config
        N = config.num_heads
        query = (N, config.head_dim + config.rope_dim)
        heads = ("heads", "head_dim")
        project = self._projection(rngs)
        if config.query_latent_dim is None:
            self.query = project(features, query, ("embed", *heads))
            self.query_down = self.query_norm = nnx.data(None)
        else:
            self.query_down = project(features, config.query_latent_dim, ("embed", "query_latent"))
            self.query_norm = self._norm(config.query_latent_dim, rngs)
            self.query = project(config.query_latent_dim, query, ("query_latent", *heads))
        self.latent = project(features, config.latent_dim, ("embed", "latent"))
        self.latent_norm = self._norm(config.latent_dim, rngs)
        self.key_rope = project(features, config.rope_dim, ("embed", "head_dim"))
        self.key_up = project(config.latent_dim, (N, config.head_dim), ("latent", *heads))
        self.value_up = project(config.latent_dim, (N, config.value_head_dim), ("latent", *heads))
        self.out = project((N, config.value_head_dim), features, (*heads, "embed"), axis=(-2, -1))

    def __call__(
        self,
        x: Float[Array, "B T features"],
        *,
        mask: Mask | None = None,
        positions: Int[Array, "*B T"] | None = None,
    ) -> Float[Array, "B T features"]:
        """Causal self-attention.

        Args:
          x: tokens.
          mask: which pairs attend, of those that are not in the future.
          positions: of the tokens; None means 0, 1, 2 and so on.

        Raises:
          ShapeError, DtypeError, ArgumentError, UnsupportedError: as `flash_attention`.
        """
        positions = jnp.arange(x.shape[1], dtype=jnp.int32) if positions is None else positions
        return self._among(x, *self._latent(x, positions), positions, mask)

    def prefill(
        self, x: Float[Array, "B T features"], cache: KVCache, *, lengths: Int[Array, " B"] | None = None
    ) -> tuple[Float[Array, "B T features"], KVCache]:
        """As `Attention.prefill`."""
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)
        latent, key_rope = self._latent(x, positions)
        mask = None if lengths is None else Lengths(q=lengths, kv=lengths)
        out = self._among(x, latent, key_rope, positions, mask)
        return out, cache.fill(jnp.concatenate([latent[:, :, None], key_rope], axis=-1), lengths=lengths)

    def decode(self, x: Float[Array, "B T features"], cache: KVCache) -> tuple[Float[Array, "B T features"], KVCache]:
        """As `Attention.decode`, in the absorbed form."""
        positions = cache.positions(x.shape[1])
        latent, key_rope = self._latent(x, positions)
        cache = cache.append(jnp.concatenate([latent[:, :, None], key_rope], axis=-1))
        plain, rotated = self._query(x, positions)
        key_up, value_up = (layer.kernel[...].astype(plain.dtype) for layer in (self.key_up, self.value_up))
        q = jnp.concatenate([jnp.einsum("btnh,lnh->btnl", plain, key_up), rotated], axis=-1)
        attended = decode_attention(q, cache, scale=self.config.scale, backend=self.config.backend)
        # What the shared key holds behind the latent vector is no value.
        attended = attended[..., : self.config.latent_dim]
        return self.out(jnp.einsum("btnl,lnh->btnh", attended, value_up)), cache

    def _among(self, x: Array, latent: Array, key_rope: Array, positions: Array, mask: Mask | None) -> Array:
        config = self.config
        q, keys = jnp.concatenate(self._query(x, positions), axis=-1), self.key_up(latent)
        k = jnp.concatenate([keys, jnp.broadcast_to(key_rope, (*keys.shape[:-1], config.rope_dim))], axis=-1)
        mask = Causal() if mask is None else Causal() & mask
        v = self.value_up(latent)
        return self.out(flash_attention(q, k, v, mask=mask, scale=config.scale, backend=config.backend))

    def _latent(self, x: Array, positions: Array) -> tuple[Array, Array]:
        """What is cached of each token: the latent vector (B, T, L), and the rotated part of its key (B, T, 1, Hr)."""
        return self.latent_norm(self.latent(x)), self.config.rope(self.key_rope(x)[:, :, None], positions)

    def _query(self, x: Array, positions: Array) -> tuple[Array, Array]:
        """The two parts of the queries, (B, T, N, H), without position, and (B, T, N, Hr), rotated."""
        if self.query_down is not None:
            x = self.query_norm(self.query_down(x))
        plain, rotated = jnp.split(self.query(x), [self.config.head_dim], axis=-1)
        return plain, self.config.rope(rotated, positions)

    def _projection(self, rngs: nnx.Rngs) -> Callable[..., nnx.LinearGeneral]:
        config = self.config

        def project(features: Any, out_features: Any, axes: tuple[str, ...], **axis: Any) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                features,
                out_features,
                use_bias=False,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                kernel_init=config.kernel_init,
                kernel_metadata={"out_sharding": axes} if config.logical_axes else {},
                rngs=rngs,
                **axis,
            )

        return project

    def _norm(self, size: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
        return nnx.RMSNorm(size, dtype=self.config.dtype, param_dtype=self.config.param_dtype, rngs=rngs)
