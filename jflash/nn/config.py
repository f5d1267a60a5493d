"""`AttentionConfig`: an attention layer without its weights, and what it computes between its projections."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jflash.api import flash_attention
from jflash.decode import KVCache, decode_attention
from jflash.errors import ArgumentError, naming
from jflash.masks import Lengths, Mask
from jflash.masks.arrays import at_least_1
from jflash.masks.patterns import window_of
from jflash.nn.rope import RoPE
from jflash.numerics.precision import compute_dtype
from jflash.problem import real
from jflash.scores import by_position, dropout_rate_of

LECUN_NORMAL = jax.nn.initializers.lecun_normal()
"""Flax's own choice for the kernels of its projections."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """An attention layer without its weights: static and hashable, the same for `nnx` and for `linen`.

    Args:
      num_heads: query heads, N.
      head_dim: of queries, keys and values, H.
      num_kv_heads: key/value heads, K; None means N. Query head n reads key/value head n // (N // K).
      causal: a token sees itself and those before it.
      window: distances (left, right) that a token sees, as of `flash_attention`; with `causal` right does not matter.
      rope: rotates queries and keys by their positions; None for none.
      qk_norm: normalises queries and keys along H, before `rope`, with a scale that is learned: "rms_norm", as in
        Qwen 3, or "layer_norm" without a bias, as Flax's `normalize_qk` does (ViT-22B, arXiv:2302.05442).
      softcap, scale: as of `flash_attention`.
      alibi_slopes: a number for each head, `alibi_slopes(num_heads)` say: each logit less the slope of its head times
        the distance of the two tokens (ALiBi, arXiv:2108.12409). None for none.
      score_fn: `score_fn(s, b, n, q, k)` in place of the logit s, as of `flash_attention`, where q and k are the
        positions of the two tokens, while decoding too. It may capture constants, and nothing that is learned.
      dropout_rate: the part of the weights that is dropped in training, other ones in each batch row and head, as of
        `flash_attention`; `Attention` says when.
      sinks: whether each head learns a logit that takes part in its softmax and has no value, as in gpt-oss.
      qkv_bias, out_bias: whether the projections to q, k and v and the one of the output have biases.
      dtype: computed in; None is the widest of inputs and parameters.
      param_dtype: of the parameters.
      kernel_init: initialises the kernels of the projections.
      logical_axes: annotates parameters with the names of their logical axes, "embed", "heads", "kv_heads" and
        "head_dim", for `flax.linen.logical_axis_rules` or `nnx.logical_axis_rules`. NNX then needs a mesh and rules
        when the layer is made.
      backend: as of `flash_attention`.

    Raises:
      ArgumentError: sizes that do not fit, an unknown qk_norm, a rate that is none.

    Example:
      >>> from jflash.nn import AttentionConfig, RoPE
      >>> config = AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=64, causal=True, window=(127, 0), rope=RoPE())
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    causal: bool = False
    window: int | tuple[int | None, int | None] | None = None
    rope: RoPE | None = None
    qk_norm: Literal["rms_norm", "layer_norm"] | None = None
    softcap: float | None = None
    scale: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    score_fn: Callable[..., Array] | None = None
    dropout_rate: float = 0.0
    sinks: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Array] = LECUN_NORMAL
    logical_axes: bool = False
    backend: str = "auto"

    def __post_init__(self):
        for name in ("num_heads", "head_dim"):
            at_least_1(name, getattr(self, name))
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.num_heads % at_least_1("num_kv_heads", self.num_kv_heads):
            wanted = f"a number that divides num_heads={self.num_heads}"
            raise ArgumentError("num_kv_heads", found=repr(self.num_kv_heads), wanted=wanted)
        if self.qk_norm not in (None, "rms_norm", "layer_norm"):
            wanted = '"rms_norm", "layer_norm" or None'
            raise ArgumentError("qk_norm", found=repr(self.qk_norm), wanted=wanted)
        if self.window is not None:
            window_of(self.window, "window")
        if self.alibi_slopes is not None:
            slopes = tuple(real("alibi_slopes", slope) for slope in self.alibi_slopes)
            if len(slopes) != self.num_heads:
                wanted = f"{self.num_heads} of them, one for each head"
                raise ArgumentError("alibi_slopes", found=f"{len(slopes)} numbers", wanted=wanted)
            object.__setattr__(self, "alibi_slopes", slopes)
        dropout_rate_of(self.dropout_rate)

    def axes(self, projection: Literal["query", "key", "value", "out"]) -> tuple[str, ...]:
        """The names of the logical axes of the kernel of a projection."""
        heads = "heads" if projection in ("query", "out") else "kv_heads"
        return (heads, "head_dim", "embed") if projection == "out" else ("embed", heads, "head_dim")

    def bias_axes(self, projection: Literal["query", "key", "value", "out"]) -> tuple[str | None, ...]:
        """The same of its bias. That of the output is whole on every device, since it is added to tokens.

        These are split otherwise than parameters where "embed" names the devices of the batch.
        """
        return (None,) if projection == "out" else self.axes(projection)[1:]

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        *,
        sinks: Float[Array, " N"] | None,
        mask: Mask | None,
        positions: Int[Array, "*B T"] | None,
        dropout_key: Array | None,
    ) -> Float[Array, "B T N H"]:
        """Attention among the tokens that q, k and v were projected from."""
        q, k = self._rotated(q, k, positions)
        scores = self._scores(q)
        if positions is not None:
            with naming(q_positions="positions", k_positions="positions"):
                scores = by_position(q, k, q_positions=positions, k_positions=positions, **scores)
        scores |= self._dropout(dropout_key)
        return self._flash_attention(q, k, v, mask=mask, causal=self.causal, sinks=sinks, **scores)

    def attend_across(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        *,
        sinks: Float[Array, " N"] | None,
        mask: Mask | None,
        positions: None,
        dropout_key: Array | None,
    ) -> Float[Array, "B T N H"]:
        """Attention of tokens to those of another sequence.

        Raises:
          ArgumentError: there is something that knows of positions, which are not on one scale in two sequences.
        """
        of_positions = {name: getattr(self, name) for name in ("window", "rope", "alibi_slopes", "score_fn")}
        of_positions |= {"causal": self.causal or None, "positions": positions}
        for name, found in of_positions.items():
            if found is not None:
                found = "an array" if name == "positions" else repr(found)
                hint = "Which pairs attend across two sequences goes into `mask`."
                raise ArgumentError(name, found=found, wanted="none in cross-attention", hint=hint)
        return self._flash_attention(q, k, v, mask=mask, sinks=sinks, **self._dropout(dropout_key))

    def prefill(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        cache: KVCache,
        *,
        sinks: Float[Array, " N"] | None,
        lengths: Int[Array, " B"] | None,
    ) -> tuple[Float[Array, "B T N H"], KVCache]:
        """Attention among the first tokens of each row, and the cache that holds them."""
        self._check_cache(cache)
        q, k = self._rotated(q, k, None)
        mask = None if lengths is None else Lengths(q=lengths, kv=lengths)
        out = self._flash_attention(q, k, v, mask=mask, causal=self.causal, sinks=sinks, **self._scores(q))
        return out, cache.fill(k, v, lengths=lengths)

    def decode(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        cache: KVCache,
        *,
        sinks: Float[Array, " N"] | None,
    ) -> tuple[Float[Array, "B T N H"], KVCache]:
        """Attention of the next tokens of each row to all before, and the cache that holds them too."""
        self._check_cache(cache)
        q, k = self._rotated(q, k, cache.positions(q.shape[1]))
        cache = cache.append(k, v)
        common = {"softcap": self.softcap, "scale": self.scale, "backend": self.backend}
        out = decode_attention(q, cache, sinks=sinks, **common, **self._scores(q))
        return out, cache

    def empty_cache(self, *, B: int, S: int, step: int = 1, dtype: Any = None) -> KVCache:
        """An empty cache for this layer.

        Args:
          B, S, step: as of `KVCache.zeros`.
          dtype: of its keys and values, that of the layer's activations; None means `config.dtype`, or if that is None
            too `config.param_dtype`.

        Raises:
          ArgumentError: the layer is not causal.
        """
        self._check_causal()
        dtype = self.dtype if dtype is None else dtype
        dtype = self.param_dtype if dtype is None else dtype
        sizes = {"B": B, "S": S, "K": self.num_kv_heads, "H": self.head_dim, "step": step}
        return KVCache.zeros(**sizes, dtype=dtype, window=self._left)

    @property
    def _left(self) -> int | None:
        return None if self.window is None else window_of(self.window, "window").left

    def _scores(self, q: Array) -> dict[str, Any]:
        slopes = None if self.alibi_slopes is None else np.array(self.alibi_slopes, compute_dtype(q.dtype))
        return {"alibi_slopes": slopes, "score_fn": self.score_fn}

    def _dropout(self, key: Array | None) -> dict[str, Any]:
        return {} if key is None else {"dropout_rate": self.dropout_rate, "dropout_key": key}

    def _rotated(self, q: Array, k: Array, positions: Array | None) -> tuple[Array, Array]:
        if self.rope is None:
            return q, k
        positions = jnp.arange(q.shape[-3], dtype=jnp.int32) if positions is None else positions
        return self.rope(q, positions), self.rope(k, positions)

    def _flash_attention(self, q: Array, k: Array, v: Array, **arguments: Any) -> Array:
        return flash_attention(
            q, k, v, window=self.window, softcap=self.softcap, scale=self.scale, backend=self.backend, **arguments
        )

    def _check_causal(self) -> None:
        if not self.causal:
            wanted = "True where a cache is used: its tokens know nothing of those to come"
            raise ArgumentError("causal", found="False", wanted=wanted)

    def _check_cache(self, cache: KVCache) -> None:
        self._check_causal()
        if cache.window != self._left:
            hint = "Make it with `empty_cache`."
            wanted = f"window={self._left}, as the layer has"
            raise ArgumentError("cache", found=f"window={cache.window}", wanted=wanted, hint=hint)
