"""What `cudnn` takes and how it tells JAX, without a GPU: the numbers are the contract's, on a GPU."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflash
from jflash import hardware
from jflash.backends import cudnn
from jflash.backends.protocol import Operands
from jflash.masks import Causal, Dense, Full, Lengths, Mask, Segments, SlidingWindow

SIZES = {"B": 2, "T": 24, "S": 24, "N": 4, "K": 2, "H": 64, "Hv": 64}


def structs(dtype="bfloat16", **sizes) -> tuple[jax.ShapeDtypeStruct, ...]:
    size = SIZES | sizes
    shapes = [[size[axis] for axis in axes] for axes in (("B", "T", "N", "H"), ("B", "S", "K", "H"))]
    shapes.append([size[axis] for axis in ("B", "S", "K", "Hv")])
    return tuple(jax.ShapeDtypeStruct(tuple(shape), dtype) for shape in shapes)


@pytest.fixture
def gpu_here(monkeypatch):
    """Makes the backend believe that the GPU planned for is the one here."""

    def pretend(name: str) -> None:
        monkeypatch.setattr(cudnn, "_gpu_here", lambda: hardware.named(name))

    return pretend


def refusal(pretend, *, on: str = "h100", dtype="bfloat16", sizes=(), **arguments) -> str | None:
    pretend(on)
    explanation = jflash.explain(*structs(dtype, **dict(sizes)), backend="cudnn", hardware=on, **arguments)
    return explanation.refusals.get("cudnn")


@pytest.mark.parametrize("on", ["a100", "rtx3090", "l4", "h100", "h200", "b200", "b300", "rtx5090"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_takes(gpu_here, on, dtype):
    assert refusal(gpu_here, on=on, dtype=dtype) is None
    assert refusal(gpu_here, on=on, dtype=dtype, sizes={"H": 128, "Hv": 128, "K": 1, "T": 24}.items()) is None


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ({"on": "cpu"}, r"compute capability 8\.0 or above, the hardware is cpu"),
        ({"on": "tpu"}, r"compute capability 8\.0 or above, the hardware is tpu"),
        ({"on": "t4"}, r"compute capability 8\.0 or above, the hardware is t4 \(compute capability 7\.5"),
        ({"dtype": "float32"}, "bfloat16 and float16, the inputs are float32"),
        ({"lse": True}, "no lse that can be differentiated"),
        ({"bias": jax.ShapeDtypeStruct((1, 4, 1, 24), "float32")}, r"no bias .* float32\[1, 4, 1, 24\]"),
        ({"softcap": 30.0}, "no softcap, asked for is softcap=30"),
        ({"deterministic": True}, "bit-equal between runs"),
        ({"sizes": {"Hv": 128}}, "Hv=128 and H=64"),
        ({"sizes": {"H": 60, "Hv": 60}}, r"multiples of 8 up to 256 on 9\.0, the head dim is H=60"),
        ({"sizes": {"H": 264, "Hv": 264}}, r"up to 256 on 9\.0, the head dim is H=264"),
        ({"sizes": {"H": 136, "Hv": 136}, "on": "a100"}, r"up to 128 on 8\.0, the head dim is H=136"),
        ({"sizes": {"H": 256, "Hv": 256}, "on": "b200"}, r"up to 128 on 10\.0, the head dim is H=256"),
        ({"sizes": {"H": 256, "Hv": 256}}, None),
        ({"sizes": {"T": 1, "S": 1}}, "only even lengths .* T=1 and S=1"),
        ({"sizes": {"T": 2, "S": 3}}, "only even lengths .* T=2 and S=3"),
        ({"sizes": {"T": 2}}, None),
        ({"sizes": {"T": 1000}}, None),
    ],
    ids=str,
)
def test_refuses_with_the_number(gpu_here, arguments, reason):
    arguments = {**arguments, "sizes": arguments.get("sizes", {}).items()}
    found = refusal(gpu_here, **arguments)
    assert found is None if reason is None else re.search(reason, found), found


@dataclasses.dataclass(frozen=True, eq=False)
class UpToTheQuery(Mask):
    """Causal by another class, whose truth is not asked here: the spans say what it is."""

    has_spans = True

    def evaluate(self, q, k):
        return k <= q

    def key_span(self, queries, *values):
        return Causal().key_span(queries)


@pytest.mark.parametrize(
    "mask, wanted",
    [
        (Full(), {}),
        (SlidingWindow(None, None), {}),
        (SlidingWindow(23, 23), {}),
        (Causal(offset=23), {}),
        (Causal(), {"is_causal": True}),
        (UpToTheQuery(), {"is_causal": True}),
        (SlidingWindow(None, 0), {"is_causal": True}),
        (SlidingWindow(23, 0), {"is_causal": True}),
        (SlidingWindow(22, 0), {"is_causal": True, "local_window_size": (22, 0)}),
        (SlidingWindow(0, 0), {"is_causal": True, "local_window_size": (0, 0)}),
        (Causal() & SlidingWindow(5, 9), {"is_causal": True, "local_window_size": (5, 0)}),
        (SlidingWindow(5, 5, offset=-5), {"is_causal": True, "local_window_size": (10, 0)}),
        (SlidingWindow(5, 1), "query 0 sees the keys 0 to 1: cuDNN is used"),
        (SlidingWindow(0, None), "query 0 sees the keys 0 to 23|query 1 sees the keys 1 to 23"),
        (Causal(offset=1), "query 0 sees the keys 0 to 1"),
        (Causal(offset=-1), "query 0 sees no key"),
        (Causal(offset=np.zeros(2, int)), r"Causal.* holds arrays: .* padding"),
        (Lengths(kv=np.array([24, 24])), "holds arrays"),
        (Segments(np.zeros(24, int)), "holds arrays"),
        (Dense(np.ones((24, 24), bool)), "holds arrays"),
        (Causal() | SlidingWindow(1, 1), "an interval of keys for each query, and the mask .* does not say"),
    ],
    ids=repr,
)
def test_masks_are_known_by_what_each_query_sees(gpu_here, mask, wanted):
    problem = jflash.explain(*structs(), mask=mask).problem
    found = cudnn._pattern(problem.mask, problem.T, problem.S)
    if isinstance(wanted, str):
        assert re.search(wanted, found), found
        assert refusal(gpu_here, mask=mask) == found
    else:
        assert found == wanted
        assert refusal(gpu_here, mask=mask) is None


@pytest.mark.parametrize("T, S", [(24, 30), (30, 24)])
def test_masks_where_lengths_differ(gpu_here, T, S):
    sizes = {"T": T, "S": S}.items()
    assert refusal(gpu_here, sizes=sizes) is None
    for mask in (Causal(), Causal(offset=S - T), SlidingWindow(3, 0)):
        found = refusal(gpu_here, sizes=sizes, mask=mask)
        assert re.search(f"T equals S, they are T={T} and S={S}|sees no key", found), found


def test_a_gpu_that_is_not_here(monkeypatch):
    """JAX cannot trace cuDNN's attention without the GPU, so that a plan for it would be one that fails."""
    explanation = jflash.explain(*structs(), hardware="a100")
    assert explanation.plan.backend == "xla"
    assert explanation.refusals["cudnn"] == "JAX traces cuDNN's attention only where such a GPU is, and here is none"
    monkeypatch.setattr(cudnn, "_gpu_here", lambda: hardware.named("h100"))
    assert re.search(r"here is h100 \(", jflash.explain(*structs(), hardware="a100").refusals["cudnn"])
    assert jflash.explain(*structs(), hardware="h200").plan.backend != "xla"


