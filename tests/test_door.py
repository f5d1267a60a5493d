"""The public calls themselves: what they refuse and how they say it, how they choose, and what they return."""

import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, tolerance

import jflash
from jflash import hardware, options
from jflash.backends import reference, registry
from jflash.backends.protocol import Backend
from jflash.backends.xla import XlaTiles
from jflash.masks import And, Causal, Dense, Full, Lengths, Mask, Segments, SlidingWindow
from jflash.plan import explain_plan

ROOT = pathlib.Path(__file__).parents[1]

B, T, S, N, K, H, Hv = 2, 5, 7, 6, 3, 8, 4


def array(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def arrays(*, T: int = T, S: int = S, dtype=np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return array(B, T, N, H, dtype=dtype), array(B, S, K, H, dtype=dtype), array(B, S, K, Hv, dtype=dtype)


def structs(*, T: int = T, S: int = S, dtype="bfloat16") -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, Hv)))


# Bad input ------------------------------------------------------------------------------------------------------------

LAYOUT = "(batch, length, heads, head_dim): q (B, T, N, H), k (B, S, K, H), v (B, S, K, Hv)"

SHAPES = [
    ("q of rank 2", {"q": array(T, H)}, "q", r"shape \(5, 8\)", r"rank 4, \(B, T, N, H\), or rank 3 without B"),
    ("q of rank 5", {"q": array(1, B, T, N, H)}, "q", r"shape \(1, 2, 5, 6, 8\)", "rank 4"),
    ("k without B", {"k": array(S, K, H)}, "k", r"shape \(7, 3, 8\)", r"\(B, S, K, H\).*same rank as `q`"),
    ("v without B", {"v": array(S, K, Hv)}, "v", r"shape \(7, 3, 4\)", r"\(B, S, K, Hv\).*same rank as `q`"),
    ("q without B", {"q": array(T, N, H)}, "k", r"shape \(2, 7, 3, 8\)", "same rank as `q`"),
    ("B of k", {"k": array(3, S, K, H)}, "k", r"B=3 in shape \(3, 7, 3, 8\)", "B=2, as `q` has"),
    ("B of v", {"v": array(1, S, K, Hv)}, "v", r"B=1 in shape \(1, 7, 3, 4\)", "B=2, as `q` has"),
    ("H of k", {"k": array(B, S, K, 9)}, "k", r"H=9 in shape \(2, 7, 3, 9\)", "H=8, as `q` has"),
    ("S of v", {"v": array(B, 8, K, Hv)}, "v", r"S=8, K=3 in shape \(2, 8, 3, 4\)", "S=7, K=3, as `k` has"),
    ("K of v", {"v": array(B, S, 2, Hv)}, "v", r"S=7, K=2 in shape \(2, 7, 2, 4\)", "S=7, K=3, as `k` has"),
    ("no K", {"k": array(B, S, 0, H), "v": array(B, S, 0, Hv)}, "k", "K=0", "divides the N=6 query heads"),
    ("K above N", {"k": array(B, S, 12, H), "v": array(B, S, 12, Hv)}, "k", "K=12", "divides the N=6 query heads"),
    ("no H", {"q": array(B, T, N, 0), "k": array(B, S, K, 0)}, "q", "H=0", "H of at least 1"),
    ("no Hv", {"v": array(B, S, K, 0)}, "v", "Hv=0", "Hv of at least 1"),
    ("causal, T < S", {"causal": True}, "causal", "T=5, S=7", r"equal.*mask=Causal\(\).*mask=Causal\(offset=2\)"),
    (
        "causal, T > S",
        {"causal": True, "q": array(B, 9, N, H)},
        "causal",
        "T=9, S=7",
        r"equal.*mask=Causal\(\).*mask=Causal\(offset=-2\)",
    ),
    (
        "ids too few",
        {"segment_ids": np.ones((B, T - 1), int)},
        "segment_ids",
        r"shape \(2, 4\)",
        r"\(B, T\) with B=2, T=5",
    ),
    ("ids for q only", {"segment_ids": np.ones((B, T), int)}, "segment_ids", r"shape \(2, 5\)", r"\(B, S\).*pair"),
    (
        "ids of another B",
        {"segment_ids": (np.ones((3, T), int), np.ones(S, int))},
        "segment_ids",
        r"shape \(3, 5\)",
        "B=2",
    ),
    ("ids of rank 3", {"segment_ids": np.ones((B, T, 1), int)}, "segment_ids", r"shape \(2, 5, 1\)", r"\(B, "),
    ("mask of a wrong shape", {"mask": Dense(np.ones((T + 1, S), bool))}, "mask", r"shape \(6, 7\)", r"\(2, 6, 5, 7\)"),
    ("lengths of another B", {"mask": Lengths(kv=np.ones(3, int))}, "kv", r"shape \(3,\)", "B=2"),
    ("offsets of another B", {"mask": Causal(offset=np.ones(3, int))}, "offset", r"shape \(3,\)", "B=2"),
    (
        "bias of a wrong S",
        {"bias": array(1, 1, T, 6)},
        "bias",
        r"shape \(1, 1, 5, 6\)",
        r"\(B, N, T, S\) = \(2, 6, 5, 7\)",
    ),
    ("bias for K heads", {"bias": array(B, K, T, S)}, "bias", r"shape \(2, 3, 5, 7\)", r"\(2, 6, 5, 7\)"),
    ("bias of rank 5", {"bias": array(1, B, N, T, S)}, "bias", r"shape \(1, 2, 6, 5, 7\)", r"\(2, 6, 5, 7\)"),
]

