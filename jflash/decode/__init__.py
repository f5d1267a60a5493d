"""Decoding: a cache of keys and values as a pytree with pure functions."""

from jflash.decode.cache import KVCache as KVCache
from jflash.decode.cache import decode_attention as decode_attention
