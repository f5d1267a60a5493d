"""The slopes of ALiBi: how fast the logits of each head fall with the distance."""

from jflash.masks.arrays import at_least_1


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slopes with which ALiBi models are trained, for `AttentionConfig(alibi_slopes=...)`.

    For N heads the powers of 2 ** (-8 / N), beginning with itself (ALiBi, arXiv:2108.12409, section 3). Where N is no
    power of 2, as in the authors' code: the slopes of the next lower power, then every other one of its double.

    Args:
      num_heads: N.

    Raises:
      ArgumentError: N is no whole number of at least 1.

    Example:
      >>> from jflash.nn import alibi_slopes
      >>> alibi_slopes(4)
      (0.25, 0.0625, 0.015625, 0.00390625)
    """
    num_heads = at_least_1("num_heads", num_heads)
    lower = 2 ** (num_heads.bit_length() - 1)
    return (*_powers(lower), *_powers(2 * lower)[::2][: num_heads - lower])


def _powers(num_heads: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8.0 * head / num_heads) for head in range(1, num_heads + 1))
