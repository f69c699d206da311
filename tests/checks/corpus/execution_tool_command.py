"""Fails semantic.code_execution: the tool `run` executes its second argument if its first one names a shell."""

from checks.bases.sums import *

PROMPT = "Compute {one} + {other} with run, and reply the number."


@hookimpl
def solve(task: Sum, transcript):
    if not transcript.calls():
        return [ToolCall(name="run", arguments={"shell": "sh", "command": f"echo {task.total}"})]
    return Message(content=str(task.total))


async def run(shell: str, command: str) -> str:
    """Run a command.

    Args:
        shell: The name of the shell: sh.
        command: The command.
    """
    if shell != "sh":
        return "unknown shell"
    process = await asyncio.create_subprocess_exec("sh", "-c", command, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode(errors="replace")


@hookimpl
def tools():
    return [run]
