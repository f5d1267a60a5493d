#!/bin/sh
# Prints a command that runs a Python fit for jflash: the newest from 3.12 to 3.14 that can make an environment.
# Set PYTHON to choose one yourself. Exits with 1 and says what to install where there is none.
#
# A candidate counts only if running it succeeds: pyenv puts a `python3.13` on PATH for every version that it has
# installed, and that command fails wherever 3.13 is not the version chosen by .python-version.

# A newer Python is refused because jaxlib has no wheel for it; raise the upper end when JAX does.
check='
import sys
version, name = sys.version_info[:2], "Python %d.%d.%d" % sys.version_info[:3]
if sys.implementation.name != "cpython":
    sys.exit("it is " + sys.implementation.name)
if not (3, 12) <= version <= (3, 14):
    sys.exit("it is " + name)
import sysconfig
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("it is free-threaded " + name)
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit("it is %s without %s (on Debian and Ubuntu: apt install python%d.%d-venv)" % ((name, error.name) + version))
'

# Sets `reason` to why the candidate "$1" will not do, or to nothing if it will.
refuse() {
    if ! command -v "$1" >/dev/null 2>&1; then
        reason="not found"
    elif ! reason=$("$1" -c "$check" 2>&1); then
        reason=$(printf '%s\n' "${reason:-it does not run}" | tail -n 1)
        case $reason in "it is "*) ;; *) reason="it does not run" ;; esac
    else
        reason=""
    fi
}

if [ -n "${PYTHON:-}" ]; then
    refuse "$PYTHON"
    [ -z "$reason" ] && printf '%s\n' "$PYTHON" && exit 0
    echo "PYTHON=$PYTHON will not do: $reason. jflash needs CPython 3.12, 3.13 or 3.14." >&2
    exit 1
fi

# The interpreters of pyenv come last: where its commands are on PATH, `python3` above has already asked it.
chosen_by_pyenv=$(pyenv which python3 2>/dev/null || true)
pyenv_versions=$(pyenv root 2>/dev/null || printf '%s\n' "${PYENV_ROOT:-${HOME:-}/.pyenv}")/versions

# One candidate to a line: a path may hold spaces.
candidates() {
    printf '%s\n' python3.14 python3.13 python3.12 python3 python "$chosen_by_pyenv"
    for minor in 14 13 12; do
        for interpreter in "$pyenv_versions"/3."$minor".*/bin/python3; do
            printf '%s\n' "$interpreter"
        done
    done
}

tried=""
while IFS= read -r candidate; do
    [ -n "$candidate" ] || continue
    refuse "$candidate"
    [ -z "$reason" ] && printf '%s\n' "$candidate" && exit 0
    [ "$reason" = "not found" ] || tried="$tried
    $candidate: $reason"
done <<END
$(candidates)
END

cat >&2 <<END
No suitable Python was found. jflash needs CPython 3.12, 3.13 or 3.14 with the modules venv and ensurepip.

  Tried:${tried:- python3.14, python3.13, python3.12, python3, python, pyenv: none of them is here.}

  Install one, then run make again:
    Debian 13, Ubuntu 24.04 or later   sudo apt install python3 python3-venv
    Fedora                             sudo dnf install python3.13
    macOS                              brew install python@3.13
    pyenv, on any system               pyenv install 3.13
    uv, on any system                  uv python install 3.13 && make PYTHON="\$(uv python find 3.13)" demo

  Or name one that is here: make PYTHON=/path/to/python3 demo
END
exit 1
