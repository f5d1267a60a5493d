"""What every test runs under: eight CPU devices, strict promotion of dtypes, reproducible property tests."""

import os

# Before JAX starts. Eight CPU devices, since meshes are tested on the CPU; they do nothing to a GPU. They also give XLA
# eight threads on the CPU: with one for each of two cores, interpreted kernels of four warpgroups, which wait for each
# other, hang. And no measuring of candidates for matmuls: on an H200 the contract test took 295 s with it and 76 s
# without (2026-11-30).
os.environ["XLA_FLAGS"] = " ".join(
    (os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", "--xla_gpu_autotune_level=0")
)

import hypothesis
import jax
import pytest
import watchdog

# A mix of dtypes that nobody asked for is how float32 is narrowed unseen.
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Derandomised: a failure is the same for everybody, and no run depends on what another one left behind.
hypothesis.settings.register_profile("jflash", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("jflash")


def pytest_configure(config: pytest.Config) -> None:
    watchdog.keep_stderr()


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def platform(request: pytest.FixtureRequest):
    """Runs a test on the CPU and, with `-m gpu`, the same test on the GPU."""
    with jax.default_device(jax.devices(request.param)[0]):
        yield request.param


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`-m gpu` without a GPU is an error, not a row of skips."""
    wants_gpu = any(item.get_closest_marker("gpu") for item in items)
    if wants_gpu and config.getoption("-m") == "gpu" and jax.default_backend() != "gpu":
        raise pytest.UsageError(f"-m gpu needs a GPU; JAX has {jax.devices()}")
