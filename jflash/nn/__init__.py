"""Flax layers on `jflash.flash_attention`, and its one line into Flax's own; README.md beside this file."""

try:
    import flax as flax
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    hint = 'jflash.nn needs Flax, which is not installed: pip install "jflash[flax]"'
    raise ModuleNotFoundError(hint, name="flax") from error

from jflash.nn import linen as linen
from jflash.nn.alibi import alibi_slopes as alibi_slopes
from jflash.nn.attention import Attention as Attention
from jflash.nn.attention_fn import attention_fn as attention_fn
from jflash.nn.config import AttentionConfig as AttentionConfig
from jflash.nn.convert import config_from_flax as config_from_flax
from jflash.nn.convert import from_flax as from_flax
from jflash.nn.convert import to_flax as to_flax
from jflash.nn.decoder import Decoder as Decoder
from jflash.nn.decoder import DecoderConfig as DecoderConfig
from jflash.nn.decoder import generate as generate
from jflash.nn.decoder import save_attention as save_attention
from jflash.nn.mla import MultiHeadLatentAttention as MultiHeadLatentAttention
from jflash.nn.mla_config import MLAConfig as MLAConfig
from jflash.nn.rope import LinearScaling as LinearScaling
from jflash.nn.rope import NTKScaling as NTKScaling
from jflash.nn.rope import RoPE as RoPE
from jflash.nn.rope import YaRN as YaRN
