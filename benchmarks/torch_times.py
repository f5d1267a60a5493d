"""Kernel times of PyTorch's attention on the rows of `kernel_times.py`, in a process of its own on the same GPU.

    python benchmarks/kernel_times.py --suites grid > jax.jsonl
    python benchmarks/torch_times.py --suites grid > torch.jsonl
    python benchmarks/report.py jax.jsonl torch.jsonl

FlashAttention-4 (`flash_attn.cute`: its Hopper kernels, compiled by the CuTe DSL when first called) and cuDNN by
torch's `scaled_dot_product_attention`. Time is the sum over all kernels of a call, by CUPTI through torch's profiler,
copies and fills by the driver left out as in `kernel_times.py`; turns, idle time and medians are as there. Results of
the first and the last head are compared with attention in float32 before anything is timed.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import suites
from machine import commit_here, driver, versions
from records import Row

_BACKWARD_SHARE = 2.5
# As in kernel_times.py.
_AGREE = 0.05
_PACKAGES = ("torch", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "triton")
# Rows of the float32 matrices that the comparison holds at a time.
_QUERIES = 4096


def flash_attention_4(row: Row, q: Any, k: Any, v: Any) -> Any:
    from flash_attn.cute import flash_attn_func

    window = (None, None) if row.window is None else (row.window, 0)
    causal = row.causal and row.window is None
    out = flash_attn_func(q, k, v, causal=causal, window_size=window, deterministic=row.deterministic)
    return out[0] if isinstance(out, tuple) else out


def torch_cudnn(row: Row, q: Any, k: Any, v: Any) -> Any:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if row.window is not None:
        raise NotImplementedError("scaled_dot_product_attention has no window but as a dense mask")
    # It takes (B, N, T, H), in any strides: nothing is copied.
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=row.causal, enable_gqa=row.K != row.N)
    return out.transpose(1, 2)


IMPLEMENTATIONS: dict[str, Callable] = {"flash_attention_4": flash_attention_4, "torch_cudnn": torch_cudnn}


class Kernel(NamedTuple):
    """What the profiler saw of one launch."""

    name: str
    start_us: float
    duration_us: float


def kernels_of(profile: Any, cuda: Any) -> list[Kernel]:
    """The kernels in a profile of torch, in the order of their start; `cuda` is `torch.autograd.DeviceType.CUDA`."""
    found = [
        Kernel(event.name, event.time_range.start, event.time_range.end - event.time_range.start)
        for event in profile.events()
        if event.device_type == cuda and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return sorted(found, key=lambda kernel: kernel.start_us)


def times_of_calls(kernels: Sequence[Kernel], calls: int) -> list[float]:
    """The time (ms) of each of so many equal calls, one after the other.

    Raises:
      ValueError: they are not equal, so that nothing says where one ends.
    """
    if not kernels or len(kernels) % calls:
        raise ValueError(f"{len(kernels)} kernels are no whole number for each of {calls} calls")
    count = len(kernels) // calls
    parts = [kernels[call * count : (call + 1) * count] for call in range(calls)]
    if any([kernel.name for kernel in part] != [kernel.name for kernel in parts[0]] for part in parts):
        raise ValueError(f"the kernels of {calls} calls are not the same: {[kernel.name[:40] for kernel in kernels]}")
    return [sum(kernel.duration_us for kernel in part) / 1e3 for part in parts]


class Timed:
    """One implementation of one row: forward, and backward from what forward saved."""

    def __init__(self, attention: Callable, row: Row, arrays: tuple):
        import torch

        *operands, d_out = arrays
        operands = [x.detach().requires_grad_() for x in operands]
        out = attention(row, *operands)

        def forward() -> Any:
            with torch.no_grad():
                return attention(row, *operands)

        def backward() -> Any:
            return torch.autograd.grad(out, operands, d_out, retain_graph=True)

        self._calls = {"forward": forward, "backward": backward}
        self.results = forward(), *backward()
        torch.cuda.synchronize()

    def times_ms(self, which: str, *, calls: int, idle_s: float) -> list[float]:
        return times_of_calls(self._kernels(which, calls=calls, idle_s=idle_s), calls)

    def warm_up(self) -> None:
        """The profiler sets itself up when it is first used, and may miss a kernel then."""
        for which in self._calls:
            self._kernels(which, calls=1, idle_s=0.0)

    def _kernels(self, which: str, *, calls: int, idle_s: float) -> list[Kernel]:
        import torch
        from torch.profiler import ProfilerActivity, profile

        call = self._calls[which]
        call()
        torch.cuda.synchronize()
        time.sleep(idle_s)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(calls):
                call()
            torch.cuda.synchronize()
        return kernels_of(seen, torch.autograd.DeviceType.CUDA)


def reference(row: Row, arrays: tuple, heads: Sequence[tuple[int, int]]) -> dict[str, list[Any]]:
    """Out and dq of some heads (batch row, query head) in float32, and dk and dv where no other head shares theirs."""
    import torch

    found: dict[str, list[Any]] = {name: [] for name in ("out", "dq", "dk", "dv")}
    for b, n in heads:
        kv = n // (row.N // row.K)
        q, k, v, d_out = (x[b, :, head].float() for x, head in zip(arrays, (n, kv, kv, n)))
        outs, d_qs, d_k, d_v = [], [], torch.zeros_like(k), torch.zeros_like(v)
        for start in range(0, row.T, _QUERIES):
            own, own_d_out = q[start : start + _QUERIES], d_out[start : start + _QUERIES]
            t = torch.arange(start, start + len(own), device=q.device)[:, None]
            s = torch.arange(row.S, device=q.device)
            allowed = torch.ones(len(own), row.S, dtype=torch.bool, device=q.device)
            if row.causal or row.window is not None:
                allowed &= s <= t
            if row.window is not None:
                allowed &= s >= t - row.window
            p = torch.softmax((own @ k.T * row.H**-0.5).masked_fill(~allowed, -torch.inf), -1)
            out = p @ v
            d_s = p * (own_d_out @ v.T - (own_d_out * out).sum(-1, keepdim=True)) * row.H**-0.5
            outs.append(out)
            d_qs.append(d_s @ k)
            d_k += d_s.T @ own
            d_v += p.T @ own_d_out
        for name, x in (("out", torch.cat(outs)), ("dq", torch.cat(d_qs)), ("dk", d_k), ("dv", d_v)):
            found[name].append(x)
    return found if row.K == row.N else {name: found[name] for name in ("out", "dq")}


def difference(row: Row, wanted: dict[str, list[Any]], results: tuple, heads: Sequence[tuple[int, int]]) -> str | None:
    """What of out, dq, dk and dv differs from the reference by more than rounding, or None."""
    for name, result in zip(("out", "dq", "dk", "dv"), results):
        for own, (b, n) in zip(wanted.get(name, ()), heads):
            found = result[b, :, n].float()
            error, limit = float((found - own).abs().max()), _AGREE * max(1.0, float(own.abs().max()))
            if not error <= limit:
                return f"its {name} differs from attention in float32 by {error:.3g}, more than {limit:.2g}"
    return None


def inputs(row: Row) -> tuple:
    import torch

    torch.manual_seed(0)
    shapes = (row.T, row.N, row.H), (row.S, row.K, row.H), (row.S, row.K, row.Hv), (row.T, row.N, row.Hv)
    return tuple(torch.randn(row.B, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)


def prepare(row: Row, names: Sequence[str]) -> tuple[dict[str, Timed], list[dict]]:
    """The implementations of a row, compiled and compared, and a line for each that does not run."""
    arrays = inputs(row)
    heads = list(dict.fromkeys([(0, 0), (row.B - 1, row.N - 1)]))
    wanted = reference(row, arrays, heads)
    timed, lines = {}, []
    for name in names:
        try:
            own = Timed(IMPLEMENTATIONS[name], row, arrays)
            reason = difference(row, wanted, own.results, heads)
            own.warm_up()
        except Exception as error:  # Peers have errors of many kinds; each is named in the record.
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if reason is None:
            timed[name] = own
            del own.results
        else:
            lines.append({**dataclasses.asdict(row), "implementation": name, "not_run": reason})
    return timed, lines


def measure(row: Row, timed: dict[str, Any], *, rounds: int, calls: int, idle_s: float) -> list[dict]:
    """A line for each implementation, with the fields of `kernel_times.py`."""
    passes = {"forward": row.operations, "backward": _BACKWARD_SHARE * row.operations}
    cool: dict[str, dict[str, list]] = {name: {which: [] for which in passes} for name in timed}
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for which in passes:
            for name, own in timed.items():
                try:
                    if name not in failed:
                        cool[name][which].append(own.times_ms(which, calls=calls, idle_s=idle_s))
                except ValueError as error:
                    failed[name] = f"{which}: {error}"[:300]
    lines = []
    for name in timed:
        line = {**dataclasses.asdict(row), "implementation": name}
        if name in failed:
            lines.append(line | {"not_run": failed[name]})
            continue
        for which, operations in passes.items():
            ms = statistics.median(ms for samples in cool[name][which] for ms in samples[: (calls + 1) // 2])
            line |= {f"{which}_ms": round(ms, 4), f"{which}_tflops": round(operations / ms / 1e9, 1)}
        samples = {which: [[round(ms, 4) for ms in turn] for turn in cool[name][which]] for which in passes}
        lines.append(line | {"samples_ms": samples})
    return lines


def circumstances(commit: str) -> dict[str, Any]:
    import torch

    return {
        "device": torch.cuda.get_device_name(),
        "platform": "gpu",
        "cores": os.cpu_count(),
        "versions": {**versions(_PACKAGES), "cuda": torch.version.cuda, "python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "driver": driver(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites.add_arguments(parser)
    parser.add_argument("--peers", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    arguments = parser.parse_args()
    where = {"kind": "kernel_times", **circumstances(arguments.commit or commit_here())}
    options = {name: getattr(arguments, name) for name in ("rounds", "calls", "idle_s")}
    rows = suites.chosen(arguments)
    # As in kernel_times.py, all before the first is timed.
    prepared = [prepare(row, arguments.peers) for row in rows]
    print("compiled", file=sys.stderr, flush=True)
    for row, (timed, missing) in zip(rows, prepared):
        for line in (*missing, *measure(row, timed, **options)):
            print(json.dumps({**line, **options, "load_s": 0.0, **where}), flush=True)


if __name__ == "__main__":
    main()
