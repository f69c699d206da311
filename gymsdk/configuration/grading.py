"""NeMo Gym's settings of a judge, as settings of our environments that have one."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError

from gymsdk.configuration.nodes import Node
from gymsdk.configuration.places import Problems, Trail, dotted

USES_JUDGE, JUDGE_SERVER, JUDGE_PARAMS = "should_use_judge", "judge_model_server", "judge_responses_create_params"
JUDGE, JUDGE_OPTIONS = "judge", "judge_options"
"""What our environments call the judge's model, and the parameters of its requests."""

JUDGED = frozenset({"math"})
"""Our environments that have a judge."""


def with_judge(
    environment: str, trail: Trail, settings: Node, models: Mapping[str, str], problems: Problems
) -> tuple[Node, dict[str, str]]:
    """Translate NeMo Gym's settings of a judge to those of *environment*.

    NeMo Gym's class has `should_use_judge` true by default, so a server that names a judge and says nothing else asks
    the judge. A judge that is required but not named goes to *problems*.

    Args:
        environment: The name of our environment.
        trail: The keys that lead to the server's block.
        settings: The block's settings, without its references to other servers.
        models: The model server that each setting refers to.
        problems: Where errors go.

    Returns:
        The settings and the references to model servers, both in the words of our environment.
    """
    if environment not in JUDGED:
        return settings, dict(models)
    rest = settings.without(USES_JUDGE, JUDGE_SERVER, JUDGE_PARAMS)
    others = {key: name for key, name in models.items() if key != JUDGE_SERVER}
    required = _is_required(trail, settings, problems)
    if required is False:
        others.pop(JUDGE, None)
        return rest.without(JUDGE, JUDGE_OPTIONS), others
    server = models.get(JUDGE_SERVER)
    own = JUDGE in rest.children or JUDGE in others
    if required and server is None and not own:
        problems.add(
            settings.place_of((USES_JUDGE,)),
            f"{dotted((*trail, USES_JUDGE))} is true, and no judge is named; write {JUDGE_SERVER}: "
            f"{{type: responses_api_models, name: NAME}} to name a model server, or {USES_JUDGE}: false",
        )
    if server is not None and own:
        problems.add(rest.place_of((JUDGE,)), f"{dotted(trail)} has both {JUDGE_SERVER} and {JUDGE}; keep one of them")
    params = settings.get(JUDGE_PARAMS)
    if params is not None and params.is_mapping and JUDGE_OPTIONS not in rest.children:
        # NeMo Gym replaces this input by the messages to the judge, too.
        rest = rest.with_key(JUDGE_OPTIONS, params.without("input"))
    return rest, others if server is None else {**others, JUDGE: server}


def _is_required(trail: Trail, settings: Node, problems: Problems) -> bool | None:
    """Return the value of `should_use_judge`, `None` where it has none or a wrong one, which goes to *problems*."""
    node = settings.get(USES_JUDGE)
    if node is None or node.value is None:
        return None
    try:
        return TypeAdapter(bool).validate_python(node.value)
    except ValidationError:
        problems.add(node.place, f"{dotted((*trail, USES_JUDGE))}: input should be true or false")
        return None
