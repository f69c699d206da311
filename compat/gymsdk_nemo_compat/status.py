"""`ng_status`: how the servers are, as `gymsdk status` tells it."""

from __future__ import annotations

from collections.abc import Sequence

from gymsdk_nemo_compat.place import head
from gymsdk_nemo_compat.words import carried_out, handed_on

USAGE = "ng_status +head_server.host=HOST +head_server.port=N: gymsdk status --head URL; +json=true for programs."
JSON = frozenset({"+json=true", "json=true", "++json=true"})


def main() -> None:
    """Tell how the servers are."""
    carried_out(_status, usage=USAGE)


def _status(words: Sequence[str]) -> None:
    options = [word for word in words if word.startswith("--")]
    settings = [word for word in words if word not in options and word not in JSON]
    json = ["--json"] if len(settings) + len(options) < len(words) else []
    handed_on("status", ["--head", head(settings), *options, *json])
