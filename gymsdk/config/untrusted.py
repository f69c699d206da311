"""Untrusted files: what an `env.yaml` that gymsdk found in the working folder may not set.

The user did not name that file: it may have come with a repository or an archive. It may hold the policy's endpoint and
settings that harm nobody. It may not read environment variables or other files' settings, send another source's key to
an address (not even one of the command line or of a trainer), let other machines reach the servers, or replace the
token and certificates that a named file gives. The same holds for its values that another source's settings refer to.
`--config FILE` lifts all of this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gymsdk.config.model import MODELS, SERVER_KINDS
from gymsdk.config.overrides import API_KEY_SETTING, BASE_URL_SETTING
from gymsdk.config.servers import get_endpoint_keys
from gymsdk.config.yaml import KeyPath, Node, Place, Problems, format_key_path, get_child
from gymsdk.http.tls import is_loopback
from gymsdk.models.options import INTERPOLATION_MARK, find_references

PROTECTED_KEYS = ("token_file", "tls_certificate", "tls_key")
"""Settings that an untrusted file may add but not replace."""

EXPOSING_SWITCHES = ("insecure", "use_absolute_ip")
OFF_WORDS = frozenset({"", "0", "f", "false", "n", "no", "none", "off"})
HOST_KEYS = ("host", "advertise_host")
HEADER_KEYS = ("headers", "default_headers", "openai_default_headers")


def check_untrusted_references(node: Node, trail: KeyPath, root: Node, problems: Problems) -> None:
    """Report each text under *node* in an untrusted file that refers to more than that file's own values.

    Args:
        node: What to look through.
        trail: The keys that lead to it.
        root: The whole configuration, where references are looked up.
        problems: Receives one sentence for each text.
    """
    leaves = node.walk(trail) if isinstance(node.value, (dict, list)) else [(trail, node)]
    for way, leaf in leaves:
        if not (leaf.place.found and isinstance(leaf.value, str) and INTERPOLATION_MARK in leaf.value):
            continue
        named = find_references(leaf.value)
        if named is None:
            problems.add(
                leaf.place,
                f"{format_key_path(way)} uses a function such as ${{oc.env:…}}, which gymsdk does not run in a file it found in"
                f" the working folder; write the value itself, or name the file: --config {leaf.place.source}",
            )
            continue
        for reference in named:
            if other := _written_elsewhere(root, tuple(re.findall(r"[\w-]+", reference))):
                problems.add(
                    leaf.place,
                    f"{format_key_path(way)} refers to {reference}, which {other} sets; a file found in the working folder may"
                    f" refer to its own values only; name it to allow that: --config {leaf.place.source}",
                )


def check_protected_settings(named: Node, whole: Node, problems: Problems) -> None:
    """Report each protective setting of the *named* files that the *whole* no longer has as they set it."""
    for key in PROTECTED_KEYS:
        before, after = named.get(key), whole.get(key)
        if before is None or before.value in (None, "") or (after is not None and after.value == before.value):
            continue
        place = after.place if after is not None else whole.place
        problems.add(
            place,
            f"{key} replaces the one of {before.place}; a file found in the working folder may not do that; leave it"
            f" out, or name the file: --config {place.source}",
        )


def check_safety(root: Node, problems: Problems) -> None:
    """Report each resolved setting of an untrusted file that would weaken the safety of the servers or of a key."""
    for trail, node in _exposing(root):
        if (file := _untrusted(node.place)) is not None:
            problems.add(
                file,
                f"{format_key_path(trail)}{_written(node.place)} would let other machines reach these servers, or lead them to"
                " another machine; a file found in the working folder may not do that; say it on the command line, or"
                f" name the file: --config {file.source}",
            )
    for key in PROTECTED_KEYS:
        if (place := root.place_of((key,))).origin is not None:
            problems.add(
                place.origin,
                f"{key}{_written(place)} refers to this value; a file found in the working folder may not change it;"
                f" name the file to allow that: --config {place.origin.source}",
            )
    for trail, address, secret in _addressed(root):
        file = _untrusted(address)
        if file is not None and not secret.found:
            problems.add(
                file,
                f"{format_key_path(trail)}{_written(address)} would receive the key or headers of {secret}; a file found in the"
                f" working folder may not choose where those go; name it to allow that: --config {file.source}",
            )


def _untrusted(place: Place) -> Place | None:
    """Give where an untrusted file decides the value at *place*, `None` if none does."""
    return place.origin or (place if place.found else None)


def _written(place: Place) -> str:
    """Give where the text stands that refers to an untrusted file's value, in parentheses."""
    return f" ({place})" if place.origin is not None else ""


def _exposing(root: Node) -> Iterator[tuple[KeyPath, Node]]:
    """Yield every setting that opens the servers to other machines, or sends them to another machine's head."""
    for key in EXPOSING_SWITCHES:
        node = root.get(key)
        if node is not None and str(node.value).strip().lower() not in OFF_WORDS:
            yield (key,), node
    hosts: list[KeyPath] = [("default_host",), ("advertise_host",), ("head_server", "host")]
    for name, block in root.children.items():
        for kind in SERVER_KINDS:
            server = block.get(kind)
            below = server.children if server is not None else {}
            hosts += [(name, kind, implementation, key) for implementation in below for key in HOST_KEYS]
    for trail in hosts:
        node = root.get(*trail)
        if node is not None and node.value not in (None, "") and not is_loopback(str(node.value)):
            yield trail, node


def _addressed(root: Node) -> Iterator[tuple[KeyPath, Place, Place]]:
    """Yield, for each model server, where its address is written, and where each secret that goes there is."""
    shared = [leaf.place for leaf in _leaves(root.get(BASE_URL_SETTING))]
    keys = [leaf.place for leaf in _leaves(root.get(API_KEY_SETTING))]
    yield from (((BASE_URL_SETTING,), address, secret) for address in shared for secret in keys)
    for name, block in root.children.items():
        server = block.get(MODELS)
        for implementation, body in (server.children if server is not None else {}).items():
            url, key, model = get_endpoint_keys(implementation)
            secrets = [leaf.place for each in (key, *HEADER_KEYS) for leaf in _leaves(body.get(each))]
            trail: KeyPath = (name, MODELS, implementation)
            addresses: list[tuple[KeyPath, Place]] = [((*trail, url), leaf.place) for leaf in _leaves(body.get(url))]
            # A block without an address is played at the policy's.
            addresses = addresses or [((BASE_URL_SETTING,), place) for place in shared]
            named = [leaf for leaf in _leaves(body.get(model)) if "@http" in str(leaf.value)]
            addresses += [((*trail, model), leaf.place) for leaf in named]
            yield from ((way, address, secret) for way, address in addresses for secret in secrets)


def _leaves(node: Node | None) -> Iterator[Node]:
    """Yield the values under *node* that are set."""
    if node is None:
        return
    below = (leaf for _, leaf in node.walk()) if isinstance(node.value, (dict, list)) else [node]
    yield from (leaf for leaf in below if leaf.value not in (None, ""))


def _written_elsewhere(root: Node, trail: KeyPath) -> Place | None:
    """Give the place of a value under *trail* that no untrusted file wrote, `None` if there is none."""
    node: Node | None = root
    for key in trail:
        node = get_child(node, key) if node is not None else None
    return next((leaf.place for leaf in _leaves(node) if not leaf.place.found), None)
