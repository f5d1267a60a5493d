"""`jflash.dot_product_attention` means what `jax.nn.dot_product_attention` means, but for the stated differences."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Case, assert_close, drawn, random_case, tolerance, truth

import jflash

B, T, S, N, K, H, Hv = 2, 5, 7, 6, 3, 8, 8
DIMS = {"B": B, "T": T, "S": S, "N": N, "K": K, "H": H, "Hv": Hv}


def visible_pairs(
    *,
    T=T,
    S=S,
    mask=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    scale=None,
):
    """(B, N, T, S): the documented meaning of the arguments, written out."""
    t, s = np.arange(T)[:, None], np.arange(S)
    visible = np.ones((B, N, T, S), bool)
    if mask is not None:
        visible &= mask
    if is_causal:
        visible &= s <= t
    if query_seq_lengths is not None:
        visible &= t < np.asarray(query_seq_lengths)[:, None, None, None]
    if key_value_seq_lengths is not None:
        visible &= s < np.asarray(key_value_seq_lengths)[:, None, None, None]
    if local_window_size is not None:
        left, right = np.broadcast_to(local_window_size, 2)
        visible &= (s >= t - left) & (s <= t + right)
    return visible


@functools.partial(jax.jit, static_argnums=(0, 3))
def value_and_gradients(attention, case, arrays, arguments):
    def call(q, k, v, bias):
        return attention(q, k, v, bias, return_residual=True, **arrays, **dict(arguments))

    (out, residual), pull_back = jax.vjp(call, case.q, case.k, case.v, case.bias)
    return out, residual, *pull_back((case.d_out, jnp.zeros_like(residual)))


def by(attention, case: Case, arguments: dict, **more) -> list:
    """Out, residual and the gradients of q, k, v and bias through out."""
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    static = tuple((name, value) for name, value in (arguments | more).items() if name not in arrays)
    return value_and_gradients(attention, case, arrays, static)


NAMES = ("out", "residual", "dq", "dk", "dv", "dbias")


def assert_twins(case: Case, arguments: dict, *, visible: np.ndarray | None = None) -> None:
    """Both agree on the rows that see keys; on the others jflash gives 0 and -inf."""
    visible = visible_pairs(**{"T": case.q.shape[1], "S": case.k.shape[1]} | arguments) if visible is None else visible
    alive = visible.any(-1).swapaxes(1, 2)
    # A row without keys has gradients there: it must not be asked for any.
    case = case._replace(d_out=np.where(alive[..., None], case.d_out, np.zeros_like(case.d_out)))
    found = by(jflash.dot_product_attention, case, arguments)
    wanted = by(jax.nn.dot_product_attention, case, arguments, implementation="xla")
    for name, one, other in zip(NAMES, found, wanted, strict=True):
        if one is None:
            assert other is None
            continue
        assert one.shape == other.shape, name
        if name != "residual":
            assert one.dtype == other.dtype, name
        one, other = np.asarray(one), np.asarray(other)
        if name in ("out", "residual"):
            assert (one[~alive] == (0 if name == "out" else -np.inf)).all(), name
            one, other = one[alive], other[alive]
        # Each side may be off the truth by the tolerance, in its own direction. What is left of a gradient whose terms
        # cancel, as all do where a query sees one key, is the rounding of the terms.
        limit = max(tolerance(case.q.dtype, other.astype(np.float64)), terms(case, name))
        assert_close(one, other, atol=2 * limit, name=name)


def terms(case: Case, name: str) -> float:
    """The rounding of the largest term p * (d_out · v) of the logits' cotangent, taken on to the named gradient."""
    largest = {key: float(np.abs(array).max(initial=0)) for key, array in case._asdict().items() if array is not None}
    onward = {"dbias": 1.0, "dq": largest["k"] * H**-0.5, "dk": largest["q"] * H**-0.5}.get(name, 0)
    return float(jnp.finfo(case.q.dtype).eps) * largest["d_out"] * largest["v"] * H**0.5 * onward


def random_mask(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).random(shape) < 0.6


def test_signature_is_the_same():
    ours, theirs = (inspect.signature(module.dot_product_attention) for module in (jflash, jax.nn))
    described = [[(p.name, p.kind, p.default) for p in signature.parameters.values()] for signature in (ours, theirs)]
    assert described[0] == described[1]


MASKS = {
    "TS": random_mask(T, S),
    "NTS": random_mask(N, T, S),
    "B11S": random_mask(B, 1, 1, S),
    "BNTS": random_mask(B, N, T, S),
    "111S": random_mask(1, 1, 1, S),
    "B1T1": random_mask(B, 1, T, 1),
    "1N11": random_mask(1, N, 1, 1),
    "S": random_mask(S),
    "": np.array(True),
}


