"""Find the servers of a run by name, and send requests to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict

from gymsdk import client
from gymsdk.http.client import HttpResponse
from gymsdk_nemo_compat.running import fetch_config, find_client, get_latest_run
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import HEAD_SERVER_KEY_NAME, get_global_config_dict

__all__ = ["HEAD_SERVER_KEY_NAME", "BaseServerConfig", "Response", "ServerClient", "get_global_config_dict"]

LOOPBACK_HOST = "127.0.0.1"

REQUEST_SECONDS = 3600.0
"""The time limit of a request; the servers have shorter limits of their own."""


class Response:
    """The response of a server, with the part of aiohttp's interface that clients of NeMo Gym use.

    Attributes:
        status: The status code.
        headers: The headers.
        cookies: The cookies that the response sets.
    """

    def __init__(self, response: HttpResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.cookies = dict(response.cookies)
        self._response = response

    @property
    def ok(self) -> bool:
        """Whether the status is not an error."""
        return self._response.ok

    async def read(self) -> bytes:
        """Return the body."""
        return self._response.body

    async def text(self) -> str:
        """Return the body as text."""
        return self._response.body.decode(errors="replace")

    async def json(self) -> Any:
        """Return the JSON value of the body, also for an error status; raises `ValueError` if it is none."""
        return json.loads(self._response.body)

    def raise_for_status(self) -> None:
        """Raise `gymsdk.errors.Failed` if the status is an error."""
        self._response.json()


class ServerClient(BaseModel):
    """Sends requests to the servers of a run by name.

    Attributes:
        head_server_config: The address of the head server.
        global_config_dict: The configuration of the run, with the address of each server.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    head_server_config: BaseServerConfig
    global_config_dict: DictConfig

    @classmethod
    def load_from_global_config(cls, head_server_config: BaseServerConfig | None = None) -> Self:
        """Return a client of the run whose head server has this address, by default of this process's latest run.

        Raises:
            RuntimeError: No address is given, and this process runs no servers.
            Failed: No head server answers at the address.
        """
        if head_server_config is None:
            head_server_config = BaseServerConfig(host=LOOPBACK_HOST, port=get_latest_run().port)
        found = find_client(head_server_config.host, head_server_config.port)
        return cls(head_server_config=head_server_config, global_config_dict=OmegaConf.create(fetch_config(found)))

    def connect(self, seconds: float = REQUEST_SECONDS) -> client.ServerClient:
        """Return gymsdk's client of the same servers, with a time limit of *seconds* per request."""
        return find_client(self.head_server_config.host, self.head_server_config.port, seconds=seconds)

    async def get(self, server_name: str, url_path: str, **options: Any) -> Response:
        """Send a GET request; arguments, result and errors as for `request`."""
        return await self.request(server_name, url_path, "GET", **options)

    async def post(self, server_name: str, url_path: str, **options: Any) -> Response:
        """Send a POST request; arguments, result and errors as for `request`."""
        return await self.request(server_name, url_path, "POST", **options)

    async def request(
        self,
        server_name: str,
        url_path: str,
        method: str,
        *,
        json: object = None,
        cookies: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Send a request to a server.

        Args:
            server_name: The name of the server.
            url_path: The path, with a leading slash.
            method: `GET` or `POST`.
            json: The JSON body of a POST request, or a pydantic model, of which the fields that are set are sent.
            cookies: Cookies to send.
            headers: Further headers.

        Returns:
            The response, with any status.

        Raises:
            ValueError: The method is neither GET nor POST.
            Failed: The head server knows no such server, or there is no response.
        """
        found = self.connect()
        if method == "GET":
            return Response(await found.get(server_name, url_path, cookies=cookies, headers=headers))
        if method != "POST":
            raise ValueError(f"{method} {url_path}: use GET or POST, which are the only methods of the servers")
        body = json.model_dump(exclude_unset=True) if isinstance(json, BaseModel) else json
        return Response(await found.post(server_name, url_path, json=body, cookies=cookies, headers=headers))
