"""The documented import path of `HostCheck`."""

from gymsdk.edge.app import HostCheck

__all__ = ["HostCheck"]
