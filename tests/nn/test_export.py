"""`jax.export` of a training step: to a process without Flax and jflash, for CUDA from the CPU, over a mesh."""

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from layer_helpers import next_token_loss, split, widened

import jflash
from jflash.nn import AttentionConfig, Decoder, DecoderConfig, RoPE, save_attention
from jflash.testing.budget import measure

ROOT = pathlib.Path(__file__).parents[2]

B, T, VOCAB = 2, 11, 13

ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, causal=True, rope=RoPE())
CONFIG = DecoderConfig(vocab_size=VOCAB, num_layers=1, features=10, hidden_features=14, attention=ATTENTION)
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (B, T))


def training_step(config):
    """Leaves of the parameters, and a function of them and of tokens: one step of gradient descent, and the logits.

    Of leaves, since `jax.export` cannot serialise the types of Flax.
    """
    parameters, model = split(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(parameters)

    def step(leaves, tokens):
        def loss(parameters):
            logits = model(parameters)(tokens)
            return next_token_loss(logits, tokens), logits

        (_, logits), slopes = jax.value_and_grad(loss, has_aux=True)(jax.tree.unflatten(tree, leaves))
        return logits, [leaf - 0.1 * slope for leaf, slope in zip(leaves, jax.tree.leaves(slopes))]

    return leaves, step


def test_an_exported_training_step_runs_in_a_process_without_flax_and_jflash(tmp_path):
    leaves, step = training_step(CONFIG)
    exported = jax.export.export(jax.jit(step))(leaves, TOKENS)
    (tmp_path / "step").write_bytes(exported.serialize())
    np.savez(tmp_path / "inputs", TOKENS, *leaves)
    source = textwrap.dedent("""
        import pathlib, sys
        import jax, numpy as np
        step = jax.export.deserialize(bytearray(pathlib.Path("step").read_bytes()))
        tokens, *leaves = np.load("inputs.npz").values()
        logits, leaves = step.call(leaves, tokens)
        assert not {"flax", "jflash"} & sys.modules.keys()
        np.savez("outputs", logits, *leaves)
    """)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", source]
    subprocess.run(command, cwd=tmp_path, env=environment | {"JAX_PLATFORMS": "cpu"}, check=True, timeout=120)
    logits, *new_leaves = np.load(tmp_path / "outputs.npz").values()
    wanted_logits, wanted = jax.jit(step)(leaves, TOKENS)
    np.testing.assert_allclose(logits, wanted_logits, rtol=0, atol=1e-6)
    assert len(new_leaves) == len(leaves)
    for found, right, old in zip(new_leaves, wanted, leaves, strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-6)
        assert np.abs(found - old).max() > 0


def test_a_training_step_exports_for_cuda_with_the_kernels_in_it():
    attention = dataclasses.replace(ATTENTION, head_dim=64, dtype=jnp.bfloat16)
    leaves, step = training_step(dataclasses.replace(CONFIG, attention=attention, remat=save_attention))
    tokens = jax.ShapeDtypeStruct((B, 128), jnp.int32)
    with jflash.use_options(hardware="h200"), jax.numpy_dtype_promotion("standard"):  # the latter for Flax's norms
        exported = jax.export.export(jax.jit(step), platforms=["cuda"])(leaves, tokens)
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    text = again.mlir_module()
    assert "jflash_forward_sm90" in text and "jflash_backward_sm90" in text
    with pytest.raises(ValueError, match="cuda"):
        again.call(leaves, np.zeros(tokens.shape, np.int32))


# On the device --------------------------------------------------------------------------------------------------------

HALF = dataclasses.replace(
    CONFIG, attention=dataclasses.replace(ATTENTION, head_dim=64, dtype=jnp.bfloat16), remat=save_attention
)
LONG = np.random.default_rng(1).integers(0, VOCAB, (B, 130)).astype(np.int32)


def export_half(platform: str, file: str) -> None:
    """What the process below does, which has no GPU: the training step in 16 bits, planned for an H200, as a file."""
    assert jax.default_backend() == "cpu"
    leaves, step = training_step(HALF)
    options = jflash.use_options(hardware="h200") if platform == "cuda" else contextlib.nullcontext()
    with options:
        exported = jax.export.export(jax.jit(step), platforms=[platform])(leaves, LONG)
    pathlib.Path(file).write_bytes(exported.serialize())


@pytest.mark.slow
def test_what_a_process_without_a_gpu_exported_runs_within_the_error_rule(platform, tmp_path):
    """With `-m gpu` on an H200 these are the kernels in the file; on the CPU it is the same test of `xla`."""
    target = {"cpu": "cpu", "gpu": "cuda"}[platform]
    source = f"import test_export; test_export.export_half({target!r}, 'step')"
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "nn")))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": folders}
    subprocess.run([sys.executable, "-c", source], cwd=tmp_path, env=environment, check=True, timeout=300)
    again = jax.export.deserialize(bytearray((tmp_path / "step").read_bytes()))
    assert again.platforms == (target,)
    assert ("jflash_forward_sm90" in again.mlir_module()) == (platform == "gpu")

    leaves, _ = training_step(HALF)

    def logits_and_slopes(results, before) -> dict[str, np.ndarray]:
        logits, new_leaves = results
        pairs = enumerate(zip(before, new_leaves, strict=True))
        slopes = {
            f"slope {i}": (np.asarray(old, np.float64) - np.asarray(new, np.float64)) / 0.1 for i, (old, new) in pairs
        }
        return {"logits": np.asarray(logits, np.float64)} | slopes

    def reference(dtype, leaves):
        attention = dataclasses.replace(HALF.attention, backend="reference", dtype=dtype)
        _, step = training_step(dataclasses.replace(HALF, attention=attention))
        return logits_and_slopes(jax.jit(step)(leaves, LONG), leaves)

    found = logits_and_slopes(again.call(leaves, LONG), leaves)
    with jax.numpy_dtype_promotion("standard"):  # for Flax's norms
        plain = reference(jnp.bfloat16, leaves)
        with jax.enable_x64(True):
            truth = reference(jnp.float64, widened(leaves))
    rows = measure(found, truth=truth, plain=plain, dtype="bfloat16")
    # As in `assert_within_error_rule`: the mean of a few errors is a matter of chance.
    judged = [row for row in rows if row.statistic == "max" or truth[row.name].size >= 100]
    assert len(judged) > len(truth) and all(row.within for row in judged), "\n".join(map(str, judged))


# Over a mesh ---------------------------------------------------------------------------------------------------------


def export_over(kind, platform):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    sharding = NamedSharding(mesh, jax.P("data", None, "model", None))
    x = jax.ShapeDtypeStruct((4, 128, 8, 64), jnp.bfloat16, sharding=sharding)

    def loss(q, k, v):
        return jflash.flash_attention(q, k, v, causal=True).astype(jnp.float32).sum()

    with jax.set_mesh(mesh), jflash.use_options(hardware="h200"):
        return jax.export.export(jax.jit(jax.grad(loss, (0, 1, 2))), platforms=[platform])(x, x, x).serialize()


def test_explicit_axes_export_for_cuda():
    again = jax.export.deserialize(export_over(AxisType.Explicit, "cuda"))
    assert again.nr_devices == 8
    assert again.mlir_module().count("custom_call @mosaic_gpu") == 3


def test_automatic_axes_do_not():
    """JAX cannot serialise the rule by which kernels are partitioned. When it can, the README is to say so."""
    with pytest.raises(NotImplementedError, match="serialization of host_callbacks"):
        export_over(AxisType.Auto, "cuda")
