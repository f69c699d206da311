"""The tools of an episode over the Model Context Protocol."""

from __future__ import annotations

import pytest

from gymsdk import responses

TOKEN = "X-NeMo-Gym-Session-Token"
ROW = {"responses_create_params": {"input": "add 3"}, "initial_count": 3, "expected_count": 6}


def message(method, number=1, **params):
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


async def call(client, name, arguments, key):
    headers = {TOKEN: key} if key else {}
    answer = await client.post("/mcp", json=message("tools/call", name=name, arguments=arguments), headers=headers)
    return answer.json()


async def open_session(client, row=ROW):
    return (await client.post("/seed_session", json=row)).json()["mcp"]["headers"][TOKEN]


async def test_mcp_is_off_by_default(resources_client):
    async with resources_client() as client:
        assert (await client.post("/seed_session", json=ROW)).json() == {}
        assert (await client.post("/mcp", json=message("ping"))).status_code == 404


async def test_opening_a_session_returns_the_access_to_its_tools(resources_client):
    async with resources_client(with_mcp=True) as client:
        access = (await client.post("/seed_session", json=ROW)).json()["mcp"]
        typed = {
            "resources_session_id": "s",
            "episode_id": {"rollout_id": "r", "attempt": 0},
            "task_id": {"taskset": "t", "task_id": "1"},
            "task_data": {"initial_count": 3},
        }
        other = (await client.post("/seed_session", json=typed)).json()["resources_tools"]
    assert (access["server_name"], access["url_path"], access["transport"]) == ("counter", "/mcp", "http")
    assert access["headers"].keys() == other["headers"].keys() == {TOKEN}
    assert access["headers"] != other["headers"]


async def test_the_key_is_not_the_cookie(resources_client):
    async with resources_client(with_mcp=True) as client:
        key = await open_session(client)
        client.cookies.clear()
        answer = await client.post("/spell", json={}, headers={"cookie": f"ResourcesServer___counter={key}"})
    assert answer.status_code == 409


async def test_a_client_initializes(resources_client):
    async with resources_client(with_mcp=True) as client:
        opened = await client.post("/mcp", json=message("initialize", protocolVersion="2025-06-18", capabilities={}))
        noted = await client.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"})
        newest = await client.post("/mcp", json=message("initialize", protocolVersion="1999"))
        ping = await client.post("/mcp", json=message("ping", "a"))
        streams = [(await client.request(method, "/mcp")).status_code for method in ("GET", "DELETE")]
    assert opened.json()["result"]["protocolVersion"] == "2025-06-18"
    assert opened.json()["result"]["capabilities"] == {"tools": {"listChanged": False}}
    assert (noted.status_code, noted.content) == (202, b"")
    assert newest.json()["result"]["protocolVersion"] == "2025-11-25"
    assert ping.json() == {"jsonrpc": "2.0", "id": "a", "result": {}}
    assert streams == [405, 405]


async def test_offered_tools_are_listed(resources_client):
    offered = [{"type": "function", "name": "spell"}]
    row = {**ROW, "responses_create_params": {"input": "x", "tools": offered}}
    async with resources_client(with_mcp=True) as client:
        headers = {TOKEN: await open_session(client, row)}
        mine = (await client.post("/mcp", json=message("tools/list"), headers=headers)).json()["result"]["tools"]
        every = (await client.post("/mcp", json=message("tools/list"))).json()["result"]["tools"]
    assert mine == [{"name": "spell", "description": "", "inputSchema": {"type": "object"}}]
    assert every[0]["inputSchema"]["required"] == ["count"]
    assert "verify" in {tool["name"] for tool in every}


