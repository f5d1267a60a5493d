"""Where a script runs: device, driver and commit, for scripts with and without JAX."""

import importlib.metadata
import subprocess
from collections.abc import Iterable


def commit_here() -> str:
    """Of the checkout that the script is run from."""
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def driver() -> str:
    return _of_gpu("driver_version")


def device() -> str:
    return _of_gpu("name")


def _of_gpu(query: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Of each package, None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
