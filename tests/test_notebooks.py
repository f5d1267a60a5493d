"""The notebooks run, say what they say in the repository, and are fit to be read there."""

import ast
import base64
import importlib
import io
import itertools
import json
import math
import pathlib
import re
import subprocess
import sys

import jax
import nbformat
import numpy as np
import pytest
from flax import nnx
from helpers import count
from matplotlib.image import imsave

import jflash
from tools import notebooks

ROOT = pathlib.Path(__file__).parents[1]
NAMES = notebooks.names()
MOST_PICTURE_BYTES, MOST_NOTEBOOK_BYTES = 150_000, 500_000
# What only the machine of whoever ran a notebook has, or a run that was not clean.
PRIVATE = re.compile(r"/tmp/|/usr/|site-packages|ipykernel_|0x[0-9a-f]{8}|Traceback|Warning")


# As they stand --------------------------------------------------------------------------------------------------------


def faults(notebook: nbformat.NotebookNode) -> list[str]:
    """What is wrong with a notebook as it stands, a line each."""
    found = []
    first, *_ = notebook.cells
    if first.cell_type != "markdown" or not re.match(r"# .+\n\n\*\*.+\?\*\*\n", first.source):
        found.append("does not begin with a title and its reader's question, in bold")
    if set(notebook.metadata) != {"kernelspec", "language_info"} or set(notebook.metadata.language_info) != {"name"}:
        found.append(f"has metadata {dict(notebook.metadata)}")
    for number, cell in enumerate(notebooks.code_cells(notebook), 1):
        where = f"code cell {number}"
        if cell.execution_count != number:
            found.append(f"{where}: was run as number {cell.execution_count}")
        if set(cell.metadata) - {"tags"}:
            found.append(f"{where}: has metadata {dict(cell.metadata)}")
        if any(output.output_type == "error" for output in cell.outputs):
            found.append(f"{where}: failed")
        if match := PRIVATE.search(notebooks.text(cell)):
            found.append(f"{where}: says {match.group()!r}")
        if _shows(cell.source) and not cell.outputs:
            found.append(f"{where}: has no output")
        sizes = [len(picture) for picture in notebooks.pictures(cell)]
        found += [f"{where}: a picture of {size} bytes" for size in sizes if size > MOST_PICTURE_BYTES]
    return found


def _shows(source: str) -> bool:
    """Whether a cell prints or draws, outside the functions that it defines."""
    tree = ast.parse("\n".join(line for line in source.splitlines() if not line.startswith("%")))
    statements = (node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef))
    called = {ast.unparse(node.func) for one in statements for node in ast.walk(one) if isinstance(node, ast.Call)}
    return bool(called & {"print", "plt.show", "picture"})


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_fit_to_be_read(name):
    notebook = notebooks.read(name)
    nbformat.validate(notebook)
    assert faults(notebook) == []
    assert (notebooks.FOLDER / f"{name}.ipynb").stat().st_size < MOST_NOTEBOOK_BYTES


