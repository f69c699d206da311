"""`ng_run` and `ng_status` run `gymsdk serve` and `gymsdk status`; all commands share the functions of this module."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gymsdk import config, console
from gymsdk.cluster.reports import build_url
from gymsdk.credentials import TOKEN_FILE_VARIABLE
from gymsdk.errors import GymsdkError, UsageError
from gymsdk.http.tls import get_reachable_host
from gymsdk.working_folder import keep_working_folder

RUN_USAGE = (
    'ng_run "+config_paths=[a.yaml,b.yaml]" +key=value: runs gymsdk serve with these arguments (gymsdk serve --help).'
)
STATUS_USAGE = (
    "ng_status +head_server.host=HOST +head_server.port=N: runs gymsdk status --head URL; +json=true prints JSON."
)
JSON_ARGUMENTS = frozenset({"+json=true", "json=true", "++json=true"})


def ng_run() -> None:
    """Serve the configurations that the arguments name."""
    run_command(_serve, usage=RUN_USAGE)


def ng_status() -> None:
    """Print the status of the servers."""
    run_command(show_status, usage=STATUS_USAGE)


def run_command(command: Callable[[Sequence[str]], None], *, usage: str) -> None:
    """Run *command* with the arguments of this process, or print *usage* for `--help`.

    Exits with code 2 if the arguments are wrong, and with code 1 if the command fails.
    """
    console.open_standard_files()
    console.replace_unencodable_characters()
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(f"{usage}\n")
        return
    with keep_working_folder(), report_errors():
        command(arguments)


@contextmanager
def report_errors() -> Iterator[None]:
    """Print an error of gymsdk and exit: with code 2 if the arguments are wrong, otherwise with code 1."""
    try:
        yield
    except GymsdkError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(2 if isinstance(error, UsageError) else 1)


def find_head(arguments: Sequence[str]) -> str:
    """Return the URL of the head server.

    The URL and the token file come from the overrides in *arguments* or from `env.yaml` in the current folder. The
    function stores the path of the token file in the environment variable that gymsdk's clients read.

    Raises:
        UsageError: The configuration is invalid.
    """
    deployment = config.load_config([], arguments)
    if deployment.token_file is not None:
        os.environ.setdefault(TOKEN_FILE_VARIABLE, str(deployment.token_file))
    host, port = deployment.head_address
    return build_url(get_reachable_host(host), port, "https" if deployment.tls else "http")


def _serve(arguments: Sequence[str]) -> None:
    if not arguments:
        raise UsageError('name the configurations, as in ng_run "+config_paths=[config.yaml]"')
    run_gymsdk("serve", arguments)


def show_status(arguments: Sequence[str]) -> None:
    """Run `gymsdk status` for the head that the *arguments* name."""
    options = [argument for argument in arguments if argument.startswith("--")]
    overrides = [argument for argument in arguments if argument not in options and argument not in JSON_ARGUMENTS]
    json = ["--json"] if JSON_ARGUMENTS & set(arguments) else []
    run_gymsdk("status", ["--head", find_head(overrides), *options, *json])


def run_gymsdk(command: str, arguments: Sequence[str]) -> None:
    """Run a command of gymsdk in this process."""
    # Imported here, so that `--help` does not wait for it.
    from gymsdk.cli import main

    sys.argv[:] = ["gymsdk", command, *arguments]
    main()
