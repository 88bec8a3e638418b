"""awa: no-op jobs, up to a batch at a time."""

import asyncio
import json
import sys
import time
from dataclasses import dataclass

import awa


@dataclass
class Noop:
    number: int


async def main(url: str, jobs: int, batch: int) -> None:
    client = awa.AsyncClient(url)
    await client.migrate()
    times: list[float] = []
    finished = asyncio.Event()

    @client.task(Noop, queue="noop")
    async def noop(_job: object) -> None:
        times.append(time.perf_counter())
        if len(times) >= jobs:
            finished.set()

    for sent in range(0, jobs, 1000):
        some = [Noop(number=n) for n in range(sent, min(sent + 1000, jobs))]
        await client.insert_many_copy(some, queue="noop")
    await client.start([("noop", batch)])
    await finished.wait()
    await client.shutdown()
    await client.close()
    print(json.dumps({"jobs": len(times), "seconds": times[-1] - times[0]}))  # noqa: T201


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
