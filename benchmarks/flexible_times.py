"""Kernel times of masks and score functions, jflash beside torch's FlexAttention, a process for each on one GPU.

    python benchmarks/flexible_times.py jflash >> lines.jsonl
    python benchmarks/flexible_times.py flex_attention >> lines.jsonl

Time is the sum over all kernels of a call, the median of calls with the device idle before each few of them. What
FlexAttention's block mask costs is not counted, since its users make it once; that jflash finds its tiles in each call
is. TFLOP/s count the pairs that attend: 4 · B · N · pairs · H operations forward, 2.5 times that backward.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from machine import commit_here, device, driver

N, H = 16, 128
_SLOPES = (2.0 ** -np.arange(0.5, 8.5, 0.5)).astype(np.float32)
_CALLS, _ROUNDS, _IDLE_S = 6, 3, 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One attention of B=1.

    Attributes:
      pairs: how many attend.
      jflash: the arguments of `flash_attention`, made when asked for.
      mask_mod, score_mod: of FlexAttention, from a function that makes CUDA tensors of numpy arrays.
    """

    name: str
    T: int
    pairs: float
    jflash: Callable[[], dict[str, Any]]
    mask_mod: Callable[[Callable], Callable]
    score_mod: Callable[[Callable], Callable] | None = None


def _documents(T: int, mean: int) -> np.ndarray:
    """Ids of packed documents with lengths from an exponential distribution."""
    lengths = 1 + np.random.default_rng(1).exponential(mean, T).astype(int)
    return np.repeat(np.arange(T), lengths)[:T].astype(np.int32)


def slope_and_value(s, b, n, q, k, slope, value):
    return s + slope[n] * (k - q).astype(s.dtype) + value[k]


def cases() -> Iterator[Case]:
    from jflash.masks import Causal, PrefixLM, Segments, SlidingWindow

    def causal_mod(tensor):
        return lambda b, h, q, k: q >= k

    def window_mod(tensor):
        return lambda b, h, q, k: (q >= k) & (q - k <= 1023)

    triangle = 16384**2 / 2
    yield Case(name="causal", T=16384, pairs=triangle, jflash=lambda: {"causal": True}, mask_mod=causal_mod)
    for T in (16384, 65536):
        window = {"mask": SlidingWindow(1023, 0)}
        yield Case(name="window", T=T, pairs=T * 1024.0, jflash=lambda window=window: window, mask_mod=window_mod)
    ids = _documents(32768, 1024)
    sizes = np.bincount(ids).astype(float)

    def document_mod(tensor):
        of = tensor(ids)
        return lambda b, h, q, k: (of[q] == of[k]) & (q >= k)

    yield Case(
        name="documents", T=32768, pairs=float((sizes**2).sum() / 2),
        jflash=lambda: {"mask": Segments(ids) & Causal()}, mask_mod=document_mod,
    )  # fmt: skip
    yield Case(
        name="prefix_lm", T=16384, pairs=triangle + 4096**2 / 2,
        jflash=lambda: {"mask": PrefixLM(np.array([4096], np.int32))},
        mask_mod=lambda tensor: lambda b, h, q, k: (q >= k) | (k < 4096),
    )  # fmt: skip

    def alibi_mod(tensor):
        slopes = tensor(_SLOPES)
        return lambda s, b, h, q, k: s - slopes[h] * (q - k).abs()

    yield Case(
        name="alibi", T=16384, pairs=triangle, mask_mod=causal_mod, score_mod=alibi_mod,
        jflash=lambda: {"causal": True, "alibi_slopes": _SLOPES},
    )  # fmt: skip
    value = np.random.default_rng(2).standard_normal(16384).astype(np.float32)

    def slope_and_value_mod(tensor):
        slopes, values = tensor(_SLOPES), tensor(value)
        return lambda s, b, h, q, k: s + slopes[h] * (k - q) + values[k]

    yield Case(
        name="slope_and_value", T=16384, pairs=triangle, mask_mod=causal_mod, score_mod=slope_and_value_mod,
        jflash=lambda: {"causal": True, "score_fn": slope_and_value, "score_args": (_SLOPES, value)},
    )  # fmt: skip

    def softcap_mod(tensor):
        import torch

        return lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0)

    yield Case(
        name="softcap", T=16384, pairs=triangle, mask_mod=causal_mod, score_mod=softcap_mod,
        jflash=lambda: {"causal": True, "softcap": 30.0},
    )  # fmt: skip


