"""Fails semantic.code_execution: `verify` executes the reply in a worker process, which is used again."""

from checks.bases.executed import *


@offload(timeout=10.0)
def run(code: str) -> object:
    names = {}
    try:
        exec(code, names)
    except Exception:  # noqa: BLE001  # so such a verifier goes on
        return None
    answer = names.get("answer")
    return answer if isinstance(answer, int) else None


@hookimpl
async def verify(task: Sum, transcript):
    return Verdict(reward=float(await run(transcript.reply) == task.total))
