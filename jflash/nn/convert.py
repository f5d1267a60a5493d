"""Weights of Flax's own attention layers for ours, and back."""

from collections.abc import Mapping
from typing import Any

from flax import linen, nnx

from jflash.errors import ArgumentError
from jflash.nn.config import AttentionConfig

# Ours to Flax's. Both have one kernel (features, heads, H) for each of q, k and v, and (N, H, features) for the output.
_NAMES = {name: name for name in ("query", "key", "value", "out")} | {"query_norm": "query_ln", "key_norm": "key_ln"}


def config_from_flax(
    layer: nnx.MultiHeadAttention | linen.MultiHeadDotProductAttention, **changes: Any
) -> AttentionConfig:
    """The config of a layer of ours that computes what Flax's layer does.

    Its dropout has the same rate, and drops other weights in each batch row and head, also where `broadcast_dropout`
    has Flax drop the same in all of them.

    Args:
      layer: of Flax. From one of `linen`, `qkv_features` must be known.
      changes: fields of the config that shall be otherwise, as `causal=True`, which Flax's layer does not hold.

    Raises:
      ArgumentError: the layer has what ours has not: an output of another size than its input.

    Example:
      >>> from flax import nnx
      >>> from jflash.nn import config_from_flax
      >>> layer = nnx.MultiHeadAttention(num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0))
      >>> config_from_flax(layer, causal=True).head_dim
      8
    """
    is_linen = isinstance(layer, linen.MultiHeadDotProductAttention)
    if layer.qkv_features is None:
        raise ArgumentError("layer", found="qkv_features=None", wanted="qkv_features of the layer, a number")
    if not is_linen and layer.out_features != layer.in_features:
        found = f"in_features={layer.in_features}, out_features={layer.out_features}"
        raise ArgumentError("layer", found=found, wanted="as many features out as in")
    fields = {
        "num_heads": layer.num_heads,
        "num_kv_heads": layer.num_heads if is_linen else layer.num_kv_heads,
        "head_dim": layer.qkv_features // layer.num_heads,
        "dropout_rate": layer.dropout_rate,
        "qk_norm": "layer_norm" if layer.normalize_qk else None,
        "qkv_bias": layer.use_bias,
        "out_bias": layer.use_bias,
        "dtype": layer.dtype,
        "param_dtype": layer.param_dtype,
    }
    return AttentionConfig(**fields | changes)


def from_flax(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of Flax's layer under the names of ours.

    Args:
      parameters: of `linen`, `variables["params"]`; of `nnx`, `nnx.to_pure_dict(nnx.state(layer, nnx.Param))`.

    Raises:
      ArgumentError: there is a name that Flax's layer has not.

    Example:
      >>> from jflash.nn import from_flax
      >>> sorted(from_flax({"query": {}, "key": {}, "value": {}, "out": {}, "query_ln": {}, "key_ln": {}}))
      ['key', 'key_norm', 'out', 'query', 'query_norm', 'value']
    """
    return _renamed(parameters, {theirs: ours for ours, theirs in _NAMES.items()})


def to_flax(parameters: Mapping[str, Any], config: AttentionConfig) -> dict[str, Any]:
    """The parameters of our layer under the names of Flax's, which computes the same with `is_causal=config.causal`.

    Args:
      parameters: as of `from_flax`.
      config: of our layer.

    Raises:
      ArgumentError: the config has what Flax's layer has not.
    """
    for name in ("rope", "window", "softcap", "scale", "alibi_slopes", "score_fn"):
        if (value := getattr(config, name)) is not None:
            hint = f"jflash.nn.attention_fn has {name}." if name in ("window", "softcap", "scale") else ""
            raise ArgumentError("config", found=f"{name}={value}", wanted=f"{name}=None", hint=hint)
    if config.sinks:
        raise ArgumentError("config", found="sinks=True", wanted="sinks=False, since Flax's layer has none")
    if config.qk_norm == "rms_norm":
        raise ArgumentError("config", found='qk_norm="rms_norm"', wanted='"layer_norm" or None, as Flax has')
    if config.qkv_bias != config.out_bias:
        found = f"qkv_bias={config.qkv_bias}, out_bias={config.out_bias}"
        raise ArgumentError("config", found=found, wanted="both or none, as Flax has")
    return _renamed(parameters, _NAMES)


def _renamed(parameters: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    for name in parameters:
        if name not in names:
            raise ArgumentError("parameters", found=f"the name {name!r}", wanted=f"names among {sorted(names)}")
    return {names[name]: values for name, values in parameters.items()}
