"""Prepare the process of a command: its standard files, and Ctrl-C before the command begins; write lines of tables.

This module imports nothing that Python has not imported already, so that it can run before all others.
"""

import os
import sys

TYPE_CHECKING = False  # as in `typing`: a type checker treats this name as true
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has stopped."""

STANDARD_FILES = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""The name in `sys` and the mode of descriptors 0, 1 and 2."""


def open_standard_files() -> None:
    """Open `/dev/null` in place of each standard file that the process was started without.

    Otherwise, the next file or socket that the process opens would get the number of that file: libuv aborts the
    process when it closes such a socket, and error messages would go into the file.
    """
    for descriptor, (name, mode) in enumerate(STANDARD_FILES):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            # Not of the descriptor, which may belong to a file that the process has opened since.
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - open until the process ends


def replace_unencodable_characters() -> None:
    """Let standard output show `?` for each character that its encoding lacks, where Python would raise an error."""
    stdout = sys.stdout
    if getattr(stdout, "errors", None) in {"strict", "surrogateescape"} and hasattr(stdout, "reconfigure"):
        stdout.reconfigure(errors="replace")


def exit_on_interrupt() -> None:
    """Let Ctrl-C exit the process without a traceback until `raise_on_interrupt`.

    Python would raise `KeyboardInterrupt` in whatever module it is importing. A process that handles or ignores Ctrl-C
    keeps its handler.
    """
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt` again, so that the work of a command is cleaned up."""
    import signal

    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(_number: int, _frame: "FrameType | None") -> None:
    os._exit(INTERRUPTED)


def format_rows(rows: "Sequence[Sequence[str]]", *, align: str = "<") -> "list[str]":
    """Return *rows* as lines with aligned columns: the first to the left, the others by *align*, `<` or `>`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{'<' if number == 0 else align}{width}" for number, width in enumerate(widths)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]
