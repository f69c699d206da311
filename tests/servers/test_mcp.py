"""The tools of an episode over the Model Context Protocol."""

from __future__ import annotations

import pytest

from gymsdk import responses

TOKEN = "X-NeMo-Gym-Session-Token"
ROW = {"responses_create_params": {"input": "add 3"}, "initial_count": 3, "expected_count": 6}


@pytest.fixture
async def client(resources_client):
    async with resources_client(with_mcp=True) as client:
        yield client


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


async def test_opening_a_session_returns_the_access_to_its_tools(client):
    access = (await client.post("/seed_session", json=ROW)).json()["mcp"]
    ids = {"episode_id": {"rollout_id": "r", "attempt": 0}, "task_id": {"taskset": "t", "task_id": "1"}}
    typed = {"resources_session_id": "s", **ids, "task_data": {"initial_count": 3}}
    other = (await client.post("/seed_session", json=typed)).json()["resources_tools"]
    assert (access["server_name"], access["url_path"], access["transport"]) == ("counter", "/mcp", "http")
    assert access["headers"].keys() == other["headers"].keys() == {TOKEN}
    assert access["headers"] != other["headers"]
    # The key is not the cookie.
    client.cookies.clear()
    headers = {"cookie": f"ResourcesServer___counter={access['headers'][TOKEN]}"}
    assert (await client.post("/spell", json={}, headers=headers)).status_code == 409


async def test_a_client_initializes(client):
    opened = await client.post("/mcp", json=message("initialize", protocolVersion="2025-06-18", capabilities={}))
    noted = await client.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"})
    newest = await client.post("/mcp", json=message("initialize", protocolVersion="1999"))
    ping = await client.post("/mcp", json=message("ping", "a"))
    streams = [(await client.request(method, "/mcp")).status_code for method in ("GET", "DELETE")]
    origins = ("http://evil.test", "http://gym.test")
    pages = [await client.post("/mcp", json=message("ping"), headers={"origin": origin}) for origin in origins]
    assert opened.json()["result"]["protocolVersion"] == "2025-06-18"
    assert opened.json()["result"]["capabilities"] == {"tools": {"listChanged": False}}
    assert (noted.status_code, noted.content) == (202, b"")
    assert newest.json()["result"]["protocolVersion"] == "2025-11-25"
    assert ping.json() == {"jsonrpc": "2.0", "id": "a", "result": {}}
    assert (streams, [page.status_code for page in pages]) == ([405, 405], [403, 200])


async def test_offered_tools_are_listed(client):
    row = {**ROW, "responses_create_params": {"input": "x", "tools": [{"type": "function", "name": "spell"}]}}
    headers = {TOKEN: await open_session(client, row)}
    mine = (await client.post("/mcp", json=message("tools/list"), headers=headers)).json()["result"]["tools"]
    every = (await client.post("/mcp", json=message("tools/list"))).json()["result"]["tools"]
    assert mine == [{"name": "spell", "description": "", "inputSchema": {"type": "object"}}]
    assert every[0]["inputSchema"]["required"] == ["count"]
    assert "verify" in {tool["name"] for tool in every}


async def test_a_tool_is_called_in_the_sessions_episode(client):
    prefixed = responses.build_function_call("mcp__counter__increment_counter", {"count": 3}, "c")
    body = {**ROW, "response": {"output": [prefixed, responses.build_function_call_output("c", "x")]}}
    # Without a session, the call is replayed under the tool's own name.
    assert (await client.post("/verify", json=body)).json()["final"] == 6
    key = await open_session(client)
    added = await call(client, "increment_counter", {"count": 3}, key)
    spelt = await call(client, "spell", None, key)
    judged = (await client.post("/verify", json=body)).json()
    content = [{"type": "text", "text": '{"success":true}'}]
    assert added["result"] == {"content": content, "structuredContent": {"success": True}, "isError": False}
    assert spelt["result"] == {"content": [{"type": "text", "text": "it is 6"}], "isError": False}
    assert (judged["final"], judged["reward"]) == (6, 1.0)
    assert judged["response"]["output"][0]["name"] == "mcp__counter__increment_counter"
    # A tool named like an endpoint can be called.
    answer = await call(client, "verify", {}, await open_session(client))
    assert answer["result"]["content"] == [{"type": "text", "text": "a tool"}]


async def test_a_call_without_a_session_or_of_a_tool_that_fails_is_an_error_the_model_can_read(client):
    missing = [{"type": "text", "text": f"Missing {TOKEN} for Gym MCP tool call."}]
    for key in ("", "forged"):
        assert (await call(client, "spell", {}, key))["result"] == {"content": missing, "isError": True}
    result = (await call(client, "stumble", {}, await open_session(client)))["result"]
    assert result["isError"] is True
    assert result["content"][0]["text"].startswith("HTTP 503 from POST /stumble: tool 'stumble'")


async def test_an_invalid_message_gets_an_error_code_and_the_tool_answers_wrong_arguments(client):
    for sent, code in (
        (message("seed_session"), -32601),
        ({"jsonrpc": "2.0", "id": 1}, -32601),
        ({**message("tools/list"), "params": [1]}, -32602),
        (message("tools/call"), -32602),
    ):
        answer = await client.post("/mcp", json=sent)
        assert (answer.status_code, answer.json()["error"]["code"]) == (200, code), sent
    key = await open_session(client)
    assert (await call(client, "seed_session", {}, key))["error"]["code"] == -32602
    answers = [
        await call(client, "increment_counter", arguments, key) for arguments in ([1], 1, "x", {"count": "many"})
    ]
    sent = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"spell","arguments":{"a":"\\ud800"}}}'
    answers.append((await client.post("/mcp", content=sent, headers={TOKEN: key})).json())
    for answer in answers:
        assert "Invalid tool call arguments" in answer["result"]["structuredContent"]["error"]
