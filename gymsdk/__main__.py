"""The command line, as the program `gymsdk` and as `python -m gymsdk`.

Python puts the working folder, which may hold other people's files, first on the search path of `python -m`. This
module removes it again. Until then, no module may be imported that Python has not imported before: therefore neither
this module nor the package's `__init__` has `from __future__ import annotations`, which imports a module.
"""

import os
import sys


def remove_working_folder() -> None:
    """Remove the entry of `python -m` from the search path, unless gymsdk itself comes from the working folder."""
    if sys.flags.safe_path or not sys.path:
        return
    try:
        folder = os.getcwd()  # noqa: PTH109  # pathlib may not be imported yet
    except OSError:  # the folder was removed, and Python has not added it
        return
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120  # as above
    if sys.path[0] == folder != home:
        del sys.path[0]


def main() -> None:
    """Run the command line and exit the process."""
    from gymsdk import console

    console.exit_on_interrupt()
    console.open_standard_files()
    from gymsdk import cli

    cli.main()


if __name__ == "__main__":
    remove_working_folder()
    main()
