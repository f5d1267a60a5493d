"""ptxas makes of the kernels what their tiles count on: no spills, no serialised wgmma, registers within setmaxnreg.

`python -m tools.sass show tests/backends/test_sass.py` prints the numbers, with `--order` the schedules.
"""

import pytest

from tools.sass import Config, compile_lowered

# One for each kernel and default tiles, `Config(name="...", function=..., arguments=(...), max_registers=...)`.
CONFIGS: list[Config] = []


@pytest.mark.sass
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_kernel(config):
    for kernel in compile_lowered(config.lower()):
        assert not config.faults(kernel), kernel
