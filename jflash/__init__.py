"""jflash: FlashAttention for JAX. Exact attention in O(n) memory, one public call, kernels chosen for the device."""

from jflash import masks as masks
from jflash.api import dot_product_attention as dot_product_attention
from jflash.api import explain as explain
from jflash.api import flash_attention as flash_attention
from jflash.api import flash_attention_varlen as flash_attention_varlen
from jflash.api import flash_attention_with_lse as flash_attention_with_lse
from jflash.backends.protocol import RESIDUAL_NAMES as RESIDUAL_NAMES
from jflash.errors import ArgumentError as ArgumentError
from jflash.errors import DtypeError as DtypeError
from jflash.errors import ShapeError as ShapeError
from jflash.errors import UnsupportedError as UnsupportedError
from jflash.numerics.online_softmax import Attended as Attended
from jflash.options import use_options as use_options
from jflash.plan import FallbackWarning as FallbackWarning

__version__ = "0.1.0.dev0"
