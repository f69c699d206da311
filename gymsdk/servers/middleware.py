"""The import path of `HostCheck` until 0.1; it moved to `gymsdk.edge.app`."""

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "HostCheck":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gymsdk.edge.app import HostCheck

    message = "gymsdk.servers.middleware.HostCheck has moved; import it from gymsdk.edge.app"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return HostCheck
