"""A model on the test engine in this process, without HTTP, for tests with many conversations."""

from __future__ import annotations

from gymsdk.cluster.router import IsFinalAnswer
from gymsdk.convert import chat_inbound
from gymsdk.convert.api import InvalidRequest
from gymsdk.convert.apis import get_outbound_api
from gymsdk.http.backoff import Retries
from gymsdk.http.client import HttpResponse
from gymsdk.jsonl import dump_json
from gymsdk.models.endpoint import Upstream
from gymsdk.models.options import ModelOptions
from gymsdk.responses import TokenInterface
from gymsdk.testing.engine import Engine, EngineKind
from gymsdk.testing.faults import NO_FAULT, Faults, RequestFault
from gymsdk.testing.templates import TEMPLATES, TemplateTokenizer
from gymsdk.testing.token_api import build_endpoints
from gymsdk.types import Item, Model

KINDS: dict[TokenInterface, EngineKind] = {
    "vllm-generate": "vllm",
    "vllm-completions": "vllm-completions",
    "sglang": "sglang",
    "nemo-rl": "nemo-rl",
    "chat": "vllm",
}
"""The kind of test engine for each token interface."""


OK = 200


class EngineTransport:
    """Answers requests with a test engine.

    Attributes:
        requests: The path and the body of each request.
        status: The status of all answers; an error answers nothing else.
        change_prompt: Whether the engine uses another prompt than it is sent.
        fixed_answer: The JSON value of all answers; `...` for those of the engine.
        weight_versions: Spans of tokens that all choices have.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._endpoints = build_endpoints(engine)
        self.requests: list[tuple[str, Item]] = []
        self.status = 200
        self.change_prompt = False
        self.fixed_answer: object = ...
        self.weight_versions: object = None

    async def __call__(
        self, path: str, body: Item, *, sticky: str, retries: Retries, is_final: IsFinalAnswer
    ) -> HttpResponse:
        self.requests.append((path, body))
        if self.status != OK:
            return HttpResponse("engine", self.status, b'{"error": {"message": "no"}}')
        if self.fixed_answer is not ...:
            return HttpResponse("engine", OK, dump_json(self.fixed_answer))
        if self.change_prompt:
            fields = {"prompt", "token_ids", "input_ids"} & body.keys()
            body = body | {key: [*body[key][:-1], 65] for key in fields if isinstance(body[key], list)}
        rooted = path if path.startswith("/") else f"/v1/{path}"
        try:
            if rooted == "/v1/chat/completions":
                answer = await self._engine.answer(chat_inbound.CHAT_API, body, RequestFault())
            elif rooted in self._endpoints:
                answer = await self._endpoints[rooted](body, RequestFault())
            else:
                return HttpResponse("engine", 404, b'{"error": {"message": "Not Found"}}')
        except InvalidRequest as error:
            return HttpResponse("engine", 400, dump_json({"error": {"message": str(error)}}))
        if self.weight_versions is not None and "choices" in answer:
            answer["choices"][0]["weight_versions"] = self.weight_versions
        return HttpResponse("engine", 200, dump_json(answer))


def build_upstream(
    policy: Model,
    interface: TokenInterface | None,
    *,
    template: str = "chatml",
    pairs: bool = True,
    kind: EngineKind | None = None,
    faults: Faults = NO_FAULT,
) -> tuple[Upstream, EngineTransport]:
    """Return a model with exact token ids on a test engine that plays *policy*, and its transport."""
    tokenizer = TemplateTokenizer(TEMPLATES[template], pairs)
    engine = Engine(
        policy, name="policy", faults=faults, kind=kind or KINDS[interface or "vllm-generate"], tokenizer=tokenizer
    )
    transport = EngineTransport(engine)
    local = tokenizer if interface == "sglang" else None
    options = ModelOptions(
        base_url=("http://engine/v1",), tokens=True, token_interface=interface, tokenizer=local, wait=0.001
    )
    defaults = {"temperature": 1.0, "top_p": 1.0}
    upstream = Upstream("policy", options, get_outbound_api("chat"), defaults=defaults, post=transport)
    return upstream, transport
