"""Play rows with the simple agent of NeMo Gym and the servers of a head; print each response as a line of JSON.

usage: nemo_agent.py HEAD_PORT ENVIRONMENT ROWS      run with a Python that has nemo-gym installed
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path

import uvicorn
from omegaconf import OmegaConf
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient, set_global_aiohttp_client

NAME = "their_agent"


async def main(head: int, environment: str, rows: list[str]) -> None:
    """Serve the agent, and send the *rows* to it one after another."""
    set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
    client = ServerClient.load_from_global_config(BaseServerConfig(host="127.0.0.1", port=head))
    sock = socket.create_server(("127.0.0.1", 0))
    block = {
        "host": "127.0.0.1",
        "port": sock.getsockname()[1],
        "entrypoint": "app.py",
        "resources_server": {"type": "resources_servers", "name": environment},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    }
    config = OmegaConf.to_container(client.global_config_dict)
    client.global_config_dict = OmegaConf.create({**config, NAME: {"responses_api_agents": {"simple_agent": block}}})
    agent = SimpleAgent(config=SimpleAgentConfig(name=NAME, **block), server_client=client)
    app = agent.setup_webserver()
    agent.setup_exception_middleware(app)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    serving = asyncio.create_task(server.serve([sock]))
    while not server.started:  # noqa: ASYNC110  # uvicorn offers no event for its start
        await asyncio.sleep(0.05)
    for line in rows:
        answer = await client.post(server_name=NAME, url_path="/run", json=json.loads(line))
        result = await answer.json() if answer.status == 200 else {"error": (await answer.read()).decode()}
        print("LINE", json.dumps(result), flush=True)
    server.should_exit = True
    await serving


asyncio.run(main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]).read_text().splitlines()))
