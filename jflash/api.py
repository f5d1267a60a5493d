"""The door: the public calls of attention. Each reads down: arguments to a `Problem`, a `Plan`, the backend."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jflash.backends import registry
from jflash.backends.platforms import per_platform
from jflash.backends.protocol import Backend, Operands, flatten, problem_of
from jflash.errors import ArgumentError, ShapeError, naming
from jflash.hardware import Hardware, named, of_device, present
from jflash.masks import And, Causal, Dense, Full, Lengths, Mask, Segments, packed
from jflash.masks.arrays import reshaped
from jflash.masks.mask import MaskStructure
from jflash.masks.patterns import window_of
from jflash.masks.varlen import packed_positions
from jflash.numerics.online_softmax import Attended, add_sink
from jflash.numerics.precision import compute_dtype
from jflash.options import current_options
from jflash.parallel.partition import over_explicit_mesh
from jflash.plan import Explanation, check_backend_name, choose, explain_plan
from jflash.problem import Problem, check_arrays, check_bias, real, terms_of
from jflash.scores import ScoreTerms, dropout_of, per_head, score_functions
from jflash.vjp import kernel_attention


def flash_attention(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K Hv"],
    *,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    segment_ids: Int[Array, "*B T"] | tuple[Int[Array, "*B T"], Int[Array, "*B S"]] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    softcap: float | None = None,
    alibi_slopes: Float[Array, " N"] | Float[Array, "B N"] | None = None,
    score_fn: Callable[..., Array] | None = None,
    score_args: tuple[Any, ...] = (),
    sinks: Float[Array, " N"] | Float[Array, "B N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    tiles: Any = None,
) -> Float[Array, "*B T N Hv"]:
    r"""Exact attention in O(n) memory.

    For each query t and head n, with kv head n // (N // K),

        s = scale * (q · k) + bias,   then softcap * tanh(s / softcap),   then s - alibi_slope * |t + offset - key|,
        then score_fn(s, ...),   then -inf where the mask does not allow,
        p = softmax(s), where a sink adds exp(sink) to the sum,   then dropout of p,
        out = p @ v.

    The order of the sum is that of the online softmax (FlashAttention, arXiv:2205.14135, algorithm 1), the result is
    that of the formula. Logits and softmax are float32 whatever the inputs (float64 for float64); float32 inputs are
    multiplied at HIGHEST precision unless `jax.default_matmul_precision` says otherwise.

    A query that sees no key gives 0, and all its gradients are 0 but that of its sink by way of lse. A key that no
    query of its batch row sees has no influence whatever it holds, NaN too.

    Args:
      q: queries, (B, T, N, H) or without B; bfloat16, float16, float32 or float64.
      k: keys, (B, S, K, H), where K divides N.
      v: values, (B, S, K, Hv); Hv may differ from H.
      mask: which pairs attend, from `jflash.masks`. The arguments `causal`, `window` and `segment_ids` narrow it.
      causal: query t sees the keys up to t. For T != S give `mask=Causal(offset=...)`, which says where the diagonal
        starts.
      window: distances (left, right) of the first and the last key that a query sees, both ends included; None in a
        pair is unlimited, an int w means (w, w).
      segment_ids: a segment for each token, (T,) or (B, T), or a pair of those for queries and keys: a query sees the
        keys of its own segment.
      bias: added to the scaled logits, broadcastable to (B, N, T, S); -inf masks a pair. It has a gradient.
      softcap: cap of the logits, positive; None for none.
      alibi_slopes: (N,) or (B, N), floating point: each logit less the slope of its head times the distance of query
        and key (ALiBi, arXiv:2108.12409). Query t stands at t + offset, the offset that Causal and SlidingWindow of the
        mask have, 0 where there are none. It has a gradient.
      score_fn: `score_fn(s, b, n, q, k, *score_args)` in place of the logit s: any traceable elementwise function of
        it, in float32 (float64 for float64 inputs), and of the indices of batch row, head, query and key, int32 arrays
        that broadcast (FlexAttention, arXiv:2412.05496). -inf masks a pair. Pass the same function object again: it is
        part of the compiled program, and one that is made anew each time compiles each time.
      score_args: arrays that `score_fn` gets whole and indexes: `table[q - k + T]`, `slope[n]`, `values[b, k]`.
        Floating ones have gradients, and arrive in the dtype of s. They may be traced; an array that `score_fn`
        captures may not. Kernels take what is indexed by head, key or q - k, and arrays of all pairs; one of these
        that is added belongs into `bias`, which takes no registers.
      sinks: (N,) or (B, N), floating point: a logit per head that takes part in the softmax and in lse and has no value
        (StreamingLLM, arXiv:2309.17453; learned as in gpt-oss). It has a gradient; -inf is none.
      dropout_rate: the part of the weights that is dropped, a Python number from 0 to below 1; the others grow by
        1 / (1 - rate). lse is that without dropout.
      dropout_key: a key of `jax.random`, typed or raw, of which and of the indices of batch row, head, query and key
        alone it depends what is dropped: not on tiles, backend or devices. Give each layer and step one of its own.
      scale: factor of q · k, a Python float; None means 1 / sqrt(H).
      deterministic: gradients are bit-equal between runs of the compiled program, or the call raises.
      backend: "auto", or the name of one, which then runs or raises; see `jflash.explain`.
      tiles: block sizes, of the type that the backend takes; None for its own choice.

    Returns:
      (B, T, N, Hv) in the dtype of q, or without B as the inputs.

    Raises:
      ShapeError, DtypeError, ArgumentError: an argument is not as above; the message says which and what is wanted.
      UnsupportedError: the backend asked for cannot do this; the message says why.

    Example:
      >>> import jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 64))
      >>> jflash.flash_attention(q, k, v, causal=True, window=(32, 0)).shape
      (2, 100, 4, 64)
    """
    (out,) = _call(
        q, k, v, lse=False, mask=mask, causal=causal, window=window, segment_ids=segment_ids, bias=bias,
        softcap=softcap, alibi_slopes=alibi_slopes, score_fn=score_fn, score_args=score_args, sinks=sinks,
        dropout_rate=dropout_rate, dropout_key=dropout_key, scale=scale, deterministic=deterministic, backend=backend,
        tiles=tiles,
    )  # fmt: skip
    return out


def flash_attention_with_lse(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K Hv"],
    *,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    segment_ids: Int[Array, "*B T"] | tuple[Int[Array, "*B T"], Int[Array, "*B S"]] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    softcap: float | None = None,
    alibi_slopes: Float[Array, " N"] | Float[Array, "B N"] | None = None,
    score_fn: Callable[..., Array] | None = None,
    score_args: tuple[Any, ...] = (),
    sinks: Float[Array, " N"] | Float[Array, "B N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    tiles: Any = None,
) -> Attended:
    """`flash_attention`, and with it the log of the sum of exponentials of each query's logits.

    Two results over different keys merge into the result over all of them by their lse; both are differentiable.

    Args, Raises: as of `flash_attention`.

    Returns:
      `out` (B, T, N, Hv) in the dtype of q, and `lse` (B, N, T), natural log, float32 (float64 for float64 inputs),
      -inf for a query that sees no key, or its sink. Without B where the inputs are.

    Example:
      >>> import jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 100, 4, 64))
      >>> out, lse = jflash.flash_attention_with_lse(q, k, v)
      >>> out.shape, lse.shape
      ((100, 4, 64), (4, 100))
    """
    return Attended(
        *_call(
            q, k, v, lse=True, mask=mask, causal=causal, window=window, segment_ids=segment_ids, bias=bias,
            softcap=softcap, alibi_slopes=alibi_slopes, score_fn=score_fn, score_args=score_args, sinks=sinks,
            dropout_rate=dropout_rate, dropout_key=dropout_key, scale=scale, deterministic=deterministic,
            backend=backend, tiles=tiles,
        )
    )  # fmt: skip


def explain(q: Any, k: Any, v: Any, *, hardware: str | None = None, lse: bool = False, **arguments: Any) -> Explanation:
    """Which backend and tiles `flash_attention` would use, and for each other backend the reason why not.

    Nothing is computed: arrays may be `jax.ShapeDtypeStruct`, in masks too, and no device of the kind need be there.

    Args:
      hardware: a name as in `jflash.hardware.names()`, `"h200"` say; None is what the call plans for: the device that
        holds q, k and v, or where they hold no numbers the option `hardware`, or the device here.
      lse: explain `flash_attention_with_lse` instead, which not every backend can give.
      q, k, v, **arguments: those of `flash_attention`.

    Raises:
      ShapeError, DtypeError, ArgumentError: as `flash_attention` would. A refusal is part of the answer and not raised.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((2, 4096, 16, 128), "bfloat16")
      >>> jflash.explain(x, x, x, causal=True, hardware="h200").plan.backend
      'mosaic_gpu'
    """
    backend, tiles = arguments.pop("backend", "auto"), arguments.pop("tiles", None)
    check_backend_name(backend)
    problem, terms, bound_mask = _pose(q, k, v, lse=lse, **arguments)
    target = _hardware(hardware, (q, k, v, terms, bound_mask))
    return explain_plan(problem, target, backend=backend, tiles=tiles)


def flash_attention_varlen(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K Hv"],
    cu_seqlens_q: Int[Array, " sequences+1"],
    cu_seqlens_k: Int[Array, " sequences+1"] | None = None,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Float[Array, " N"] | Float[Array, "B N"] | None = None,
    score_fn: Callable[..., Array] | None = None,
    score_args: tuple[Any, ...] = (),
    sinks: Float[Array, " N"] | Float[Array, "B N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    tiles: Any = None,
) -> Float[Array, "T N Hv"]:
    """`flash_attention` on sequences of any lengths, packed one after the other without padding.

    `jflash.masks.packed` is the mask, for other calls: with lse, with a bias.

    Args:
      q, k, v: the tokens of all sequences, and slack at the end if there is any.
      cu_seqlens_q: where the queries of each sequence begin, and where the last ones end: whole numbers from 0 on,
        ascending. They may be traced: other lengths do not compile again. Queries past the last number give 0; where it
        is known when tracing that there are none, q, k and v are not searched for them.
      cu_seqlens_k: likewise for the keys; None is the same as for the queries.
      causal, window: within each sequence, whose last query stands at its last key, as in FlashAttention.
      alibi_slopes: as of `flash_attention`, by the distance of positions in a sequence, whose last query stands at its
        last key.
      score_fn: as of `flash_attention`, where q and k count all packed tokens, and b is 0.
      softcap, score_args, sinks, dropout_rate, dropout_key, scale, deterministic, backend, tiles: as of
        `flash_attention`.

    Returns:
      (T, N, Hv) in the dtype of q.

    Raises:
      ShapeError, DtypeError, ArgumentError: an argument is not as above; the message says which and what is wanted.
      UnsupportedError: the backend asked for cannot do this; the message says why.

    Example:
      >>> import jax, numpy as np
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 100, 4, 64))
      >>> jflash.flash_attention_varlen(q, k, v, np.array([0, 30, 30, 100]), causal=True).shape
      (100, 4, 64)
    """
    check_arrays(q, k, v)
    if q.ndim != 3:
        raise ShapeError("q", found=f"shape {q.shape}", wanted="(T, N, H): all sequences one after the other, no batch")
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    lengths = {"T": q.shape[0], "S": k.shape[0]}
    mask = packed(cu_seqlens_q, cu_seqlens_k, causal=causal, window=window, **lengths)
    positions = None if alibi_slopes is None else packed_positions(cu_seqlens_q, cu_seqlens_k, **lengths)
    (out,) = _call(
        q, k, v, lse=False, mask=mask, softcap=softcap, alibi_slopes=alibi_slopes, alibi_positions=positions,
        score_fn=score_fn, score_args=score_args, sinks=sinks, dropout_rate=dropout_rate, dropout_key=dropout_key,
        scale=scale, deterministic=deterministic, backend=backend, tiles=tiles,
    )  # fmt: skip
    return out


def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Any:
    """Takes what `jax.nn.dot_product_attention` takes, and means the same, in O(n) memory.

    It differs where the other gives something of little use:

    - a query that sees no key gives 0 with gradients 0 (there: the mean of all values);
    - what padding holds, NaN too, never reaches a result;
    - the residual is float32 (there: rounded to the dtype of key) and has a gradient (there: none);
    - Hv may differ from H;
    - `scale` is part of the compiled program, so a traced one raises; a traced factor can multiply `query` instead.

    Args:
      query, key, value: (B, T, N, H), (B, S, K, H), (B, S, K, Hv), or without B. Whatever `jnp.asarray` takes.
      bias: added to the scaled logits; broadcastable to (B, N, T, S) from any rank up to 4.
      mask: booleans, True where a pair attends; broadcastable likewise.
      scale: factor of the logits, a number or an array scalar that is not traced; None means 1 / sqrt(H).
      is_causal: query t sees the keys up to t, aligned at the top left also where T != S.
      query_seq_lengths, key_value_seq_lengths: (B,); what lies past a length is padding. Each works alone.
      local_window_size: (left, right) distances, both ends included, aligned at the top left; an int w means (w, w).
      implementation: None is `backend="auto"`, "xla" is `backend="xla"`, "cudnn" is `backend="cudnn"` or raises.
      return_residual: also return the lse, (B, T, N).

    Returns:
      (B, T, N, Hv) in the dtype of query; with `return_residual` a tuple of it and the lse.

    Raises:
      ShapeError, DtypeError, ArgumentError, UnsupportedError: as `flash_attention`.

    Example:
      >>> import jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 64))
      >>> jflash.dot_product_attention(q, k, v, is_causal=True).shape
      (2, 100, 4, 64)
    """
    if implementation not in (None, "xla", "cudnn"):
        raise ArgumentError("implementation", found=repr(implementation), wanted='None, "xla" or "cudnn"')
    query, key, value = (jnp.asarray(array) for array in (query, key, value))
    with naming(q="query", k="key", v="value"):
        check_arrays(query, key, value)
    masks: list[Mask] = [Causal()] if is_causal else []
    if mask is not None:
        mask = jnp.asarray(mask)
        with naming(array="mask"):
            masks.append(Dense(mask.reshape((1,) * (2 - mask.ndim) + mask.shape)))
    if local_window_size is not None:
        masks.append(window_of(local_window_size, "local_window_size"))
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        *batch, T, N, _ = query.shape
        with naming(q="query_seq_lengths", kv="key_value_seq_lengths"):
            lengths = Lengths(q=_optional_array(query_seq_lengths), kv=_optional_array(key_value_seq_lengths))
            masks.append(lengths.bind(B=batch[0] if batch else 1, N=N, T=T, S=key.shape[-3]))
    if isinstance(scale, jax.Array) and not isinstance(scale, jax.core.Tracer) and scale.ndim == 0:
        scale = float(scale)
    arguments = {
        "mask": And(*masks) if masks else None,
        "bias": _optional_array(bias),
        "scale": scale,
        "backend": implementation or "auto",
    }
    if not return_residual:
        return flash_attention(query, key, value, **arguments)
    out, lse = flash_attention_with_lse(query, key, value, **arguments)
    return out, jnp.swapaxes(lse, -1, -2)


def _call(q: Any, k: Any, v: Any, *, lse: bool, backend: str, tiles: Any, **arguments: Any) -> tuple:
    """What the public calls have in common: arguments to a problem, its plan, and (out, lse) or (out,) from that."""
    check_backend_name(backend)
    problem, terms, bound_mask = _pose(q, k, v, lse=lse, **arguments)
    hardware = _hardware(None, (q, k, v, terms, bound_mask))
    plan = choose(problem, hardware, backend=backend, tiles=tiles)
    is_batched = len(q.shape) == 4
    q, k, v = (jnp.asarray(array) if is_batched else jnp.expand_dims(array, 0) for array in (q, k, v))
    operands = Operands(q, k, v, terms, bound_mask)
    runs = registry.get(plan.backend)
    if plan.elsewhere is not None:
        runs = per_platform(runs, hardware.platform, registry.get(plan.elsewhere.backend), plan.elsewhere.tiles)
    results = _attend(problem, runs, plan.tiles, operands)
    return results if is_batched else tuple(array[0] for array in results)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _attend(problem: Problem, backend: Backend, tiles: Any, operands: Operands) -> tuple[Array, ...]:
    """The call itself, (out, lse) or (out,): jitted, so that a second call of the same problem traces nothing."""
    if problem.is_empty:
        out = jnp.zeros((problem.B, problem.T, problem.N, problem.Hv), problem.dtype)
        lse = jnp.full((problem.B, problem.N, problem.T), -jnp.inf, compute_dtype(problem.dtype))
        if operands.sinks is not None:
            lse = add_sink(lse, operands.sinks[..., None])
        return (out, lse) if problem.lse else (out,)
    arrays, axes, unflatten = flatten(operands)

    def on_device(*arrays: Array) -> tuple[Array, ...]:
        own = unflatten(*arrays)
        if backend.backward is None:
            attended = backend.forward(problem_of(problem, own), tiles, own)
        else:
            attended = kernel_attention(backend, problem, tiles, own)
        return tuple(attended) if problem.lse else (attended.out,)

    # JAX (0.11.2, 0.12.0) cannot check kernels under interpretation: "dynamic_slice requires varying manual axes to
    # match". What is differentiated by JAX itself is checked, which spares it sums over axes that split nothing.
    check_vma = backend.backward is None
    result_axes = ("BTND", "BNT") if problem.lse else ("BTND",)
    return over_explicit_mesh(on_device, arrays, axes=axes, result_axes=result_axes, check_vma=check_vma)


def _hardware(name: str | None, operands: Any) -> Hardware:
    """What to plan for: as named; the device of concrete operands, which runs them; as the option says; what is here.

    Operands that are traced, under `jax.grad` too, do not say where they are.
    """
    if name is not None:
        return named(name)
    option = current_options().hardware
    told = None if option is None else named(option)
    leaves = jax.tree.leaves(operands)
    if all(isinstance(leaf, jax.Array | np.ndarray) and not isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        committed = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and leaf.committed]
        # Arrays that are committed nowhere run on the default device, whatever device they happen to lie on.
        return of_device(next(iter(committed[0].devices()))) if committed else present()
    return told or present()


def _pose(
    q: Any,
    k: Any,
    v: Any,
    *,
    lse: bool,
    mask: Mask | None = None,
    causal: bool = False,
    window: Any = None,
    segment_ids: Any = None,
    bias: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    alibi_positions: Any = None,
    score_fn: Any = None,
    score_args: Any = (),
    sinks: Any = None,
    dropout_rate: Any = 0.0,
    dropout_key: Any = None,
    scale: float | None = None,
    deterministic: bool = False,
) -> tuple[Problem, ScoreTerms | None, Mask]:
    """The problem that a call poses, and its terms and mask bound to it. All checks of arguments are made here.

    `alibi_positions`, (T,), say where the queries stand among the keys where that is not on a diagonal of the mask.
    """
    check_arrays(q, k, v)
    *batch, T, N, H = q.shape
    *_, S, K, Hv = v.shape
    lengths = {"B": batch[0] if batch else 1, "N": N, "T": T, "S": S}
    for name, flag in (("causal", causal), ("deterministic", deterministic), ("lse", lse)):
        if not isinstance(flag, bool):
            raise ArgumentError(name, found=repr(flag), wanted="True or False")
    if causal and T != S:
        hint = f"Give mask=Causal() for query t to see keys up to t, or mask=Causal(offset={S - T}) to align the ends."
        raise ShapeError(
            "causal", found=f"T={T}, S={S}", wanted="equal lengths, where only one diagonal is meant", hint=hint
        )
    masks = [_checked_mask(mask).bind(**lengths)] if mask is not None else []
    masks += [Causal()] if causal else []
    masks += [window_of(window, "window")] if window is not None else []
    if segment_ids is not None:
        with naming(q_ids="segment_ids", kv_ids="segment_ids"):
            masks.append(_segments(segment_ids).bind(**lengths))
    bound = And(*masks) if len(masks) > 1 else masks[0] if masks else Full()
    heads = {"B": lengths["B"], "N": N, "dtype": compute_dtype(np.dtype(q.dtype))}
    terms = ScoreTerms(
        bias=None if bias is None else reshaped(bias, check_bias(bias, **lengths)),
        functions=score_functions(
            alibi_slopes, bound if alibi_positions is None else alibi_positions, score_fn, score_args, **heads
        ),
        sinks=None if sinks is None else per_head("sinks", sinks, **heads),
        dropout=dropout_of(dropout_rate, dropout_key, B=lengths["B"], N=N),
    )
    problem = Problem(
        B=lengths["B"], T=T, S=S, N=N, K=K, H=H, Hv=Hv,
        dtype=np.dtype(q.dtype),
        scale=H**-0.5 if scale is None else real("scale", scale),
        softcap=None if softcap is None else real("softcap", softcap, positive=True),
        mask=MaskStructure.of(bound),
        deterministic=deterministic,
        lse=lse,
        **terms_of(terms),
    )  # fmt: skip
    return problem, terms if jax.tree.leaves(terms) else None, bound


def _checked_mask(mask: Any) -> Mask:
    if isinstance(mask, Mask):
        return mask
    hint = "Wrap an array of booleans in jflash.masks.Dense; an additive mask goes into `bias`."
    raise ArgumentError("mask", found=type(mask).__name__, wanted="a mask of jflash.masks", hint=hint)


def _segments(segment_ids: Any) -> Segments:
    if not isinstance(segment_ids, tuple):
        return Segments(segment_ids)
    if len(segment_ids) != 2:
        wanted = "ids, or a pair of ids for queries and keys"
        raise ArgumentError("segment_ids", found=f"a tuple of {len(segment_ids)}", wanted=wanted)
    return Segments(*segment_ids)


def _optional_array(array: Any) -> jax.Array | None:
    return None if array is None else jnp.asarray(array)