@pytest.mark.parametrize("letters", MASKS)
def test_masks_of_every_rank(letters):
    assert_twins(random_case(1, **DIMS), {"mask": MASKS[letters]})


@pytest.mark.parametrize(
    "shape", [(B, N, T, S), (B, 1, T, S), (N, T, S), (T, S), (S,), (1, 1, 1, S), (B, N, T, 1)], ids=str
)
def test_bias_of_every_rank(shape):
    assert_twins(random_case(2, **DIMS, bias=shape), {})


def test_bias_and_mask():
    assert_twins(random_case(3, **DIMS, bias=(B, 1, T, S)), {"mask": MASKS["BNTS"], "scale": 0.7})


@pytest.mark.parametrize("bias_dtype", ["float32", "bfloat16"])
def test_sixteen_bits_with_a_bias(bias_dtype):
    # Not float16, for which jax.nn has no implementation on the CPU.
    case = random_case(4, **DIMS, dtype=jnp.bfloat16, bias=(1, N, T, S))
    case = case._replace(bias=case.bias.astype(jnp.dtype(bias_dtype)))
    with jax.numpy_dtype_promotion("standard"):
        assert_twins(case, {"mask": MASKS["B11S"]})


LENGTHS = {
    "kv": {"key_value_seq_lengths": np.array([3, 6], np.int32)},
    "q": {"query_seq_lengths": np.array([4, 1], np.int32)},
    "both": {"query_seq_lengths": np.array([5, 2], np.int32), "key_value_seq_lengths": np.array([1, 7], np.int32)},
    "longer": {"query_seq_lengths": np.array([50, 2], np.int32), "key_value_seq_lengths": np.array([1, 70], np.int32)},
    "zero": {"query_seq_lengths": np.array([0, 5], np.int32), "key_value_seq_lengths": np.array([7, 0], np.int32)},
}


@pytest.mark.parametrize("given", LENGTHS)
def test_lengths(given):
    assert_twins(random_case(5, **DIMS), LENGTHS[given])


WINDOWS = [0, (2, 1), (0, 3), (9, 9)]


@pytest.mark.parametrize("T, S", [(5, 7), (7, 5)])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows_are_aligned_at_the_top_left(window, T, S):
    assert_twins(random_case(6, **DIMS | {"T": T, "S": S}), {"local_window_size": window})


@pytest.mark.parametrize("T, S", [(5, 7), (7, 5), (1, 9), (9, 1)])
def test_causal_is_aligned_at_the_top_left(T, S):
    assert_twins(random_case(7, **DIMS | {"T": T, "S": S}), {"is_causal": True})


@pytest.mark.parametrize("T, S", [(5, 7), (7, 5)])
def test_causal_with_window_lengths_and_mask(T, S):
    case = random_case(8, **DIMS | {"T": T, "S": S}, bias=(1, 1, T, S))
    causal = {"is_causal": True, "local_window_size": (2, 5)} | LENGTHS["both"]
    assert_twins(case, causal)
    assert_twins(case, causal | {"mask": random_mask(B, 1, T, S)})


@pytest.mark.parametrize("N, K", [(6, 1), (6, 2), (6, 6), (1, 1)])
def test_groups_of_heads(N, K):
    case = random_case(9, **DIMS | {"N": N, "K": K})
    assert_twins(case, {"is_causal": True}, visible=np.broadcast_to(np.tri(T, S, dtype=bool), (B, N, T, S)))


@pytest.mark.parametrize("scale", [None, 0.3, 1, -0.5, 0.0])
def test_scale(scale):
    assert_twins(random_case(10, **DIMS, bias=(1, 1, T, S)), {"scale": scale})


def test_scale_may_be_an_array_scalar():
    # `1 / jnp.sqrt(H)` is how many a caller computes it.
    q, k, v = random_case(11, **DIMS)[:3]
    found, wanted = (module.dot_product_attention(q, k, v, scale=1 / jnp.sqrt(16.0)) for module in (jflash, jax.nn))
    assert_close(found, wanted, atol=2 * tolerance(np.float32, np.asarray(wanted)))


def test_a_traced_scale_is_refused_and_says_what_to_do():
    q, k, v = random_case(11, **DIMS)[:3]
    with pytest.raises(jflash.ArgumentError, match=r"^`scale`: found .+ can multiply `q` instead"):
        jax.jit(lambda scale: jflash.dot_product_attention(q, k, v, scale=scale))(0.5)


