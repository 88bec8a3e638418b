// graphile-worker in its default, crash-safe mode: no-op jobs, ten at a time.
import { Logger, makeWorkerUtils, run } from "graphile-worker";
import pg from "pg";

const [url, jobs] = [process.argv[2], Number(process.argv[3])];
const utils = await makeWorkerUtils({ connectionString: url });
await utils.migrate();
await utils.release();
const client = new pg.Client(url);
await client.connect();
await client.query(
  "select graphile_worker.add_job('noop', '{}'::json) from generate_series(1, $1)",
  [jobs],
);
await client.end();
let done = 0;
let began = 0;
let finish;
const finished = new Promise((resolve) => (finish = resolve));
const noop = () => {
  if (done === 0) began = performance.now();
  if (++done === jobs) finish((performance.now() - began) / 1000);
};
const logger = new Logger(() => () => {});
const runner = await run({
  connectionString: url,
  concurrency: 10,
  maxPoolSize: 10,
  taskList: { noop },
  logger,
});
const seconds = await finished;
await runner.stop();
console.log(JSON.stringify({ jobs: done, seconds }));
process.exit(0);