def test_auto_takes_it_where_no_kernel_of_ours_runs(gpu_here):
    gpu_here("a100")
    explanation = jflash.explain(*structs(), hardware="a100")
    assert explanation.order == ("mosaic_gpu", "cudnn", "xla")
    assert explanation.plan.backend == "cudnn"
    assert explanation.refusals["xla"] == "cudnn comes before it on cuda"
    gpu_here("h200")
    assert jflash.explain(*structs(), hardware="h200").plan.backend == "mosaic_gpu"


# What JAX is told, in programs lowered for CUDA. There is no cuDNN here, so JAX is told a version of it.


@pytest.fixture
def cudnn_version(monkeypatch):
    module = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(module, "cuda_versions", types.SimpleNamespace(cudnn_get_version=lambda: 91200))


def passes(mask):
    problem = jflash.explain(*structs(), mask=mask).problem

    def run(q, k, v, d_out):
        def forward(q, k, v):
            attended = cudnn.BACKEND.forward(problem, None, Operands(q, k, v, None, mask))
            assert attended.lse is None
            return attended.out

        out, pull = jax.vjp(forward, q, k, v)
        return out, *pull(d_out)

    return run


def lowered(call, *arguments) -> str:
    return jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def calls(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.search(r"custom_call @\S*fmha", line)]


@pytest.mark.parametrize(
    "mask, kind, window",
    [(Full(), "NO_MASK", 0), (Causal(), "CAUSAL", 0), (SlidingWindow(5, 0), "CAUSAL", 6)],
    ids=repr,
)
def test_what_cudnn_is_asked_for(cudnn_version, mask, kind, window):
    q, k, v = structs()
    forward, backward = calls(lowered(passes(mask), q, k, v, q))
    assert "@__cudnn$fmhaSoftmax(" in forward and "@__cudnn$fmhaSoftmaxBackward(" in backward
    for call in (forward, backward):
        assert re.search(rf"mask_type[^,]*\\22{kind}\\22", call)
        assert re.search(rf"sliding_window_length\\22: {window},", call)
        assert re.search(r"fmha_scale\\22: 0\.125,", call)


@pytest.mark.parametrize("mapped", [(0, 0, 0, 0), (2, 1, None, 4), (None, 3, 0, None)], ids=str)
def test_vmap_of_both_passes_along_any_axis(cudnn_version, mapped):
    q, k, v = (jnp.zeros(x.shape, x.dtype) for x in structs())
    arguments = [jnp.stack([x] * 3, axis) if axis is not None else x for x, axis in zip((q, k, v, q), mapped)]
    found = calls(lowered(jax.vmap(passes(Causal()), mapped, 1), *arguments))
    assert len(found) == 2
    assert all(call.count("tensor<6x24x4x64xbf16>") >= 1 for call in found), found


def test_the_twin_asks_for_it_by_name(gpu_here, cudnn_version):
    gpu_here("h100")
    call = functools.partial(jflash.dot_product_attention, is_causal=True, implementation="cudnn")
    with jflash.use_options(hardware="h100"):
        (found,) = calls(lowered(call, *structs()))
        assert "CAUSAL" in found
        with pytest.raises(jflash.UnsupportedError, match=r"cudnn: .* no lse that can be differentiated"):
            lowered(functools.partial(call, return_residual=True), *structs())
