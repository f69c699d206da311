"""A resources server as a program, with the HTTP contract of NeMo Gym's `SimpleResourcesServer`: a counter."""

from __future__ import annotations

import json
import os
import secrets
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response

name = os.environ["NEMO_GYM_CONFIG_PATH"]
config = json.loads(os.environ["NEMO_GYM_CONFIG_DICT"])
(own,) = config[name]["resources_servers"].values()
app = FastAPI()
counts: dict[str, int] = {}


@app.post("/seed_session")
async def seed_session(response: Response) -> dict[str, Any]:
    session = secrets.token_hex(8)
    counts[session] = 0
    response.set_cookie("session", session)
    return {}


@app.post("/add")
async def add(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    counts[request.cookies["session"]] += body["amount"]
    return {"count": counts[request.cookies["session"]], "unit": own["unit"]}


@app.post("/verify")
async def verify(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    right = counts[request.cookies["session"]] == body["total"]
    servers = sorted(key for key in config if key != "dry_run")
    return {**body, "reward": float(right), "servers": servers, "entrypoint": own["entrypoint"]}


@app.post("/aggregate_metrics")
async def aggregate_metrics(body: dict[str, Any]) -> dict[str, Any]:
    return {"group_level_metrics": [], "agent_metrics": {"seen": len(body["verify_responses"])}, "key_metrics": {}}


if __name__ == "__main__":
    uvicorn.run(app, host=own["host"], port=own["port"], log_level="warning")