FLOATS = "bfloat16, float16, float32, float64"
DTYPES = [
    *((f"q {name}", {"q": np.zeros((B, T, N, H), name)}, "q", f"dtype {name}", FLOATS) for name in ("int32", "bool")),
    ("q complex64", {"q": np.zeros((B, T, N, H), "complex64")}, "q", "dtype complex64", FLOATS),
    ("q fp8", {"q": np.zeros((B, T, N, H), jnp.float8_e4m3fn)}, "q", "dtype float8_e4m3fn", FLOATS),
    ("v int8", {"v": np.zeros((B, S, K, Hv), "int8")}, "v", "dtype int8", FLOATS),
    ("k bfloat16", {"k": array(B, S, K, H, dtype=jnp.bfloat16)}, "k", "dtype bfloat16", "dtype float32, as `q` has"),
    ("v float16", {"v": array(B, S, K, Hv, dtype=np.float16)}, "v", "dtype float16", "dtype float32, as `q` has"),
    ("float64", dict(zip("qkv", arrays(dtype=np.float64))), "q", "dtype float64", "x64 off.*jax_enable_x64"),
    (
        "segment ids of floats",
        {"segment_ids": (np.ones(T), np.ones(S))},
        "segment_ids",
        "dtype float64",
        "whole numbers",
    ),
    ("bias int32", {"bias": np.zeros((1, 1, T, S), "int32")}, "bias", "dtype int32", "floating point"),
    ("bias bool", {"bias": np.zeros((1, 1, T, S), bool)}, "bias", "dtype bool", "floating point.*Dense"),
    ("bias float64", {"bias": np.zeros((1, 1, T, S))}, "bias", "dtype float64", "x64 off.*float32"),
]

WINDOW = "distance of at least 0|pair"
NUMBER = "finite Python number"
POSITIVE = "finite positive Python number"
ARGUMENTS = [
    ("q a list", {"q": [[1.0]]}, "q", "list", r"array of shape \(B, T, N, H\)"),
    ("k None", {"k": None}, "k", "NoneType", r"array of shape \(B, S, K, H\)"),
    ("v a float", {"v": 1.0}, "v", "float", r"array of shape \(B, S, K, Hv\)"),
    ("causal an int", {"causal": 1}, "causal", "1", "True or False"),
    ("causal None", {"causal": None}, "causal", "None", "True or False"),
    ("deterministic an int", {"deterministic": 0}, "deterministic", "0", "True or False"),
    ("deterministic a string", {"deterministic": "yes"}, "deterministic", "'yes'", "True or False"),
    ("window negative", {"window": -1}, "window", "-1", WINDOW),
    ("window negative left", {"window": (-1, 0)}, "window", r".*-1", WINDOW),
    ("window negative right", {"window": (5, -3)}, "window", r".*-3", WINDOW),
    ("window a float", {"window": 2.0}, "window", r"2\.0", "int, or a pair"),
    ("window of floats", {"window": (2.0, 0)}, "window", r".*2\.0", WINDOW),
    ("window a triple", {"window": (1, 2, 3)}, "window", r"\(1, 2, 3\)", "int, or a pair"),
    ("window a list", {"window": [1, 2]}, "window", r"\[1, 2\]", "int, or a pair"),
    ("window a bool", {"window": True}, "window", "True", "int, or a pair|distance"),
    ("window of bools", {"window": (True, False)}, "window", ".*True", WINDOW),
    ("segment ids a list", {"segment_ids": [1, 1, 2, 2, 2]}, "segment_ids", r".*\[1, 1", "array of whole numbers"),
    ("segment ids a single", {"segment_ids": (np.ones(T, int),)}, "segment_ids", "", "pair"),
    ("segment ids a triple", {"segment_ids": (np.ones(T, int), np.ones(S, int), 3)}, "segment_ids", "", "pair"),
    ("mask an array", {"mask": np.ones((T, S), bool)}, "mask", "ndarray", "mask of jflash.masks.*Dense.*`bias`"),
    ("mask a jax array", {"mask": jnp.ones((T, S), bool)}, "mask", "ArrayImpl", "mask of jflash.masks.*Dense"),
    ("mask a function", {"mask": lambda q, k: q >= k}, "mask", "function", "mask of jflash.masks"),
    ("mask a string", {"mask": "causal"}, "mask", "str", "mask of jflash.masks"),
    ("mask a class", {"mask": Causal}, "mask", "type", "mask of jflash.masks"),
    ("bias a list", {"bias": [[0.0] * S] * T}, "bias", "list", r"\(B, N, T, S\)"),
    ("bias a float", {"bias": 1.0}, "bias", "float", r"\(B, N, T, S\)"),
    ("scale a string", {"scale": "1"}, "scale", "str", NUMBER),
    ("scale a bool", {"scale": True}, "scale", "bool", NUMBER),
    ("scale nan", {"scale": float("nan")}, "scale", "nan", NUMBER),
    ("scale inf", {"scale": float("inf")}, "scale", "inf", NUMBER),
    ("scale complex", {"scale": 1j}, "scale", "complex", NUMBER),
    ("scale a jax array", {"scale": jnp.float32(1)}, "scale", "ArrayImpl", f"{NUMBER}.*multiply `q`"),
    ("softcap zero", {"softcap": 0}, "softcap", "0", POSITIVE),
    ("softcap negative", {"softcap": -30.0}, "softcap", r"-30\.0", POSITIVE),
    ("softcap nan", {"softcap": float("nan")}, "softcap", "nan", POSITIVE),
    ("softcap inf", {"softcap": float("inf")}, "softcap", "inf", POSITIVE),
    ("softcap a bool", {"softcap": True}, "softcap", "bool", POSITIVE),
    ("backend unknown", {"backend": "flash"}, "backend", "'flash'", "\"auto\" or one of.*'xla', 'reference'"),
    ("backend None", {"backend": None}, "backend", "None", '"auto" or the name'),
    ("backend a class", {"backend": Backend}, "backend", ".*Backend", '"auto" or the name'),
]

BAD = [
    pytest.param(error, *case, id=name)
    for error, cases in (
        (jflash.ShapeError, SHAPES),
        (jflash.DtypeError, DTYPES),
        (jflash.ArgumentError, ARGUMENTS),
    )
    for name, *case in cases
]


@pytest.mark.parametrize("call", [jflash.flash_attention, jflash.flash_attention_with_lse, jflash.explain])
@pytest.mark.parametrize("error, wrong, argument, found, wanted", BAD)
def test_bad_input_is_named(call, error, wrong, argument, found, wanted):
    arguments = dict(zip("qkv", arrays())) | wrong
    with pytest.raises(error, match=rf"(?s)^`{argument}`: found {found}.*, wanted .*({wanted})") as caught:
        call(**arguments)
    assert type(caught.value) is error
    assert isinstance(caught.value, ValueError)
    assert caught.value.argument == argument
    if error is jflash.ShapeError:
        # B30: an array in another layout cannot be detected in general, so every message about shapes says the layout.
        assert LAYOUT in str(caught.value)


