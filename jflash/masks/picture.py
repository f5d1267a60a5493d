"""A mask as a picture, with its tiles."""

import textwrap
from typing import Any

import numpy as np

from jflash.masks.mask import Mask, TileKind
from jflash.masks.tile_map import TileMap

# Of pairs that do not attend and that do, on tiles that are visited; tiles that are not stay white.
_VISITED, _PAIR = "#e8eef5", "#1b5e9e"


def plot(
    mask: Mask,
    T: int,
    S: int,
    *,
    B: int = 1,
    N: int = 1,
    b: int = 0,
    n: int = 0,
    block_q: int = 128,
    block_k: int = 128,
) -> Any:
    """The pairs of a mask and the tiles that a kernel visits, for one batch row and head.

    Pairs that attend are dark. Tiles that are never loaded are white, full ones, where no mask code runs, dark alone,
    and partial ones show their pairs on light ground. The title has the part of the tiles that is left out.

    Args:
      mask: any mask.
      T, S: queries and keys.
      B, N: batch rows and heads that the mask is made for; `b` and `n` are the ones to show.
      block_q, block_k: the size of a tile.

    Returns:
      A `matplotlib.figure.Figure`: a notebook shows it after `%matplotlib inline`, `savefig` writes it.

    Raises:
      ArgumentError: an array of the mask does not fit the sizes.
      ImportError: matplotlib is not installed.

    Example:
      >>> from jflash.masks import Causal, SlidingWindow, plot
      >>> figure = plot(Causal() & SlidingWindow(100, 0), 512, 512, block_q=64, block_k=64)
      >>> figure.axes[0].get_title()
      '(Causal(offset=0) & SlidingWindow(100, 0, offset=0))\\n67 % of the tiles are left out'
    """
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('jflash.masks.plot needs matplotlib: pip install "jflash[bench]"') from error
    bound = mask.bind(B=B, N=N, T=T, S=S)
    kinds = np.asarray(TileMap(mask=bound, T=T, S=S, block_q=block_q, block_k=block_k).kinds())
    kinds = kinds[b % kinds.shape[0], n % kinds.shape[1]]
    pairs = np.asarray(bound.allowed(np.arange(T)[:, None], np.arange(S), b=b, n=n))
    visited = (kinds != TileKind.EMPTY.value).repeat(block_q, 0).repeat(block_k, 1)[:T, :S]
    shown = np.broadcast_to(pairs, (T, S)).astype(np.int8) + visited

    figure = Figure(figsize=(5, 5 * max(0.3, min(T / S, 2)) + 0.6), layout="constrained")
    axes = figure.add_subplot()
    # Edges of elements, so that the lines between tiles lie between pairs.
    axes.imshow(
        shown, cmap=ListedColormap(["white", _VISITED, _PAIR]), vmin=0, vmax=2, extent=(0, S, T, 0), aspect="auto"
    )
    axes.set_xticks(range(0, S + 1, block_k), minor=True)
    axes.set_yticks(range(0, T + 1, block_q), minor=True)
    axes.grid(which="minor", color="0.8", linewidth=0.5)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    left_out = (kinds == TileKind.EMPTY.value).mean()
    name = textwrap.fill(repr(mask), width=60)
    axes.set_title(f"{name}\n{100 * left_out:.0f} % of the tiles are left out", fontsize="medium")
    return figure
