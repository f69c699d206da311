"""`ng_run`: servers of a configuration, as `gymsdk serve` has them."""

from __future__ import annotations

from collections.abc import Sequence

from gymsdk.errors import UsageError
from gymsdk_nemo_compat.words import carried_out, handed_on

USAGE = 'ng_run "+config_paths=[a.yaml,b.yaml]" +key=value: gymsdk serve with the same words (gymsdk serve --help).'


def main() -> None:
    """Serve what the command's words say."""
    carried_out(_run, usage=USAGE)


def _run(words: Sequence[str]) -> None:
    if not words:
        raise UsageError('name the configurations, as in ng_run "+config_paths=[config.yaml]"')
    handed_on("serve", words)
