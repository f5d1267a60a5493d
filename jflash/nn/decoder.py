"""A decoder in NNX, plain enough to copy: embedding, blocks of RMSNorm, attention and SwiGLU, a tied head."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jflash.backends.protocol import RESIDUAL_NAMES
from jflash.decode import KVCache
from jflash.errors import ArgumentError
from jflash.masks import Mask
from jflash.nn.attention import Attention
from jflash.nn.config import AttentionConfig
from jflash.nn.mla import MultiHeadLatentAttention
from jflash.nn.mla_config import MLAConfig
from jflash.nn.sharding import product_sharding, projected
from jflash.numerics.precision import compute_dtype
from jflash.problem import real

save_attention = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
"""A policy of `jax.checkpoint` for long contexts: of a block it keeps the output and the lse of its attention alone.

The backward pass then computes projections and SwiGLU again, which cost time linear in the length, and not the forward
pass of attention, which costs its square.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder without its weights.

    Args:
      vocab_size: number of tokens.
      num_layers: blocks.
      features: of a token between the blocks.
      hidden_features: within SwiGLU.
      attention: of every block, an `MLAConfig` for latent attention; dtypes, initialisers and logical axes of the other
        parameters are as it says. The axes are named "vocab", "embed" and "hidden".
      remat: the policy of `jax.checkpoint` around each block, `save_attention` say; None keeps everything.

    Raises:
      ArgumentError: attention is not causal.
    """

    vocab_size: int
    num_layers: int
    features: int
    hidden_features: int
    attention: AttentionConfig | MLAConfig
    remat: Callable[..., bool] | None = None

    def __post_init__(self):
        if not self.attention.causal:
            raise ArgumentError("attention", found="causal=False", wanted="causal=True in a decoder")

    def empty_cache(self, *, B: int, S: int, step: int = 1, dtype: Any = None) -> tuple[KVCache, ...]:
        """An empty cache for each block; see `AttentionConfig.empty_cache`."""
        empty = [self.attention.empty_cache(B=B, S=S, step=step, dtype=dtype) for _ in range(self.num_layers)]
        return tuple(empty)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        sizes = config.features, config.hidden_features
        self.gate = _linear(config, *sizes, axes=("embed", "hidden"), rngs=rngs)
        self.up = _linear(config, *sizes, axes=("embed", "hidden"), rngs=rngs)
        self.down = _linear(config, *reversed(sizes), axes=("hidden", "embed"), rngs=rngs)

    def __call__(self, x: Float[Array, "B T features"]) -> Float[Array, "B T features"]:
        return projected(self.down, nnx.silu(projected(self.gate, x)) * projected(self.up, x))


class Block(nnx.Module):
    """Attention and SwiGLU, each on a normalised copy of the tokens and added to them."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, rngs=rngs)
        layer = MultiHeadLatentAttention if isinstance(config.attention, MLAConfig) else Attention
        self.attention = layer(config.attention, config.features, rngs=rngs)
        self.swiglu_norm = _norm(config, rngs=rngs)
        self.swiglu = SwiGLU(config, rngs=rngs)

    def __call__(self, x: Array, mask: Mask | None, positions: Array | None) -> Array:
        x = x + self.attention(self.attention_norm(x), mask=mask, positions=positions)
        return x + self.swiglu(self.swiglu_norm(x))

    def prefill(self, x: Array, cache: KVCache, *, lengths: Array | None) -> tuple[Array, KVCache]:
        attended, cache = self.attention.prefill(self.attention_norm(x), cache, lengths=lengths)
        x = x + attended
        return x + self.swiglu(self.swiglu_norm(x)), cache

    def decode(self, x: Array, cache: KVCache) -> tuple[Array, KVCache]:
        attended, cache = self.attention.decode(self.attention_norm(x), cache)
        x = x + attended
        return x + self.swiglu(self.swiglu_norm(x)), cache


