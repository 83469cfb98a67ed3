"""The example service under uvicorn: cold, warm, with two workers, stopped during a tune, and started again."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import anyio
import httpx
import pytest
from support.web_service import WARM_ROWS, WebService

PATIENCE_S = 60.0  # how long anything is waited for before the test is called broken
CLIENTS, REQUESTS = 8, 6
ROWS = (16, 24, 32)
GRACE_S = 5.0  # of the selector, and once more of the server


def client(service: WebService) -> httpx.AsyncClient:
    # A connection for each request, so that either worker may take it.
    transport = httpx.AsyncHTTPTransport(uds=str(service.socket), limits=httpx.Limits(max_keepalive_connections=0))
    return httpx.AsyncClient(transport=transport, base_url="http://service", timeout=PATIENCE_S)


async def load(http: httpx.AsyncClient, rows: tuple[int, ...] = ROWS) -> list[dict]:
    """Request all shapes repeatedly from many concurrent clients, and return the answers."""
    answers = []

    async def ask(first: int) -> None:
        for number in range(REQUESTS):
            size = rows[(first + number) % len(rows)]
            answer = (await http.post(f"/scale/{size}")).raise_for_status().json()
            assert answer["sum"] == 2 * 4 * size
            answers.append(answer)

    async with anyio.create_task_group() as tasks:
        for first in range(CLIENTS):
            tasks.start_soon(ask, first)
    return answers


async def until_warm(http: httpx.AsyncClient) -> list[dict]:
    """Repeat the load until every answer comes from memory, in any worker."""
    answers = await load(http)
    while any(answer["tier"] != "memory" for answer in answers):
        answers = await load(http)
    return answers


async def until_ready(http: httpx.AsyncClient) -> dict:
    status = None
    while status in (None, 503):
        with suppress(httpx.ConnectError):  # a worker has started a moment before it listens
            answer = await http.get("/readyz")
            assert (await http.get("/livez")).status_code == 200
            status = answer.status_code
    return answer.json()


async def ask_until_tuned(service: WebService, http: httpx.AsyncClient, rows: int, tuners: int = 1) -> None:
    """Request a search until the given number of workers have begun it."""
    while len(service.tuners(f"search x=f32[{rows},4]")) < tuners:
        with suppress(httpx.TransportError):  # a timeout too: a killed worker may just have accepted it
            await http.post(f"/search/{rows}", timeout=5.0)


async def kill_a_tuning_worker(service: WebService, http: httpx.AsyncClient) -> None:
    """Kill a worker that holds the key's claim and the device during a tune; another worker takes the tune over."""
    await ask_until_tuned(service, http, rows=16)
    (first,) = service.tuners("search x=f32[16,4]")
    os.kill(first, signal.SIGKILL)
    await ask_until_tuned(service, http, rows=16, tuners=2)
    assert service.tuners("search x=f32[16,4]")[1] != first


@pytest.mark.timeout(240)
def test_two_workers_share_their_tunes_and_lose_nothing_when_they_are_stopped(tmp_path: Path):
    """Under load, each key is tuned once over both workers; stored configs survive a stop during a tune."""
    keys = {f"scale x=f32[{rows},4]": 1 for rows in (WARM_ROWS, *ROWS)}

    async def serve_cold(service: WebService) -> None:
        with anyio.fail_after(PATIENCE_S):
            async with client(service) as http:
                assert await until_ready(http) == {"status": "ready", "total": 1, "settled": 1}
                cold = await load(http)
                assert {answer["tier"] for answer in cold} <= {"heuristics", "persistent", "memory"}  # nobody waited
                warm = await until_warm(http)
                assert {answer["worker"] for answer in warm} <= set(service.workers)
                assert service.tunes("ended") == keys
                await kill_a_tuning_worker(service, http)

    async def serve_again(service: WebService) -> None:
        with anyio.fail_after(PATIENCE_S):
            async with client(service) as http:
                await until_ready(http)
                assert {answer["tier"] for answer in await load(http)} == {"memory"}

    with WebService(tmp_path, workers=2) as service:
        anyio.run(serve_cold, service)
        service.started()  # in the place of the killed worker
        start = time.monotonic()
        code, said = service.terminate()
        assert time.monotonic() - start < 2 * GRACE_S + 5
        assert code in (0, -15), said
        assert "Traceback" not in said
        ended = service.tunes("ended")
        assert ended == keys  # the search was cut short

    with WebService(tmp_path, workers=1) as service:
        anyio.run(serve_again, service, backend="trio")  # the client's loop; uvicorn's is asyncio
        service.terminate()
        assert service.tunes("ended") == ended  # nothing was tuned again
