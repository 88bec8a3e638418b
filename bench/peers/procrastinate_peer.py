"""procrastinate: no-op jobs, ten at a time."""

import asyncio
import json
import sys
import time

import procrastinate


async def main(url: str, jobs: int) -> None:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))
    times: list[float] = []

    @app.task(name="noop")
    async def noop() -> None:
        times.append(time.perf_counter())

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        await noop.batch_defer_async(*[{} for _ in range(jobs)])
        await app.run_worker_async(concurrency=10, wait=False, install_signal_handlers=False)
    print(json.dumps({"jobs": len(times), "seconds": times[-1] - times[0]}))  # noqa: T201


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