class Decoder(nnx.Module):
    """Tokens to the logits of the token that follows each.

    If its attention has dropout, `model.train()` before training and `model.eval()` before `generate` say when.

    Example:
      >>> from flax import nnx
      >>> from jflash.nn import AttentionConfig, Decoder, DecoderConfig, RoPE
      >>> attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, causal=True, rope=RoPE())
      >>> config = DecoderConfig(vocab_size=50, num_layers=1, features=32, hidden_features=64, attention=attention)
      >>> model = Decoder(config, rngs=nnx.Rngs(0))
      >>> model(jnp.arange(6).reshape(2, 3)).shape
      (2, 3, 50)
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        dtypes = {"dtype": config.attention.dtype, "param_dtype": config.attention.param_dtype}
        named = {"out_sharding": ("vocab", "embed")} if config.attention.logical_axes else {}
        self.embed = nnx.Embed(config.vocab_size, config.features, **dtypes, embedding_metadata=named, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = _norm(config, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "B T"], *, mask: Mask | None = None, positions: Int[Array, "*B T"] | None = None
    ) -> Float[Array, "B T vocab"]:
        """Logits, float32, or float64 where the tokens are computed in it.

        Args:
          tokens: of each batch row.
          mask: which pairs attend, besides what the config says: packed documents, say.
          positions: of the tokens; None means 0, 1, 2 and so on.
        """
        run = Block.__call__ if self.config.remat is None else nnx.remat(Block.__call__, policy=self.config.remat)
        x = self._embedded(tokens)
        for block in self.blocks:
            x = run(block, x, mask, positions)
        return self._logits(x)

    def prefill(
        self, tokens: Int[Array, "B T"], cache: tuple[KVCache, ...], *, lengths: Int[Array, " B"] | None = None
    ) -> tuple[Float[Array, "B vocab"], tuple[KVCache, ...]]:
        """Logits of the token that follows each prompt, and the cache with the prompts.

        Args:
          tokens: prompts, of which the last tokens may be padding.
          cache: from `config.empty_cache`; what it holds is forgotten.
          lengths: how many tokens the prompt of each row has, at least 1; None means T.
        """
        x, cache = self._with_cache(tokens, cache, lambda block, x, cache: block.prefill(x, cache, lengths=lengths))
        # Logits of all tokens of a long prompt would be larger than all else.
        last = x[:, -1:] if lengths is None else jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)
        return self._logits(last)[:, 0], cache

    def decode(
        self, tokens: Int[Array, "B T"], cache: tuple[KVCache, ...]
    ) -> tuple[Float[Array, "B T vocab"], tuple[KVCache, ...]]:
        """Logits of what follows each of the next T tokens of each row, and the cache with them too."""
        x, cache = self._with_cache(tokens, cache, Block.decode)
        return self._logits(x), cache

    def _with_cache(self, tokens: Array, cache: tuple[KVCache, ...], step: Callable) -> tuple[Array, tuple]:
        x, caches = self._embedded(tokens), []
        for block, own in zip(self.blocks, cache, strict=True):
            x, own = step(block, x, own)
            caches.append(own)
        return x, tuple(caches)

    def _embedded(self, tokens: Array) -> Array:
        tokens = jnp.asarray(tokens)
        # A lookup is a product with an axis of length vocab_size that is 1 in one place.
        sharding = product_sharding(tokens[..., None], self.embed.embedding[...], contracted=1)
        return self.embed(tokens, out_sharding=sharding)

    def _logits(self, x: Array) -> Array:
        head = self.embed.embedding[...].astype(x.dtype).T
        sharding, dtype = product_sharding(x, head, contracted=1), compute_dtype(x.dtype)
        return jnp.matmul(self.norm(x), head, preferred_element_type=dtype, out_sharding=sharding)


def generate(
    model: Decoder,
    prompt: Int[Array, "B T"],
    *,
    num_tokens: int,
    lengths: Int[Array, " B"] | None = None,
    temperature: float = 0.0,
    key: Array | None = None,
) -> Int[Array, "B num_tokens"]:
    """The tokens that follow each prompt: a pass over it, then a loop of `decode` with the cache in its place.

    Call it under `jax.jit` or `nnx.jit`, which compile that once for prompts of one shape.

    Args:
      model: a decoder, or whatever has its `config`, `prefill` and `decode`.
      prompt: tokens of each row.
      num_tokens: how many to make.
      lengths: how many tokens the prompt of each row has, at least 1, the rest being padding; None means T.
      temperature: of the distribution that tokens are drawn from; 0 takes the most likely.
      key: for drawing; needed with a temperature.

    Raises:
      ArgumentError: a temperature without a key, or below 0.

    Example:
      >>> from flax import nnx
      >>> from jflash.nn import AttentionConfig, Decoder, DecoderConfig, generate
      >>> config = DecoderConfig(
      ...     vocab_size=50, num_layers=1, features=8, hidden_features=9,
      ...     attention=AttentionConfig(num_heads=2, head_dim=4, causal=True),
      ... )
      >>> model = Decoder(config, rngs=nnx.Rngs(0))
      >>> four = nnx.jit(lambda model, prompt: generate(model, prompt, num_tokens=4))
      >>> four(model, jnp.array([[7, 8, 9]])).shape
      (1, 4)
    """
    if real("temperature", temperature) < 0:
        raise ArgumentError("temperature", found=repr(temperature), wanted="at least 0")
    if temperature and key is None:
        raise ArgumentError("key", found="None", wanted=f"a key of jax.random with temperature={temperature}")
    prompt = jnp.asarray(prompt)
    B, T = prompt.shape
    cache = model.config.empty_cache(B=B, S=T + num_tokens)
    lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    last, cache = model.prefill(prompt, cache, lengths=lengths)

    def choose(logits: Array, step: Array) -> Array:
        if not temperature:
            return logits.argmax(-1).astype(prompt.dtype)
        return jax.random.categorical(jax.random.fold_in(key, step), logits / temperature).astype(prompt.dtype)

    def next_token(carry: tuple, step: Array) -> tuple[tuple, Array]:
        logits, cache = carry
        token = choose(logits, step)
        logits, cache = model.decode(token[:, None], cache)
        return (logits[:, 0], cache), token

    _, tokens = jax.lax.scan(next_token, (last, cache), jnp.arange(num_tokens))
    return tokens.T


def _linear(config: DecoderConfig, in_features: int, out_features: int, *, axes: tuple[str, ...], rngs: nnx.Rngs):
    attention = config.attention
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=False,
        dtype=attention.dtype,
        param_dtype=attention.param_dtype,
        kernel_init=attention.kernel_init,
        kernel_metadata={"out_sharding": axes} if attention.logical_axes else {},
        rngs=rngs,
    )


def _norm(config: DecoderConfig, *, rngs: nnx.Rngs) -> nnx.RMSNorm:
    attention = config.attention
    # Every device has a vector as small as this: it multiplies tokens, which are split otherwise than parameters.
    named = {"out_sharding": (None,)} if attention.logical_axes else {}
    dtypes = {"dtype": attention.dtype, "param_dtype": attention.param_dtype}
    return nnx.RMSNorm(config.features, **dtypes, scale_metadata=named, rngs=rngs)
