"""Hopper kernels (compute capability 9.0): TMA, WGMMA, warp specialisation."""
