"""The attention layers for Linen: projections around `AttentionConfig` and `MLAConfig`."""

from typing import Any

from flax import linen
from jaxtyping import Array, Float, Int

from jflash.decode import KVCache
from jflash.masks import Mask
from jflash.nn.config import AttentionConfig
from jflash.nn.dropout import check_drops_nothing
from jflash.nn.mla_config import MLAConfig


class Attention(linen.Module):
    """Multi-head attention with projections, for `flax.linen`; `jflash.nn.Attention` has the documentation.

    Its variables are those of `linen.MultiHeadDotProductAttention`, and the same tree as of `jflash.nn.Attention`:
    `{"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}`.

    Args:
      config: what it computes.
      features: of the tokens it gives out.
      deterministic: as of `jflash.nn.Attention`, here for calls that do not say it; what says both raises.

    Example:
      >>> import jax
      >>> from jflash.nn import AttentionConfig
      >>> from jflash.nn.linen import Attention
      >>> layer = Attention(AttentionConfig(num_heads=4, head_dim=16), features=96)
      >>> x = jnp.ones((2, 30, 96))
      >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
      (2, 30, 96)
    """

    config: AttentionConfig
    features: int
    deterministic: bool | None = None

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
        zeros = _named(config, linen.initializers.zeros, "heads")
        shape = (config.num_heads,)
        self._sinks = self.param("sinks", zeros, shape, config.param_dtype) if config.sinks else None

    def __call__(
        self,
        x: Float[Array, "B T features"],
        context: Float[Array, "B S kv_features"] | None = None,
        *,
        mask: Mask | None = None,
        positions: Int[Array, "*B T"] | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
    ) -> Float[Array, "B T features"]:
        """Self-attention of x, or cross-attention of x to a context.

        Keys of dropout are `dropout_rng`, or where that is None of the stream "dropout".
        """
        is_cross = context is not None
        attend = self.config.attend_across if is_cross else self.config.attend
        q, k, v = self._project(x, context if is_cross else x)
        dropout_key = _dropout_key(self, deterministic, dropout_rng)
        out = attend(q, k, v, sinks=self._sinks, mask=mask, positions=positions, dropout_key=dropout_key)
        return self.out(out)

    def prefill(
        self, x: Float[Array, "B T features"], cache: KVCache, *, lengths: Int[Array, " B"] | None = None
    ) -> tuple[Float[Array, "B T features"], KVCache]:
        """Self-attention of the first T tokens of each row, and the cache with these tokens and no others."""
        check_drops_nothing(self.config.dropout_rate, self.deterministic)
        out, cache = self.config.prefill(*self._project(x, x), cache, sinks=self._sinks, lengths=lengths)
        return self.out(out), cache

    def decode(self, x: Float[Array, "B T features"], cache: KVCache) -> tuple[Float[Array, "B T features"], KVCache]:
        """Self-attention of the next T tokens of each row to all tokens so far, and the cache that holds them too."""
        check_drops_nothing(self.config.dropout_rate, self.deterministic)
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
            kernel_init=_named(config, config.kernel_init, *axes),
            bias_init=_named(config, linen.initializers.zeros, *config.bias_axes(name)),
            **axis,
        )

    def _norm(self) -> linen.RMSNorm | linen.LayerNorm:
        config = self.config
        arguments = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        arguments["scale_init"] = _named(config, linen.initializers.ones, "head_dim")
        if config.qk_norm == "layer_norm":
            return linen.LayerNorm(use_bias=False, **arguments)
        return linen.RMSNorm(**arguments)


