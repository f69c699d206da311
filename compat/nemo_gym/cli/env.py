"""Start and stop the servers of a training run."""

from __future__ import annotations

import sys

from gymsdk.config.read import load_config_mapping
from gymsdk.deploy import programs
from gymsdk.errors import UsageError
from gymsdk_nemo_compat.running import ServerRun, find_own_cluster
from nemo_gym.global_config import GlobalConfigDictParserConfig

__all__ = ["RunHelper"]


class RunHelper:
    """Runs the servers of a training run in a process of their own.

    The servers require a token that is made for the run. `RolloutCollectionHelper` and `ServerClient` of this process
    send it, and its child processes find it through `GYMSDK_TOKEN_FILE`. With `insecure: true` in the configuration,
    everyone who reaches the servers may use them.
    """

    def __init__(self) -> None:
        self._run: ServerRun | None = None

    def start(self, global_config_dict_parser_config: GlobalConfigDictParserConfig) -> None:
        """Start the servers and wait until all are ready.

        Args:
            global_config_dict_parser_config: The configuration. Its `config_paths` may be files, or names of NeMo
                Gym's files such as `resources_servers/math_with_judge/configs/math_with_judge.yaml`.

        Raises:
            BadConfig: The configuration is wrong; the message has a line for each error.
            UsageError: The configuration names no server, or a port is in use.
            RuntimeError: The servers end before they are ready, or this object runs servers already.
        """
        if self._run is not None:
            raise RuntimeError("this RunHelper runs servers already; call shutdown() first")
        parser = global_config_dict_parser_config
        deployment = load_config_mapping(
            parser.initial_global_config_dict or {},
            () if parser.skip_load_from_cli else sys.argv[1:],
            env_file=parser.dotenv_path,
            reads_env=not parser.skip_load_from_dotenv,
        )
        programs.check_deployment(deployment)
        if not deployment.servers:
            raise UsageError("the configuration names no server; name the files of the environments in config_paths")
        if deployment.ray_address is None:
            deployment = deployment.model_copy(update={"ray_address": find_own_cluster()})
        self._run = ServerRun.start(deployment)

    def poll(self) -> None:
        """Raise `RuntimeError` if the servers have ended."""
        self._get_run().check()

    def shutdown(self) -> None:
        """Stop the servers; a second call has no effect."""
        if self._run is not None:
            self._run.stop()
            self._run = None

    def _get_run(self) -> ServerRun:
        if self._run is None:
            raise RuntimeError("no servers run: start() was never called, or shutdown() was")
        return self._run
