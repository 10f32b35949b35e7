"""Schedules over HTTP: whose they are, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.server.live import JSON, Live, served

ONE = {"session": "s", "text": "tick", "every_s": 60, "schedule_id": "one"}


def test_a_schedule_is_seen_and_changed_by_its_owner_alone() -> None:
    async def scenario(server: Live) -> None:
        http = server.http
        secrets = {}
        for who, role in (("root", "admin"), ("anna", "user"), ("bert", "user")):
            answer = await http.post("/v1/keys", json={"principal": who, "role": role})
            secrets[who] = {"authorization": f"Bearer {answer.json()['secret']}"}
            http.headers["authorization"] = secrets["root"]["authorization"]
        anna, bert = secrets["anna"], secrets["bert"]
        assert (await http.post("/v1/schedules", json=ONE, headers=anna)).status_code == 201
        assert (await http.post("/v1/schedules", json={**ONE, "every_s": 5}, headers=bert)).status_code == 201
        listed = (await http.get("/v1/schedules", headers=bert)).json()["schedules"]
        assert [(view["principal"], view["every_s"]) for view in listed] == [("bert", 5.0)]
        assert (await http.get("/v1/schedules?all=true", headers=bert)).status_code == 403
        everybody = (await http.get("/v1/schedules?all=true")).json()["schedules"]
        assert [view["principal"] for view in everybody] == ["anna", "bert"]
        assert (await http.delete("/v1/schedules/one", headers=bert)).status_code == 200
        for method, path, body in (
            ("GET", "one", None),
            ("PATCH", "one", {"paused": True}),
            ("POST", "one/run", {}),
            ("DELETE", "one", None),
        ):
            answer = await http.request(method, f"/v1/schedules/{path}", json=body, headers=bert)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_schedule")
        mine = (await http.get("/v1/schedules/one", headers=anna)).json()
        assert (mine["state"], mine["fired"], mine["every_s"]) == ("active", 0, 60.0)
        http.headers["authorization"] = anna["authorization"]
        assert (await http.post("/v1/schedules/one/run", headers=JSON)).status_code == 202
        assert (await http.delete("/v1/schedules/one")).status_code == 200
        await server.end()

    served(scenario)


def test_a_schedule_outlives_the_key_that_made_it_and_an_admin_ends_it() -> None:
    async def scenario(server: Live) -> None:
        http = server.http
        answer = await http.post("/v1/keys", json={"principal": "root", "role": "admin"})
        http.headers["authorization"] = f"Bearer {answer.json()['secret']}"
        made = (await http.post("/v1/keys", json={"principal": "anna"})).json()
        anna = {"authorization": f"Bearer {made['secret']}"}
        assert (await http.post("/v1/schedules", json=ONE, headers=anna)).status_code == 201
        assert (await http.delete(f"/v1/keys/{made['key']['key_id']}")).status_code == 200
        assert (await http.get("/v1/schedules", headers=anna)).status_code == 401
        (view,) = (await http.get("/v1/schedules?all=true")).json()["schedules"]
        assert (view["principal"], view["state"]) == ("anna", "active")
        assert (await http.delete("/v1/schedules/one")).status_code == 404
        for_anna = {"x-holdfast-user": "anna"}
        assert (await http.delete("/v1/schedules/one", headers=for_anna)).status_code == 200
        assert (await http.get("/v1/schedules?all=true")).json() == {"schedules": []}

    served(scenario)


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"session": "s", "text": "x"}, 422, "invalid_schedule"),
    ({**ONE, "cron": "* * * * *"}, 422, "invalid_schedule"),
    ({**ONE, "every_s": 0.5}, 422, "invalid_schedule"),
    ({**ONE, "every_s": "5"}, 422, "invalid_request"),
    ({**ONE, "every_s": 1e300}, 422, "invalid_schedule"),
    ({**ONE, "max_runs": 1.5}, 422, "invalid_request"),
    ({**ONE, "max_runs": 0}, 422, "invalid_schedule"),
    ({**ONE, "jitter_s": 61}, 422, "invalid_schedule"),
    ({**ONE, "timezone": "Europe/Berlin"}, 422, "invalid_schedule"),
    ({**ONE, "miss": "sometimes"}, 422, "invalid_schedule"),
    ({**ONE, "overlap": "sometimes"}, 422, "unknown_policy"),
    ({**ONE, "agent": "nobody"}, 404, "unknown_agent"),
    ({**ONE, "session": "a/b"}, 422, "invalid_key"),
    ({**ONE, "schedule_id": "a/b"}, 422, "invalid_key"),
    ({**ONE, "schedule_id": ""}, 422, "invalid_request"),
    ({**ONE, "text": "x" * 100_001}, 422, "invalid_request"),
    ({**ONE, "more": 1}, 422, "invalid_request"),
    ({"session": "s", "text": "x", "cron": "0 0 30 2 *"}, 422, "invalid_schedule"),
    ({"session": "s", "text": "x", "cron": "* * */20 * 1L"}, 422, "invalid_schedule"),
    ({"session": "s", "text": "x", "cron": "0 0 * * *", "timezone": "../../etc/passwd"}, 422, "invalid_schedule"),
    ({"session": "s", "text": "x", "cron": "0 " * 500}, 422, "invalid_request"),
]


def test_what_cannot_be_a_schedule_is_refused_with_a_code_and_a_next_step() -> None:
    async def scenario(server: Live) -> None:
        for body, status, code in REFUSED:
            answer = await server.http.post("/v1/schedules", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (status, code), body
            assert error["message"]
        assert (await server.http.get("/v1/schedules")).json() == {"schedules": []}

    served(scenario)


def test_bounds_wrong_addresses_and_a_host_that_drains() -> None:
    async def scenario(server: Live) -> None:
        http = server.http
        answers = await asyncio.gather(
            *(http.post("/v1/schedules", json={**ONE, "schedule_id": str(n)}) for n in range(5))
        )
        assert sorted(answer.status_code for answer in answers) == [201, 201, 201, 429, 429]
        assert (await http.put("/v1/schedules/0", json=ONE)).status_code == 405
        assert (await http.get("/v1/schedules/0/run")).status_code == 405
        assert (await http.get("/v1/schedules?limit=0")).status_code == 422
        assert (await http.get("/v1/schedules?session=s&all=true")).status_code == 422
        assert (await http.patch("/v1/schedules/0", json={})).status_code == 422
        assert (await http.patch("/v1/schedules/0", content=b"paused=true")).status_code == 415
        await http.post("/v1/drain", headers=JSON)
        assert (await http.post("/v1/schedules", json=ONE)).status_code == 503
        there = (await http.get("/v1/schedules")).json()["schedules"]
        assert (await http.post(f"/v1/schedules/{there[0]['schedule_id']}/run", headers=JSON)).status_code == 503
        await server.end()

    served(scenario, principal_schedules=3)