def made(*cells: tuple[str, list], title: str = "# Title\n\n**What?**\n\nText.") -> nbformat.NotebookNode:
    """A notebook of these code cells, each with its outputs, as `renew` would leave it."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(title)])
    notebook.metadata = nbformat.from_dict({"kernelspec": {"name": "python3"}, "language_info": {"name": "python"}})
    for number, (source, outputs) in enumerate(cells, 1):
        notebook.cells.append(nbformat.v4.new_code_cell(source, outputs=outputs, execution_count=number))
    return notebook


def says(text: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_output("stream", text=text)


def shows(shade: float) -> nbformat.NotebookNode:
    """A grey picture."""
    file = io.BytesIO()
    imsave(file, np.full((20, 30), shade), cmap="gray", vmin=0, vmax=1, format="png")
    return nbformat.v4.new_output("display_data", {"image/png": base64.b64encode(file.getvalue()).decode()})


FAILED = nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])


@pytest.mark.parametrize(
    ("notebook", "wanted"),
    [
        (made(("print(1)", [says("1")])), []),
        (made(("def f():\n    print(1)", [])), []),
        (made(title="Title"), ["does not begin with a title and its reader's question, in bold"]),
        (made(("print(1)", [])), ["code cell 1: has no output"]),
        (made(("%matplotlib inline\nplt.show()", [])), ["code cell 1: has no output"]),
        (made(("f()", [FAILED])), ["code cell 1: failed"]),
        (made(("print(path)", [says("in /tmp/a")])), ["code cell 1: says '/tmp/'"]),
        (made(("f()", [says("UserWarning: no")])), ["code cell 1: says 'Warning'"]),
    ],
)
def test_faults_are_found(notebook, wanted):
    assert faults(notebook) == wanted


def test_an_order_of_cells_that_was_not_that_of_the_run_is_found():
    notebook = made(("a = 1", []), ("a", [says("1")]))
    notebook.cells[1].execution_count = 3
    assert faults(notebook) == ["code cell 1: was run as number 3"]


def test_the_table_lists_every_notebook_and_script():
    table = (notebooks.FOLDER / "README.md").read_text("utf-8")
    files = {path.name for path in notebooks.FOLDER.iterdir() if path.suffix in (".ipynb", ".py")}
    assert set(re.findall(r"\]\(([^)/]+\.(?:ipynb|py))\)", table)) == files


@pytest.mark.parametrize("name", NAMES)
def test_the_table_has_the_question_of_the_notebook(name):
    question = re.search(r"^\*\*(.+?\?.*)\*\*$", notebooks.read(name).cells[0].source, re.MULTILINE).group(1)
    assert f"| [{name}]({name}.ipynb) | {question} |" in (notebooks.FOLDER / "README.md").read_text("utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    text = "\n".join(cell.source for cell in notebooks.read(name).cells if cell.cell_type == "markdown")
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if not target.startswith("https://")]
    assert [target for target in targets if not (notebooks.FOLDER / target).exists()] == []


# Executed anew --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_a_fresh_run(name):
    """In a process of its own: the kernel's sockets and event loop are not those of the tests."""
    command = [sys.executable, "-m", "tools.notebooks", "check", name]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, f"{found.stdout}\n{found.stderr}\nTo renew: python -m tools.notebooks renew {name}"


def test_stale_outputs_are_found():
    one, other = made(("f()", [says("1")])), made(("f()", [says("2")]))
    assert notebooks.stale(one, one) == []
    assert notebooks.stale(one, other) == ["code cell 1: says\n1\nand gives\n2"]
    assert "has outputs" in notebooks.stale(one, made(("f()", [])))[0]
    varies = made(("f()", [says("1")]))
    varies.cells[1].metadata["tags"] = [notebooks.VARIES]
    assert notebooks.stale(varies, other) == []
    assert "has outputs" in notebooks.stale(varies, made(("f()", [shows(0.5)])))[0]


@pytest.mark.parametrize(("shade", "differs"), [(0.5, False), (0.505, False), (0.55, True)])
def test_pictures_are_compared_by_what_they_show(shade, differs):
    found = notebooks.stale(made(("f()", [shows(0.5)])), made(("f()", [shows(shade)])))
    assert found == (["code cell 1: a picture differs"] if differs else [])


@pytest.mark.slow
def test_a_notebook_that_fails_or_is_stale_fails_the_check(tmp_path, monkeypatch, capsys):
    """The check of the check, on a small notebook."""
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
    nbformat.write(made(("import jax\nprint(len(jax.devices()))", [says("2\n")])), tmp_path / "small.ipynb")
    assert notebooks.main(["check", "small"]) == 1
    assert "says\n2\n\nand gives\n1\n" in capsys.readouterr().out
    assert notebooks.main(["renew", "small"]) == 0
    assert notebooks.main(["check", "small"]) == 0
    nbformat.write(made(("1 / 0", [])), tmp_path / "small.ipynb")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        notebooks.main(["check", "small"])


# What they define -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def collection():
    """The masks and scores of the gallery, from the cells that define them."""
    namespace: dict[str, object] = {}
    exec("import jax.numpy as jnp\nimport numpy as np\nfrom jflash.masks import *", namespace)
    for cell in notebooks.code_cells(notebooks.read("masks_gallery")):
        if {"masks", "scores"} & set(cell.metadata.get("tags", [])):
            exec(cell.source, namespace)
    return namespace


