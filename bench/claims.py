"""Claims and verdicts by the hundred: over a long ledger, against a window, and against peers.

The claim is the product's own, as `shared.leases` sends it. The verdict is written here: one
fenced UPDATE for a whole batch, without attempt rows, as the peers complete their jobs. The product
gives each replay its verdict by itself, because a replay lies between any two of them.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Final
from uuid import UUID, uuid4

import psycopg
import typer
from psycopg import sql
from psycopg.rows import scalar_row
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import machine
from bench.peers import PEERS, Peer, PeerError
from dev.postgres import Server
from shared import db, leases, log, migrate

OF_SHORT: Final = 0.55
OF_WINDOW: Final = 20.0

SHORT: Final = 1_000
BATCH: Final = 100
RACE_BATCH: Final = 500  # ours and the peers', where they have such a thing
VERDICTS_AT_ONCE: Final = 3  # with the claims four connections, as pg-boss has here

# Of a long ledger a tenth is due, over 500 tenants; of a short one everything, over 50.
_FILL: Final = """
insert into subscriber_subscriberfailedevent
  (event_id, payload_sha256, source, topic, event_type, shop_domain, organization_id, envelope,
   payload, error_type, error_class, error_code, error_message, traceback, fingerprint, status,
   resolved_at, resolution, created_at)
select 'event-' || n, '\\x00', 'pubsub', 'orders/create', 'create', 'shop-' || tenant,
       'org-' || lpad(tenant::text, 4, '0'), '{}', '\\x7b7d', 'RuntimeError', 'transient',
       'unexpected', 'broken', 'broken', 'f',
       case when is_due then 'pending' else 'resolved' end,
       case when not is_due then now() end, case when not is_due then 'replayed' end,
       now() - make_interval(secs => n %% 86400)
from (select n, n %% %(tenants)s as tenant, n / %(tenants)s %% %(one_in)s = 0 as is_due
      from generate_series(0, %(rows)s - 1) n) g"""

_UNDISTURBED: Final = """
alter table subscriber_subscriberfailedevent set (autovacuum_enabled = off)"""

_VERDICT: Final = """
update subscriber_subscriberfailedevent f
set status = case when v.ok then 'resolved'
                  when f.retry_count + 1 >= f.max_retries then 'failed' else 'pending' end,
    resolved_at = case when v.ok then now() end, resolution = case when v.ok then 'replayed' end,
    retry_count = f.retry_count + case when v.ok then 0 else 1 end,
    next_retry_at = case when not v.ok and f.retry_count + 1 < f.max_retries
                         then now() + interval '2 minutes' end,
    last_attempted_at = now(), updated_at = now(), lease_token = null, leased_until = null
from unnest(%(ids)s::bigint[], %(oks)s::boolean[]) as v(id, ok)
where f.id = v.id and f.status = 'pending' and f.lease_token = %(token)s
returning f.id"""

# What is usually written for fair turns: number all that is due, take the lowest numbers.
_WINDOW: Final = """
with numbered as (
  select id, row_number() over (partition by tenant order by due_at, id) as turn
  from subscriber_subscriberfailedevent
  where status = 'pending' and lease_token is null and due_at <= now()
), locked as materialized (
  select f.id from (select id from numbered order by turn, id limit %(limit)s) p
  join subscriber_subscriberfailedevent f using (id)
  where f.status = 'pending' and f.lease_token is null and f.due_at <= now()
  for update of f skip locked
)
update subscriber_subscriberfailedevent f
set lease_token = %(token)s, updated_at = now(),
    leased_until = now() + make_interval(secs => %(lease_seconds)s)
from locked l where f.id = l.id
returning f.id"""


def claims(  # noqa: PLR0917 - options, given by name
    rows: Annotated[int, typer.Option(min=10_000, help="Of the long ledger.")] = 1_000_000,
    batches: Annotated[int, typer.Option(min=10, help="In each round.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved; the median counts.")] = 5,
    peers: Annotated[bool, typer.Option(help="Race other job queues, if they install.")] = True,
    jobs: Annotated[
        int, typer.Option(min=RACE_BATCH, help="For each peer in each round.")
    ] = 10_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Claim and complete by the hundred, on one connection: rows in a second."""
    log.setup(level="WARNING", project="")
    with tempfile.TemporaryDirectory() as name, Server(Path(name) / "postgres") as server:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            report = _measured(server, progress, rows, batches, rounds)
            report["peers"] = _raced(server, progress, Path(name), rounds, jobs) if peers else {}
        server.remove()
    _judge(report)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(report, Console(highlight=False))
    if not report["passed"]:
        raise typer.Exit(1)


