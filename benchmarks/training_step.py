"""A training step with jflash beside jax.nn: `python benchmarks/training_step.py > lines.jsonl`.

The model is `jflash.nn.Decoder` with five blocks of the size of Llama 3 8B's (4096 features, 32 heads of 128 on 8 of
keys and values, 14336 in SwiGLU), 1.1 billion parameters, on bytes of Python's standard library. It computes in
bfloat16; parameters and the moments of AdamW are float32. All implementations start from the same parameters and see
the same text. Few large blocks, not many small ones, so that a run with its six compilations takes minutes.

Every step of the optimiser is timed on the host, from the call to its loss, back to back as in training; the time of a
step is the median after the first few. Each measurement has a process of its own, so that its peak memory, what the
allocator of the device has seen, is that of the step.

With `--remat attention` (the default) blocks are computed again for the backward pass, but for the output and lse of
attention, which jflash gives names (`jflash.nn.save_attention`). Those of jax.nn have none: its attention runs again
too. With `--remat none` everything is kept, and no implementation computes anything twice.
"""

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from kernel_times import commit_here, driver

from jflash.cli.measurement import OutOfMemory, circumstances, device_bytes, memory_errors
from jflash.nn import AttentionConfig, Decoder, DecoderConfig, RoPE, save_attention

