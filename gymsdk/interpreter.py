"""Build the commands of child processes that run Python.

By default, Python searches the working folder first for `python -m` and `python -c`, even for modules of the standard
library. The folder in which a person starts gymsdk may hold files of other people, so that no child may import from it.
Therefore only this module builds commands that run Python; `tests/test_child_commands.py` enforces this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from gymsdk.working_folder import resolve_path

SAFE_PATH: Mapping[str, str] = MappingProxyType({"PYTHONSAFEPATH": "1"})
"""The environment variables that have the effect of `-P` on a program and on all its descendants."""


def get_python() -> str:
    """Return the path of this interpreter."""
    return sys.executable


def build_module_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """Return the command that runs *module*, from the packages that are installed for *python* or on `PYTHONPATH`.

    Args:
        module: The name of the module.
        arguments: The arguments of the module.
        python: An interpreter of version 3.11 or later, by default this one.
    """
    return [python or get_python(), "-P", "-m", module, *arguments]


def build_code_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs *code*, with the module search path of this process.

    Thus the child finds the code of a script, a notebook or a test that this process imports from its own folder.

    Args:
        code: Statements, one or more lines.
        arguments: The arguments in `sys.argv`.
    """
    return [get_python(), "-P", "-c", f"import sys; sys.path[:] = {get_search_path()!r}\n{code}", *arguments]


def get_search_path() -> list[str]:
    """Return the module search path of this process for another process, which may have another working folder.

    Relative folders, such as the empty entry of an interactive interpreter, become absolute. Other entries, such as the
    names that the path hooks of editable installs handle, stay as they are.
    """
    # Entries are strings.
    return [
        os.path.normpath(resolve_path(Path(entry))) if os.path.isdir(entry or ".") else entry  # noqa: PTH112
        for entry in sys.path
    ]


def build_isolated_command(file: str, *arguments: str) -> list[str]:
    """Return the command that runs *file*, which imports nothing but the standard library."""
    return [get_python(), "-I", "-S", file, *arguments]


def build_program_command(python: str, file: str) -> list[str]:
    """Return the command that runs the program *file*, which imports modules from its own folder.

    Not with `-P`, which would leave out the folder of the program, and which interpreters before 3.11 do not have.

    Args:
        python: The interpreter of the program.
        file: The absolute path of the program.
    """
    return [python, file]
