"""The package as a user has it: built, installed, imported with what may be missing, called from the shell."""

import email
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]

OPTIONAL = ("triton", "jax_triton", "flax", "matplotlib", "optax", "chex")

# A tiny call of the public function, forward and gradient, as a program of its own.
CALL = """
import sys
import jax, jax.numpy as jnp
import numpy as np
import jflash

keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(key, (1, 5, 2, 8)) for key in keys)

def value_and_grads(backend):
    def loss(q, k, v):
        return jnp.sum(jflash.flash_attention(q, k, v, causal=True, backend=backend) ** 2)
    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

xla, reference = value_and_grads("xla"), value_and_grads("reference")
for one, other in zip(jax.tree.leaves(xla), jax.tree.leaves(reference), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
"""


def run(command: list, *, cwd: pathlib.Path, **environment: str) -> str:
    """Runs a command on the CPU, away from the checkout, and returns what it prints; fails with what it says."""
    unwanted = ("PYTHONPATH", "XLA_FLAGS", "JFLASH_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def run_source(source: str, cwd: pathlib.Path) -> str:
    """Runs Python source in a fresh process that has jflash from this checkout."""
    return run([sys.executable, "-c", source], cwd=cwd, PYTHONPATH=str(ROOT))


def test_wheel_installed_in_an_empty_environment(tmp_path):
    # From a copy, so that building neither leaves anything in the checkout nor finds anything built there before.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "jflash", source / "jflash", ignore=shutil.ignore_patterns("__pycache__"))
    # Without isolation, pip takes the build backend from here and needs no network.
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    run([sys.executable, "-m", "pip", *build], cwd=tmp_path)
    (wheel,) = tmp_path.glob("jflash-*.whl")

    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name) for name in names if name.endswith(".dist-info/METADATA"))
    assert "jflash/py.typed" in names
    in_checkout = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "jflash").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    in_wheel = {name for name in names if ".dist-info/" not in name}
    assert in_wheel == in_checkout
    assert email.message_from_bytes(metadata)["License-Expression"] == "Apache-2.0"

    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel], cwd=tmp_path)

    # The dependencies come from this environment. A path file that is itself reached through a path file is not read,
    # so an editable install of jflash here stays invisible there.
    dependencies = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages,) = (environment / "lib").glob("python*/site-packages")
    (site_packages / "dependencies.pth").write_text("\n".join(dependencies) + "\n")

    report = CALL + textwrap.dedent("""
        import importlib.metadata
        print(jflash.__file__, jflash.__version__, importlib.metadata.version("jflash"), sep="\\n")
    """)
    file, version, metadata_version = run([python, "-c", report], cwd=tmp_path).splitlines()
    assert pathlib.Path(file).is_relative_to(environment)
    assert version == metadata_version == email.message_from_bytes(metadata)["Version"]

    assert "check" in run([environment / "bin" / "jflash", "--help"], cwd=tmp_path)


def test_runs_without_optional_packages(tmp_path):
    block = textwrap.dedent(f"""
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {OPTIONAL!r}:
                    raise ImportError(f"{{name}} is blocked by this test")

        sys.meta_path.insert(0, Blocked())
        try:
            import matplotlib
        except ImportError:
            pass
        else:
            raise AssertionError("the block does not work")
    """)
    run_source(block + CALL, tmp_path)


def test_import_loads_neither_optional_packages_nor_gpu_kernels(tmp_path):
    late = (*OPTIONAL, "jax.experimental.pallas", "jax.experimental.mosaic")
    source = f"import sys, jflash; print(*(name for name in {late!r} if name in sys.modules))"
    assert run_source(source, tmp_path).split() == []


def test_import_adds_little_to_that_of_jax(tmp_path):
    source = textwrap.dedent("""
        import time
        import jax, jax.numpy
        started = time.perf_counter()
        import jflash
        print(time.perf_counter() - started)
    """)
    # Other tests run beside this one and make single times long; the first run may also compile to bytecode.
    seconds = min(float(run_source(source, tmp_path)) for _ in range(3))
    assert seconds < 0.3


def test_command_line_lists_its_commands(tmp_path):
    printed = run([sys.executable, "-m", "jflash.cli", "--help"], cwd=tmp_path, PYTHONPATH=str(ROOT))
    for command in ("check", "explain", "bench"):
        assert re.search(rf"\b{command}\b", printed), f"{command} is not in:\n{printed}"


def why_nothing_is_tracked(root: pathlib.Path) -> str | None:
    """Why git cannot list the files of a folder, or None. Any other failure of git is a failure of the test."""
    if not (root / ".git").exists():
        return "not a git checkout"
    return None if shutil.which("git") else "git is not installed"


def tracked_files(root: pathlib.Path) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (root / name).is_file()]


# What would tie the repository to the machine of whoever wrote a file. Written so that this file does not match.
PRIVATE = re.compile(rb"(?<![\w.$}~-])/(?:root|home|work|Users)/|https?://[^\s/]*/(?:[^\s/]+/)*sim[p]le\b")


@pytest.mark.parametrize(
    ("text", "is_private"),
    [
        (b"see /ro" + b"ot/notes", True),
        (b'"/ho' + b'me/ada/jflash"', True),
        (b"--index-url http://mirror.example/py" + b"pi/sim" + b"ple", True),
        (b"https://mirror.example/sim" + b"ple/", True),
        (b"$HOME/.pyenv and docs/ho" + b"me/page", False),
        (b"https://example.org/a/sim" + b"pler/way", False),
    ],
)
def test_private_names_are_recognised(text, is_private):
    assert bool(PRIVATE.search(text)) == is_private


def test_only_a_checkout_has_tracked_files(tmp_path, monkeypatch):
    assert why_nothing_is_tracked(tmp_path) == "not a git checkout"
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert why_nothing_is_tracked(tmp_path) == "git is not installed"


def test_no_tracked_file_names_a_machine():
    if reason := why_nothing_is_tracked(ROOT):
        pytest.skip(reason)
    tracked = tracked_files(ROOT)
    assert not [name for name in tracked if pathlib.PurePath(name).name == "uv.lock"]
    found = {name: match.group() for name in tracked if (match := PRIVATE.search((ROOT / name).read_bytes()))}
    assert not found


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-newest-jax.txt"])
def test_constraints_are_plain_pins(name):
    lines = (ROOT / name).read_text("utf-8").splitlines()
    assert [line for line in lines if not re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)] == []
