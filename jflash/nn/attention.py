"""The attention layer for NNX: projections around `AttentionConfig`."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jflash.decode import KVCache
from jflash.masks import Mask
from jflash.nn.config import AttentionConfig
from jflash.nn.dropout import DropoutLayer
from jflash.nn.sharding import projected


class Attention(DropoutLayer):
    """Multi-head attention with projections, for `flax.nnx`; `jflash.nn.linen.Attention` computes the same.

    Parameters have the names and shapes of `nnx.MultiHeadAttention`: `query`, `key` and `value` with kernels
    (features, heads, H), `out` with (N, H, features). `query_norm`, `key_norm` and `sinks` are there if the config
    has them.

    Args:
      config: what it computes.
      features: of the tokens, in and out.
      kv_features: of the context in cross-attention; None means as `features`.
      deterministic: whether calls drop no weights; None means that each call says it. Only with
        `config.dropout_rate` does it matter. (It is Flax's word for that; gradients of kernels are another matter.)
      rngs: for the parameters, and its stream "dropout" for the keys of dropout.
      keep_rngs: whether the layer keeps a stream of keys of its own, so that calls need bring none.

    Example:
      >>> from flax import nnx
      >>> from jflash.nn import Attention, AttentionConfig, RoPE
      >>> config = AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=16, causal=True, rope=RoPE())
      >>> layer = Attention(config, 96, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 30, 96))).shape
      (2, 30, 96)
    """

    def __init__(
        self,
        config: AttentionConfig,
        features: int,
        *,
        kv_features: int | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ):
        self.config = config
        kv_features = features if kv_features is None else kv_features
        heads, kv_heads = (config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim)
        self.query = self._projection("query", features, heads, rngs=rngs)
        self.key = self._projection("key", kv_features, kv_heads, rngs=rngs)
        self.value = self._projection("value", kv_features, kv_heads, rngs=rngs)
        self.out = self._projection("out", heads, features, axis=(-2, -1), rngs=rngs)
        self.query_norm = nnx.data(self._norm(rngs))
        self.key_norm = nnx.data(self._norm(rngs))
        zeros = jnp.zeros((config.num_heads,), config.param_dtype)
        self.sinks = nnx.data(nnx.Param(zeros, **self._named("heads")) if config.sinks else None)
        # Last, as in Flax's layer: keys of the parameters do not depend on the rate.
        super().__init__(config.dropout_rate, deterministic=deterministic, rngs=rngs, keep_rngs=keep_rngs)

    def __call__(
        self,
        x: Float[Array, "B T features"],
        context: Float[Array, "B S kv_features"] | None = None,
        *,
        mask: Mask | None = None,
        positions: Int[Array, "*B T"] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> Float[Array, "B T features"]:
        """Self-attention of x, or cross-attention of x to a context.

        Args:
          x: tokens.
          context: tokens that keys and values come from; None means x.
          mask: which pairs attend, besides what the config says.
          positions: of the tokens, for `rope`, `alibi_slopes` and `score_fn`; None means 0, 1, 2 and so on.
          deterministic: whether no weights are dropped; None means as the layer has it.
          rngs: where the key of dropout comes from; None means the layer's own stream.

        Raises:
          ShapeError, DtypeError, ArgumentError, UnsupportedError: as `flash_attention`.
        """
        is_cross = context is not None
        attend = self.config.attend_across if is_cross else self.config.attend
        q, k, v = self._project(x, context if is_cross else x)
        dropout_key = self._dropout_key(deterministic, rngs)
        out = attend(q, k, v, sinks=self._sinks, mask=mask, positions=positions, dropout_key=dropout_key)
        return projected(self.out, out)

    def prefill(
        self, x: Float[Array, "B T features"], cache: KVCache, *, lengths: Int[Array, " B"] | None = None
    ) -> tuple[Float[Array, "B T features"], KVCache]:
        """Self-attention of the first T tokens of each row, and the cache with these tokens and no others.

        Args:
          x: the tokens.
          cache: from `config.empty_cache`; what it holds is forgotten.
          lengths: how many tokens each row has, the rest being padding, which nobody sees; None means T.

        Raises:
          ShapeError, DtypeError, ArgumentError: as `KVCache.fill`; the config is not causal; the layer is set to drop
            weights.
        """
        self._check_drops_nothing()
        out, cache = self.config.prefill(*self._project(x, x), cache, sinks=self._sinks, lengths=lengths)
        return projected(self.out, out), cache

    def decode(self, x: Float[Array, "B T features"], cache: KVCache) -> tuple[Float[Array, "B T features"], KVCache]:
        """Self-attention of the next T tokens of each row to all tokens so far, and the cache that holds them too.

        Raises:
          ShapeError, DtypeError, ArgumentError: as `KVCache.append` and `decode_attention`; the config is not causal;
            the layer is set to drop weights.
        """
        self._check_drops_nothing()
        out, cache = self.config.decode(*self._project(x, x), cache, sinks=self._sinks)
        return projected(self.out, out), cache

    @property
    def _sinks(self) -> Float[Array, " N"] | None:
        return None if self.sinks is None else self.sinks[...]

    def _project(self, x: Array, context: Array) -> tuple[Array, Array, Array]:
        q, k, v = projected(self.query, x), projected(self.key, context), projected(self.value, context)
        if self.config.qk_norm is None:
            return q, k, v
        return self.query_norm(q), self.key_norm(k), v

    def _projection(self, name: str, features: Any, out_features: Any, *, rngs: nnx.Rngs, **axis: Any):
        config = self.config
        axes = config.axes(name)
        return nnx.LinearGeneral(
            features,
            out_features,
            use_bias=config.out_bias if name == "out" else config.qkv_bias,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            kernel_init=config.kernel_init,
            kernel_metadata=self._named(*axes),
            bias_metadata=self._named(*config.bias_axes(name)),
            rngs=rngs,
            **axis,
        )

    def _norm(self, rngs: nnx.Rngs) -> nnx.RMSNorm | nnx.LayerNorm | None:
        config = self.config
        arguments = {"dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}
        arguments["scale_metadata"] = self._named("head_dim")
        match config.qk_norm:
            case "rms_norm":
                return nnx.RMSNorm(config.head_dim, **arguments)
            case "layer_norm":
                return nnx.LayerNorm(config.head_dim, use_bias=False, **arguments)
        return None

    def _named(self, *axes: str) -> dict[str, Any]:
        return {"out_sharding": axes} if self.config.logical_axes else {}
