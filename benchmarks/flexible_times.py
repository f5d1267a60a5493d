"""Kernel times of masks and score functions, jflash beside torch's FlexAttention, a process for each on one GPU.

    python benchmarks/flexible_times.py jflash >> lines.jsonl
    python benchmarks/flexible_times.py flex_attention >> lines.jsonl
    python benchmarks/flexible_report.py lines.jsonl

Time is the sum over all kernels of a call, the median of calls with the device idle before each few of them. What
FlexAttention's block mask costs is not counted, since its users make it once; that jflash finds its tiles in each call
is. Copies and fills of memory by the driver are left out on both sides. TFLOP/s count the pairs that attend:
4 · B · N · pairs · H operations forward, 2.5 times that backward.

What it does stands on stderr with the seconds since it began: FlexAttention compiles for a minute or so in each case.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from machine import commit_here, device, driver
from torch_times import Kernel, kernels_of, times_of_calls

N, H = 16, 128
_SLOPES = (2.0 ** -np.arange(0.5, 8.5, 0.5)).astype(np.float32)
_BLOCK = 128
"""Queries and keys of a block of FlexAttention's block masks, its default."""
_ROWS_AT_A_TIME = 16

# A numpy array as the other side has it; with True one whose gradient is asked for.
type Tensor = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One attention of B=1.

    Attributes:
      pairs: how many attend.
      jflash: the arguments of `flash_attention`, made when asked for; the arrays in them are traced.
      learned: those of its arguments whose gradients the backward pass gives beside dq, dk and dv.
      backend: what computes it.
      mask_mod, score_mod: of FlexAttention, from a function that makes CUDA tensors of numpy arrays; None for none.
      kernel_options: of FlexAttention, where it does not run without.
    """

    name: str
    T: int
    pairs: float
    jflash: Callable[[], dict[str, Any]]
    learned: tuple[str, ...] = ()
    backend: str = "mosaic_gpu"
    mask_mod: Callable[[Tensor], Callable] | None
    score_mod: Callable[[Tensor], Callable] | None = None
    kernel_options: dict[str, Any] | None = None


def _documents(T: int, mean: int) -> np.ndarray:
    """Ids of packed documents with lengths from an exponential distribution."""
    lengths = 1 + np.random.default_rng(1).exponential(mean, T).astype(int)
    return np.repeat(np.arange(T), lengths)[:T].astype(np.int32)


def slope_and_value(s, b, n, q, k, slope, value):
    return s + slope[n] * (k - q).astype(s.dtype) + value[k]


def relative(s, b, n, q, k, table):
    return s + table[n, q - k + table.shape[1] // 2]


def cases(shrink: int = 1) -> Iterator[Case]:
    """The cases, with all lengths divided by a power of two where a test wants them small."""
    from jflash.masks import Causal, PrefixLM, Segments, SlidingWindow

    T, window, prefix = (length // shrink for length in (16384, 1024, 4096))
    triangle = T * T / 2

    def causal_mod(tensor):
        return lambda b, h, q, k: q >= k

    def window_mod(tensor):
        return lambda b, h, q, k: (q >= k) & (q - k < window)

    yield Case(name="causal", T=T, pairs=triangle, jflash=lambda: {"causal": True}, mask_mod=causal_mod)
    for long in (T, 4 * T):
        yield Case(
            name="window", T=long, pairs=float(long * window),
            jflash=lambda: {"mask": SlidingWindow(window - 1, 0)}, mask_mod=window_mod,
        )  # fmt: skip
    ids = _documents(2 * T, window)
    sizes = np.bincount(ids).astype(float)

    def document_mod(tensor):
        of = tensor(ids)
        return lambda b, h, q, k: (of[q] == of[k]) & (q >= k)

    yield Case(
        name="documents", T=2 * T, pairs=float((sizes**2).sum() / 2),
        jflash=lambda: {"mask": Segments(ids) & Causal()}, mask_mod=document_mod,
    )  # fmt: skip
    yield Case(
        name="prefix_lm", T=T, pairs=triangle + prefix**2 / 2,
        jflash=lambda: {"mask": PrefixLM(np.array([prefix], np.int32))},
        mask_mod=lambda tensor: lambda b, h, q, k: (q >= k) | (k < prefix),
    )  # fmt: skip

    def alibi_mod(tensor):
        slopes = tensor(_SLOPES)
        return lambda s, b, h, q, k: s - slopes[h] * abs(q - k)

    yield Case(
        name="alibi", T=T, pairs=triangle, mask_mod=causal_mod, score_mod=alibi_mod,
        jflash=lambda: {"causal": True, "alibi_slopes": _SLOPES},
    )  # fmt: skip
    value = np.random.default_rng(2).standard_normal(T).astype(np.float32)
    for learned in ((), ("score_args",)):

        def slope_and_value_mod(tensor, learned=learned):
            slopes, values = (tensor(array, bool(learned)) for array in (_SLOPES, value))
            return lambda s, b, h, q, k: s + slopes[h] * (k - q) + values[k]

        yield Case(
            name="slope_and_value" + "_learned" * len(learned), T=T, pairs=triangle,
            jflash=lambda: {"causal": True, "score_fn": slope_and_value, "score_args": (_SLOPES, value)},
            learned=learned, mask_mod=causal_mod, score_mod=slope_and_value_mod,
        )  # fmt: skip

    table = np.random.default_rng(4).standard_normal((N, 2 * T)).astype(np.float32)

    def relative_mod(tensor):
        of = tensor(table)
        return lambda s, b, h, q, k: s + of[h, q - k + T]

    yield Case(
        name="relative", T=T, pairs=triangle, mask_mod=causal_mod, score_mod=relative_mod,
        jflash=lambda: {"causal": True, "score_fn": relative, "score_args": (table,)},
    )  # fmt: skip

    def softcap_mod(tensor):
        import torch

        return lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0)

    yield Case(
        name="softcap", T=T, pairs=triangle, mask_mod=causal_mod, score_mod=softcap_mod,
        jflash=lambda: {"causal": True, "softcap": 30.0},
    )  # fmt: skip

    @functools.cache
    def bias() -> np.ndarray:
        return np.random.default_rng(3).standard_normal((1, N, T // 4, T // 4), np.float32)

    def bias_mod(tensor):
        of = tensor(bias(), True)
        return lambda s, b, h, q, k: s + of[0, h, q, k]

    yield Case(
        name="bias_learned", T=T // 4, pairs=T * T / 16, mask_mod=None, score_mod=bias_mod,
        jflash=lambda: {"bias": bias()}, learned=("bias",), backend="auto",
        # With as many as it takes itself it wants 262144 bytes of shared memory (torch 2.11, H200).
        kernel_options={"bwd_num_stages": 1},
    )  # fmt: skip


class Pass(NamedTuple):
    """The forward or the backward pass of a case, compiled.

    Attributes:
      run: runs it once and waits for it.
      times_ms: the sum over the kernels of each of so many calls.
    """

    run: Callable[[], Any]
    times_ms: Callable[[int], list[float]]


def jflash_passes(case: Case) -> tuple[dict[str, Pass], dict[str, str]]:
    """Both passes, and the versions of what computes them."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.mosaic.gpu import profiler

    import jflash

    # Arrays among the arguments are arguments of the compiled program too: XLA must not know what a mask holds.
    leaves, tree = jax.tree.flatten(case.jflash())
    is_array = [isinstance(leaf, np.ndarray) for leaf in leaves]
    arrays = [jnp.asarray(leaf) for leaf, own in zip(leaves, is_array) if own]

    def arguments_of(arrays: list[Any]) -> dict[str, Any]:
        rest = iter(arrays)
        return tree.unflatten([next(rest) if own else leaf for leaf, own in zip(leaves, is_array)])

    def attend(q, k, v, learned, arrays):
        return jflash.flash_attention(q, k, v, **arguments_of(arrays) | learned, backend=case.backend)

    q, k, v, d_out = jax.random.normal(jax.random.key(0), (4, 1, case.T, N, H), jnp.bfloat16)
    operands = q, k, v, {name: arguments_of(arrays)[name] for name in case.learned}
    pull = jax.jit(lambda operands, arrays: jax.vjp(lambda *own: attend(*own, arrays), *operands)[1])(operands, arrays)
    compiled = {
        "forward": (jax.jit(attend).lower(*operands, arrays).compile(), (*operands, arrays)),
        "backward": (jax.jit(lambda pull, d_out: pull(d_out)).lower(pull, d_out).compile(), (pull, d_out)),
    }

    def times_ms(which: str, calls: int) -> list[float]:
        call, own = compiled[which]
        _, times = profiler.Cupti(finalize=False).measure(call, aggregate=False, iterations=calls)(*own)
        return [sum(ms for _, ms in kernels) for kernels in times]

    def run(which: str) -> None:
        call, own = compiled[which]
        jax.block_until_ready(call(*own))

    plan = jflash.explain(q, k, v, **arguments_of(arrays), backend=case.backend).plan
    passes = {which: Pass(*(functools.partial(f, which) for f in (run, times_ms))) for which in compiled}
    return passes, {"jax": jax.__version__, "jflash": jflash.__version__, "backend": plan.backend}


