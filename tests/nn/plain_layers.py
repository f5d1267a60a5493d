"""The layers written out: einsum by einsum, with every weight of every pair, in the dtype of what they are given.

For 16 bits logits, softmax and angles are float32, as for the plain attention of the error rule.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jflash.numerics.precision import compute_dtype


def rotated(x, positions, frequencies):
    """RoPE as multiplication of complex numbers: element i and element i + H / 2 are one of them."""
    half, dtype = x.shape[-1] // 2, x.dtype
    x = x.astype(compute_dtype(dtype))
    positions = jnp.asarray(positions).astype(x.dtype)
    angles = positions[..., None, None] * jnp.asarray(frequencies, x.dtype)
    turned = jax.lax.complex(x[..., :half], x[..., half:]) * jax.lax.complex(jnp.cos(angles), jnp.sin(angles))
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(dtype)


def normalised(x, scale, kind):
    if kind == "layer_norm":
        x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def dense_attention(q, k, v, visible, *, scale, softcap=None, score=None, sinks=None):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=compute_dtype(q.dtype)) * scale
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    logits = logits if score is None else score(logits)
    logits = jnp.where(visible, logits, -1e30)
    if sinks is not None:  # a key more, without a value
        sinks = jnp.broadcast_to(sinks[:, None, None].astype(logits.dtype), (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, sinks], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[1]]
    return jnp.einsum("bnts,bsnd->btnd", weights.astype(v.dtype), v)


def scored(config, positions, logits):
    """ALiBi and the score function by the positions of the tokens, (T,) or (B, T)."""
    B, N = logits.shape[:2]
    b, n = np.arange(B)[:, None, None, None], np.arange(N)[:, None, None]
    positions = np.broadcast_to(positions, (B, logits.shape[-1]))
    q, k = positions[:, None, :, None], positions[:, None, None]
    if config.alibi_slopes is not None:
        logits = logits - np.array(config.alibi_slopes).astype(logits.dtype)[n] * np.abs(q - k).astype(logits.dtype)
    return logits if config.score_fn is None else config.score_fn(logits, b, n, q, k)


def attention(weights, x, context, config, visible, positions):
    """`weights` is the tree of parameters; `visible` (B or 1, N or 1, T, S) is all that the masks say."""

    def project(name, x):
        projected = jnp.einsum("btf,fnh->btnh", x, weights[name]["kernel"])
        return projected + weights[name]["bias"] if config.qkv_bias else projected

    q, k, v = project("query", x), project("key", context), project("value", context)
    if config.qk_norm is not None:
        q = normalised(q, weights["query_norm"]["scale"], config.qk_norm)
        k = normalised(k, weights["key_norm"]["scale"], config.qk_norm)
    if config.rope is not None:
        frequencies = config.rope.base ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        q, k = (rotated(x, positions, frequencies) for x in (q, k))
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    sinks = weights["sinks"] if config.sinks else None
    score = functools.partial(scored, config, np.asarray(positions)) if config.alibi_slopes or config.score_fn else None
    out = dense_attention(q, k, v, visible, scale=scale, softcap=config.softcap, score=score, sinks=sinks)
    out = jnp.einsum("btnh,nhf->btf", out, weights["out"]["kernel"])
    return out + weights["out"]["bias"] if config.out_bias else out


def latent_attention(weights, x, config, visible):
    """MLA with every key and value of every head formed."""

    def project(name, x, equation="btf,fnh->btnh"):
        return jnp.einsum(equation, x, weights[name]["kernel"])

    frequencies = config.rope.base ** (-np.arange(0, config.rope_dim, 2) / config.rope_dim)
    positions = np.arange(x.shape[1])
    q = x
    if config.query_latent_dim is not None:
        q = normalised(project("query_down", x, "btf,fl->btl"), weights["query_norm"]["scale"], "rms_norm")
    q = project("query", q)
    q = jnp.concatenate([q[..., : config.head_dim], rotated(q[..., config.head_dim :], positions, frequencies)], -1)
    latent = normalised(project("latent", x, "btf,fl->btl"), weights["latent_norm"]["scale"], "rms_norm")
    key_rope = rotated(project("key_rope", x, "btf,fh->bth")[:, :, None], positions, frequencies)
    keys = project("key_up", latent)
    k = jnp.concatenate([keys, jnp.repeat(key_rope, config.num_heads, axis=2)], axis=-1)
    out = dense_attention(q, k, project("value_up", latent), visible, scale=config.scale)
    return jnp.einsum("btnh,nhf->btf", out, weights["out"]["kernel"])


def decoder(weights, tokens, config):
    """Logits of a causal decoder without a window."""
    t = np.arange(tokens.shape[1])
    x = weights["embed"]["embedding"][tokens]
    for _, block in sorted(weights["blocks"].items()):
        y = normalised(x, block["attention_norm"]["scale"], "rms_norm")
        x = x + attention(block["attention"], y, y, config.attention, t <= t[:, None], t)
        y = normalised(x, block["swiglu_norm"]["scale"], "rms_norm")
        gate, up, down = (block["swiglu"][name]["kernel"] for name in ("gate", "up", "down"))
        x = x + (jax.nn.silu(y @ gate) * (y @ up)) @ down
    return normalised(x, weights["norm"]["scale"], "rms_norm") @ weights["embed"]["embedding"].T
