"""Named calls of attention: the small ones that every backend is tested with, and the real ones that users meet."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jflash.masks import (
    Causal,
    Chunked,
    Dense,
    Dilated,
    Full,
    KeyRange,
    Lengths,
    Mask,
    MaskFn,
    PrefixLM,
    Segments,
    SlidingWindow,
    Tree,
)

DROPOUT_KEY = np.array([1, 2], np.uint32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One call of `flash_attention`, without its numbers.

    Attributes:
      name: short, unique, fit for a test id.
      B, T, S, N, K, H, Hv: the dimensions; Hv 0 means H, S 0 means T.
      dtype: of q, k and v.
      mask: the mask; its arrays are part of the workload.
      bias: shape of the bias, or None.
      bias_dtype: its dtype.
      softcap: cap of the logits, or None.
      alibi_slopes, sinks: their shapes, or None.
      score_fn, score_args: as of `flash_attention`; the arrays are part of the workload.
      dropout_rate: as of `flash_attention`, with the key `DROPOUT_KEY`.
    """

    name: str
    B: int
    T: int
    S: int = 0
    N: int
    K: int
    H: int
    Hv: int = 0
    dtype: str = "float32"
    mask: Mask = dataclasses.field(default_factory=Full)
    bias: tuple[int, ...] | None = None
    bias_dtype: str = "float32"
    softcap: float | None = None
    alibi_slopes: tuple[int, ...] | None = None
    sinks: tuple[int, ...] | None = None
    score_fn: Callable[..., Any] | None = None
    score_args: tuple[np.ndarray, ...] = ()
    dropout_rate: float = 0.0

    def __post_init__(self):
        object.__setattr__(self, "S", self.S or self.T)
        object.__setattr__(self, "Hv", self.Hv or self.H)

    @property
    def flops(self) -> int:
        """Floating point operations of the two matmuls of the forward pass, every pair counted."""
        return 2 * self.B * self.N * self.T * self.S * (self.H + self.Hv)


def documents(lengths: list[list[int]], *, padding: int = 0) -> np.ndarray:
    """Segment ids of packed documents: row b holds documents of `lengths[b]`, numbered from 1, then `padding` zeros."""
    rows = [np.repeat(np.arange(1, len(row) + 1), row) for row in lengths]
    total = max(len(row) for row in rows) + padding
    return np.stack([np.pad(row, (0, total - len(row))) for row in rows]).astype(np.int32)


def _random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


_DOCUMENTS = documents([[30, 41, 20], [7, 83]], padding=3)[:, :93]

# Lengths that are no multiple of any block and all dimensions distinct: a mixed-up axis cannot go unseen.
_SMALL = {"B": 2, "T": 93, "N": 6, "K": 3, "H": 16, "Hv": 24}
_CROSS = _SMALL | {"T": 37, "S": 101}
# And with even lengths and Hv as H, which some kernels want.
_EVEN = _SMALL | {"T": 94, "Hv": 16}


def _parents(nodes: int) -> np.ndarray:
    """Of each node one of the three before it, or -1."""
    return np.maximum(np.arange(nodes) - 1 - _random(8).integers(0, 3, nodes), -1)


def _near_or_marked(b, n, q, k, reach, marked, stride):
    return (abs(q + 30 - k) <= reach) | marked & (b == 0) | (k % (stride + 2) == n)


def _values_of_head_and_key(s, b, n, q, k, slope, value):
    """A slope per head and a value per key of a batch row, as an index and as a factor."""
    return s * (1 + value[b, k]) + slope[n] * (q - k).astype(s.dtype) / 64


def _capped_and_sparse(s, b, n, q, k, limit):
    """A softcap that is learned, and every pair masked whose sum is a multiple of 5."""
    return jnp.where((q + k + b) % 5 == 0, -np.inf, limit * jnp.tanh(s / limit))


