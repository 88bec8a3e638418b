// pg-boss: no-op jobs, fetched and completed by the batch, four at once.
import PgBoss from "pg-boss";

const [url, jobs, batch] = [process.argv[2], Number(process.argv[3]), Number(process.argv[4])];
const boss = new PgBoss({ connectionString: url, supervise: false, schedule: false });
await boss.start();
await boss.createQueue("noop");
for (let sent = 0; sent < jobs; sent += 1000) {
  await boss.insert(Array.from({ length: Math.min(1000, jobs - sent) }, () => ({ name: "noop" })));
}
let done = 0;
const began = performance.now();
const work = async () => {
  for (;;) {
    const fetched = await boss.fetch("noop", { batchSize: batch });
    if (!fetched || fetched.length === 0) return;
    await boss.complete("noop", fetched.map((job) => job.id));
    done += fetched.length;
  }
};
await Promise.all([work(), work(), work(), work()]);
const seconds = (performance.now() - began) / 1000;
await boss.stop({ graceful: false });
console.log(JSON.stringify({ jobs: done, seconds }));
process.exit(0);
