"""Trains a byte-level language model on the source of Python's standard library, with jflash for its attention.

On a CPU, in about two minutes:

    python train.py --plot loss.png

On a GPU, at long context, beside the same model on the attention of JAX itself:

    for attention in jflash jax-xla jax-cudnn; do
        python train.py --attention $attention --dtype bfloat16 --context 16384 --batch 1 \\
            --width 1024 --layers 8 --heads 8 --learning-rate 3e-4 --steps 100 --json training.jsonl
    done

It prints the loss on held-out files, tokens per second without compiling, and the memory of a step.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8
from tqdm import tqdm

import jflash
from jflash.cli.measurement import circumstances
from jflash.cli.plot import MissingMatplotlib
from jflash.cli.plot import prepare as prepare_plot

BYTES = 256

# Causal attention of q (B, T, N, H) and k, v (B, T, K, H), by the names of `--attention`.
ATTENTIONS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "jflash": functools.partial(jflash.flash_attention, causal=True),
    "jax-xla": functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"),
    "jax-cudnn": functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The model and its training.

    Attributes:
      attention: a name of `ATTENTIONS`.
      context: tokens of a sequence, each a byte.
      batch: sequences of a step.
      width, layers, heads: the size of the model; `kv_heads` divides `heads`.
      dtype: what is computed in; parameters and logits are float32.
      remat: whether the backward pass computes the blocks anew, from their inputs and jflash's out and lse.
      steps: steps of the optimiser.
      learning_rate: its peak, after a tenth of the steps.
      seed: of parameters and batches.
    """

    attention: str = "jflash"
    context: int = 256
    batch: int = 8
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    dtype: str = "float32"
    remat: bool = False
    steps: int = 200
    learning_rate: float = 3e-3
    seed: int = 0


# The model ------------------------------------------------------------------------------------------------------------