def flex_passes(case: Case) -> tuple[dict[str, Pass], dict[str, str]]:
    """As `jflash_passes`."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    learned = []

    def tensor(array: np.ndarray, is_learned: bool = False) -> Any:
        made = torch.from_numpy(array).cuda()
        if is_learned:
            learned.append(made.requires_grad_())
        return made

    # Dynamo falls back to what is not compiled once it has compiled a function some times.
    torch.compiler.reset()
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(1, N, case.T, H, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    mask_mod = case.mask_mod and case.mask_mod(tensor)
    score_mod = case.score_mod and case.score_mod(tensor)
    block_mask = mask_mod and block_mask_of(mask_mod, case.T, device="cuda")
    say(f"{case.name}: has its block mask")
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward() -> Any:
        # With what the backward pass needs, so that one program serves both.
        return compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, kernel_options=case.kernel_options)

    out = forward()
    torch.cuda.synchronize()
    say(f"{case.name}: compiled forward")

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v, *learned), d_out, retain_graph=True)

    def run(call: Callable[[], Any]) -> None:
        call()
        torch.cuda.synchronize()

    def kernels(call: Callable[[], Any], calls: int) -> list[Kernel]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(calls):
                run(call)
        return kernels_of(profile, torch.autograd.DeviceType.CUDA)

    def times_ms(call: Callable[[], Any], calls: int) -> list[float]:
        return times_of_calls(kernels(call, calls), calls)

    # The profiler sets itself up when it is first used, and may miss a kernel then.
    kernels(backward, 1)
    passes = {
        which: Pass(functools.partial(run, call), functools.partial(times_ms, call))
        for which, call in (("forward", forward), ("backward", backward))
    }
    return passes, {"torch": torch.__version__}


def allowed_in_blocks(mask_mod: Callable, T: int, arange: Callable[[int, int], Any]) -> list[Any]:
    """How many pairs attend in each block, some rows of blocks at a time; for numpy as for torch.

    `create_block_mask` of torch holds all pairs at once, or has to be compiled for each mask.

    Args:
      arange: numbers from the first to the last, excluded.
    """
    keys, counts = arange(0, T)[None], []
    for first in range(0, T, _BLOCK * _ROWS_AT_A_TIME):
        queries = arange(first, min(T, first + _BLOCK * _ROWS_AT_A_TIME))[:, None]
        allowed = mask_mod(queries * 0, queries * 0, queries, keys)
        counts.append(allowed.reshape(-1, _BLOCK, T // _BLOCK, _BLOCK).sum((1, 3)))
    return counts


def block_mask_of(mask_mod: Callable, T: int, *, device: str) -> Any:
    """The `BlockMask` that `create_block_mask` makes: full blocks apart from those that must be masked."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    counts = torch.cat(allowed_in_blocks(mask_mod, T, functools.partial(torch.arange, device=device)))

    def ordered(blocks: Any) -> tuple[Any, Any]:
        indices = torch.argsort((~blocks).to(torch.int32), dim=-1, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[None, None], indices.to(torch.int32)[None, None]

    is_full = counts == _BLOCK * _BLOCK
    return BlockMask.from_kv_blocks(
        *ordered((counts > 0) & ~is_full), *ordered(is_full), BLOCK_SIZE=_BLOCK, mask_mod=mask_mod, seq_lengths=(T, T)
    )


SIDES = {"jflash": jflash_passes, "flex_attention": flex_passes}
_BEGAN = time.perf_counter()


def say(what: str) -> None:
    print(f"{time.perf_counter() - _BEGAN:7.1f} s  {what}", file=sys.stderr, flush=True)


def measured(case: Case, side: str, *, rounds: int, calls: int, idle_s: float) -> dict[str, Any]:
    """The fields of a line that tell of the times of one case."""
    line: dict[str, Any] = {}
    try:
        passes, line["versions"] = SIDES[side](case)
        say(f"{case.name}: compiled")
        for which, share in (("forward", 1.0), ("backward", 2.5)):
            samples: list[float] = []
            for _ in range(rounds):
                passes[which].run()
                time.sleep(idle_s)
                # The first half of each turn's calls, as in kernel_times.py: an H200 lowers its clock under load.
                samples += passes[which].times_ms(calls)[: (calls + 1) // 2]
            ms = statistics.median(samples)
            line |= {f"{which}_ms": round(ms, 4), f"{which}_samples_ms": [round(x, 4) for x in samples]}
            line[f"{which}_tflops"] = round(share * 4 * N * case.pairs * H / ms / 1e9, 1)
            say(f"{case.name}: {which} {ms:.3f} ms")
    except Exception as error:  # Compilers have errors of many kinds; each is named in the record.
        line["not_run"] = f"{type(error).__name__}: {error}"[:300]
        say(f"{case.name}: {line['not_run']}")
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--cases", nargs="+", choices=sorted({case.name for case in cases()}), help="only these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--idle-s", type=float, default=0.3)
    parser.add_argument("--commit", default=None, help="where the checkout does not say it itself")
    arguments = parser.parse_args()
    where = {"device": device(), "driver": driver(), "date": time.strftime("%Y-%m-%d")}
    where["commit"] = arguments.commit or commit_here()
    options = {name: getattr(arguments, name) for name in ("rounds", "calls", "idle_s")}
    for case in cases():
        if arguments.cases is None or case.name in arguments.cases:
            line = {"kind": "flexible_times", "case": case.name, "T": case.T, "N": N, "H": H}
            line |= {"implementation": arguments.side, **options, **measured(case, arguments.side, **options)}
            print(json.dumps({**line, **where}), flush=True)


if __name__ == "__main__":
    main()
