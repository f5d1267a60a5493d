"""Registers, spills, shared memory and SASS of Pallas Mosaic GPU kernels, on a machine without a GPU.

`make sass-tools` installs what it needs into `.sass/`. `python -m tools.sass show FILE` prints a table of the `CONFIGS`
in FILE; `compile_lowered` is the same for tests.
"""

from tools.sass.report import Compiled as Compiled
from tools.sass.report import Config as Config
from tools.sass.report import compile_lowered as compile_lowered
from tools.sass.toolchain import SassError as SassError
