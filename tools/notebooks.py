"""Executes the notebooks: `python -m tools.notebooks renew [NAME...]` writes their outputs, `check` compares them.

What is compared: the text and the pictures of every code cell. A cell with the tag `varies`, whose output has times or
dates in it, is compared in the kinds of its outputs alone.
"""

import argparse
import base64
import io
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence

import nbformat
import numpy as np
from nbclient import NotebookClient
from traitlets.config import Config

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
VARIES = "varies"
# Of one cell: the training takes 60 s on two cores, and four times that where others use them.
_CELL_SECONDS = 600
# The mean difference of two pictures, of the range of a colour: fonts may be drawn a little differently elsewhere; a
# curve that moved is above it.
_PICTURE_TOLERANCE = 0.01


def names() -> list[str]:
    """The notebooks there are, without their suffix."""
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> nbformat.NotebookNode:
    """A notebook as it is in the repository."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy with the outputs of a fresh kernel, which has jflash from this checkout and computes on the CPU.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.from_dict(notebook)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    inherited = {
        key: value for key, value in os.environ.items() if key != "XLA_FLAGS" and not key.startswith("JFLASH_")
    }
    with tempfile.TemporaryDirectory() as home:
        # Without the settings of whoever runs it.
        own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "IPYTHONDIR": home}
        # Over sockets in that folder: a port would be open to all users of the machine.
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{home}/kernel"}})
        client = NotebookClient(
            notebook,
            timeout=_CELL_SECONDS,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            config=config,
        )
        client.execute(cwd=str(FOLDER), env=inherited | own)
    # What nbclient notes of the kernel names the version of Python, which is no part of a notebook.
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells that are executed."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(cell: nbformat.NotebookNode) -> list[bytes]:
    """The pictures below a cell, as PNG."""
    found = (output["data"]["image/png"] for output in cell.outputs if "image/png" in output.get("data", {}))
    return [base64.b64decode(text) for text in found]


def text(cell: nbformat.NotebookNode) -> str:
    """All text below a cell."""
    data = (output.get("data", {}) for output in cell.outputs)
    written = (one.get("text/markdown") or one.get("text/plain", "") for one in data)
    return "\n".join([output.get("text", "") + other for output, other in zip(cell.outputs, written)])


def _kinds(cell: nbformat.NotebookNode) -> list[str]:
    return [" ".join([output.output_type, *sorted(output.get("data", {}))]) for output in cell.outputs]


def stale(committed: nbformat.NotebookNode, fresh: nbformat.NotebookNode) -> list[str]:
    """Where the outputs of two executions of one notebook differ, a line each."""
    found = []
    for number, (old, new) in enumerate(zip(code_cells(committed), code_cells(fresh), strict=True), 1):
        where = f"code cell {number}"
        if _kinds(old) != _kinds(new):
            found.append(f"{where}: has outputs {_kinds(old)}, gives {_kinds(new)}")
        elif VARIES in old.metadata.get("tags", []):
            continue
        elif text(old) != text(new):
            found.append(f"{where}: says\n{text(old)}\nand gives\n{text(new)}")
        elif any(_differ(*pair) for pair in zip(pictures(old), pictures(new), strict=True)):
            found.append(f"{where}: a picture differs")
    return found


def _differ(one: bytes, other: bytes) -> bool:
    from matplotlib.image import imread

    old, new = (imread(io.BytesIO(picture)) for picture in (one, other))
    return old.shape != new.shape or float(np.abs(old - new).mean()) > _PICTURE_TOLERANCE


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["renew", "check"])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}; all by default")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(names())):
        parser.error(f"NAME: found {', '.join(unknown)}, wanted some of {', '.join(names())}")
    differences = []
    for name in options.names or names():
        committed = read(name)
        fresh = execute(committed)
        if options.action == "renew":
            nbformat.write(fresh, FOLDER / f"{name}.ipynb")
        else:
            differences += [f"{name}, {line}" for line in stale(committed, fresh)]
    print("\n".join(differences))
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