def rotate(x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Rotary position embedding (arXiv:2104.09864): the first half of H with the second, by the position."""
    T, H = x.shape[1], x.shape[-1]
    angle = jnp.arange(T)[:, None] * 10_000.0 ** (-jnp.arange(H // 2) / (H // 2))
    cos, sin = jnp.cos(angle)[:, None].astype(x.dtype), jnp.sin(angle)[:, None].astype(x.dtype)
    one, other = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)


class Block(nnx.Module):
    """Attention and a gated MLP, each added to its input, which is normalised before."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c, dtype = config, jnp.dtype(config.dtype)
        project = functools.partial(nnx.LinearGeneral, use_bias=False, dtype=dtype, rngs=rngs)
        self.attend = ATTENTIONS[c.attention]
        self.query = project(c.width, (c.heads, c.width // c.heads))
        self.key, self.value = (project(c.width, (c.kv_heads, c.width // c.heads)) for _ in range(2))
        self.attended = project((c.heads, c.width // c.heads), c.width, axis=(-2, -1))
        self.gate, self.up = (project(c.width, 3 * c.width) for _ in range(2))
        self.down = project(3 * c.width, c.width)
        self.attention_norm, self.mlp_norm = (nnx.RMSNorm(c.width, dtype=dtype, rngs=rngs) for _ in range(2))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        y = self.attention_norm(x)
        x = x + self.attended(self.attend(rotate(self.query(y)), rotate(self.key(y)), self.value(y)))
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class LanguageModel(nnx.Module):
    """Bytes to the logits of the byte after each."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.remat = config.remat
        self.bytes = nnx.Embed(BYTES, config.width, dtype=jnp.dtype(config.dtype), rngs=rngs)
        self.blocks = nnx.List(Block(config, rngs=rngs) for _ in range(config.layers))
        self.norm = nnx.RMSNorm(config.width, dtype=jnp.float32, rngs=rngs)
        self.logits = nnx.Linear(config.width, BYTES, use_bias=False, dtype=jnp.float32, rngs=rngs)

    def __call__(self, text: Int[Array, "B T"]) -> Float[Array, "B T 256"]:
        policy = jax.checkpoint_policies.save_only_these_names(*jflash.RESIDUAL_NAMES)
        run = nnx.remat(Block.__call__, policy=policy) if self.remat else Block.__call__
        x = self.bytes(text)
        for block in self.blocks:
            x = run(block, x)
        return self.logits(self.norm(x))


def loss_of(model: LanguageModel, text: UInt8[Array, "B T1"]) -> Float[Array, ""]:
    """The mean cross-entropy of every byte after the first, in nats."""
    text = text.astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(model(text[:, :-1]), text[:, 1:]).mean()


# The text -------------------------------------------------------------------------------------------------------------


def standard_library() -> tuple[UInt8[np.ndarray, " n"], UInt8[np.ndarray, " m"]]:
    """The source of Python's standard library as bytes, less its tests: for training, and every 20th file held out."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
    files = [path for path in sorted(folder.rglob("*.py")) if not skipped & set(path.relative_to(folder).parts)]
    parts = [np.frombuffer(path.read_bytes() + b"\0", np.uint8) for path in files]
    return np.concatenate([part for i, part in enumerate(parts) if i % 20]), np.concatenate(parts[::20])


def windows(text: UInt8[np.ndarray, " n"], config: Config, *, seed: int) -> Iterator[UInt8[np.ndarray, "B T1"]]:
    """Batches of windows of the text, at random places, each one byte longer than the context."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(text) - config.context, config.batch)
        yield text[starts[:, None] + np.arange(config.context + 1)]


# The training ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of a training.

    Attributes:
      model: the trained model.
      losses: of each step, in nats per byte.
      held_out_loss: on files that were not trained on, after the last step.
      tokens_per_s: over all steps but the first, without compiling.
      step_temporary_bytes: temporary memory of the compiled step.
      peak_bytes: the most that the device ever had in use; None where JAX does not know it.
    """

    model: LanguageModel
    losses: list[float]
    held_out_loss: float
    tokens_per_s: float
    step_temporary_bytes: int
    peak_bytes: int | None


class Step(NamedTuple):
    """A model, its optimiser, and the compiled `run(model, optimizer, text)`, which updates both and gives the loss."""

    model: LanguageModel
    optimizer: nnx.Optimizer
    run: Callable[..., Float[Array, ""]]
    temporary_bytes: int


def prepare(config: Config) -> Step:
    """The first step of a training, compiled but not run."""
    model = LanguageModel(config, rngs=nnx.Rngs(config.seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, config.steps // 10, config.steps)
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, text):
        loss, gradients = nnx.value_and_grad(loss_of)(model, text)
        optimizer.update(model, gradients)
        return loss

    run = step.lower(model, optimizer, jnp.zeros((config.batch, config.context + 1), jnp.uint8)).compile()
    return Step(model, optimizer, run, run.compiled.memory_analysis().temp_size_in_bytes)


def train(config: Config) -> Trained:
    """Trains a model, with a progress bar."""
    model, optimizer, run, temporary_bytes = prepare(config)
    text, held_out = standard_library()
    batches = windows(text, config, seed=config.seed)
    losses = [run(model, optimizer, next(batches)).block_until_ready()]
    started = time.perf_counter()
    with tqdm(total=config.steps, initial=1, unit="step", desc=config.attention, mininterval=1.0) as bar:
        while len(losses) < config.steps:
            losses.append(run(model, optimizer, next(batches)))
            # Not of every step: to ask for a loss is to wait for it.
            if len(losses) % 10 == 0:
                bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update()
    jax.block_until_ready(losses)
    seconds = time.perf_counter() - started
    evaluate = nnx.jit(loss_of)
    found = [evaluate(model, batch) for batch in itertools.islice(windows(held_out, config, seed=1), 8)]
    return Trained(
        model=model,
        losses=[float(loss) for loss in losses],
        held_out_loss=float(np.mean(found)),
        tokens_per_s=(config.steps - 1) * config.batch * config.context / seconds,
        step_temporary_bytes=temporary_bytes,
        peak_bytes=(jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    )


def continued(model: LanguageModel, prompt: bytes, *, length: int, context: int, seed: int = 0) -> bytes:
    """A prompt and `length` bytes that the model writes after it, seeing the last `context` each time."""
    run = nnx.jit(lambda model, text, last: model(text)[0, last])
    text, key = bytearray(prompt), jax.random.key(seed)
    for i in range(length):
        # Padded on the right, where a causal model does not look.
        seen = np.frombuffer(bytes(text[-context:]), np.uint8)
        logits = run(model, np.pad(seen, (0, context - len(seen)))[None].astype(np.int32), len(seen) - 1)
        text.append(int(jax.random.categorical(jax.random.fold_in(key, i), logits / 0.7)))
    return bytes(text)


# The command ----------------------------------------------------------------------------------------------------------


def backend_of(config: Config) -> str:
    """What computes attention: where it is jflash, the backend that it chooses for this device."""
    if config.attention != "jflash":
        return config.attention
    shapes = ((config.batch, config.context, n, config.width // config.heads) for n in (config.heads, config.kv_heads))
    q, k = (jax.ShapeDtypeStruct(shape, config.dtype) for shape in shapes)
    return jflash.explain(q, k, k, causal=True).plan.backend


def record(config: Config, trained: Trained) -> dict[str, Any]:
    """The training as an object of JSON, with its circumstances."""
    found = {field.name: getattr(trained, field.name) for field in dataclasses.fields(trained) if field.name != "model"}
    own = {"kind": "training", "backend": backend_of(config)}
    return own | dataclasses.asdict(config) | found | circumstances()


def draw(file: pathlib.Path, config: Config, trained: Trained) -> None:
    """Draws the loss by step into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, config.steps + 1), trained.losses, color="#1b5e9e", label=config.attention)
    axes.axhline(trained.held_out_loss, color="#e3963e", linestyle="--", label="held-out files, at the end")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.legend(frameon=False)
    figure.savefig(file)


def parse(arguments: Sequence[str] | None) -> tuple[Config, argparse.Namespace]:
    """The configuration and the other options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Config):
        option = f"--{field.name.replace('_', '-')}"
        if field.type is bool:
            parser.add_argument(option, action="store_true")
            continue
        choices = {"attention": list(ATTENTIONS), "dtype": ["float32", "bfloat16"]}.get(field.name)
        parser.add_argument(option, type=field.type, default=field.default, choices=choices)
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png", help="draw the loss")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="append a line with everything to a file")
    options = parser.parse_args(arguments)
    config = Config(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Config)})
    if config.steps < 2:
        parser.error(f"--steps: found {config.steps}, wanted at least 2, since the first is not timed")
    if config.width % (2 * config.heads) or config.heads % config.kv_heads:
        parser.error("--width must be a multiple of twice --heads, and --heads one of --kv-heads")
    if options.plot is not None:
        try:
            prepare_plot(options.plot)
        except (MissingMatplotlib, OSError) as error:
            parser.error(str(error))
    if config.attention == "jax-cudnn" and (jax.default_backend() != "gpu" or config.dtype == "float32"):
        parser.error("--attention jax-cudnn: found no GPU or float32, wanted an NVIDIA GPU and --dtype bfloat16")
    return config, options


def main(arguments: Sequence[str] | None = None) -> None:
    config, options = parse(arguments)
    trained = train(config)
    peak = "unknown" if trained.peak_bytes is None else f"{trained.peak_bytes / 2**20:,.0f} MiB"
    print(
        f"loss              {trained.losses[0]:.3f} at first, {np.mean(trained.losses[-10:]):.3f} in the last ten steps"
    )
    print(f"held-out files    {trained.held_out_loss:.3f} nats per byte")
    print(f"tokens per second {trained.tokens_per_s:,.0f}")
    print(f"memory            {trained.step_temporary_bytes / 2**20:,.0f} MiB of temporaries; peak {peak}")
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(json.dumps(record(config, trained)) + "\n")
    if options.plot is not None:
        draw(options.plot, config, trained)


if __name__ == "__main__":
    main()
