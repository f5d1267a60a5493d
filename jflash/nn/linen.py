"""The attention layer for Linen: projections around `AttentionConfig`."""

from typing import Any

from flax import linen
from jaxtyping import Array, Float, Int

from jflash.decode import KVCache
from jflash.masks import Mask
from jflash.nn.config import AttentionConfig


class Attention(linen.Module):
    """Multi-head attention with projections, for `flax.linen`; `jflash.nn.Attention` has the documentation.

    Its variables are those of `linen.MultiHeadDotProductAttention`, and the same tree as of `jflash.nn.Attention`:
    `{"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}`.

    Args:
      config: what it computes.
      features: of the tokens it gives out.

    Example:
      >>> import jax
      >>> from jflash.nn import AttentionConfig
      >>> from jflash.nn.linen import Attention
      >>> config = AttentionConfig(num_heads=4, head_dim=16, causal=True)
      >>> layer = Attention(config, features=96)
      >>> x = jnp.ones((2, 30, 96))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> out, cache = layer.apply(variables, x, config.empty_cache(B=2, S=100), method="prefill")
      >>> out, cache = layer.apply(variables, x[:, :1], cache, method="decode")
      >>> out.shape
      (2, 1, 96)
    """

    config: AttentionConfig
    features: int

    def setup(self):
        config = self.config
        heads, kv_heads = (config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim)
        self.query = self._projection("query", heads)
        self.key = self._projection("key", kv_heads)
        self.value = self._projection("value", kv_heads)
        self.out = self._projection("out", self.features, axis=(-2, -1))
        if config.qk_norm is not None:
            self.query_norm = self._norm()
            self.key_norm = self._norm()
        zeros = self._named(linen.initializers.zeros, "heads")
        shape = (config.num_heads,)
        self._sinks = self.param("sinks", zeros, shape, config.param_dtype) if config.sinks else None

    def __call__(
        self,
        x: Float[Array, "B T features"],
        context: Float[Array, "B S kv_features"] | None = None,
        *,
        mask: Mask | None = None,
        positions: Int[Array, "*B T"] | None = None,
    ) -> Float[Array, "B T features"]:
        """Self-attention of x, or cross-attention of x to a context."""
        if context is not None:
            return self.out(self.config.attend_across(*self._project(x, context), sinks=self._sinks, mask=mask))
        out = self.config.attend(*self._project(x, x), sinks=self._sinks, mask=mask, positions=positions)
        return self.out(out)

    def prefill(
        self, x: Float[Array, "B T features"], cache: KVCache, *, lengths: Int[Array, " B"] | None = None
    ) -> tuple[Float[Array, "B T features"], KVCache]:
        """Self-attention of the first T tokens of each row, and the cache with these tokens and no others."""
        out, cache = self.config.prefill(*self._project(x, x), cache, sinks=self._sinks, lengths=lengths)
        return self.out(out), cache

    def decode(self, x: Float[Array, "B T features"], cache: KVCache) -> tuple[Float[Array, "B T features"], KVCache]:
        """Self-attention of the next T tokens of each row to all tokens so far, and the cache that holds them too."""
        out, cache = self.config.decode(*self._project(x, x), cache, sinks=self._sinks)
        return self.out(out), cache

    def _project(self, x: Array, context: Array) -> tuple[Array, Array, Array]:
        q, k, v = self.query(x), self.key(context), self.value(context)
        if self.config.qk_norm is None:
            return q, k, v
        return self.query_norm(q), self.key_norm(k), v

    def _projection(self, name: str, features: Any, **axis: Any) -> linen.DenseGeneral:
        config = self.config
        axes = config.axes(name)
        return linen.DenseGeneral(
            features,
            use_bias=config.out_bias if name == "out" else config.qkv_bias,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            kernel_init=self._named(config.kernel_init, *axes),
            bias_init=self._named(linen.initializers.zeros, *(axes[2:] if name == "out" else axes[1:])),
            **axis,
        )

    def _norm(self) -> linen.RMSNorm | linen.LayerNorm:
        config = self.config
        arguments = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        arguments["scale_init"] = self._named(linen.initializers.ones, "head_dim")
        if config.qk_norm == "layer_norm":
            return linen.LayerNorm(use_bias=False, **arguments)
        return linen.RMSNorm(**arguments)

    def _named(self, initializer: Any, *axes: str) -> Any:
        return linen.with_logical_partitioning(initializer, axes) if self.config.logical_axes else initializer