def test_unbatched():
    case = random_case(12, **DIMS)
    q, k, v = (array[0] for array in case[:3])
    bias = random_case(12, **DIMS, bias=(N, T, S)).bias
    for arguments in (
        {},
        {"mask": MASKS["NTS"], "bias": bias},
        {"is_causal": True, "local_window_size": 2},
        {"query_seq_lengths": np.array([3], np.int32), "key_value_seq_lengths": np.array([5], np.int32)},
    ):
        out, lse = jflash.dot_product_attention(q, k, v, return_residual=True, **arguments)
        wanted, wanted_lse = jax.nn.dot_product_attention(q, k, v, return_residual=True, **arguments)
        assert out.shape == wanted.shape == (T, N, H)
        assert lse.shape == wanted_lse.shape == (T, N)
        alive = np.isfinite(lse)
        assert alive.any()
        assert_close(out[alive], wanted[alive], atol=2 * tolerance(np.float32, np.asarray(wanted)))
        assert_close(lse[alive], wanted_lse[alive], atol=2 * tolerance(np.float32, np.asarray(wanted_lse)[alive]))


def test_residual_is_transposed():
    q, k, v = random_case(13, **DIMS)[:3]
    found = jflash.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    assert type(found) is tuple
    assert [array.shape for array in found] == [(B, T, N, Hv), (B, T, N)]
    wanted = jflash.flash_attention_with_lse(q, k, v, mask=jflash.masks.Causal())
    assert np.array_equal(found[0], wanted.out)
    assert np.array_equal(found[1], wanted.lse.swapaxes(1, 2))
    assert isinstance(jflash.dot_product_attention(q, k, v), jax.Array)


def test_what_asarray_takes_is_taken():
    q, k, v = random_case(14, **DIMS)[:3]
    arguments = {"mask": MASKS["TS"].tolist(), "key_value_seq_lengths": [4, 7], "bias": [[0.5] * S] * T}
    wanted = jax.nn.dot_product_attention(q.tolist(), k.astype(np.float64), v, **arguments)
    found = jflash.dot_product_attention(q.tolist(), k.astype(np.float64), v, **arguments)
    assert found.dtype == wanted.dtype
    alive = visible_pairs(mask=MASKS["TS"], key_value_seq_lengths=[4, 7]).any(-1).swapaxes(1, 2)
    assert_close(found[alive], np.asarray(wanted)[alive], atol=2 * tolerance(np.float32, np.asarray(wanted)))


@pytest.mark.parametrize("sizes", [{"B": 0}, {"S": 0}, {"T": 0}, {"T": 0, "S": 0}, {"N": 0, "K": 1}], ids=str)
def test_zero_size(sizes):
    case = random_case(15, **DIMS | sizes)
    found, wanted = (
        jax.vjp(function, *case[:3]) for function in (jflash.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert found[0].shape == wanted[0].shape
    assert found[0].dtype == wanted[0].dtype
    assert (found[0] == 0).all()
    for one, other in zip(found[1](case.d_out), wanted[1](case.d_out), strict=True):
        assert one.shape == other.shape
        assert (one == 0).all()


# Forward mode and second order ----------------------------------------------------------------------------------------


def test_forward_mode():
    case, tangent = (random_case(seed, **DIMS, bias=(1, N, T, S)) for seed in (16, 17))
    primals, tangents = (case.q, case.k, case.v, case.bias), (tangent.q, tangent.k, tangent.v, tangent.bias)
    found, wanted = (
        jax.jvp(functools.partial(module.dot_product_attention, is_causal=True), primals, tangents)
        for module in (jflash, jax.nn)
    )
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, atol=2 * tolerance(np.float32, np.asarray(other)))


def test_hessian():
    case = random_case(18, B=1, T=2, S=3, N=2, K=1, H=2, Hv=2)

    def hessian(attention):
        def loss(q, k, v):
            return jnp.sum(attention(q, k, v, mask=np.array([[True, False, True], [True, True, True]])) * case.d_out)

        return jax.hessian(loss, (0, 1, 2))(*case[:3])

    found, wanted = (jax.tree.leaves(hessian(module.dot_product_attention)) for module in (jflash, jax.nn))
    assert len(found) == len(wanted) == 9
    # Entries of one Hessian differ in size by what they are derivatives by: errors go with the largest of all.
    scale = max(np.abs(array).max() for array in wanted)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, atol=2 * tolerance(np.float32, np.array([scale])))
    assert scale > 0.1


# The stated differences -----------------------------------------------------------------------------------------------


