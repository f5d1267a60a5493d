"""Attention of other JAX packages on a row; each is imported when it is first called."""

import importlib.util
import sys
import types

import jax
from records import Row

PACKAGES = ("tokamax", "flash_attn3_jax")


def cudnn(row: Row, q, k, v):
    window = None if row.window is None else (row.window, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=row.causal, local_window_size=window, implementation="cudnn")


def xla(row: Row, q, k, v):
    window = None if row.window is None else (row.window, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=row.causal, local_window_size=window, implementation="xla")


def import_tokamax() -> types.ModuleType:
    # It imports these for tools that are not called here.
    for name in ("xprof", "xprof.cli.tools.get_kernel_stats_tool", "tensorboardX.writer"):
        _stub(name)
    import tokamax

    return tokamax


def tokamax(row: Row, q, k, v):
    window = None if row.window is None else (row.window, 0)
    return import_tokamax().dot_product_attention(
        q, k, v, is_causal=row.causal, local_window_size=window, implementation="mosaic"
    )


def flash_attn3(row: Row, q, k, v):
    from flash_attn3_jax import flash_mha

    window = (-1, -1) if row.window is None else (row.window, 0)
    return flash_mha(q, k, v, is_causal=row.causal, window_size=window)


def _stub(name: str) -> None:
    """Puts an empty module where a package is not installed."""
    parent, _, child = name.rpartition(".")
    if name in sys.modules or (not parent and importlib.util.find_spec(name) is not None):
        return
    module = sys.modules[name] = types.ModuleType(name)
    if parent:
        _stub(parent)
        setattr(sys.modules[parent], child, module)