def jflash_calls(case: Case) -> tuple[dict[str, Callable[[], list[float]]], dict[str, str]]:
    """Functions to the times (ms) of some calls, and the versions."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.mosaic.gpu import profiler

    import jflash

    q, k, v, d_out = jax.random.normal(jax.random.key(0), (4, 1, case.T, N, H), jnp.bfloat16)
    arguments = case.jflash()
    attend = jax.jit(lambda q, k, v: jflash.flash_attention(q, k, v, **arguments, backend="mosaic_gpu"))
    _, pull = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v))(q, k, v)
    compiled = {
        "forward": (attend.lower(q, k, v).compile(), (q, k, v)),
        "backward": (jax.jit(lambda pull, d_out: pull(d_out)).lower(pull, d_out).compile(), (pull, d_out)),
    }

    def measure(which: str) -> list[float]:
        call, operands = compiled[which]
        jax.block_until_ready(call(*operands))
        time.sleep(_IDLE_S)
        _, times = profiler.Cupti(finalize=False).measure(call, aggregate=False, iterations=_CALLS)(*operands)
        return [sum(ms for _, ms in kernels) for kernels in times]

    versions = {"jax": jax.__version__, "jflash": jflash.__version__}
    return {which: lambda which=which: measure(which) for which in compiled}, versions


def flex_calls(case: Case) -> tuple[dict[str, Callable[[], list[float]]], dict[str, str]]:
    """As `jflash_calls`."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def tensor(array: np.ndarray) -> Any:
        return torch.from_numpy(array).cuda()

    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(1, N, case.T, H, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    block_mask = create_block_mask(case.mask_mod(tensor), None, None, case.T, case.T, device="cuda", _compile=True)
    score_mod = None if case.score_mod is None else case.score_mod(tensor)
    compiled = torch.compile(flex_attention, dynamic=False)
    out = compiled(q, k, v, score_mod=score_mod, block_mask=block_mask)

    def forward() -> None:
        with torch.no_grad():
            compiled(q, k, v, score_mod=score_mod, block_mask=block_mask)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)

    def measure(call: Callable[[], None]) -> list[float]:
        call()
        torch.cuda.synchronize()
        time.sleep(_IDLE_S)
        times = []
        for _ in range(_CALLS):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                call()
                torch.cuda.synchronize()
            times.append(sum(event.self_device_time_total for event in profile.key_averages()) / 1e3)
        return times

    calls = {"forward": lambda: measure(forward), "backward": lambda: measure(backward)}
    return calls, {"torch": torch.__version__}


SIDES = {"jflash": jflash_calls, "flex_attention": flex_calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--cases", nargs="+", help="only these")
    parser.add_argument("--commit", default=None, help="where the checkout does not say it itself")
    arguments = parser.parse_args()
    where = {"device": device(), "driver": driver(), "date": time.strftime("%Y-%m-%d")}
    where["commit"] = arguments.commit or commit_here()
    for case in cases():
        if arguments.cases is not None and case.name not in arguments.cases:
            continue
        calls, versions = SIDES[arguments.side](case)
        line = {"kind": "flexible_times", "case": case.name, "T": case.T, "N": N, "H": H}
        line |= {"implementation": arguments.side, "rounds": _ROUNDS, "calls": _CALLS, "idle_s": _IDLE_S}
        for which, share in (("forward", 1.0), ("backward", 2.5)):
            # The first half of each turn's calls, as in kernel_times.py: an H200 lowers its clock under load.
            samples = [ms for _ in range(_ROUNDS) for ms in calls[which]()[: (_CALLS + 1) // 2]]
            ms = statistics.median(samples)
            line |= {f"{which}_ms": round(ms, 4), f"{which}_samples_ms": [round(x, 4) for x in samples]}
            line[f"{which}_tflops"] = round(share * 4 * N * case.pairs * H / ms / 1e9, 1)
        print(json.dumps({**line, **where, "versions": versions}), flush=True)


if __name__ == "__main__":
    main()
