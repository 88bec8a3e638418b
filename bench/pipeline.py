"""One event, on one kept connection: ours against pgbench, and against the earlier design.

Ours is `Pipeline.apply`, parsing included, with the shop's route remembered. pgbench is
PostgreSQL's own client: it sends the same statement, prepared, and does nothing else. The earlier
design connects for each event, makes sure of two tables, and writes two upserts.
"""

import json
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import psycopg
import typer
from cryptography.fernet import Fernet
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.json import Jsonb
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import machine, order
from dev.postgres import Server, find_binaries
from shared import bootstrap, db, directory, log, migrate, store
from shared.model import Envelope
from shared.parse import parse
from shared.privacy import Privacy

OF_PGBENCH: Final = 0.85
OF_EARLIER: Final = 7.0
TURNS: Final = 3  # of each client in a round
EARLIER_SHARE: Final = 10  # it gets a tenth of the events, being that much slower

_ORGANIZATION: Final = "bench"
_TPS: Final = re.compile(r"tps = ([0-9.]+) \(without initial connection time\)")

_VARIABLE: Final = re.compile(r"%\((\w+)\)s")

_EMPTY: Final = "truncate shopify_events, shopify_orders, earlier_events, earlier_orders"

_EARLIER_EVENTS: Final = """
create table if not exists earlier_events (
  id bigint generated always as identity primary key,
  event_id text not null, organization_id text not null, shop_domain text not null,
  topic text not null, event_type text not null, resource_type text not null, resource_id text,
  payload jsonb, parsed_payload jsonb, received_at timestamptz not null,
  inserted_at timestamptz not null default now(),
  unique (organization_id, shop_domain, event_id))"""

_EARLIER_ORDERS: Final = """
create table if not exists earlier_orders (
  id bigint generated always as identity primary key,
  organization_id text not null, shop_domain text not null, shopify_id text not null,
  topic text not null, event_type text not null, payload jsonb, parsed_payload jsonb,
  is_deleted boolean not null default false,
  first_seen_at timestamptz not null default now(), last_seen_at timestamptz not null default now(),
  unique (organization_id, shop_domain, shopify_id))"""

_EARLIER_EVENT: Final = """
insert into earlier_events
  (event_id, organization_id, shop_domain, topic, event_type, resource_type, resource_id,
   payload, parsed_payload, received_at)
values (%(event_id)s, %(organization_id)s, %(shop_domain)s, %(topic)s, %(event_type)s,
        %(resource_type)s, %(resource_id)s, %(payload)s, %(parsed)s, %(received_at)s)
on conflict (organization_id, shop_domain, event_id) do update set
  received_at = excluded.received_at"""

_EARLIER_ORDER: Final = """
insert into earlier_orders
  (organization_id, shop_domain, shopify_id, topic, event_type, payload, parsed_payload)
values (%(organization_id)s, %(shop_domain)s, %(resource_id)s, %(topic)s, %(event_type)s,
        %(payload)s, %(parsed)s)
on conflict (organization_id, shop_domain, shopify_id) do update set
  topic = excluded.topic, event_type = excluded.event_type, payload = excluded.payload,
  parsed_payload = excluded.parsed_payload, is_deleted = false, last_seen_at = now()"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Events in a second, one client after the other."""

    pgbench: float
    ours: float
    earlier: float