@pytest.mark.parametrize("N, K", [(3, 2), (33, 2), (2, 4)])
def test_b22_heads_that_do_not_divide(N, K):
    q, k, v = array(B, T, N, H), array(B, S, K, H), array(B, S, K, Hv)
    with pytest.raises(jflash.ShapeError, match=rf"^`k`: found K={K} .*divides the N={N} query heads"):
        jflash.flash_attention(q, k, v)


def test_b30_the_wrong_layout_shows_the_right_one():
    # (B, N, T, H): here the lengths differ, and stand where the heads belong.
    q, k, v = (x.swapaxes(1, 2) for x in arrays())
    with pytest.raises(jflash.ShapeError) as caught:
        jflash.flash_attention(q, k, v)
    assert LAYOUT in str(caught.value)
    assert "K=7" in str(caught.value)
    assert "N=5" in str(caught.value)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_traced_number_is_refused(name):
    q, k, v = arrays()

    def call(number):
        return jflash.flash_attention(q, k, v, **{name: number})

    with pytest.raises(jflash.ArgumentError, match=rf"`{name}`: found .*Tracer, wanted .*compiled.*multiply `q`"):
        jax.jit(call)(2.0)


def test_numbers_of_numpy_are_numbers():
    q, k, v = arrays()
    one = jflash.flash_attention(q, k, v, scale=0.25, softcap=3, window=2)
    other = jflash.flash_attention(
        q, k, v, scale=np.float32(0.25), softcap=np.int64(3), window=(np.int32(2), np.int64(2))
    )
    assert np.array_equal(one, other)


def test_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="is_causal"):
        jflash.flash_attention(*arrays(), is_causal=True)
    with pytest.raises(TypeError, match="is_causal"):
        jflash.explain(*arrays(), is_causal=True)


TILES = [
    ("xla", 16, "it takes tiles of type XlaTiles, not int"),
    ("xla", {"block_q": 16, "block_k": 16}, "it takes tiles of type XlaTiles, not dict"),
    ("xla", 0, "it takes tiles of type XlaTiles, not int"),
    ("auto", (16, 16), "it takes tiles of type XlaTiles, not tuple"),
    ("reference", XlaTiles(block_q=16, block_k=16), "it takes no tiles, not XlaTiles"),
    ("reference", 0, "it takes no tiles, not int"),
]


@pytest.mark.parametrize("backend, tiles, reason", TILES)
def test_tiles_that_a_backend_does_not_take(backend, tiles, reason):
    with pytest.raises(jflash.UnsupportedError, match=re.escape(reason)) as caught:
        jflash.flash_attention(*arrays(), backend=backend, tiles=tiles)
    assert isinstance(caught.value, ValueError)
    assert caught.value.reasons == {"xla" if backend == "auto" else backend: reason}
    explanation = jflash.explain(*arrays(), backend=backend, tiles=tiles)
    assert explanation.plan is None
    assert explanation.refusals.items() >= caught.value.reasons.items()


# Not 16.0 or None: in tests beartype takes offence at the wrong types before the record does.
@pytest.mark.parametrize("size", [0, -16, True])
@pytest.mark.parametrize("name", ["block_q", "block_k"])
def test_xla_tiles_refuse_bad_values(name, size):
    with pytest.raises(jflash.ArgumentError, match=rf"^`tiles`: found {name}={size}, wanted a positive int"):
        XlaTiles(**{"block_q": 16, "block_k": 16} | {name: size})


def test_xla_tiles_are_a_frozen_record_by_keyword():
    with pytest.raises(TypeError):
        XlaTiles(16, 16)
    tiles = XlaTiles(block_q=16, block_k=32)
    with pytest.raises(AttributeError):
        tiles.block_q = 8
    assert hash(tiles) == hash(XlaTiles(block_q=16, block_k=32))


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment, wanted",
    [
        ({}, options.Options()),
        ({"PATH": "x", "jflash_strict": "1", "XJFLASH_STRICT": "1"}, options.Options()),
        ({"JFLASH_HARDWARE": "h200"}, options.Options(hardware="h200")),
        *(({"JFLASH_STRICT": text}, options.Options(strict=True)) for text in ("1", "true", "True")),
        *(({"JFLASH_STRICT": text}, options.Options(strict=False)) for text in ("0", "false", "FALSE")),
    ],
)
def test_options_from_the_environment(environment, wanted):
    assert options.from_environment(environment) == wanted


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"JFLASH_STRIKT": "1"}, "`JFLASH_STRIKT`: found an unknown variable, wanted one of .*JFLASH_STRICT"),
        ({"JFLASH_": "1"}, "`JFLASH_`: found an unknown variable, wanted one of .*JFLASH_HARDWARE"),
        ({"JFLASH_STRICT": "yes"}, "`JFLASH_STRICT`: found 'yes', wanted one of 0, false, 1, true"),
        ({"JFLASH_STRICT": ""}, "`JFLASH_STRICT`: found '', wanted one of"),
    ],
)
def test_bad_environment_is_named(environment, message):
    with pytest.raises(jflash.ArgumentError, match=message):
        options.from_environment(environment)


def run_source(source: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs Python source in a fresh process, where nothing checks types but the package itself."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JFLASH_")}
    environment = inherited | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=300)


def test_environment_reaches_a_call():
    source = """if True:
        import jax, jflash
        from jflash.backends.xla import XlaTiles
        for size in (16.0, "16", None):
            try:
                XlaTiles(block_q=16, block_k=size)
            except jflash.ArgumentError as error:
                print(error)
        x = jax.ShapeDtypeStruct((2, 5, 6, 8), "bfloat16")
        print(jflash.explain(x, x, x))
    """
    done = run_source(source, JFLASH_HARDWARE="l4")
    assert re.search(r"^hardware +l4 ", done.stdout, re.MULTILINE), done.stdout + done.stderr
    for size in ("16.0", "'16'", "None"):
        assert f"`tiles`: found block_k={size}, wanted a positive int" in done.stdout
    done = run_source(source, JFLASH_HARDWARE="abacus")
    assert done.returncode != 0
    assert "ArgumentError: `hardware`: found 'abacus', wanted one of cpu" in done.stderr


