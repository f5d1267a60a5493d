"""The examples in jflash/nn/README.md run, and its table names what is there."""

import pathlib
import re

import jax
import numpy as np
import pytest

import jflash.nn

FOLDER = pathlib.Path(jflash.nn.__file__).parent
README = (FOLDER / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_examples_run_in_order():
    namespace: dict[str, object] = {}
    with jax.numpy_dtype_promotion("standard"):  # for Flax's norms in 16 bits
        for source in re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
            exec(compile(source, "README.md", "exec"), namespace)
    assert namespace["out"].shape == (2, 1, 32)
    assert namespace["logits"].sharding.spec == jax.P("data", None, None)
    assert namespace["tokens"].shape == (2, 5)
    assert namespace["cache"].length.tolist() == [31, 8]
    assert namespace["cache"].k.shape == (2, 16, 2, 16)
    x = np.random.default_rng(0).standard_normal((2, 30, 32)).astype(np.float32)
    ours, stock = namespace["layer"](x), namespace["stock"](x, is_causal=True)
    np.testing.assert_allclose(ours, stock, rtol=0, atol=3e-6)


def test_the_table_is_complete():
    assert {link for link in re.findall(r"\]\(([^)]+\.py)\)", README) if "/" not in link} == {
        path.name for path in FOLDER.glob("*.py") if path.name != "__init__.py"
    }
