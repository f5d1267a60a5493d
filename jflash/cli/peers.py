"""Whom jflash is compared with: `jax.nn.dot_product_attention`, and a dense formula where that cannot run."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jflash.cli.measurement import Call
from jflash.testing.workloads import Workload


class Peer(NamedTuple):
    """Another implementation of a workload.

    Attributes:
      call: a function of (q, k, v, *others).
      others: its further arguments.
      note: what a reader must know of it; empty where it is `jax.nn` as it stands.
    """

    call: Call
    others: tuple[Bool[Array, "..."], ...]
    note: str


def peer_of(workload: Workload) -> Peer | str:
    """The peer of a workload, or why it has none."""
    if workload.softcap is not None or workload.bias is not None:
        return "jax.nn has no softcap, and a bias is not compared"
    allowed = dense_mask(workload)
    others = () if allowed.all() else (jnp.asarray(allowed),)
    if workload.H != workload.Hv:
        return Peer(_dense, others, "jax.nn refuses Hv != H: compared with its formula written out")
    return Peer(_jax_nn, others, "")


def dense_mask(workload: Workload) -> Bool[np.ndarray, "#B #N T S"]:
    """The mask of a workload as `jax.nn` takes it, axes that it does not depend on of size 1."""
    w = workload
    b, n, t, s = np.ix_(*(np.arange(size) for size in (w.B, w.N, w.T, w.S)))
    return np.asarray(w.mask.bind(B=w.B, N=w.N, T=w.T, S=w.S).allowed(t, s, b=b, n=n))


def _jax_nn(q: Array, k: Array, v: Array, allowed: Array | None = None) -> Array:
    return jax.nn.dot_product_attention(q, k, v, mask=allowed)


def _dense(q: Array, k: Array, v: Array, allowed: Array | None = None) -> Array:
    k, v = (jnp.repeat(array, q.shape[2] // k.shape[2], axis=2) for array in (k, v))
    s = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if allowed is not None:
        s = jnp.where(allowed, s, jnp.finfo(s.dtype).min)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s).astype(v.dtype), v)
