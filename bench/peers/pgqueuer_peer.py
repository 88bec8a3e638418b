"""pgqueuer: no-op jobs, dequeued by the batch."""

import asyncio
import json
import sys
import time

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.types import QueueExecutionMode


async def main(url: str, jobs: int, batch: int) -> None:
    connection = await asyncpg.connect(url)
    queuer = PgQueuer(AsyncpgDriver(connection))
    await queuer.qm.queries.install()
    await queuer.qm.queries.enqueue(["noop"] * jobs, [None] * jobs, [0] * jobs)
    times: list[float] = []

    @queuer.entrypoint("noop")
    async def noop(_job: object) -> None:
        times.append(time.perf_counter())

    await queuer.run(batch_size=batch, mode=QueueExecutionMode.drain)
    print(json.dumps({"jobs": len(times), "seconds": times[-1] - times[0]}))  # noqa: T201


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
