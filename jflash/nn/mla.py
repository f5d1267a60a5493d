"""The layer of multi-head latent attention for NNX: projections around `MLAConfig`."""

from flax import nnx
from jaxtyping import Array, Float, Int

from jflash.decode import KVCache
from jflash.masks import Mask
from jflash.nn.dropout import DropoutLayer
from jflash.nn.mla_config import MLAConfig
from jflash.nn.sharding import projected


class MultiHeadLatentAttention(DropoutLayer):
    """Causal multi-head latent attention, MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1), for `flax.nnx`.

    From a token x comes a latent vector c, which is normalised; key and value of each head are linear in it:

        k[n] = [key_up[n] c, RoPE(key_rope x)],   v[n] = value_up[n] c,   q[n] = [query x or query query_down x]

    where the last `rope_dim` elements of q are rotated as well (equations 37 to 47). So attention runs at
    head_dim + rope_dim elements for q and k, and value_head_dim for v: 192 and 128 in DeepSeek-V2.

    `decode` caches [c, RoPE(key_rope x)] alone, and takes `key_up` to the side of the query and `value_up` to that of
    the output: attention of all heads to one shared key of latent_dim + rope_dim elements, which is the value too. That
    is the same sum in another order. At 576 elements no kernel of ours takes it, and `backend="auto"` runs `xla`.

    `jflash.nn.linen.MultiHeadLatentAttention` computes the same from the same tree of parameters.

    Args:
      config: what it computes.
      features: of the tokens, in and out.
      deterministic, rngs, keep_rngs: as of `Attention`.

    Example:
      >>> from flax import nnx
      >>> from jflash.nn import MLAConfig, MultiHeadLatentAttention
      >>> config = MLAConfig(num_heads=2, head_dim=16, rope_dim=8, value_head_dim=16, latent_dim=24)
      >>> layer = MultiHeadLatentAttention(config, 40, rngs=nnx.Rngs(0))
      >>> out, cache = layer.prefill(jnp.ones((1, 5, 40)), config.empty_cache(B=1, S=9))
      >>> out.shape, cache.k.shape
      ((1, 5, 40), (1, 9, 1, 32))
    """

    def __init__(
        self,
        config: MLAConfig,
        features: int,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ):
        self.config = config
        for name, (size_in, size_out, axes) in config.projections.items():
            projection = nnx.LinearGeneral(
                features if size_in is None else size_in,
                features if size_out is None else size_out,
                axis=(-2, -1) if name == "out" else -1,
                use_bias=False,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                kernel_init=config.kernel_init,
                kernel_metadata={"out_sharding": axes} if config.logical_axes else {},
                rngs=rngs,
            )
            setattr(self, name, projection)
        self.latent_norm = self._norm(config.latent_dim, "latent", rngs)
        if config.query_latent_dim is not None:
            self.query_norm = self._norm(config.query_latent_dim, "query_latent", rngs)
        # Last, as in Flax's layer: keys of the parameters do not depend on the rate.
        super().__init__(config.dropout_rate, deterministic=deterministic, rngs=rngs, keep_rngs=keep_rngs)

    def __call__(
        self,
        x: Float[Array, "B T features"],
        *,
        mask: Mask | None = None,
        positions: Int[Array, "*B T"] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> Float[Array, "B T features"]:
        """Causal self-attention.

        Args:
          x: tokens.
          mask: which pairs attend, of those that are not in the future.
          positions: of the tokens; None means 0, 1, 2 and so on.
          deterministic, rngs: as of `Attention`.

        Raises:
          ShapeError, DtypeError, ArgumentError, UnsupportedError: as `flash_attention`.
        """
        heads, dropout_key = self._heads(x, self._latent(x)), self._dropout_key(deterministic, rngs)
        out = self.config.attend(*heads, mask=mask, positions=positions, dropout_key=dropout_key)
        return projected(self.out, out)

    def prefill(
        self, x: Float[Array, "B T features"], cache: KVCache, *, lengths: Int[Array, " B"] | None = None
    ) -> tuple[Float[Array, "B T features"], KVCache]:
        """As `Attention.prefill`."""
        self._check_drops_nothing()
        latent = self._latent(x)
        out, cache = self.config.prefill(*self._heads(x, latent), latent, cache, lengths=lengths)
        return projected(self.out, out), cache

    def decode(self, x: Float[Array, "B T features"], cache: KVCache) -> tuple[Float[Array, "B T features"], KVCache]:
        """As `Attention.decode`."""
        self._check_drops_nothing()
        kernels = {"key_up": self.key_up.kernel[...], "value_up": self.value_up.kernel[...]}
        out, cache = self.config.decode(self._query(x), projected(self.key_rope, x), self._latent(x), cache, **kernels)
        return projected(self.out, out), cache

    def _latent(self, x: Array) -> Float[Array, "B T L"]:
        return self.latent_norm(projected(self.latent, x))

    def _query(self, x: Array) -> Float[Array, "B T N H+R"]:
        if self.config.query_latent_dim is not None:
            x = self.query_norm(projected(self.query_down, x))
        return projected(self.query, x)

    def _heads(self, x: Array, latent: Array) -> tuple[Array, ...]:
        keys, values = projected(self.key_up, latent), projected(self.value_up, latent)
        return self._query(x), keys, values, projected(self.key_rope, x)

    def _norm(self, size: int, axis: str, rngs: nnx.Rngs) -> nnx.RMSNorm:
        named = {"out_sharding": (axis,)} if self.config.logical_axes else {}
        dtypes = {"dtype": self.config.dtype, "param_dtype": self.config.param_dtype}
        return nnx.RMSNorm(size, **dtypes, scale_metadata=named, rngs=rngs)