_LEARNING_RATE = 1e-4
_WARM_UP = 3
_GIB = 2**30
_REMAT = {"attention": save_attention, "none": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement, with the fields that its line begins with.

    B and T are batch rows and tokens of each, N and K heads of queries and of keys and values, H their size.
    """

    implementation: str
    T: int
    B: int = 1
    remat: str = "attention"
    layers: int = 5
    features: int = 4096
    hidden_features: int = 14336
    N: int = 32
    K: int = 8
    H: int = 128
    steps: int = 20

    @property
    def attention_operations(self) -> float:
        """Floating-point operations of attention in a step: forward, and 2.5 times that backward."""
        return 3.5 * self.layers * 4.0 * self.B * self.N * self.H * self.T * self.T / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class JaxAttention(AttentionConfig):
    """The attention of the decoder by `jax.nn.dot_product_attention`, which takes all that is asked of it here."""

    implementation: str

    def attend(self, q, k, v, *, sinks, mask, positions, dropout_key):
        positions = jnp.arange(q.shape[1], dtype=jnp.int32)
        q, k = self.rope(q, positions), self.rope(k, positions)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.implementation)


IMPLEMENTATIONS: dict[str, Callable[..., AttentionConfig]] = {
    "jflash": AttentionConfig,
    "jax_cudnn": lambda **sizes: JaxAttention(implementation="cudnn", **sizes),
    "jax_xla": lambda **sizes: JaxAttention(implementation="xla", **sizes),
}


class Training(NamedTuple):
    """`initial()` makes parameters and moments; `step` takes them and tokens (B, T + 1), and gives new ones and a loss.

    `parameters` is how many there are.
    """

    initial: Callable[[], Any]
    step: Callable[[Any, Any], tuple[Any, Any]]
    parameters: int


def training_of(case: Case, *, backend: str) -> Training:
    """The training of a case; `backend` is that of jflash, which jax.nn does not ask."""
    heads = {"num_heads": case.N, "num_kv_heads": case.K, "head_dim": case.H}
    attention = IMPLEMENTATIONS[case.implementation](
        **heads, causal=True, rope=RoPE(base=500_000.0), dtype=jnp.bfloat16, backend=backend
    )
    config = DecoderConfig(
        vocab_size=256,
        num_layers=case.layers,
        features=case.features,
        hidden_features=case.hidden_features,
        attention=attention,
        remat=_REMAT[case.remat],
    )
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(_LEARNING_RATE))
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    def initial() -> Any:
        parameters = nnx.state(Decoder(config, rngs=nnx.Rngs(0)), nnx.Param)
        return parameters, optimiser.init(parameters)

    def step(state: Any, tokens: Any) -> tuple[Any, Any]:
        parameters, moments = state

        def loss_of(parameters: Any) -> Any:
            logits = nnx.merge(graph, parameters)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, slopes = jax.value_and_grad(loss_of)(parameters)
        updates, moments = optimiser.update(slopes, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), loss

    sizes = (leaf.size for leaf in jax.tree.leaves(shapes))
    return Training(initial, jax.jit(step, donate_argnums=0), sum(sizes))


def batches(case: Case) -> np.ndarray:
    """The tokens of every step, (steps, B, T + 1): windows of text at random places."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - case.T, (case.steps, case.B, 1))
    return text[starts + np.arange(case.T + 1)].astype(np.int32)


def measure(case: Case, *, backend: str) -> dict[str, Any]:
    """What a line says of a case besides its fields.

    Raises:
      OutOfMemory: the device cannot hold the step.
    """
    training = training_of(case, backend=backend)
    tokens = batches(case)
    with memory_errors():
        started = time.perf_counter()
        compiled = training.step.lower(jax.eval_shape(training.initial), tokens[0]).compile()
        compile_s = time.perf_counter() - started
        sizes = compiled.memory_analysis()
        # The new state takes the place of the old one.
        needed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        needed += sizes.temp_size_in_bytes
        if needed > device_bytes():
            raise OutOfMemory(f"it needs {needed / _GIB:.4g} GiB of memory, the device has {device_bytes() / _GIB:.4g}")
        state, losses, times_ms = training.initial(), [], []
        jax.block_until_ready(state)
        for batch in map(jnp.asarray, tokens):
            started = time.perf_counter()
            state, loss = compiled(state, batch)
            losses.append(round(float(loss), 5))
            times_ms.append(round(1e3 * (time.perf_counter() - started), 3))
    step_ms = statistics.median(times_ms[_WARM_UP:])
    operations = 6.0 * training.parameters * case.B * case.T + case.attention_operations
    return {
        "parameters": training.parameters,
        "step_ms": round(step_ms, 3),
        "tokens_per_s": round(1e3 * case.B * case.T / step_ms),
        "tflops": round(operations / step_ms / 1e9, 1),
        "compiled_bytes": needed,
        "temporary_bytes": sizes.temp_size_in_bytes,
        "peak_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "compile_s": round(compile_s, 1),
        "losses": losses,
        "samples_ms": times_ms,
    }


def line_of(case: Case, *, backend: str, commit: str) -> dict[str, Any]:
    """The line of a case, with the reason where it did not run."""
    fields = {"kind": "training_step", **dataclasses.asdict(case), "dtype": "bfloat16"}
    if case.implementation == "jflash":
        fields["backend"] = backend
    try:
        found = measure(case, backend=backend)
    except Exception as error:  # jax.nn has errors of many kinds; each is named in the record.
        if case.implementation == "jflash" and not isinstance(error, OutOfMemory):
            raise
        found = {"not_run": f"{type(error).__name__}: {error}"[:300]}
    where = circumstances()
    where["versions"] |= {name: importlib.metadata.version(name) for name in ("flax", "optax")}
    on_gpu = where["platform"] == "gpu"
    return {**fields, **found, **where, "commit": commit, "driver": driver() if on_gpu else None}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768], help="tokens of a row")
    parser.add_argument("--remat", nargs="+", choices=_REMAT, default=["attention"], help="what the blocks keep")
    for field in dataclasses.fields(Case):
        if field.name not in ("implementation", "T", "remat"):
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it, by jflash's xla")
    parser.add_argument("--commit", default=None, help="where the checkout does not say it itself")
    parser.add_argument("--here", action="store_true", help="measure one case in this process")
    options = parser.parse_args(arguments)
    if options.steps <= _WARM_UP:
        parser.error(f"--steps: found {options.steps}, wanted more than the first {_WARM_UP}, which are not counted")
    backend = {"cuda": "mosaic_gpu", "cpu": "auto"}[options.platform]
    commit = options.commit or commit_here()
    chosen = itertools.product(options.lengths, options.remat, options.implementations)
    names = {field.name for field in dataclasses.fields(Case)}
    sizes = {name: value for name, value in vars(options).items() if name in names}
    cases = [Case(**sizes | {"T": T, "remat": remat, "implementation": name}) for T, remat, name in chosen]
    if options.here:
        (case,) = cases
        print(json.dumps(line_of(case, backend=backend, commit=commit)), flush=True)
        return 0
    codes = [_in_a_process(case, platform=options.platform, commit=commit) for case in cases]
    return int(any(codes))


def _in_a_process(case: Case, *, platform: str, commit: str) -> int:
    """Prints the line of a case that a process of its own measures; gives its exit code."""
    options = {"implementation": "implementations", "T": "lengths", "hidden_features": "hidden-features"}
    arguments = [f"--{options.get(name, name)}={value}" for name, value in dataclasses.asdict(case).items()]
    arguments += ["--here", f"--platform={platform}", f"--commit={commit}"]
    # By default JAX takes three quarters of the memory, and a case may need more.
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"} | os.environ | {"JAX_PLATFORMS": platform}
    return subprocess.run([sys.executable, __file__, *arguments], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