class _Ledger:
    """A failure ledger in a database of its own, and one connection to it as a pool makes it."""

    def __init__(self, server: Server, name: str, rows: int, *, tenants: int, one_in: int) -> None:
        target = db.Target(conninfo=server.create_database(name))
        with db.connect(target, migrate.LIMITS) as connection:
            migrate.apply(connection, migrate.Series.APP)
            connection.execute(_UNDISTURBED)
        limits = db.Limits(statement=600)
        self.connection = db.connect(target, limits)
        self._values = {"rows": rows, "tenants": tenants, "one_in": one_in}
        self._pool = db.Pool(target, size=1 + VERDICTS_AT_ONCE, limits=limits)
        self._leases = leases.Leases(self._pool, lease_seconds=120)
        self.refill()

    def refill(self) -> None:
        """The rows are as new as rows that are due mostly are: no vacuum has seen them."""
        self.connection.execute("truncate subscriber_subscriberfailedevent cascade")
        self.connection.execute(_FILL, self._values)
        self.connection.execute("analyze subscriber_subscriberfailedevent")
        self.connection.execute("checkpoint")

    def rate(self, batches: int) -> float:
        """Rows in a second by the product's claim."""
        return self._rate(batches, lambda token: self._claimed(token, BATCH))

    def race_rate(self, jobs: int) -> float:
        """As in a run: the next rows are claimed while verdicts are given, on other connections."""
        began = time.perf_counter()
        with ThreadPoolExecutor(VERDICTS_AT_ONCE) as threads:
            verdicts = []
            while ids := self._claimed(token := uuid4(), RACE_BATCH):
                verdicts.append(threads.submit(self._verdict, token, ids))
            done = sum(verdict.result() for verdict in verdicts)
        if done != jobs:
            raise RuntimeError(f"only {done} of {jobs} rows came to their verdict")
        return done / (time.perf_counter() - began)

    def window_rate(self, batches: int) -> float:
        """Rows in a second by a window over all that is due."""
        return self._rate(batches, self._by_window)

    def _claimed(self, token: UUID, limit: int) -> list[int]:
        return [claim.id for claim in self._leases.claim(token, limit)]

    def _verdict(self, token: UUID, ids: list[int]) -> int:
        values = {"ids": ids, "oks": [True] * len(ids), "token": token}
        return len(self._pool.fetch(scalar_row, _VERDICT, values))

    def _by_window(self, token: UUID) -> list[int]:
        values = {"token": token, "lease_seconds": 120, "limit": BATCH}
        return self._pool.fetch(scalar_row, _WINDOW, values)

    def _rate(self, batches: int, claim: Callable[[UUID], list[int]]) -> float:
        done = 0
        began = time.perf_counter()
        for _ in range(batches):
            token = uuid4()
            done += self._verdict(token, claim(token))
        seconds = time.perf_counter() - began
        if done != batches * BATCH:
            raise RuntimeError(f"only {done} of {batches * BATCH} rows were there to be claimed")
        return done / seconds

    def close(self) -> None:
        self._pool.close()
        self.connection.close()