def pipeline(
    rounds: Annotated[int, typer.Option(min=1, help="The median counts.")] = 5,
    events: Annotated[int, typer.Option(min=100, help="For each client in each turn.")] = 1500,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Compare Pipeline.apply with pgbench and with the earlier design, on one connection."""
    log.setup(level="WARNING", project="")
    err = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        with machine.core_for_servers():
            server = servers.enter_context(Server(Path(folder) / "postgres"))
        bench = _Bench(server, Path(folder), events)
        with Progress(console=err, transient=True) as progress:
            steps = progress.track(range(rounds), description="Measuring")
            measured = [bench.round() for _ in steps]
        report = _report(measured, bench.machine)
        bench.close()
        server.remove()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(report, Console(highlight=False))
    if not report["passed"]:
        raise typer.Exit(1)


class _Bench:
    def __init__(self, server: Server, folder: Path, events: int) -> None:
        self._events = events
        self._core, self._tenant = _prepared(server)
        self._script = folder / "store.sql"
        self._connection = psycopg.connect(self._tenant, autocommit=True)
        self._connection.execute(_EARLIER_EVENTS)
        self._connection.execute(_EARLIER_ORDERS)
        self.machine = machine.describe(self._connection)

    def round(self) -> Round:
        """Turn and turn about, so that whatever else the machine does hits all alike."""
        seconds = {self._pgbench: 0.0, self._ours: 0.0, self._earlier: 0.0}
        for client in list(seconds) * TURNS:
            # Each finds the same: empty tables, and nothing left for a checkpoint to write.
            self._connection.execute(_EMPTY)
            self._connection.execute("checkpoint")
            seconds[client] += client(self._events)
        pgbench, ours, earlier = (TURNS / spent for spent in seconds.values())
        return Round(
            pgbench=pgbench * self._events,
            ours=ours * self._events,
            earlier=earlier * (self._events // EARLIER_SHARE),
        )

    def close(self) -> None:
        self._connection.close()
        self._core.tenants.close()
        self._core.application.close()

    def _ours(self, events: int) -> float:
        return _timed(self._core.pipeline.apply, order.envelopes(events))

    def _earlier(self, events: int) -> float:
        return _timed(self._as_earlier, order.envelopes(events // EARLIER_SHARE))

    def _pgbench(self, events: int) -> float:
        """The same statement with the same values, but for the ids that vary."""
        values = _pgbench_script(self._script, self._core.privacy)
        parts = conninfo_to_dict(self._tenant)
        command = [
            find_binaries() / "pgbench",
            *("-n", "-M", "prepared", "-c", "1", "-t", str(events)),
            *("-f", self._script),
            *(f"-D{name}={value}" for name, value in values.items()),
            *("-h", str(parts["host"]), "-p", str(parts["port"]), "-U", str(parts["user"])),
            str(parts["dbname"]),
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={"PGPASSWORD": str(parts["password"])},
            check=False,
        )
        found = _TPS.search(done.stdout)
        if done.returncode or not found:
            raise RuntimeError(f"pgbench failed:\n{done.stdout}\n{done.stderr}")
        return events / float(found[1])

    def _as_earlier(self, envelope: Envelope) -> None:
        event = parse(envelope)
        body = Jsonb(json.loads(envelope.payload))
        parameters = store.parameters(_ORGANIZATION, envelope, event) | {"payload": body}
        with psycopg.connect(self._tenant) as connection:
            connection.execute(_EARLIER_EVENTS)
            connection.execute(_EARLIER_ORDERS)
            connection.execute(_EARLIER_EVENT, parameters)
            connection.execute(_EARLIER_ORDER, parameters)


def _timed(apply: Callable[[Envelope], object], envelopes: list[Envelope]) -> float:
    began = time.perf_counter()
    for envelope in envelopes:
        apply(envelope)
    return time.perf_counter() - began


def _prepared(server: Server) -> tuple[bootstrap.Core, str]:
    """The parts of a subscriber with one connected shop, and the tenant's database."""
    app, tenant = server.create_database("application"), server.create_database("tenant")
    for url, series in ((app, migrate.Series.APP), (tenant, migrate.Series.TENANT)):
        with db.connect(db.Target(conninfo=url), migrate.LIMITS) as connection:
            migrate.apply(connection, series)
    key = Fernet.generate_key().decode()
    settings = {"APP_DATABASE_URL": app, "CREDENTIAL_KEYS": key, "PRIVACY_HASH_KEY": "b" * 43}
    core = bootstrap.core(settings)
    core.application.run(
        lambda connection: directory.connect_shop(
            connection,
            core.keyring,
            shop_domain=order.SHOP,
            organization_id=_ORGANIZATION,
            target=db.Target(conninfo=make_conninfo(tenant, sslmode="disable")),
        )
    )
    return core, tenant


def _pgbench_script(path: Path, privacy: Privacy) -> dict[str, str]:
    """Writes the store's own statement as pgbench's; returns its variables that do not vary."""
    sample = order.envelopes(1)[0]
    event = parse(sample)
    statement = store.statement(event.table).decode()
    marks = privacy.marks(sample.shop_domain, event)
    values = store.parameters(_ORGANIZATION, sample, event, marks)

    def variable(found: re.Match[str]) -> str:
        return "null" if values[found[1]] is None else f":{found[1]}"

    path.write_text(
        f"\\set event_id random({order.EVENT_IDS}, {10 * order.EVENT_IDS - 1})\n"
        f"\\set resource_id random({order.FIRST_ID}, {order.FIRST_ID + order.RESOURCES - 1})\n"
        + _VARIABLE.sub(variable, statement)
        + ";\n"
    )
    varying = ("event_id", "resource_id")
    return {
        name: _text(value)
        for name, value in values.items()
        if name not in varying and value is not None
    }


def _text(value: Any) -> str:
    match value:
        case bytes():
            return "\\x" + value.hex()
        case _:
            return str(value)


def _report(rounds: list[Round], described: dict[str, str]) -> dict[str, Any]:
    rates = {
        name: statistics.median(getattr(each, name) for each in rounds)
        for name in ("pgbench", "ours", "earlier")
    }
    of_pgbench = statistics.median(each.ours / each.pgbench for each in rounds)
    of_earlier = statistics.median(each.ours / each.earlier for each in rounds)
    return {
        "events_per_second": {name: round(rate) for name, rate in rates.items()},
        "of_pgbench": round(of_pgbench, 3),
        "of_earlier": round(of_earlier, 1),
        "targets": {"of_pgbench": OF_PGBENCH, "of_earlier": OF_EARLIER},
        "passed": of_pgbench >= OF_PGBENCH and of_earlier >= OF_EARLIER,
        "rounds": [
            {"pgbench": round(r.pgbench), "ours": round(r.ours), "earlier": round(r.earlier)}
            for r in rounds
        ],
        "machine": described,
    }


def _show(report: dict[str, Any], out: Console) -> None:
    rates, ours = report["events_per_second"], report["events_per_second"]["ours"]
    table = Table("one connection, 4.4 KB orders", title="Pipeline.apply")
    for column in ("events/s", "µs each", "ours is", "target", ""):
        table.add_column(column, justify="right")
    table.add_row("pgbench -M prepared", *_cells(rates["pgbench"]), *_verdict(report, "of_pgbench"))
    table.add_row("Pipeline.apply, parsing included", *_cells(ours), "", "", "")
    table.add_row("the earlier design", *_cells(rates["earlier"]), *_verdict(report, "of_earlier"))
    out.print(table)
    for name, value in report["machine"].items():
        out.print(f"[dim]{name:<18}[/] {value}")


def _cells(rate: float) -> tuple[str, str]:
    return f"{rate:,.0f}", f"{1e6 / rate:,.0f}"


def _verdict(report: dict[str, Any], name: str) -> tuple[str, str, str]:
    ratio, target = report[name], report["targets"][name]
    verdict = "[green]pass[/]" if ratio >= target else "[red]fail[/]"
    return f"{ratio:.2f} x", f"≥ {target:g} x", verdict