def emptied() -> tuple[dict, np.ndarray]:
    """Arguments for each way to have rows without keys, and (B, T, N), which rows those are."""
    mask = random_mask(B, N, T, S)
    mask[0, :, 2:4], mask[1, 3] = False, False
    return {
        "mask": {"mask": mask},
        "kv_length": {"key_value_seq_lengths": np.array([0, 4], np.int32)},
        "window": {"local_window_size": (0, 0)},
        "bias": {},
    }


@pytest.mark.parametrize("how", emptied())
def test_rows_without_keys_give_zero(how):
    arguments = emptied()[how]
    # Queries past the keys see none through a window: here there are more queries than keys.
    sizes = DIMS | ({"T": S, "S": T} if how == "window" else {})
    case = random_case(19, **sizes, bias=(B, 1, T, S) if how == "bias" else None)
    if how == "bias":
        case.bias[0, 0, 2], case.bias[1, 0, 4] = -np.inf, -np.inf
        visible = np.broadcast_to(np.isfinite(case.bias), (B, N, T, S))
    else:
        visible = visible_pairs(**{"T": sizes["T"], "S": sizes["S"]} | arguments)
    dead = ~visible.any(-1).swapaxes(1, 2)
    assert dead.any()
    out, residual, dq, dk, dv, dbias = (
        None if x is None else np.asarray(x) for x in by(jflash.dot_product_attention, case, arguments)
    )
    assert (out[dead] == 0).all()
    assert (residual[dead] == -np.inf).all()
    assert (dq[dead] == 0).all()
    # Their cotangents reach neither k nor v nor bias: the gradients are those of the float64 truth, which has none.
    clean = case if how != "bias" else case._replace(bias=np.nan_to_num(case.bias, neginf=0))
    wanted = truth(clean._replace(d_lse=np.zeros_like(case.d_lse)), allowed=visible)
    for name, one, other in (("dk", dk, wanted.dk), ("dv", dv, wanted.dv), ("dbias", dbias, wanted.dbias)):
        if one is not None:
            assert_close(one, other, atol=max(tolerance(np.float32, other), terms(case, name)), name=name)


@pytest.mark.parametrize("how", ["lengths", "mask"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e4])
def test_padding_does_not_leak(how, value):
    lengths = np.array([3, 6], np.int32)
    padding = np.arange(S) >= lengths[:, None]
    arguments = {"key_value_seq_lengths": lengths} if how == "lengths" else {"mask": ~padding[:, None, None]}
    case = random_case(20, **DIMS)
    here = padding[:, :, None, None]
    clean, filled = (
        by(
            jflash.dot_product_attention,
            case._replace(k=np.where(here, np.float32(fill), case.k), v=np.where(here, np.float32(fill), case.v)),
            arguments,
        )
        for fill in (0, value)
    )
    for name, one, other in zip(NAMES[:5], filled, clean):
        assert not np.isnan(one).any(), name
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), name
    for gradient in filled[3:5]:
        assert (np.asarray(gradient)[padding] == 0).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32], ids=["bfloat16", "float32"])
def test_residual_is_float32_and_differentiable(dtype):
    case = random_case(21, **DIMS, dtype=dtype)
    weight = random_case(22, **DIMS).d_lse.swapaxes(1, 2)

    def loss(q, k):
        residual = jflash.dot_product_attention(q, k, case.v.astype(q.dtype), return_residual=True)[1]
        return jnp.sum(residual * weight.astype(residual.dtype))

    residual = jflash.dot_product_attention(*case[:3], return_residual=True)[1]
    assert residual.dtype == np.float32
    gradients = jax.grad(loss, (0, 1))(case.q, case.k)
    assert [gradient.dtype for gradient in gradients] == [dtype] * 2
    # Central differences in float64, at the same numbers.
    q, k = (np.asarray(array).astype(np.float64) for array in case[:2])
    step = 1e-5
    with jax.enable_x64(True):
        for index, gradient in enumerate(gradients):
            gradient = np.asarray(gradient).astype(np.float64)
            assert np.abs(gradient).max() > 0.1
            for seed in range(3):
                direction = np.random.default_rng(seed).standard_normal(gradient.shape)
                ends = [
                    float(loss(*(x + sign * step * direction if here == index else x for here, x in enumerate((q, k)))))
                    for sign in (1, -1)
                ]
                # Each entry of the gradient is rounded to its dtype: the errors add up at random over a direction.
                limit = tolerance(dtype, gradient) * np.linalg.norm(direction) + 1e-8
                assert_close(np.sum(gradient * direction), (ends[0] - ends[1]) / (2 * step), atol=limit)