class MultiHeadLatentAttention(linen.Module):
    """Multi-head latent attention for `flax.linen`; `jflash.nn.MultiHeadLatentAttention` has the documentation.

    Args:
      config: what it computes.
      features: of the tokens, in and out.
      deterministic: as of `Attention`.

    Example:
      >>> import jax
      >>> from jflash.nn import MLAConfig
      >>> from jflash.nn.linen import MultiHeadLatentAttention
      >>> config = MLAConfig(num_heads=2, head_dim=16, rope_dim=8, value_head_dim=16, latent_dim=24)
      >>> layer = MultiHeadLatentAttention(config, features=40)
      >>> x = jnp.ones((1, 5, 40))
      >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
      (1, 5, 40)
    """

    config: MLAConfig
    features: int
    deterministic: bool | None = None

    def setup(self):
        config = self.config
        for name, (_, size_out, axes) in config.projections.items():
            projection = linen.DenseGeneral(
                self.features if size_out is None else size_out,
                axis=(-2, -1) if name == "out" else -1,
                use_bias=False,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                kernel_init=_named(config, config.kernel_init, *axes),
            )
            setattr(self, name, projection)
        self.latent_norm = self._norm("latent")
        if config.query_latent_dim is not None:
            self.query_norm = self._norm("query_latent")

    def __call__(
        self,
        x: Float[Array, "B T features"],
        *,
        mask: Mask | None = None,
        positions: Int[Array, "*B T"] | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
    ) -> Float[Array, "B T features"]:
        """Causal self-attention."""
        heads, dropout_key = self._heads(x, self._latent(x)), _dropout_key(self, deterministic, dropout_rng)
        return self.out(self.config.attend(*heads, mask=mask, positions=positions, dropout_key=dropout_key))

    def prefill(
        self, x: Float[Array, "B T features"], cache: KVCache, *, lengths: Int[Array, " B"] | None = None
    ) -> tuple[Float[Array, "B T features"], KVCache]:
        """As `Attention.prefill`."""
        check_drops_nothing(self.config.dropout_rate, self.deterministic)
        latent = self._latent(x)
        out, cache = self.config.prefill(*self._heads(x, latent), latent, cache, lengths=lengths)
        return self.out(out), cache

    def decode(self, x: Float[Array, "B T features"], cache: KVCache) -> tuple[Float[Array, "B T features"], KVCache]:
        """As `Attention.decode`."""
        check_drops_nothing(self.config.dropout_rate, self.deterministic)
        kernels = {name: self._kernel(name) for name in ("key_up", "value_up")}
        out, cache = self.config.decode(self._query(x), self.key_rope(x), self._latent(x), cache, **kernels)
        return self.out(out), cache

    def _latent(self, x: Array) -> Float[Array, "B T L"]:
        return self.latent_norm(self.latent(x))

    def _query(self, x: Array) -> Float[Array, "B T N H+R"]:
        return self.query(x if self.config.query_latent_dim is None else self.query_norm(self.query_down(x)))

    def _heads(self, x: Array, latent: Array) -> tuple[Array, ...]:
        return self._query(x), self.key_up(latent), self.value_up(latent), self.key_rope(x)

    def _kernel(self, name: str) -> Array:
        return linen.unbox(getattr(self, name).variables["params"]["kernel"])

    def _norm(self, axis: str) -> linen.RMSNorm:
        config = self.config
        named = _named(config, linen.initializers.ones, axis)
        return linen.RMSNorm(dtype=config.dtype, param_dtype=config.param_dtype, scale_init=named)


def _named(config: AttentionConfig | MLAConfig, initializer: Any, *axes: str) -> Any:
    return linen.with_logical_partitioning(initializer, axes) if config.logical_axes else initializer


def _dropout_key(
    layer: Attention | MultiHeadLatentAttention, deterministic: bool | None, dropout_rng: Array | None
) -> Array | None:
    """The key of one call, as `linen.MultiHeadDotProductAttention` takes it; None where nothing is dropped."""
    if not layer.config.dropout_rate:
        return None
    if linen.merge_param("deterministic", layer.deterministic, deterministic):
        return None
    return layer.make_rng("dropout") if dropout_rng is None else dropout_rng
