"""`jflash.nn` without Flax says how to get it, and `jflash` alone never asks for it."""

import os
import pathlib
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).parents[2]


def test_without_flax():
    source = textwrap.dedent("""
        import sys
        import jflash
        assert "flax" not in sys.modules
        sys.modules["flax"] = None  # as where it is not installed
        try:
            import jflash.nn
        except ImportError as error:
            print(error.name, error, sep=": ")
    """)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout == 'flax: jflash.nn needs Flax, which is not installed: pip install "jflash[flax]"\n'