def _t5_bias(s, b, n, q, k, table):
    """The bias of T5 (arXiv:1910.10683): a number for each bucket of distances, exact nearby and logarithmic beyond."""
    distance = abs(q - k)
    beyond = 4 + (2 * jnp.log(jnp.maximum(distance, 1).astype(np.float32) / 4)).astype(np.int32)
    bucket = jnp.where(distance < 4, distance, jnp.minimum(beyond, 8))
    return s + table[n, bucket + jnp.where(k > q, 9, 0)]


def _log_distance(s, b, n, q, k, rate):
    """NaN above the diagonal, and minus infinity on it, unless it is masked."""
    return s - rate[n, q] * jnp.log((q - k).astype(s.dtype))


def _draw(seed: int, *shape: int) -> np.ndarray:
    return _random(seed).standard_normal(shape).astype(np.float32)


CONTRACT: tuple[Workload, ...] = (
    Workload(name="full", **_SMALL),
    Workload(name="full_cross", **_CROSS),
    Workload(name="causal", mask=Causal(), **_SMALL),
    Workload(name="causal_bottom_right", mask=Causal(offset=64), **_CROSS),
    Workload(name="causal_offset_per_row", mask=Causal(offset=np.array([5, -9], np.int32)), **_SMALL),
    Workload(name="window", mask=SlidingWindow(9, 4), **_SMALL),
    Workload(name="window_left_offset", mask=SlidingWindow(3, 0, offset=20), **_CROSS),
    Workload(name="documents_causal", mask=Segments(_DOCUMENTS, padding_id=0) & Causal(), **_SMALL),
    Workload(
        name="segments_unsorted",
        mask=Segments(_random(1).integers(0, 3, (2, 37)), _random(2).integers(0, 3, (2, 101))),
        **_CROSS,
    ),
    Workload(
        name="lengths",
        mask=Lengths(q=np.array([30, 37], np.int32), kv=np.array([0, 77], np.int32)),
        **_CROSS,
    ),
    Workload(name="dense_per_head", mask=Dense(_random(3).random((2, 6, 37, 101)) < 0.3), **_CROSS),
    Workload(name="dense_broadcast", mask=Dense(_random(4).random((2, 1, 1, 101)) < 0.5), **_CROSS),
    Workload(
        name="or_and",
        mask=(Causal() | Lengths(kv=np.array([11, 0], np.int32))) & SlidingWindow(40, None),
        **_SMALL,
    ),
    Workload(name="prefix_lm", mask=PrefixLM(np.array([30, 0], np.int32)), **_SMALL),
    Workload(name="chunked_causal", mask=Chunked(30) & Causal(), **_SMALL),
    # Few queries and many keys, which kernels share among blocks of threads; some blocks find no key.
    Workload(
        name="few_queries",
        mask=Causal(offset=np.array([1340, 80], np.int32)),
        B=2,
        T=29,
        S=1390,
        N=6,
        K=2,
        H=64,
        Hv=32,
    ),
    Workload(name="not_dilated", mask=~Dilated(5) & SlidingWindow(30, 20), **_CROSS),
    Workload(
        name="key_ranges",
        mask=KeyRange(*np.sort(_random(5).integers(-3, 105, (2, 2, 37)), axis=0)),
        **_CROSS,
    ),
    Workload(name="tree", mask=Tree(_parents(37), prefix=np.array([50, 3], np.int32), keys=101), **_CROSS),
    Workload(
        name="function",
        mask=MaskFn(
            _near_or_marked,
            per_query=(_random(6).integers(0, 20, (2, 37)),),
            per_key=(_random(7).random(101) < 0.1,),
            per_head=(np.arange(6),),
        ),
        **_CROSS,
    ),
    Workload(name="nothing", mask=SlidingWindow(2, 2, offset=1000), **_SMALL),
    Workload(name="mqa_decode", B=3, T=1, S=130, N=8, K=1, H=32, mask=Causal(offset=np.array([129, 0, 57], np.int32))),
    # Not one key: there d_out has no share in dq and dk, and what rounding leaves of it has no scale to be judged by.
    Workload(name="few_keys", B=2, T=5, S=3, N=4, K=1, H=8, Hv=12),
    Workload(name="bias_pair", bias=(2, 6, 37, 101), **_CROSS),
    Workload(name="bias_head_causal", bias=(1, 6, 1, 93), mask=Causal(), bias_dtype="bfloat16", **_SMALL),
    Workload(name="bias_row_softcap", bias=(2, 1, 93, 1), softcap=2.5, mask=SlidingWindow(20, 0), **_SMALL),
    Workload(name="softcap", softcap=1.5, **_SMALL),
    Workload(name="sinks", sinks=(6,), mask=SlidingWindow(2, 2, offset=80), **_CROSS),
    Workload(
        name="alibi_sinks_softcap",
        alibi_slopes=(2, 6),
        sinks=(2, 6),
        softcap=2.5,
        mask=SlidingWindow(30, 9, offset=np.array([40, -5], np.int32)),
        **_CROSS,
    ),
    Workload(
        name="score_head_and_key",
        score_fn=_values_of_head_and_key,
        score_args=(_draw(9, 6), _draw(10, 2, 93)),
        mask=Causal(),
        **_SMALL,
    ),
    Workload(name="score_t5", score_fn=_t5_bias, score_args=(_draw(11, 6, 18),), mask=SlidingWindow(30, 70), **_CROSS),
    Workload(name="dropout", dropout_rate=0.3, mask=Segments(_DOCUMENTS, padding_id=0) & Causal(), **_SMALL),
    Workload(
        name="score_limit_alibi_bias",
        score_fn=_capped_and_sparse,
        score_args=(np.float32(1.7),),
        alibi_slopes=(6,),
        bias=(1, 1, 93, 93),
        mask=Segments(_DOCUMENTS, padding_id=0) & Causal(),
        **_SMALL,
    ),
    Workload(
        name="score_poles",
        score_fn=_log_distance,
        score_args=(_draw(12, 6, 93),),
        mask=Causal(offset=-1) & Segments(_DOCUMENTS, padding_id=0),
        **_SMALL,
    ),
    Workload(name="even_full", **_EVEN),
    Workload(name="even_full_cross", **_EVEN | {"T": 38, "S": 102}),
    Workload(name="even_causal", mask=Causal(), **_EVEN),
    Workload(name="even_window", mask=Causal() & SlidingWindow(9, 3), **_EVEN),
)