def test_options_nest_and_are_restored():
    before = options.current_options()
    with jflash.use_options(strict=True) as outer:
        assert outer == options.current_options() == options.Options(hardware=before.hardware, strict=True)
        with jflash.use_options(hardware="h200") as inner:
            assert inner == options.current_options() == options.Options(hardware="h200", strict=True)
            with jflash.use_options(strict=False):
                assert options.current_options() == options.Options(hardware="h200", strict=False)
            assert options.current_options() == inner
        assert options.current_options() == outer
    assert options.current_options() == before
    with pytest.raises(KeyError), jflash.use_options(strict=True):
        raise KeyError
    assert options.current_options() == before
    with pytest.raises(TypeError):
        jflash.use_options(unknown=1)


def test_option_hardware_is_planned_for():
    with jflash.use_options(hardware="h200"):
        assert jflash.explain(*structs()).hardware == hardware.named("h200")
        # The argument goes first.
        assert jflash.explain(*structs(), hardware="t4").hardware == hardware.named("t4")
    with jflash.use_options(hardware="abacus"), pytest.raises(jflash.ArgumentError, match="`hardware`: found 'abacus'"):
        jflash.flash_attention(*arrays())


# Explain and the choice of a backend ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", hardware.names())
def test_explain_from_shapes_alone(name):
    ids = jax.ShapeDtypeStruct((B, T), "int32")
    lengths = jax.ShapeDtypeStruct((B,), "int32")
    explanation = jflash.explain(
        *structs(S=T), hardware=name, causal=True, segment_ids=ids, mask=Lengths(kv=lengths),
        bias=jax.ShapeDtypeStruct((1, N, T, 1), "float32"), softcap=30.0,
    )  # fmt: skip
    assert explanation.hardware == hardware.named(name)
    assert explanation.plan.backend in explanation.order
    assert {explanation.plan.backend, *explanation.refusals} == set(registry.names())
    assert all(explanation.refusals.values()), "a refusal without a reason"
    text = str(explanation)
    assert re.search(rf"^hardware +{re.escape(name)}\b", text, re.MULTILINE)
    assert re.search(rf"^runs +{explanation.plan.backend}\b", text, re.MULTILINE)
    for refused, reason in explanation.refusals.items():
        assert re.search(rf"^not +{refused}: {re.escape(reason)}$", text, re.MULTILINE)
    assert "B=2 T=5 S=5 N=6 K=3 H=8 Hv=4 bfloat16" in text
    assert "bias=float32[1, 6, 5, 1]" in text
    assert "softcap=30" in text


def test_explain_where_there_is_no_b():
    explanation = jflash.explain(*(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in structs()))
    assert explanation.problem.B == 1


@pytest.mark.parametrize("name", ["h300", "", "H200"])
def test_unknown_hardware_is_refused(name):
    if name == "":
        with pytest.raises(jflash.ArgumentError, match="`hardware`"):
            hardware.named(name)
        return
    with pytest.raises(jflash.ArgumentError, match=f"`hardware`: found '{name}', wanted one of cpu, .*h200"):
        jflash.explain(*structs(), hardware=name)


def test_auto_never_takes_the_reference():
    for name in hardware.names():
        explanation = jflash.explain(*structs(), hardware=name)
        assert "reference" not in explanation.order
        assert explanation.order[-1] == "xla", "the last of the order takes every problem"
        assert "asked for by name" in explanation.refusals["reference"]
    explanation = jflash.explain(*structs(), backend="reference")
    assert explanation.plan.backend == "reference"
    assert explanation.refusals["xla"] == "another was asked for"


def test_explain_takes_what_the_call_takes():
    tiles = XlaTiles(block_q=3, block_k=4)
    explanation = jflash.explain(*arrays(), window=2, deterministic=True, scale=0.5, backend="xla", tiles=tiles)
    assert explanation.plan.tiles == tiles
    assert str(tiles) in str(explanation)
    assert "deterministic" in str(explanation)
    assert explanation.problem.scale == 0.5


def test_impossible_request_is_explained_and_not_raised():
    with registry.registered(refusing("never")):
        explanation = jflash.explain(*structs(), backend="never")
    assert explanation.plan is None
    assert explanation.order == ("never",)
    assert explanation.refusals["never"] == REASON
    assert "runs      nothing" in str(explanation)
    assert f"not       never: {REASON}" in str(explanation)
    # But what is no backend at all is a wrong argument.
    with pytest.raises(jflash.ArgumentError, match="`backend`: found 'never'"):
        jflash.explain(*structs(), backend="never")


CAPABILITIES = ["7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0"]


def device(capability: str, *, platform: str = "gpu") -> types.SimpleNamespace:
    """What a device says of itself, as far as it is asked."""
    return types.SimpleNamespace(
        platform=platform, device_kind="A card", compute_capability=capability, core_count=80
    )  # fmt: skip


