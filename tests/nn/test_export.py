"""`jax.export` of a training step: to a process without Flax and jflash, for CUDA from the CPU, over a mesh."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from layer_helpers import next_token_loss, split

import jflash
from jflash.nn import AttentionConfig, Decoder, DecoderConfig, RoPE, save_attention

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
    assert again.mlir_module().count("custom_call @mosaic_gpu") == 2


def test_automatic_axes_do_not():
    """JAX cannot serialise the rule by which kernels are partitioned. When it can, the README is to say so."""
    with pytest.raises(NotImplementedError, match="serialization of host_callbacks"):
        export_over(AxisType.Auto, "cuda")
