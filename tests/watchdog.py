"""Ends the process, with the stacks of all threads, when what it guards takes too long: for hangs in compiled code."""

import contextlib
import faulthandler
import os
from collections.abc import Iterator

_stderr = 2


def keep_stderr() -> None:
    """Remembers where stderr goes now. pytest captures it later, and what it captures is lost when the process ends."""
    global _stderr
    _stderr = os.dup(2)


@contextlib.contextmanager
def watchdog(timeout_s: float) -> Iterator[None]:
    """Under pytest-xdist only the worker ends: its test fails as crashed, the others go on in a new one."""
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=_stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
