"""What README.md shows, runs and prints what it says."""

import contextlib
import io
import pathlib
import re
import shlex

import pytest

from jflash.cli import main

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def printed_by(run, *arguments) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run(*arguments)
    return out.getvalue()


def test_examples_run_in_order_and_print_what_stands_below_them():
    namespace: dict[str, object] = {}
    for (language, source), (next_language, text) in zip(BLOCKS, [*BLOCKS[1:], ("", "")]):
        if language == "python":
            printed = printed_by(exec, compile(source, "README.md", "exec"), namespace)
            assert printed == (text if next_language == "text" else ""), source
    assert namespace["out"].shape == (2, 300, 8, 64)


def test_every_block_is_of_a_kind_that_is_tested():
    assert {language for language, _ in BLOCKS} == {"sh", "python", "text"}


def test_the_shell_example_says_what_the_python_example_says():
    (command,) = re.findall(r"`(jflash explain [^`]+)`", README)
    (text,) = (text for language, text in BLOCKS if language == "text" and text.startswith("problem"))
    assert printed_by(main, shlex.split(command)[1:]) == text


def test_make_has_the_two_commands():
    (shell,) = (source for language, source in BLOCKS if language == "sh")
    commands = [line.split()[:2] for line in shell.splitlines()]
    assert commands == [["make", "demo"], ["make", "test"]]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for _, target in commands)


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", README))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()