async def test_a_tool_is_called_in_the_sessions_episode(resources_client):
    async with resources_client(with_mcp=True) as client:
        key = await open_session(client)
        added = await call(client, "increment_counter", {"count": 3}, key)
        spelt = await call(client, "spell", None, key)
        output = [
            responses.build_function_call("mcp__counter__increment_counter", {"count": 3}, "c"),
            responses.build_function_call_output("c", "x"),
        ]
        judged = (await client.post("/verify", json={**ROW, "response": {"output": output}})).json()
    assert added["result"] == {
        "content": [{"type": "text", "text": '{"success":true}'}],
        "structuredContent": {"success": True},
        "isError": False,
    }
    assert spelt["result"] == {"content": [{"type": "text", "text": "it is 6"}], "isError": False}
    assert (judged["final"], judged["reward"]) == (6, 1.0)
    assert judged["response"]["output"][0]["name"] == "mcp__counter__increment_counter"


async def test_a_prefixed_tool_name_is_replayed_under_the_tools_own_name(resources_client):
    output = [
        responses.build_function_call("mcp__counter__increment_counter", {"count": 3}, "c"),
        responses.build_function_call_output("c", "x"),
    ]
    async with resources_client(with_mcp=True) as client:
        judged = (await client.post("/verify", json={**ROW, "response": {"output": output}})).json()
    assert judged["final"] == 6


async def test_a_tool_named_like_an_endpoint_can_be_called(resources_client):
    async with resources_client(with_mcp=True) as client:
        answer = await call(client, "verify", {}, await open_session(client))
    assert answer["result"]["content"] == [{"type": "text", "text": "a tool"}]


@pytest.mark.parametrize("key", ["", "forged"])
async def test_a_call_without_a_session_is_an_error_the_model_can_read(resources_client, key):
    async with resources_client(with_mcp=True) as client:
        answer = await call(client, "spell", {}, key)
    message_text = f"Missing {TOKEN} for Gym MCP tool call."
    assert answer["result"] == {"content": [{"type": "text", "text": message_text}], "isError": True}


async def test_a_tool_that_fails_is_an_error_the_model_can_read(resources_client):
    async with resources_client(with_mcp=True) as client:
        result = (await call(client, "stumble", {}, await open_session(client)))["result"]
    assert result["isError"] is True
    assert result["content"][0]["text"].startswith("HTTP 503 from POST /stumble: tool 'stumble'")


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (message("seed_session"), -32601),
        ({"jsonrpc": "2.0", "id": 1}, -32601),
        ({**message("tools/list"), "params": [1]}, -32602),
        (message("tools/call"), -32602),
    ],
)
async def test_an_invalid_message_gets_an_error_code(resources_client, sent, code):
    async with resources_client(with_mcp=True) as client:
        answer = await client.post("/mcp", json=sent)
    assert (answer.status_code, answer.json()["error"]["code"]) == (200, code)


async def test_an_unknown_tool_gets_an_error_code(resources_client):
    async with resources_client(with_mcp=True) as client:
        answer = await call(client, "seed_session", {}, await open_session(client))
    assert answer["error"]["code"] == -32602


@pytest.mark.parametrize("arguments", [[1], 1, "x", {"count": "many"}])
async def test_the_tool_answers_wrong_arguments(resources_client, arguments):
    async with resources_client(with_mcp=True) as client:
        answer = await call(client, "increment_counter", arguments, await open_session(client))
    assert "Invalid tool call arguments" in answer["result"]["structuredContent"]["error"]


async def test_a_foreign_web_page_is_rejected(resources_client):
    async with resources_client(with_mcp=True) as client:
        foreign = await client.post("/mcp", json=message("ping"), headers={"origin": "http://evil.test"})
        own = await client.post("/mcp", json=message("ping"), headers={"origin": "http://gym.test"})
    assert (foreign.status_code, own.status_code) == (403, 200)


async def test_half_a_surrogate_pair_in_the_arguments_gets_a_response(resources_client):
    async with resources_client(with_mcp=True) as client:
        headers = {TOKEN: await open_session(client)}
        sent = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"spell","arguments":{"a":"\\ud800"}}}'
        answer = await client.post("/mcp", content=sent, headers=headers)
    assert "Invalid tool call arguments" in answer.json()["result"]["structuredContent"]["error"]
