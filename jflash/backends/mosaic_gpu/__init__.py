"""Kernels in Pallas Mosaic GPU, for Hopper: forward and backward, for 16-bit inputs.

`support.py` says what they take, `tiles.py` how they cut it, `sm90/` holds them.
"""

from jflash.backends.mosaic_gpu.candidates import candidate_tiles, tuned_kernels
from jflash.backends.mosaic_gpu.sm90.backward import backward
from jflash.backends.mosaic_gpu.sm90.forward import forward
from jflash.backends.mosaic_gpu.support import notes, supports
from jflash.backends.mosaic_gpu.tiles import HopperTiles, default_tiles
from jflash.backends.protocol import Backend

BACKEND = Backend(
    name="mosaic_gpu",
    supports=supports,
    forward=forward,
    backward=backward,
    default_tiles=default_tiles,
    tiles_type=HopperTiles,
    notes=notes,
    tuned_kernels=tuned_kernels,
    candidate_tiles=candidate_tiles,
)