def _measured(
    server: Server, progress: Progress, rows: int, batches: int, rounds: int
) -> dict[str, Any]:
    filling = progress.add_task(f"Filling a ledger with {rows:,} rows", total=None)
    long = _Ledger(server, "long", rows, tenants=500, one_in=10)
    short = _Ledger(server, "short", SHORT, tenants=50, one_in=1)
    progress.remove_task(filling)
    described = machine.describe(long.connection)
    figures: dict[str, list[float]] = {"short": [], "long": [], "window": []}
    for ledger in (short, long):  # the first statements are not prepared yet
        ledger.rate(SHORT // BATCH)
    for _ in progress.track(range(rounds), description="Measuring"):
        figures["short"].append(_short_rate(short, batches))
        if _due(long.connection) < (batches + 10) * BATCH:
            long.refill()
        figures["long"].append(long.rate(batches))
        figures["window"].append(long.window_rate(5))
    long.close()
    short.close()
    return {
        "rows": rows,
        "rows_per_second": {name: round(statistics.median(of)) for name, of in figures.items()},
        "of_short": _ratio(figures["long"], figures["short"]),
        "of_window": _ratio(figures["long"], figures["window"]),
        "rounds": {name: [round(rate) for rate in of] for name, of in figures.items()},
        "machine": described,
    }


def _short_rate(short: _Ledger, batches: int) -> float:
    """Over as many fillings as it takes; only claims and verdicts count."""
    once = SHORT // BATCH
    rates = []
    for _ in range(max(1, batches // once)):
        short.refill()
        rates.append(short.rate(once))
    return statistics.harmonic_mean(rates)


def _due(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute(
        "select count(*) from subscriber_subscriberfailedevent where status = 'pending'"
    ).fetchone()
    return row[0] if row else 0


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)


def _raced(
    server: Server, progress: Progress, folder: Path, rounds: int, jobs: int
) -> dict[str, Any]:
    """Ours and each peer, round after round, on the same server, every time in a new database."""
    found: dict[str, Any] = {"ours": []}
    for peer in progress.track(PEERS, description="Installing peers"):
        try:
            peer.install(folder / peer.script)
            found[peer.name] = []
        except PeerError as error:
            found[peer.name] = str(error)
    for number in progress.track(range(rounds), description="Racing"):
        ours = _Ledger(server, f"ours_{number}", jobs, tenants=50, one_in=1)
        found["ours"].append(round(ours.race_rate(jobs)))
        ours.close()
        for place, peer in enumerate(PEERS):
            try:
                if isinstance(found[peer.name], list):
                    name = f"peer_{place}_{number}"
                    found[peer.name].append(_race(server, folder, peer, name, jobs))
            except PeerError as error:
                found[peer.name] = str(error)
    return {
        name: round(statistics.median(rates)) if isinstance(rates, list) else rates
        for name, rates in found.items()
    }


def _race(server: Server, folder: Path, peer: Peer, name: str, jobs: int) -> float:
    """The peer's rate in a database that is gone afterwards; raises PeerError."""
    url = server.create_database(name)
    try:
        return peer.rate(folder / peer.script, url, jobs, RACE_BATCH)
    finally:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            drop = sql.SQL("drop database {} with (force)")
            connection.execute(drop.format(sql.Identifier(name)))


def _judge(report: dict[str, Any]) -> None:
    peers = report["peers"]
    fastest = max((rate for name, rate in peers.items() if _is_peer(name, rate)), default=0)
    report["targets"] = {"of_short": OF_SHORT, "of_window": OF_WINDOW}
    report["passed"] = (
        report["of_short"] >= OF_SHORT
        and report["of_window"] >= OF_WINDOW
        and peers.get("ours", 0) >= fastest
    )


def _is_peer(name: str, rate: Any) -> bool:
    return name != "ours" and isinstance(rate, int)


def _show(report: dict[str, Any], out: Console) -> None:
    rates = report["rows_per_second"]
    table = Table(f"{BATCH} rows at a time, one connection", title="Claim and verdict")
    for column in ("rows/s", "ours is", "target", ""):
        table.add_column(column, justify="right")
    table.add_row(f"a ledger of {report['rows']:,} rows, a tenth due", f"{rates['long']:,}")
    table.add_row(f"a ledger of {SHORT:,} rows", f"{rates['short']:,}", *_verdict(report, "short"))
    table.add_row(
        "row_number() over all that is due", f"{rates['window']:,}", *_verdict(report, "window")
    )
    out.print(table)
    if report["peers"]:
        out.print(_race_table(report["peers"]))
    for name, value in report["machine"].items():
        out.print(f"[dim]{name:<18}[/] {value}")


def _verdict(report: dict[str, Any], name: str) -> tuple[str, str, str]:
    ratio, target = report[f"of_{name}"], report["targets"][f"of_{name}"]
    verdict = "[green]pass[/]" if ratio >= target else "[red]fail[/]"
    return f"{ratio:.2f} ×", f"≥ {target:g} ×", verdict  # noqa: RUF001


def _race_table(peers: dict[str, Any]) -> Table:
    table = Table(f"no-op jobs, {RACE_BATCH} at a time", title="Against peers, on the same server")
    for column in ("jobs/s", "ours is", ""):
        table.add_column(column, justify="right")
    ours = peers["ours"]
    table.add_row("Hookledger: claim, batched verdict", f"{ours:,}")
    for name, rate in peers.items():
        if _is_peer(name, rate):
            verdict = "[green]pass[/]" if ours >= rate else "[red]fail[/]"
            table.add_row(name, f"{rate:,}", f"{ours / rate:.1f} ×", verdict)  # noqa: RUF001
        elif name != "ours":
            table.add_row(name, "-", "", f"[dim]left out: {rate}[/]")
    return table
