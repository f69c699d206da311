"""Restrict what an `env.yaml` may set that gymsdk found in the working folder.

The user did not name that file: it may have come with a repository or an archive. It may contain the policy's endpoint
and harmless settings. It must not read environment variables or other files' settings, send the key of another source
to an address (not even a key from the command line or a trainer), let other machines reach the servers, or replace the
token and certificates of a named file. The same holds for its values that settings of other sources refer to.
`--config FILE` lifts these restrictions.
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


def check_untrusted_references(node: Node, path: KeyPath, root: Node, problems: Problems) -> None:
    """Report each text in an untrusted file that refers to more than that file's own values.

    Args:
        node: The node to search.
        path: The path of the node.
        root: The whole configuration, in which references are looked up.
        problems: Receives one error for each text.
    """
    leaves = node.walk(path) if isinstance(node.value, (dict, list)) else [(path, node)]
    for leaf_path, leaf in leaves:
        if not (leaf.place.found and isinstance(leaf.value, str) and INTERPOLATION_MARK in leaf.value):
            continue
        name, file = format_key_path(leaf_path), leaf.place.source
        references = find_references(leaf.value)
        if references is None:
            problems.add(
                leaf.place,
                f"{name} uses a function such as ${{oc.env:…}}, which gymsdk does not run in a file it found in"
                f" the working folder; write the value itself, or name the file: --config {file}",
            )
            continue
        for reference in references:
            if other := _find_trusted_place(root, tuple(re.findall(r"[\w-]+", reference))):
                problems.add(
                    leaf.place,
                    f"{name} refers to {reference}, which {other} sets; a file found in the working folder may"
                    f" refer to its own values only; name it to allow that: --config {file}",
                )


def check_protected_settings(named: Node, merged: Node, problems: Problems) -> None:
    """Report each protected setting of the *named* files that the *merged* configuration changes."""
    for key in PROTECTED_KEYS:
        before, after = named.get(key), merged.get(key)
        if before is None or before.value in (None, "") or (after is not None and after.value == before.value):
            continue
        place = after.place if after is not None else merged.place
        problems.add(
            place,
            f"{key} replaces the one of {before.place}; a file found in the working folder may not do that; leave it"
            f" out, or name the file: --config {place.source}",
        )


def check_safety(root: Node, problems: Problems) -> None:
    """Report each resolved setting of an untrusted file that would expose the servers or a key."""
    for path, node in _find_exposing_settings(root):
        if (file := _get_untrusted_place(node.place)) is not None:
            problems.add(
                file,
                f"{format_key_path(path)}{_format_referrer(node.place)} would let other machines reach these servers,"
                " or lead them to another machine; a file found in the working folder may not do that; give it on the"
                f" command line, or name the file: --config {file.source}",
            )
    for key in PROTECTED_KEYS:
        if (place := root.place_of((key,))).origin is not None:
            problems.add(
                place.origin,
                f"{key}{_format_referrer(place)} refers to this value; a file found in the working folder may not"
                f" change it; name the file to allow that: --config {place.origin.source}",
            )
    for path, address, secret in _pair_addresses_with_secrets(root):
        file = _get_untrusted_place(address)
        if file is not None and not secret.found:
            problems.add(
                file,
                f"{format_key_path(path)}{_format_referrer(address)} would receive the key or headers of {secret};"
                " a file found in the working folder may not choose where those go; name it to allow that:"
                f" --config {file.source}",
            )


def _get_untrusted_place(place: Place) -> Place | None:
    """Return the place in an untrusted file that determines the value at *place*, `None` if there is none."""
    return place.origin or (place if place.found else None)


def _format_referrer(place: Place) -> str:
    """Return, in parentheses, the place of a text that refers to a value in an untrusted file."""
    return f" ({place})" if place.origin is not None else ""


def _find_exposing_settings(root: Node) -> Iterator[tuple[KeyPath, Node]]:
    """Yield every setting that opens the servers to other machines, or sends them to another machine's head."""
    for key in EXPOSING_SWITCHES:
        node = root.get(key)
        if node is not None and str(node.value).strip().lower() not in OFF_WORDS:
            yield (key,), node
    host_paths: list[KeyPath] = [("default_host",), ("advertise_host",), ("head_server", "host")]
    for name, server in root.children.items():
        for kind in SERVER_KINDS:
            node = server.get(kind)
            implementations = node.children if node is not None else {}
            host_paths += [(name, kind, implementation, key) for implementation in implementations for key in HOST_KEYS]
    for path in host_paths:
        node = root.get(*path)
        if node is not None and node.value not in (None, "") and not is_loopback(str(node.value)):
            yield path, node


def _pair_addresses_with_secrets(root: Node) -> Iterator[tuple[KeyPath, Place, Place]]:
    """Yield the path and place of each address of a model server, with the place of each secret that it receives."""
    policy_urls = [leaf.place for leaf in _list_values(root.get(BASE_URL_SETTING))]
    policy_keys = [leaf.place for leaf in _list_values(root.get(API_KEY_SETTING))]
    yield from (((BASE_URL_SETTING,), address, secret) for address in policy_urls for secret in policy_keys)
    for name, server in root.children.items():
        models = server.get(MODELS)
        for implementation, body in (models.children if models is not None else {}).items():
            url_key, api_key_key, model_key = get_endpoint_keys(implementation)
            secrets = [leaf.place for key in (api_key_key, *HEADER_KEYS) for leaf in _list_values(body.get(key))]
            path: KeyPath = (name, MODELS, implementation)
            addresses: list[tuple[KeyPath, Place]] = [
                ((*path, url_key), leaf.place) for leaf in _list_values(body.get(url_key))
            ]
            # A model server without an address uses the policy's.
            addresses = addresses or [((BASE_URL_SETTING,), place) for place in policy_urls]
            with_address = [leaf for leaf in _list_values(body.get(model_key)) if "@http" in str(leaf.value)]
            addresses += [((*path, model_key), leaf.place) for leaf in with_address]
            yield from ((each, address, secret) for each, address in addresses for secret in secrets)


def _list_values(node: Node | None) -> Iterator[Node]:
    """Yield *node* or its descendants, as far as they have a value."""
    if node is None:
        return
    leaves = (leaf for _, leaf in node.walk()) if isinstance(node.value, (dict, list)) else [node]
    yield from (leaf for leaf in leaves if leaf.value not in (None, ""))


def _find_trusted_place(root: Node, path: KeyPath) -> Place | None:
    """Return the place of a value at or below *path* that no untrusted file set, `None` if there is none."""
    node: Node | None = root
    for key in path:
        node = get_child(node, key) if node is not None else None
    return next((leaf.place for leaf in _list_values(node) if not leaf.place.found), None)