def pairs_of_the_collection() -> dict[str, object]:
    """Whether query q sees key k, for each mask of the gallery, a pair at a time and in other words."""
    width, height = 16, 24
    ids = [5] * 120 + [2] * 64 + [9] * 150 + [4] * 50
    images = [0] * 50 + [1] * 100 + [0] * 70 + [2] * 120 + [0] * 44
    last_image = [-1] * 20 + [0] * 100 + [1] * 90 + [2] * 110 + [3] * 64

    def square(first_x, first_y, k):
        return first_x <= k % width < first_x + 7 and first_y <= k // width < first_y + 7

    return {
        "causal": lambda q, k: k <= q,
        "sliding window": lambda q, k: q - 50 <= k <= q,
        "prefix-LM": lambda q, k: k < 70 or k <= q,
        "document": lambda q, k: k <= q and ids[q] == ids[k],
        "dilated sliding window": lambda q, k: k in range(q % 4, 400, 4) and q - 60 <= k <= q + 60,
        "stand-alone self-attention": lambda q, k: square(q % width - 3, q // width - 3, k),
        "neighbourhood": lambda q, k: square(
            sorted((0, q % width - 3, width - 7))[1], sorted((0, q // width - 3, height - 7))[1], k
        ),
        "transfusion": lambda q, k: k <= q or images[q] == images[k] != 0,
        "flamingo": lambda q, k: last_image[q] >= 0 and k // 64 == last_image[q],
    }


def test_every_mask_of_the_collection_is_checked(collection):
    assert collection["COLLECTION"].keys() == pairs_of_the_collection().keys()


@pytest.mark.parametrize(("name", "sees"), pairs_of_the_collection().items(), ids=pairs_of_the_collection())
def test_masks_of_the_collection(collection, name, sees):
    mask, T, S = collection["COLLECTION"][name], 384, 256 if name == "flamingo" else 384
    wanted = np.array([[sees(q, k) for k in range(S)] for q in range(T)])
    bound = mask.bind(B=1, N=1, T=T, S=S)
    np.testing.assert_array_equal(np.broadcast_to(bound.allowed(*np.ix_(range(T), range(S))), (T, S)), wanted)
    # And as attention computes it, from its tiles.
    q, k, v = (jax.random.normal(jax.random.key(i), (1, n, 2, 8)) for i, n in enumerate((T, S, S)))
    found = jflash.flash_attention(q, k, v, mask=mask)
    truth = jflash.flash_attention(q, k, v, mask=jflash.masks.Dense(wanted), backend="reference")
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-5)


def t5_bucket(distance: int) -> int:
    """The formula of T5 for one direction, a distance at a time."""
    if distance < 16:
        return distance
    return min(31, 16 + int(math.log(distance / 16) / math.log(128 / 16) * 16))


# What each score of the gallery makes of the logit s of head n at a distance, with its array.
SCORES = {
    "T5 bias": lambda s, n, distance, table: s + table[n][t5_bucket(distance)],
    "relative bias": lambda s, n, distance, table: s + table[distance + 199],
    "ALiBi": lambda s, n, distance, slopes: s - slopes[n] * distance,
    "softcap": lambda s, n, distance, cap: cap * math.tanh(s / cap),
    "tanh": lambda s, n, distance, _: 20 * math.tanh(s / 20),
    "sinks": lambda s, n, distance, _: s,
}


def test_every_score_of_the_collection_is_checked(collection):
    assert collection["SCORES"].keys() == SCORES.keys()


@pytest.mark.parametrize("name", SCORES)
def test_scores_of_the_collection(collection, name):
    """Rows of causal attention, a pair at a time in float64."""
    arguments = collection["SCORES"][name]
    (array,) = arguments.get("score_args") or [
        arguments.get("alibi_slopes", arguments.get("softcap", arguments.get("sinks")))
    ]
    # Large logits, so that what caps them shows.
    q, k, v = (np.asarray(jax.random.normal(jax.random.key(i), (1, 200, 4, 8))) * c for i, c in enumerate((6, 2, 1)))
    found = jflash.flash_attention(q, k, v, causal=True, **arguments)
    for t, n in ((0, 1), (7, 3), (120, 2), (199, 0)):
        logits = (k[0, :, n].astype(np.float64) @ q[0, t, n] / math.sqrt(8))[: t + 1]
        weight = np.exp([SCORES[name](s, n, t - key, array) for key, s in enumerate(logits)])
        total = weight.sum() + (np.exp(array[n]) if name == "sinks" else 0)
        np.testing.assert_allclose(found[0, t, n], weight @ v[0, : t + 1, n] / total, rtol=0, atol=2e-5)


# The training script --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def train():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(notebooks.FOLDER), *sys.path])
        yield importlib.import_module("train")


TINY = ["--context=48", "--batch=3", "--width=32", "--layers=2", "--heads=2", "--kv-heads=1", "--steps=12"]


def test_training_is_the_same_on_another_attention(train, tmp_path, capsys):
    file, plot = tmp_path / "training.jsonl", tmp_path / "loss.png"
    for attention in ("jflash", "jax-xla"):
        # The types of JAX are promoted as they are outside these tests.
        with jax.numpy_dtype_promotion("standard"):
            train.main([*TINY, f"--attention={attention}", f"--json={file}", f"--plot={plot}"])
    assert "tokens per second" in capsys.readouterr().out
    ours, plain = (json.loads(line) for line in file.read_text().splitlines())
    assert (ours["attention"], plain["attention"]) == ("jflash", "jax-xla")
    assert (ours["backend"], plain["backend"]) == ("xla", "jax-xla")
    assert len(ours["losses"]) == 12
    assert ours["losses"][-1] < ours["losses"][0] - 0.5
    np.testing.assert_allclose(ours["losses"], plain["losses"], rtol=0, atol=1e-3)
    assert ours["held_out_loss"] < np.log(256)
    assert plot.stat().st_size > 0


def test_remat_changes_no_loss(train):
    with jax.numpy_dtype_promotion("standard"):
        one, other = (train.prepare(train.parse([*TINY, *more])[0]) for more in ([], ["--remat"]))
        text = next(train.windows(train.standard_library()[0], train.parse(TINY)[0], seed=3))
        np.testing.assert_allclose(*(step.run(step.model, step.optimizer, text) for step in (one, other)), rtol=1e-6)


@pytest.mark.parametrize("more", [[], ["--remat"]])
def test_training_lowers_to_the_kernels_of_an_h200(train, more):
    """A forward and a backward kernel for each layer: `--remat` runs no forward kernel again."""
    size = ["--dtype=bfloat16", "--context=1024", "--width=256", "--layers=3", "--heads=4", "--kv-heads=2"]
    config, _ = train.parse([*size, *more])
    text = jax.ShapeDtypeStruct((config.batch, config.context + 1), np.uint8)
    with jflash.use_options(hardware="h200"), jax.numpy_dtype_promotion("standard"):
        graph, state = nnx.split(nnx.eval_shape(lambda: train.LanguageModel(config, rngs=nnx.Rngs(0))))
        gradient = jax.jit(jax.grad(lambda state, text: train.loss_of(nnx.merge(graph, state), text)))
        traced = gradient.trace(state, text)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert "custom_call @mosaic_gpu" in lowered.as_text()
    # Each stands in its partition rule. Without the names that the policy saves there are nine.
    assert count(traced.jaxpr.jaxpr, lambda equation: equation.primitive.name == "custom_partitioning") == 6


def test_text_is_that_of_python(train):
    text, held_out = train.standard_library()
    assert 2_000_000 < len(text) < 60_000_000
    assert len(text) / 50 < len(held_out) < len(text) / 5
    (config, _) = train.parse(TINY)
    one, other = itertools.islice(train.windows(text, config, seed=0), 2)
    assert one.shape == (3, 49) and one.dtype == np.uint8
    assert not np.array_equal(one, other)
    assert bytes(one[0]) in text.tobytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--attention=jax-cudnn"], "wanted an NVIDIA GPU"),
        (["--steps=1"], "found 1, wanted at least 2"),
        (["--heads=3"], "must be a multiple"),
        (["--plot=missing/loss.png"], "there is no folder missing"),
    ],
)
def test_training_refuses(train, capsys, arguments, words):
    with pytest.raises(SystemExit) as found:
        train.main(arguments)
    assert found.value.code == 2
    assert words in capsys.readouterr().err
