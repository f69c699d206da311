"""What a supervisor hands on to its servers: settings not where everybody can read them, and no socket any further."""

from __future__ import annotations

import json
import os
import socket

import pytest

from gymsdk.cli import serving


def test_settings_are_no_words_of_the_command_by_which_a_server_is_started() -> None:
    words = ["serve", "sums", "--insecure", "policy_api_key=hush", "--set", "a=1", "a=1", "--separate", "--port", "0"]
    assert serving._again(words, ("policy_api_key=hush", "a=1")) == ["serve", "sums", "--insecure", "--set", "a=1"]


def test_settings_that_were_handed_on_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serving.OVERRIDES, raising=False)
    assert serving.handed_overrides() == ()
    monkeypatch.setenv(serving.OVERRIDES, json.dumps(["policy_api_key=hush"]))
    assert serving.handed_overrides() == ("policy_api_key=hush",)


def test_a_socket_that_was_handed_down_goes_no_further() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        file = os.dup(listening.fileno())
        os.set_inheritable(file, True)
        with serving._handed(file):
            assert not os.get_inheritable(file)