@pytest.mark.parametrize("capability", [*CAPABILITIES, "6.1", "13.7"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_b101_every_gpu_gets_something(capability, dtype):
    card = hardware.of_device(device(capability))
    assert card.platform == "cuda"
    assert card.compute_capability == tuple(map(int, capability.split(".")))
    assert 64 * 1024 <= card.smem_bytes_per_block <= 227 * 1024
    problem = jflash.explain(*structs(dtype=dtype)).problem
    explanation = explain_plan(problem, card)
    assert explanation.plan is not None
    assert f"compute capability {capability}" in str(explanation)


def test_b101_every_generation_has_a_name():
    known = {hardware.named(name).compute_capability for name in hardware.names()} - {None}
    assert known == {tuple(map(int, capability.split("."))) for capability in CAPABILITIES}


def test_b101_cards_of_others():
    assert hardware.of_device(device("gfx942")).platform == "rocm"
    assert hardware.of_device(device("gfx942")).compute_capability is None
    assert hardware.of_device(device("", platform="tpu")).platform == "tpu"


# Where the arrays are -------------------------------------------------------------------------------------------------


def for_cuda(name: str) -> Backend:
    """The reference, as a kernel that runs on CUDA devices alone."""

    def supports(problem, hardware):
        return None if hardware.platform == "cuda" else f"it runs on CUDA devices, not on {hardware}"

    return Backend(name=name, supports=supports, forward=reference.BACKEND.forward)


@pytest.fixture
def gpu_machine(monkeypatch):
    """Takes the first CPU device, the default one, for an H200, and the others for what they are."""
    real = hardware.of_device

    def of_device(device):
        return hardware.named("h200") if device == jax.devices()[0] else real(device)

    for module in ("jflash.hardware", "jflash.api"):
        monkeypatch.setattr(f"{module}.of_device", of_device)
    return lambda tree: jax.device_put(tree, jax.devices()[3])


def test_concrete_arrays_are_planned_for_their_device(gpu_machine):
    on_cpu = gpu_machine(arrays())
    on_gpu = jax.device_put(arrays(), jax.devices()[0])
    with registry.registered(for_cuda("gpu_only"), auto_on=("cuda",)):
        for there in (on_gpu, arrays(), tuple(map(jnp.asarray, arrays()))):
            assert jflash.explain(*there).hardware == hardware.named("h200")
            assert jflash.explain(*there).plan.backend == "gpu_only"
            jflash.flash_attention(*there, backend="gpu_only")
        assert jflash.explain(*on_cpu).hardware == hardware.named("cpu")
        assert jflash.explain(*on_cpu).plan.backend == "xla"
        assert jflash.flash_attention(*on_cpu).devices() == {jax.devices()[3]}
        for call in (jflash.flash_attention, jflash.flash_attention_with_lse):
            with pytest.raises(jflash.UnsupportedError, match="gpu_only: it runs on CUDA devices, not on cpu"):
                call(*on_cpu, backend="gpu_only")


@pytest.mark.parametrize("argument", ["q", "bias", "mask"])
def test_any_committed_array_says_where_the_call_runs(gpu_machine, argument):
    given = dict(zip("qkv", arrays())) | {"bias": array(1, 1, T, S), "mask": Lengths(kv=np.array([3, 4]))}
    with registry.registered(for_cuda("gpu_only")):
        jflash.flash_attention(**given, backend="gpu_only")
        given[argument] = gpu_machine(given[argument])
        with pytest.raises(jflash.UnsupportedError, match="not on cpu"):
            jflash.flash_attention(**given, backend="gpu_only")


def test_the_option_hardware_is_for_traced_calls():
    def trace():
        # A function of its own each time, since JAX traces one function once.
        jax.jit(functools.partial(jflash.flash_attention, backend="gpu_only")).trace(*arrays())

    with registry.registered(for_cuda("gpu_only")):
        with jflash.use_options(hardware="h200"):
            trace()
            assert jflash.explain(*structs()).hardware == hardware.named("h200")
            assert jflash.explain(*arrays()).hardware == hardware.named("cpu")
            assert jflash.explain(*arrays(), hardware="t4").hardware == hardware.named("t4")
            with pytest.raises(jflash.UnsupportedError, match="gpu_only: it runs on CUDA devices, not on cpu"):
                jflash.flash_attention(*arrays(), backend="gpu_only")
        with pytest.raises(jflash.UnsupportedError, match="not on cpu"):
            trace()
        # The other way round: told a CPU, an array that is traced is planned for it.
        with jflash.use_options(hardware="cpu"), pytest.raises(jflash.UnsupportedError, match="not on cpu"):
            trace()


# A backend that refuses -----------------------------------------------------------------------------------------------

REASON = "T=5 is no multiple of 8"


def refusing(name: str) -> Backend:
    def never(problem, tiles, operands):
        raise AssertionError("a backend that refuses must not run")

    return Backend(name=name, supports=lambda problem, hardware: REASON, forward=never)


@pytest.mark.parametrize(
    "call",
    [jflash.flash_attention, jflash.flash_attention_with_lse, jflash.dot_product_attention],
    ids=lambda call: call.__name__,
)
def test_b102_auto_warns_once_and_computes(call):
    q, k, v = arrays()
    wanted = jflash.flash_attention(q, k, v, backend="xla")
    with registry.registered(refusing("picky"), auto_on=("cpu",)):
        with pytest.warns(jflash.FallbackWarning) as record:
            found = call(q, k, v)
    assert np.array_equal(getattr(found, "out", found), wanted)
    assert len(record) == 1
    assert str(record[0].message) == f"picky refuses ({REASON}), xla runs instead"
    # Python shows a warning once for each place: it must be the caller's, or another library's would hide it.
    assert record[0].filename == __file__


def test_b102_gradient_warns_once_too():
    q, k, v = arrays()
    with registry.registered(refusing("picky"), auto_on=("cpu",)):
        with pytest.warns(jflash.FallbackWarning) as record:
            jax.grad(lambda q: jflash.flash_attention(q, k, v).sum())(q)
    assert len(record) == 1


def test_b102_explain_tells():
    with registry.registered(refusing("picky"), auto_on=("cpu",)):
        explanation = jflash.explain(*structs())
        elsewhere = jflash.explain(*structs(), hardware="h200")
    assert explanation.order[0] == "picky"
    assert explanation.plan.backend == "xla"
    assert explanation.refusals["picky"] == REASON
    assert f"not       picky: {REASON}" in str(explanation)
    assert "picky" not in elsewhere.order


def test_b102_strict_raises():
    q, k, v = arrays()
    with registry.registered(refusing("picky"), auto_on=("cpu",)), jflash.use_options(strict=True):
        with pytest.raises(jflash.UnsupportedError, match=f"picky: {REASON}\n.*strict") as caught:
            jflash.flash_attention(q, k, v)
        assert caught.value.reasons == {"picky": REASON}
        # Who asks for another by name gets it, and no warning.
        jflash.flash_attention(q, k, v, backend="xla")


def test_b102_a_fall_from_one_kernel_to_the_next_is_no_warning():
    """On a device that a kernel is not for, every call would warn though another kernel runs it."""
    q, k, v = arrays()
    second = counting("second", [])
    with registry.registered(second, auto_on=("cpu",)), registry.registered(refusing("picky"), auto_on=("cpu",)):
        assert registry.auto_order("cpu") == ("picky", "second", "xla")
        with warnings.catch_warnings(), jflash.use_options(strict=True):
            warnings.simplefilter("error")
            jflash.flash_attention(q, k, v)
        explanation = jflash.explain(q, k, v)
    assert explanation.plan.backend == "second"
    assert explanation.refusals["picky"] == REASON


def test_b102_all_reasons_are_told():
    q, k, v = arrays()
    with (
        registry.registered(refusing("fussy"), auto_on=("cpu",)),
        registry.registered(refusing("picky"), auto_on=("cpu",)),
    ):
        with pytest.warns(jflash.FallbackWarning) as record:
            jflash.flash_attention(q, k, v)
        assert [str(warning.message) for warning in record] == [
            f"picky refuses ({REASON}), fussy refuses ({REASON}), xla runs instead"
        ]
        with jflash.use_options(strict=True), pytest.raises(jflash.UnsupportedError, match="strict") as caught:
            jflash.flash_attention(q, k, v)
    assert caught.value.reasons == {"picky": REASON, "fussy": REASON}


def test_b102_explicit_backend_never_falls_back():
    with registry.registered(refusing("picky")):
        with pytest.raises(jflash.UnsupportedError, match=f'picky: {REASON}\n.*backend="auto"') as caught:
            jflash.flash_attention(*arrays(), backend="picky")
    assert caught.value.reasons == {"picky": REASON}


def test_preferred_backend_runs_without_a_warning():
    with registry.registered(counting("preferred", []), auto_on=("cpu",)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jflash.flash_attention(*arrays())
        explanation = jflash.explain(*structs())
    assert explanation.plan.backend == "preferred"
    assert explanation.refusals["xla"] == "preferred comes before it on cpu"


def test_registered_backend_leaves_no_trace():
    before = registry.names(), registry.auto_order("cpu")
    with pytest.raises(KeyError), registry.registered(refusing("picky"), auto_on=("cpu", "cuda")):
        assert registry.auto_order("cpu")[0] == registry.auto_order("cuda")[0] == "picky"
        raise KeyError
    assert (registry.names(), registry.auto_order("cpu")) == before
    for taken in ("xla", "auto"):
        with pytest.raises(jflash.ArgumentError, match="name that is not taken"), registry.registered(refusing(taken)):
            pass


def test_a_name_given_anew_runs_the_new_backend():
    def constant(value):
        def forward(problem, tiles, operands):
            out, lse = reference.BACKEND.forward(problem, tiles, operands)
            return jflash.Attended(jnp.full_like(out, value), lse)

        return Backend(name="constant", supports=lambda problem, hardware: None, forward=forward)

    for value in (1.0, 2.0):
        with registry.registered(constant(value)):
            assert (jflash.flash_attention(*arrays(), backend="constant") == value).all()


# Who wants the lse ----------------------------------------------------------------------------------------------------


def without_lse(name: str) -> Backend:
    """The reference without its lse: the lse is not made up where nobody asks for it, and not given where one does."""

    def supports(problem, hardware):
        return "it has no lse" if problem.lse else None

    def forward(problem, tiles, operands):
        return reference.BACKEND.forward(problem, tiles, operands)._replace(lse=None)

    return Backend(name=name, supports=supports, forward=forward)


def test_only_who_asks_for_the_lse_needs_a_backend_that_has_one():
    q, k, v = arrays()
    with registry.registered(without_lse("lseless")):
        call = functools.partial(jflash.flash_attention, backend="lseless", window=3)
        found, pull_back = jax.vjp(call, q, k, v)
        wanted, wanted_back = jax.vjp(functools.partial(call, backend="reference"), q, k, v)
        for one, other in zip((found, *pull_back(found)), (wanted, *wanted_back(wanted)), strict=True):
            assert np.array_equal(one, other)
        assert jflash.flash_attention(q[0], k[0], v[0], backend="lseless").shape == (T, N, Hv)
        assert jflash.flash_attention(q[:, :0], k, v, backend="lseless").shape == (B, 0, N, Hv)
        with pytest.raises(jflash.UnsupportedError, match="lseless: it has no lse"):
            jflash.flash_attention_with_lse(q, k, v, backend="lseless")
        assert jflash.explain(q, k, v, backend="lseless").plan is not None
        explanation = jflash.explain(q, k, v, backend="lseless", lse=True)
    assert explanation.plan is None
    assert explanation.refusals["lseless"] == "it has no lse"
    assert re.search(r"^problem .* lse$", str(explanation), re.MULTILINE)
    assert " lse" not in str(jflash.explain(q, k, v)).splitlines()[0]


def test_auto_takes_another_backend_for_the_lse():
    q, k, v = arrays()
    with registry.registered(without_lse("lseless"), auto_on=("cpu",)):
        assert jflash.explain(q, k, v).plan.backend == "lseless"
        jflash.flash_attention(q, k, v)
        jflash.dot_product_attention(q, k, v)
        assert jflash.explain(q, k, v, lse=True).plan.backend == "xla"
        for call in (
            jflash.flash_attention_with_lse,
            functools.partial(jflash.dot_product_attention, return_residual=True),
        ):
            with pytest.warns(jflash.FallbackWarning, match="lseless refuses"):
                _, lse = call(q, k, v)
            assert np.isfinite(lse).all()


def test_explain_refuses_an_lse_that_is_no_flag():
    with pytest.raises(jflash.ArgumentError, match="`lse`: found 1, wanted True or False"):
        jflash.explain(*structs(), lse=1)


# Tracing --------------------------------------------------------------------------------------------------------------


def counting(name: str, traced: list) -> Backend:
    """The reference under another name, which notes each time that it is traced."""

    def forward(problem, tiles, operands):
        traced.append(problem)
        return reference.BACKEND.forward(problem, tiles, operands)

    return Backend(name=name, supports=lambda problem, hardware: None, forward=forward)


def masks_with(data: int) -> dict[str, dict]:
    """Arguments whose arrays hold `data`, and whose structure does not depend on it."""
    ids = np.arange(T) // data
    rng = np.random.default_rng(data)
    return {
        "nothing": {},
        "lengths": {"mask": Lengths(kv=np.array([data, 1]))},
        "one_length": {"mask": Lengths(kv=data)},
        "offsets": {"mask": Causal(offset=np.array([data, 0]))},
        "scalar_offset": {"mask": SlidingWindow(3, 1, offset=jnp.int32(data))},
        "segments": {"mask": Segments(ids, np.arange(S) // data)},
        "segment_ids": {"segment_ids": (ids, np.arange(S) // data)},
        "dense": {"mask": Dense(rng.random((T, S)) < 0.5)},
        "bias": {"bias": array(1, 1, T, S) * data},
        "and": {"mask": Lengths(q=np.array([data, 4])) & Causal(offset=2), "window": (3, 3)},
    }


@pytest.mark.parametrize("kind", masks_with(1))
def test_second_eager_call_does_not_retrace(kind):
    traced = []
    with registry.registered(counting(f"counting_{kind}", traced)):
        results = []
        for data in (1, 2, 2):
            q, k, v = (x * data for x in arrays())
            results.append(jflash.flash_attention(q, k, v, **masks_with(data)[kind], backend=f"counting_{kind}"))
            assert len(traced) == 1
    assert not np.array_equal(results[0], results[1])
    assert np.array_equal(results[1], results[2])


@pytest.mark.parametrize(
    "one, other",
    [
        ({"mask": Causal(offset=1)}, {"mask": Causal(offset=2)}),
        ({"window": 1}, {"window": (1, 2)}),
        ({"scale": 0.5}, {"scale": 0.25}),
        ({"softcap": 2.0}, {"softcap": None}),
        ({"mask": Segments(np.arange(T), np.arange(S))}, {"mask": Segments(np.arange(T), np.arange(S), padding_id=1)}),
    ],
    ids=["offset", "window", "scale", "softcap", "padding_id"],
)
def test_changed_static_number_retraces(one, other, request):
    traced, name = [], f"counting {request.node.name}"
    q, k, v = arrays()
    with registry.registered(counting(name, traced)):
        first = jflash.flash_attention(q, k, v, **one, backend=name)
        second = jflash.flash_attention(q, k, v, **other, backend=name)
        again = jflash.flash_attention(q, k, v, **one, backend=name)
    assert len(traced) == 2
    assert not np.array_equal(first, second)
    assert np.array_equal(first, again)


# What the arguments mean ----------------------------------------------------------------------------------------------


def square() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return arrays(T=13, S=13)


PARTS = {
    "mask": Dense(np.random.default_rng(1).random((N, 13, 13)) < 0.7),
    "causal": Causal(),
    "window": SlidingWindow(6, 2),
    "segment_ids": Segments(np.repeat([1, 2], [5, 8])),
}


def test_arguments_narrow_each_other():
    q, k, v = square()

    def attend(**arguments):
        return np.asarray(jflash.flash_attention(q, k, v, **arguments))

    given = {"mask": PARTS["mask"], "causal": True, "window": (6, 2), "segment_ids": PARTS["segment_ids"].q_ids}
    found = attend(**given)
    assert found.tobytes() == attend(mask=And(*PARTS.values())).tobytes()
    t, s = np.arange(13)[:, None], np.arange(13)
    ids = PARTS["segment_ids"].q_ids
    allowed = PARTS["mask"].array & (s <= t) & (s >= t - 6) & (ids[:, None] == ids)
    assert_close(found, attend(mask=Dense(allowed)), atol=tolerance(np.float32, found))
    # Each of them counts: without one of them something else comes out.
    for name in given:
        without = {key: value for key, value in given.items() if key != name}
        if name == "window":
            assert not np.array_equal(attend(**without), found)
            # On its right side the window is moot beside `causal`.
            assert_close(attend(**without, window=(6, None)), found, atol=tolerance(np.float32, found))
        else:
            assert not np.array_equal(attend(**without), found)


@pytest.mark.parametrize("name", PARTS)
def test_argument_alone_means_its_mask(name):
    q, k, v = square()
    argument = {
        "mask": PARTS["mask"],
        "causal": True,
        "window": (6, 2),
        "segment_ids": PARTS["segment_ids"].q_ids,
    }[name]
    found = jflash.flash_attention(q, k, v, **{name: argument})
    wanted = jflash.flash_attention(q, k, v, mask=PARTS[name])
    assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
    assert not np.array_equal(found, jflash.flash_attention(q, k, v))


def test_full_mask_is_no_mask():
    q, k, v = arrays()
    assert np.array_equal(jflash.flash_attention(q, k, v, mask=Full()), jflash.flash_attention(q, k, v))


def test_window_of_one_number_is_both_sides():
    q, k, v = arrays()
    one, pair, narrower = (jflash.flash_attention(q, k, v, window=window) for window in (2, (2, 2), (2, 1)))
    assert np.asarray(one).tobytes() == np.asarray(pair).tobytes()
    assert not np.array_equal(one, narrower)


def test_default_scale():
    q, k, v = arrays()
    found, wanted = (jflash.flash_attention(q, k, v, scale=scale) for scale in (None, H**-0.5))
    assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_unbatched_is_a_batch_of_one(backend):
    q, k, v = (x[0] for x in arrays())
    arguments = {"segment_ids": (np.array([1, 1, 2, 2, 3]), np.array([1, 1, 1, 2, 2, 2, 3])), "bias": array(N, T, S)}
    d_out, d_lse = array(T, N, Hv), array(N, T)

    @jax.jit
    def passes(q, k, v, bias, d_out, d_lse, segment_ids):
        def call(q, k, v, bias):
            return jflash.flash_attention_with_lse(q, k, v, bias=bias, segment_ids=segment_ids, backend=backend)

        attended, pull_back = jax.vjp(call, q, k, v, bias)
        return *attended, *pull_back(jflash.Attended(d_out, d_lse))

    found = passes(q, k, v, arguments["bias"], d_out, d_lse, arguments["segment_ids"])
    batched = [x[None] for x in (q, k, v, arguments["bias"], d_out, d_lse)]
    wanted = passes(*batched, tuple(ids[None] for ids in arguments["segment_ids"]))
    assert [x.shape for x in found] == [(T, N, Hv), (N, T), (T, N, H), (S, K, H), (S, K, Hv), (N, T, S)]
    for one, other in zip(found, wanted, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other[0]).tobytes()


@pytest.mark.parametrize(
    "mask", [Lengths(kv=3), Lengths(q=np.array([2])), Causal(offset=np.array(1)), Dense(np.eye(5, 7) == 1)]
)
def test_unbatched_takes_masks(mask):
    q, k, v = arrays()
    found = jflash.flash_attention_with_lse(q[0], k[0], v[0], mask=mask)
    wanted = jflash.flash_attention_with_lse(q[:1], k[:1], v[:1], mask=mask)
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(one, other[0])


# Results --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_types_of_results(backend, dtype):
    with jax.enable_x64(dtype == "float64"):
        q, k, v = arrays(dtype=jnp.dtype(dtype))
        attended = jflash.flash_attention_with_lse(q, k, v, backend=backend)
        out, pull_back = jax.vjp(functools.partial(jflash.flash_attention, backend=backend), q, k, v)
        gradients = pull_back(out)
    assert isinstance(out, jax.Array)
    assert type(attended) is jflash.Attended
    assert attended._fields == ("out", "lse")
    assert attended.out.dtype == out.dtype == dtype
    assert attended.lse.dtype == ("float64" if dtype == "float64" else "float32")
    assert [gradient.dtype for gradient in gradients] == [dtype] * 3
    assert out.shape == attended.out.shape == (B, T, N, Hv)
    assert attended.lse.shape == (B, N, T)
    assert np.array_equal(out, attended.out)
    assert not np.isnan(out).any()


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_float64_is_computed_in_float64(backend):
    with jax.enable_x64(True):
        q, k, v = arrays(dtype=np.float64)
        out, lse = (np.asarray(x) for x in jflash.flash_attention_with_lse(q, k, v, backend=backend))
    score = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, 2, axis=2)) / np.sqrt(H)
    weight = np.exp(score - score.max(-1, keepdims=True))
    wanted = np.einsum("bnts,bsnd->btnd", weight / weight.sum(-1, keepdims=True), np.repeat(v, 2, axis=2))
    assert_close(out, wanted, atol=tolerance(np.float64, wanted))
    assert_close(lse, np.log(np.exp(score).sum(-1)), atol=tolerance(np.float64, lse))


def test_numpy_inputs_are_taken():
    q, k, v = arrays()
    arguments = {
        "bias": array(1, N, T, S),
        "mask": Dense(np.ones((T, S), bool)),
        "segment_ids": (np.ones(T, int), np.ones(S, int)),
    }
    found = jflash.flash_attention(q, k, v, **arguments)
    wanted = jflash.flash_attention(*map(jnp.asarray, (q, k, v)), **jax.tree.map(jnp.asarray, arguments))
    assert isinstance(found, jax.Array)
    assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


EMPTY = {
    "B": {"B": 0},
    "T": {"T": 0},
    "S": {"S": 0},
    "N": {"N": 0, "K": 0},
    "N with K": {"N": 0},
    "T and S": {"T": 0, "S": 0},
    "B, T and S": {"B": 0, "T": 0, "S": 0},
}


def empty_call(sizes: dict, backend: str, *, dtype=jnp.bfloat16):
    """The function of q, k, v, bias and those arrays; causal too where T equals S."""
    sizes = {"B": B, "T": T, "S": S, "N": N, "K": K} | sizes
    b, t, s, n, kv = (sizes[letter] for letter in ("B", "T", "S", "N", "K"))

    def call(q, k, v, bias):
        return jflash.flash_attention_with_lse(
            q, k, v, bias=bias, causal=t == s, window=(2, 0), mask=Lengths(kv=np.full(b, s, np.int32)), backend=backend
        )

    shapes = ((b, t, n, H), (b, s, kv, H), (b, s, kv, Hv))
    return call, (*(array(*shape, dtype=dtype) for shape in shapes), array(1, n, 1, s))


@pytest.mark.parametrize("backend", ["auto", "xla", "reference"])
@pytest.mark.parametrize("axis", EMPTY)
def test_b25_zero_size(axis, backend):
    call, operands = empty_call(EMPTY[axis], backend)
    attended, pull_back = jax.vjp(call, *operands)
    b, t, n, _ = operands[0].shape
    assert attended.out.shape == (b, t, n, Hv)
    assert attended.out.dtype == jnp.bfloat16
    assert attended.lse.shape == (b, n, t)
    assert attended.lse.dtype == np.float32
    assert (attended.out == 0).all()
    assert np.isneginf(attended.lse).all()
    gradients = pull_back(jax.tree.map(jnp.ones_like, attended))
    for gradient, operand in zip(gradients, operands, strict=True):
        assert gradient.shape == operand.shape
        assert gradient.dtype == operand.dtype
        assert (gradient == 0).all()


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("size", [3, 1])
@pytest.mark.parametrize("axis", EMPTY)
def test_b25_vmap_of_zero_size(axis, backend, size):
    call, operands = empty_call(EMPTY[axis], backend)
    stacked = tuple(np.stack([operand] * size) for operand in operands)
    attended = jax.vmap(call)(*stacked)
    b, t, n, _ = operands[0].shape
    assert attended.out.shape == (size, b, t, n, Hv)
    assert (attended.out == 0).all()
    assert np.isneginf(attended.lse).all()

    def loss(*operands):
        return call(*operands).out.astype(jnp.float32).sum()

    gradients = jax.vmap(jax.grad(loss, (0, 1, 2, 3)))(*stacked)
    for gradient, operand in zip(gradients, stacked, strict=True):
        assert gradient.shape == operand.shape
        assert (gradient == 0).all()


def test_explain_of_zero_size():
    for sizes in EMPTY.values():
        _, operands = empty_call(sizes, "auto")
        assert jflash.explain(*operands[:3]).plan is not None


@dataclasses.dataclass(frozen=True, eq=False)
class EvenKeys(Mask):
    """A mask from outside the package."""

    def evaluate(self, q, k):
        return (k % 2 == 0) & (q == q)

    def tile_kind(self, queries, keys):
        return np.ones(np.broadcast_shapes(np.shape(queries.first), np.shape(keys.first)), np.int8)


def test_mask_of_a_user_is_a_mask():
    q, k, v = arrays()
    found = jflash.flash_attention(q, k, v, mask=EvenKeys())
    wanted = jflash.flash_attention(q, k[:, ::2], v[:, ::2])
    assert_close(found, wanted, atol=2 * tolerance(np.float32, np.asarray(wanted)))


def test_a_call_loads_no_backend_that_it_does_not_need():
    program = (
        "import sys, jax, jflash; x = jax.numpy.ones((1, 2, 1, 4)); jflash.flash_attention(x, x, x); "
        "assert 'jflash.backends.xla' in sys.modules and 'jflash.backends.reference' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
