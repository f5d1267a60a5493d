"""The compiler of Mosaic GPU with ptxas and nvdisasm, from PyPI into `.sass/`; needs `cc`, and no GPU."""

import dataclasses
import hashlib
import importlib.metadata
import pathlib
import platform
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
REQUIREMENTS, FAKE_LIBCUDA = HERE / "requirements.txt", HERE / "fake_libcuda.c"


class SassError(RuntimeError):
    """The toolchain is absent or unfit, or a kernel does not compile; the message says which and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toolchain:
    """Where the parts lie. `fake_cuda` may be on the library path of the process that compiles, and of no other."""

    root: pathlib.Path

    @property
    def plugin(self) -> pathlib.Path:
        """Exports MosaicGpuCompile, with which JAX compiles a kernel."""
        return self.root / "site/jax_plugins/xla_cuda13/xla_cuda_plugin.so"

    @property
    def runtime(self) -> pathlib.Path:
        return self.root / "site/jax_cuda13_plugin/libmosaic_gpu_runtime.so"

    @property
    def cuda_root(self) -> pathlib.Path:
        """What the compiler takes for CUDA when it runs in `root`.

        It looks for ptxas and libdevice in ./cuda_sdk_lib, then on PATH, in /usr/local/cuda and /opt/cuda, and only
        then beside itself (strace of jax-cuda13-pjrt 0.11.2). So this folder alone decides which ptxas compiles.
        """
        return self.root / "cuda_sdk_lib"

    @property
    def fake_cuda(self) -> pathlib.Path:
        return self.root / "fake_cuda"

    @property
    def stamp(self) -> pathlib.Path:
        """Holds what it was installed from."""
        return self.root / "installed"

    def parts(self) -> tuple[pathlib.Path, ...]:
        tools = tuple(self.cuda_root / name for name in ("bin/ptxas", "bin/nvdisasm", "nvvm/libdevice/libdevice.10.bc"))
        return (*tools, self.plugin, self.runtime, self.fake_cuda / "libcuda.so.1", self.stamp)


def default_root() -> pathlib.Path:
    """A folder for each version of JAX: the compiler must be of the same."""
    return HERE.parents[1] / ".sass" / importlib.metadata.version("jax")


def find(root: pathlib.Path | None = None) -> Toolchain:
    """The installed toolchain; an error if it is incomplete or out of date."""
    toolchain = Toolchain(root=(root or default_root()).absolute())
    missing = [str(part) for part in toolchain.parts() if not part.exists()]
    if missing:
        raise SassError(f"the offline compiler is not installed (`make sass-tools` does it): no {', '.join(missing)}")
    if toolchain.stamp.read_text() != _fingerprint():
        raise SassError(f"{toolchain.root} was installed from other files than {HERE} holds: run `make sass-tools`")
    return toolchain


def install(root: pathlib.Path | None = None) -> None:
    """Installs everything into `root`, about 700 MB, unless it is there."""
    toolchain = Toolchain(root=(root or default_root()).absolute())
    if toolchain.stamp.exists() and toolchain.stamp.read_text() == _fingerprint():
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SassError(f"the offline compiler needs Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    compiler = shutil.which("cc")
    if compiler is None:
        raise SassError("the offline compiler needs a C compiler, and there is no `cc` on the path")
    shutil.rmtree(toolchain.root, ignore_errors=True)
    toolchain.fake_cuda.mkdir(parents=True)
    library = toolchain.fake_cuda / "libcuda.so.1"
    _run("cc", [compiler, "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", library, FAKE_LIBCUDA])
    version = importlib.metadata.version("jax")
    # Without their dependencies: cuBLAS, cuDNN and the like take gigabytes, and compiling needs none of them.
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--only-binary=:all:",
        "--target",
        toolchain.root / "site",
    ]
    _run("pip", [*pip, "-r", REQUIREMENTS, f"jax-cuda13-plugin=={version}", f"jax-cuda13-pjrt=={version}"])
    toolchain.cuda_root.symlink_to("site/nvidia/cu13")
    toolchain.stamp.write_text(_fingerprint())
    find(toolchain.root)


def _fingerprint() -> str:
    return hashlib.sha256(REQUIREMENTS.read_bytes() + FAKE_LIBCUDA.read_bytes()).hexdigest()


def _run(name: str, command: list[str | pathlib.Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SassError(f"{name} failed ({done.returncode}): {' '.join(map(str, command))}\n{done.stderr.strip()}")
