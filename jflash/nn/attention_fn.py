"""One line into existing models: `attention_fn` for the layers and call sites of Flax's own attention."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash.api import flash_attention
from jflash.errors import ArgumentError, ShapeError, naming
from jflash.masks import And, Causal, Dense, Mask
from jflash.nn.rope import RoPE


def attention_fn(
    *,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    rope: RoPE | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Callable[..., Float[Array, "*batch T N Hv"]]:
    """A function that does what `nnx.dot_product_attention` and `linen.dot_product_attention` do, by `flash_attention`.

    For `nnx.MultiHeadAttention(attention_fn=...)`, `linen.MultiHeadDotProductAttention(attention_fn=...)`, and in the
    place of `nnx.dot_product_attention` in a model's own code. It takes their arguments:

    - `mask`, True or nonzero where a pair attends, as Flax's helpers make it, becomes a `jflash.masks.Dense`; `bias` is
      added to the logits, and an additive mask belongs there. Both broadcast to (*batch, N, T, S). A pattern given to
      `attention_fn` itself needs no such array, whose memory and time grow with the square of the length.
    - Any number of batch axes. Fewer key/value heads than query heads, also where Flax's function refuses them.
    - `dtype` is the dtype computed in; None is the widest of query, key and value.
    - `is_causal` is aligned at the top left, as in Flax. `input_positions`, (*batch, T), are for `rope`, as those of
      `nnx.dot_product_attention_with_rope`.
    - `force_fp32_for_softmax` is always so. `precision` is met: products are exact for 16-bit inputs, and HIGHEST for
      float32. (`jax.default_matmul_precision` changes that; with both set, the call raises.)
    - `dropout_rng` is a key of jax.random. Each batch row and head drops weights of its own, also where
      `broadcast_dropout` allows Flax to draw one pattern for all of them.
    - What needs the matrix of weights raises: `module` (`sow_weights=True`), einsums of the caller's.

    A query that sees no key gives 0, where Flax gives the mean of all values.

    Layers share a compiled program only if they share the function: call this once for all of them.

    Args:
      mask: which pairs attend besides what the layer says, from `jflash.masks`.
      rope: rotates queries and keys, of which there must be as many: cached keys of decoding steps have been rotated by
        nobody.
      causal, window, softcap, scale, backend: as of `flash_attention`.

    Returns:
      A function of (query, key, value), (*batch, T, N, H), (*batch, S, K, H), (*batch, S, K, Hv), and of the arguments
      above, that gives (*batch, T, N, Hv).

    Raises:
      ArgumentError: by that function, on arguments that it cannot serve.

    Example:
      >>> import jflash.nn
      >>> from flax import nnx
      >>> layer = nnx.MultiHeadAttention(
      ...     num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0),
      ...     attention_fn=jflash.nn.attention_fn(mask=Causal() & SlidingWindow(127, 0)),
      ... )
      >>> layer(jnp.ones((2, 300, 32))).shape
      (2, 300, 32)
    """
    own_mask = mask

    # linen passes on only what it finds in the signature: an argument hidden in **kwargs would be dropped unseen.
    def dot_product_attention(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable | None = None,
        qk_attn_weights_einsum: Callable | None = None,
        attn_weights_value_einsum: Callable | None = None,
        is_causal: bool = False,
        input_positions: Array | None = None,
    ) -> Array:
        einsums = {
            "einsum_dot_general": einsum_dot_general,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }
        _refuse_what_needs_weights(module, einsums)
        _check_precision(precision)
        if input_positions is not None and rope is None:
            hint = "Give attention_fn(rope=RoPE(...))."
            raise ArgumentError("input_positions", found="an array", wanted="None without `rope`", hint=hint)

        if jnp.ndim(query) < 3:
            raise ShapeError(
                "query", found=f"shape {jnp.shape(query)}", wanted="at least three axes, (*batch, T, N, H)"
            )
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        query, key, value = (jnp.asarray(array, dtype) for array in (query, key, value))
        *batch, T, _, _ = query.shape
        S = key.shape[-3]
        if mask is not None and T != S and (own_mask is not None or causal or window is not None):
            # So it is in a decoding step of Flax's layers, where the array alone knows where the query stands.
            found = f"an array, with T={T}, S={S}, beside the mask, causal or window given to attention_fn"
            wanted = "one of the two where T != S"
            hint = "Decode with attention_fn() and the layer's own mask, or with jflash.nn.Attention and its cache."
            raise ArgumentError("mask", found=found, wanted=wanted, hint=hint)
        if rope is not None:
            if T != S:
                hint = "jflash.nn.Attention rotates what it caches."
                raise ArgumentError("rope", found=f"T={T}, S={S}", wanted="equal lengths", hint=hint)
            positions = jnp.arange(T, dtype=jnp.int32) if input_positions is None else jnp.asarray(input_positions)
            query, key = rope(query, positions), rope(key, positions)
        masks = [own_mask] if own_mask is not None else []
        masks += [Causal()] if is_causal else []
        if mask is not None:
            pairs = _on_one_batch_axis("mask", jnp.asarray(mask).astype(bool), batch)
            masks.append(Dense(pairs.reshape((1,) * (2 - pairs.ndim) + pairs.shape)))
        operands = {"query": query, "key": key, "value": value}
        dropout = {} if deterministic else {"dropout_rate": dropout_rate, "dropout_key": dropout_rng}
        with naming(q="query", k="key", v="value", dropout_key="dropout_rng"):
            out = flash_attention(
                *(_on_one_batch_axis(name, array, batch) for name, array in operands.items()),
                mask=And(*masks) if masks else None,
                causal=causal,
                window=window,
                bias=None if bias is None else _on_one_batch_axis("bias", jnp.asarray(bias), batch),
                softcap=softcap,
                **dropout,
                scale=scale,
                backend=backend,
            )
        return out.reshape(*batch, *out.shape[-3:])

    return dot_product_attention


def _refuse_what_needs_weights(module: Any, einsums: Mapping[str, Any]) -> None:
    if module is not None:
        hint = "Leave sow_weights=False, or look at weights with the attention_fn of Flax."
        raise ArgumentError(
            "module", found="a module to sow weights into", wanted="None, since there are none", hint=hint
        )
    for name, einsum in einsums.items():
        if einsum is not None:
            hint = (
                "Products with q, k and v are formed tile by tile; the attention_fn of Flax takes einsums of your own."
            )
            raise ArgumentError(name, found=repr(einsum), wanted="None", hint=hint)


def _check_precision(precision: Any) -> None:
    default = jax.config.jax_default_matmul_precision
    if precision is not None and default is not None:
        found = f"{precision} under jax.default_matmul_precision={default!r}"
        raise ArgumentError("precision", found=found, wanted="one of the two")


def _on_one_batch_axis(name: str, array: Array, batch: list[int]) -> Array:
    """Axes (*batch, ...), of which the last three are no batch, as (B, ...); up to one batch axis stays as it is."""
    leading = array.shape[:-3]
    if len(batch) < 2 or not leading:
        return array
    # An operand has all its batch axes; a mask and a bias broadcast along them.
    may_broadcast = name in ("mask", "bias")
    fits = len(leading) <= len(batch) if may_broadcast else len(leading) == len(batch)
    own = batch[len(batch) - len(leading) :]
    if not fits or any(size != wanted and not (may_broadcast and size == 1) for size, wanted in zip(leading, own)):
        raise ShapeError(name, found=f"batch axes {leading}", wanted=f"{tuple(batch)}, as `query` has")
    if all(size == 1 for size in leading):
        return array.reshape(math.prod(leading), *array.shape[-3:])
    return jnp.broadcast_to(array, (*batch, *array.shape[-3:])).reshape(math.prod(batch), *array.shape[-3:])
