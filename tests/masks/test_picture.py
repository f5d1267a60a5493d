"""The picture of a mask: its pairs, its tiles, and the part of these that is left out."""

import sys

import numpy as np
import pytest

from jflash.errors import ShapeError
from jflash.masks import Causal, Lengths, MaskFn, SlidingWindow, plot

pytest.importorskip("matplotlib")


def pixels(figure) -> np.ndarray:
    """0 on tiles that are left out, 1 where a pair of a visited tile does not attend, 2 where one does."""
    (image,) = figure.axes[0].get_images()
    return np.asarray(image.get_array())


def test_pairs_and_tiles():
    figure = plot(Causal(), 5, 6, block_q=2, block_k=3)
    assert pixels(figure).tolist() == [
        [2, 1, 1, 0, 0, 0],
        [2, 2, 1, 0, 0, 0],
        [2, 2, 2, 1, 1, 1],
        [2, 2, 2, 2, 1, 1],
        [2, 2, 2, 2, 2, 1],
    ]
    assert figure.axes[0].get_title() == "Causal(offset=0)\n17 % of the tiles are left out"


def test_of_one_batch_row_and_head():
    mask = MaskFn(lambda b, n, q, k: k <= q + n) & Lengths(kv=np.array([4, 2]))
    shown = pixels(plot(mask, 3, 4, B=2, N=3, b=1, n=2, block_q=3, block_k=2))
    assert shown.tolist() == [[2, 2, 0, 0]] * 3
    assert pixels(plot(mask, 3, 4, B=2, N=3, block_q=3, block_k=2)).tolist()[0] == [2, 1, 1, 1]


def test_can_be_written(tmp_path):
    file = tmp_path / "mask.png"
    plot(SlidingWindow(9, 0), 64, 40, block_q=16, block_k=16).savefig(file)
    assert file.stat().st_size > 1000


def test_arrays_must_fit():
    with pytest.raises(ShapeError, match="kv"):
        plot(Lengths(kv=np.array([1, 2, 3])), 8, 8, B=2)


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install \"jflash\[bench\]\""):
        plot(Causal(), 4, 4)