@pytest.mark.parametrize("Hv", [3, 20])
def test_value_head_dim_may_differ(Hv):
    case = random_case(23, **DIMS | {"Hv": Hv})
    with pytest.raises(ValueError):
        jax.nn.dot_product_attention(*case[:3])
    out, residual, dq, dk, dv, _ = by(jflash.dot_product_attention, case, {"is_causal": True})
    wanted = truth(case._replace(d_lse=np.zeros_like(case.d_lse)), allowed=np.tri(T, S, dtype=bool))
    assert out.shape == (B, T, N, Hv)
    right = (wanted.out, wanted.lse.swapaxes(1, 2), wanted.dq, wanted.dk, wanted.dv)
    for one, other in zip((out, residual, dq, dk, dv), right, strict=True):
        assert_close(one, other, atol=tolerance(np.float32, other))


# Implementations and bad input ----------------------------------------------------------------------------------------


def test_implementations():
    q, k, v = random_case(24, **DIMS)[:3]
    out = jflash.dot_product_attention(q, k, v)
    assert np.array_equal(out, jflash.dot_product_attention(q, k, v, implementation=None))
    assert np.array_equal(
        jflash.dot_product_attention(q, k, v, implementation="xla"), jflash.flash_attention(q, k, v, backend="xla")
    )
    with pytest.raises(jflash.UnsupportedError, match=r"cudnn: .*compute capability 8.0 or above.* cpu") as caught:
        jflash.dot_product_attention(q, k, v, implementation="cudnn")
    assert list(caught.value.reasons) == ["cudnn"]
    # A backend of jflash is not an implementation of jax.nn, whose names these are.
    for name in ("foo", "reference", "auto", "XLA"):
        with pytest.raises(jflash.ArgumentError, match=f"^`implementation`: found '{name}', wanted None, \"xla\" or"):
            jflash.dot_product_attention(q, k, v, implementation=name)


BAD = {
    "rank of query": ("query", {"query": np.zeros((T, H), np.float32)}),
    "dtype of query": ("query", {"query": np.zeros((B, T, N, H), np.int32)}),
    "dtype of key": ("key", {"key": np.zeros((B, S, K, H), jnp.bfloat16)}),
    "heads of key": ("key", {"key": np.zeros((B, S, 4, H), np.float32), "value": np.zeros((B, S, 4, H), np.float32)}),
    "length of value": ("value", {"value": np.zeros((B, S + 1, K, H), np.float32)}),
    "shape of bias": ("bias", {"bias": np.zeros((B, N, T, S + 1), np.float32)}),
    "dtype of bias": ("bias", {"bias": np.zeros((B, N, T, S), np.int32)}),
    "shape of mask": ("mask", {"mask": np.zeros((T, S + 1), bool)}),
    "rank of mask": ("mask", {"mask": np.zeros((1, B, N, T, S), bool)}),
    "dtype of mask": ("mask", {"mask": np.zeros((T, S), np.float32)}),
    "scale": ("scale", {"scale": "1"}),
    "shape of query_seq_lengths": ("query_seq_lengths", {"query_seq_lengths": np.ones(3, np.int32)}),
    "dtype of query_seq_lengths": ("query_seq_lengths", {"query_seq_lengths": np.ones(B, np.float32)}),
    "shape of key_value_seq_lengths": ("key_value_seq_lengths", {"key_value_seq_lengths": np.ones((B, 1), np.int32)}),
    "negative local_window_size": ("local_window_size", {"local_window_size": -1}),
    "triple local_window_size": ("local_window_size", {"local_window_size": (1, 2, 3)}),
}


@pytest.mark.parametrize("wrong", BAD)
def test_bad_input_is_named(wrong):
    argument, arguments = BAD[wrong]
    q, k, v = random_case(25, **DIMS)[:3]
    # The names are those of this call, not of the one that it is made of.
    with pytest.raises(jflash.ArgumentError, match=rf"^`{argument}`: found .+, wanted ") as caught:
        jflash.dot_product_attention(**{"query": q, "key": k, "value": v} | arguments)
    assert caught.value.argument == argument


def test_window_drawn_by_hand():
    # The documented example, (3, 2) around the middle of ten tokens; values are one-hot, so the output is the weights.
    q, k = np.zeros((1, 10, 1, 4), np.float32), np.ones((1, 10, 1, 4), np.float32)
    values = np.eye(10, dtype=np.float32)[None, :, None]
    found = jflash.dot_product_attention(q, k, values, local_window_size=(3, 2))[0, :, 0] > 0
    picture = """
    ###.......
    ####......
    #####.....
    ######....
    .######...
    ..######..
    ...######.
    ....######
    .....#####
    ......####
    """
    assert np.array_equal(found, drawn(picture))