def contract_workloads(*dtypes: str) -> tuple[Workload, ...]:
    """The small workloads in each of these dtypes, the dtype added to the name."""
    return tuple(
        dataclasses.replace(workload, name=f"{workload.name}-{dtype}", dtype=dtype)
        for workload in CONTRACT
        for dtype in dtypes
    )


def check_workloads(*, large: bool) -> tuple[Workload, ...]:
    """What `jflash check` runs: shapes of real models, at lengths for a GPU (`large`) or for a CPU."""
    T = 4096 if large else 1024
    N, K = (32, 8) if large else (8, 2)
    few, dtype = {"N": N // 4, "K": K // 2}, "bfloat16"
    row = [T // 4, T // 2 - 13, T // 8]
    packed = documents([row, row[::-1]], padding=T - sum(row))
    return (
        Workload(name="llama_gqa_causal", B=1, T=T, N=N, K=K, H=128, dtype=dtype, mask=Causal()),
        Workload(name="window", B=1, T=T, H=128, dtype=dtype, mask=SlidingWindow(T // 8 - 1, 0), **few),
        Workload(
            name="packed_documents", B=2, T=T, H=128, dtype=dtype,
            mask=Segments(packed, padding_id=0) & Causal(), **few,
        ),
        Workload(name="odd_float32", B=2, T=T // 2 - 47, S=T // 2 + 29, H=80, dtype="float32", **few),
        Workload(name="mla_causal", B=1, T=T // 2, N=N // 2, K=N // 2, H=192, Hv=128, dtype=dtype, mask=Causal()),
    )  # fmt: skip
