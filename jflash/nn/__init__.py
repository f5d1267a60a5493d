"""Flax layers on `jflash.flash_attention`, and its one line into Flax's own; README.md beside this file."""

try:
    import flax as flax
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    hint = 'jflash.nn needs Flax, which is not installed: pip install "jflash[flax]"'
    raise ModuleNotFoundError(hint, name="flax") from error

from jflash.nn.attention_fn import attention_fn as attention_fn
