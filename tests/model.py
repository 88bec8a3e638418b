"""A model of the whole path: what was sent, what may happen, and what must hold whatever happens.

Every action is deterministic, so that a sequence of them can be shrunk and kept: deliveries and
retry runs are tasks, each in a thread of its own, of which only one moves at a time, from gate to
gate. A gate is the end of a step that changes something. Between any two, anything else may happen:
another task, an outage, the passing of time, or the task's death.
"""

import base64
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, LiteralString, NamedTuple, Self

import psycopg
from cryptography.fernet import Fernet
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from dev.postgres import Server
from shared import bootstrap, db, directory, migrate, signature
from shared import envelope as envelopes
from shared.errors import PublishError, TenantPaused
from shared.leases import Verdict
from shared.message import Message
from shared.outbox import Outbox
from shared.receive import Receiver
from shared.replay import Replayer, Request
from tests.world import NOW

SHOPS: Final = {
    "acme.myshopify.com": "acme",
    "acme-two.myshopify.com": "acme",
    "other.myshopify.com": "other",
    "late.myshopify.com": "other",  # connected while the model runs, or never
}
LATE: Final = "late.myshopify.com"
TABLES: Final = {
    "orders/create": "shopify_orders",
    "orders/updated": "shopify_orders",
    "orders/delete": "shopify_orders",
    "inventory_levels/update": "shopify_inventory_levels",
    "inventory_levels/disconnect": "shopify_inventory_levels",
    "orders/edited": None,
    "brand_new/topic": None,
}
DELETIONS: Final = ("orders/delete", "inventory_levels/disconnect")
CLOCKED: Final = ("orders/create", "orders/updated", "inventory_levels/update")
STORABLE: Final = ("good", "idless", "nul")
CONNECTION_ERRORS: Final = ("OperationalError", "CannotConnectNow", "AdminShutdown")
MAX_RETRIES: Final = 2
SECRET: Final = "shhh"
LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)
GATES: Final = frozenset(
    {
        *("run_started", "reap", "without_canary", "claim", "start", "apply", "probe", "resolve"),
        *("reschedule", "release", "unavailable", "answered", "run_finished", "record"),
        "publish",
    }
)

_TERMINATE: Final = """
select pg_terminate_backend(pid) from pg_stat_activity
where datname = %s and application_name = 'hookledger'"""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What Shopify sends, but for its id. Times are minutes; None: it has none."""

    shop: str = "acme.myshopify.com"
    topic: str = "orders/create"
    resource: int = 1
    clock: int | None = 0
    triggered: int | None = 0
    published: int | None = 0
    kind: str = "good"
    native: bool = False
    named: bool = True  # has a webhook id

    @property
    def resource_id(self) -> str | None:
        """The id that the ledger must have found."""
        if self.kind == "idless" or self.topic == "orders/edited":
            return None
        return f"{self.resource}:7" if "inventory" in self.topic else str(self.resource)

    def body(self, note: int) -> bytes:
        """The body; `note` makes it different from all others."""
        fields: dict[str, Any] = {"id": self.resource, "note": note}
        if "inventory" in self.topic:
            fields = {"inventory_item_id": self.resource, "location_id": 7, "note": note}
        if self.clock is not None and self.topic in CLOCKED:
            fields["updated_at"] = minute(self.clock).isoformat()
        match self.kind:
            case "idless":
                return json.dumps({"note": note}).encode()
            case "nul":
                return json.dumps({**fields, "text": "\x00"}).encode()
            case "overflow":
                return json.dumps(fields)[:-1].encode() + b', "n": 1e200000}'
            case "stranger":
                return json.dumps({**fields, "myshopify_domain": "x.myshopify.com"}).encode()
            case "text":
                return b"not json %d" % note
        return json.dumps(fields).encode()


class Identity(NamedTuple):
    """What makes two messages one event."""

    shop: str
    event_id: str
    sha256: bytes


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One event, as Shopify would send it again and again."""

    delivery: Delivery
    headers: Mapping[str, str]
    payload: bytes

    @property
    def message(self) -> Message:
        """The native message; a garbled one holds its payload as it is."""
        data = base64.b64encode(self.payload).decode()
        if self.delivery.kind == "garbled":
            data = "*" + self.payload.decode()
        published = self.delivery.published
        return Message(
            data=data,
            attributes=self.headers,
            publish_time=None if published is None else minute(published).isoformat(),
        )


def minute(n: int) -> datetime:
    """One of a few times."""
    return NOW + timedelta(minutes=n)


def identity(message: Message) -> Identity:
    """Whose event a message is."""
    envelope = envelopes.from_message(message, NOW)
    return Identity(envelope.shop_domain, envelope.event_id, envelope.payload_sha256)


class Database:
    """A database that can be switched off; who looked at it before still can."""

    def __init__(self, server: Server, name: str, template: str) -> None:
        self.url = server.create_database(name, template=template)
        self.is_down = False
        self._name = name
        self._admin = psycopg.connect(server.url(), autocommit=True)
        self._observer = psycopg.connect(self.url, autocommit=True, row_factory=dict_row)

    def rows(self, query: LiteralString, **parameters: Any) -> list[dict[str, Any]]:
        """What is in it, if the statement has rows."""
        cursor = self._observer.execute(query, parameters or None)
        return cursor.fetchall() if cursor.description else []

    def switch(self, *, on: bool) -> None:
        """Refuses new connections and ends those that are open; or takes them again."""
        self._admin.execute(
            sql.SQL("alter database {} allow_connections {}").format(
                sql.Identifier(self._name), sql.Literal(on)
            )
        )
        if not on:
            # Asked again at once: the server's own way to wait looks ten times a second only.
            while self._admin.execute(_TERMINATE, (self._name,)).fetchone():
                pass
        self.is_down = not on

    def close(self) -> None:
        """Stops looking."""
        self._admin.close()
        self._observer.close()


class Site:
    """The databases, made once for all examples of a test."""

    def __init__(self, server: Server, templates: Mapping[Any, str], name: str) -> None:
        self.app = Database(server, f"{name}_app", templates[migrate.Series.APP])
        self.tenants = {
            organization: Database(
                server, f"{name}_{organization}", templates[migrate.Series.TENANT]
            )
            for organization in ("acme", "other")
        }
        self.environ = {
            "APP_DATABASE_URL": self.app.url,
            "CREDENTIAL_KEYS": Fernet.generate_key().decode("ascii"),
            "SHOPIFY_CLIENT_SECRETS": SECRET,
            "RETRY_MAX_RETRIES": str(MAX_RETRIES),
            "RETRY_BATCH_LIMIT": "3",
            "LOG_LEVEL": "ERROR",
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for database in (self.app, *self.tenants.values()):
            database.close()

    def empty(self) -> None:
        """Everything up, and nothing in it but the connections of the shops."""
        for database in (self.app, *self.tenants.values()):
            if database.is_down:
                database.switch(on=True)
        self.app.rows("delete from subscriber_subscriberfailedevent")
        self.app.rows("delete from subscriber_tenantincident")
        self.app.rows("delete from subscriber_operatoraction")
        self.app.rows("delete from shopify_shopifyevent")
        self.app.rows("delete from shopify_shopifyconnection")
        self.app.rows("update subscriber_retrystate set last_tenant = ''")
        for tenant in self.tenants.values():
            tenant.rows("delete from shopify_events")
            tenant.rows("delete from shopify_orders")
            tenant.rows("delete from shopify_inventory_levels")


class Killed(BaseException):
    """The end of a process, as seen from within."""


class Task:
    """Work that stops at every gate until it is told to go on, or to die."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.at = ""
        self.done = False
        self.killed = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.message: Message | None = None  # of a delivery
        self.is_acknowledgement_lost = False
        self._work = work
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def gate(self, name: str) -> None:
        """Called from within: waits for the next `advance`."""
        self.at = name
        if not self.killed:
            self._stopped.release()
            self._go.acquire()
        if self.killed:
            raise Killed

    def advance(self) -> None:
        """To the next gate, or to the end."""
        self._go.release()
        assert self._stopped.acquire(timeout=60), f"stuck after {self.at}"

    def kill(self) -> None:
        """Nothing more comes of it."""
        self.killed = True
        self._go.release()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self.killed:
                self.result = self._work()
        except BaseException as error:  # noqa: BLE001 - the model judges it
            self.error = error
        self.done = True
        self._stopped.release()


class Part:
    """A part of a process, with a gate at the end of each of its steps."""

    def __init__(self, part: Any, model: "Model") -> None:
        self._part, self._model = part, model

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._part, name)
        return partial(self._model.step, name, method) if name in GATES else method


@dataclass
class Topic:
    """Pub/Sub, as a publisher sees it: up, down, or unclear about what it did."""

    put: Callable[[Message], None]
    state: str = "up"

    def prepare(self) -> None:
        """There is no client to make."""

    def publish(self, data: bytes, attributes: Mapping[str, str], *, timeout: float) -> str:
        """As `shared.publish.Publisher`."""
        if self.state != "down":
            encoded = base64.b64encode(data).decode()
            published = minute(1).isoformat()
            self.put(Message(data=encoded, attributes=attributes, publish_time=published))
        if self.state != "up":
            raise PublishError("Pub/Sub did not confirm the message.")
        return "1"


@dataclass
class Seen:
    """What the databases held at the last look."""

    ledger: dict[tuple[str, str, str], tuple[Any, ...]] = field(default_factory=dict)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    uncharged_at: dict[int, int] = field(default_factory=dict)  # row: charged attempts until then
    incidents: dict[int, str] = field(default_factory=dict)  # those that are open: whose
    may_end: set[int] = field(default_factory=set)  # those whose tenant has answered, or could have


class Model:
    """The world in one example: actions, and `check`, which holds after each of them."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.seconds = 1000.0
        self.bag: list[Message] = []  # what Pub/Sub has not been told to forget
        self.sent: list[Sent] = []
        self.known: dict[Identity, Sent] = {}
        self.accepted: set[Identity] = set()
        self.acknowledged: set[Identity] = set()
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.paused: set[str] = set()
        self.troubled: set[str] = set()  # organizations whose connection ever failed
        self.lost_answers: set[str] = set()
        self.violations: list[str] = []
        self.connected = set(SHOPS) - {LATE}
        self.cores: dict[str, bootstrap.Core] = {}  # the processes, by their roles
        self._all_cores: list[bootstrap.Core] = []
        self._message_ids = 0
        self._seen = Seen()
        site.empty()
        self.operator = bootstrap.core(site.environ)
        self._all_cores.append(self.operator)
        for shop in self.connected:
            self._connect(shop)
        self.forget("webhook", "subscriber", "retry")

    # What may happen

    def send(self, delivery: Delivery, *, event_id: str = "", pubsub: str = "up") -> Sent:
        """Something happened in a shop. An `event_id` that was used makes it a collision."""
        number = len(self.sent)
        headers = {"X-Shopify-Topic": delivery.topic, "X-Shopify-Shop-Domain": delivery.shop}
        if delivery.named:
            headers["X-Shopify-Webhook-Id"] = event_id or f"{'aZ'[number % 2]}{number}"
        if delivery.triggered is not None:
            headers["X-Shopify-Triggered-At"] = minute(delivery.triggered).isoformat()
        sent = Sent(delivery=delivery, headers=headers, payload=delivery.body(number))
        self.sent.append(sent)
        self.resend(sent, pubsub=pubsub)
        return sent

    def resend(self, sent: Sent, *, pubsub: str = "up") -> None:
        """Shopify's own retry of a delivery, or the first."""
        self.known.setdefault(identity(sent.message), sent)
        if sent.delivery.native:
            self.put(sent.message)
            return
        headers = [
            *sent.headers.items(),
            ("X-Shopify-Hmac-Sha256", signature.header(sent.payload, SECRET)),
        ]
        self._topic.state = pubsub
        answer = self._receiver.receive(headers, sent.payload)
        assert answer.status in (200, 503), answer
        if answer.status == 200:
            self.accepted.add(identity(sent.message))

    def put(self, message: Message) -> None:
        """A message for the subscriber."""
        self._message_ids += 1
        self.bag.append(replace(message, message_id=str(self._message_ids)))

    def pull(
        self, message: Message, *, stop: int | str | None = None, lose_ack: bool = False
    ) -> Task:
        """Pub/Sub delivers a message, no matter how often it has done so."""
        task = self._task(partial(self.cores["subscriber"].ingester().ingest, message))
        task.message, task.is_acknowledgement_lost = message, lose_ack
        self.advance(task, stop)
        return task

    def deliver(self, delivery: Delivery, **options: Any) -> Sent:
        """Sent, and delivered at once."""
        sent = self.send(delivery, **options)
        self.pull(self.bag[-1])
        return sent

    def run(
        self,
        *,
        limit: int | None = None,
        row: int | None = None,
        stop: int | str | None = None,
    ) -> Task:
        """The scheduler's call of the retry function; `row` names the one to be replayed."""
        core = self.cores["retry"]
        replayer = Replayer(
            core.application,
            core.leases,
            core.incidents,
            core.pipeline,
            batch_limit=core.settings.retry_batch_limit,
            parallelism=1,  # side by side is for other tests: here every sequence must repeat
            clock=self.clock,
        )
        request = Request(limit=limit, event_id=row)
        task = self._task(partial(replayer.run, request, budget_seconds=50))
        self.advance(task, stop)
        return task

    def republish(self, *, pubsub: str = "up", stop: int | str | None = None) -> Task:
        """The same call's other half: what Pub/Sub did not confirm is sent again."""
        core = self.cores["retry"]
        topic = Part(Topic(self.put, pubsub), self)
        outbox = Outbox(core.application, core.failures, lambda: topic, clock=self.clock)
        task = self._task(partial(outbox.republish, budget_seconds=50))
        self.advance(task, stop)
        return task

    def advance(self, task: Task, stop: int | str | None = None) -> None:
        """So many gates on, or until the gate of that name, or to its end."""
        self.current = task
        try:
            passed = 0
            while not task.done:
                task.advance()
                passed += 1
                assert passed < 500, "it never ends"
                if stop in (passed, task.at) and not task.done:
                    return
        finally:
            self.current = None
        self.tasks.remove(task)
        self._finished(task)

    def kill(self, task: Task) -> None:
        """The process dies where it stands."""
        self.tasks.remove(task)
        task.kill()

    def forget(self, *roles: str) -> None:
        """A fresh process; what an older one is doing goes on."""
        for role in roles:
            self.cores[role] = self._core()
            if role == "webhook":
                core = self.cores[role]
                self._topic = Topic(self.put)
                self._receiver = Receiver(
                    core.application, core.failures, self._topic, lambda: [SECRET], clock=self.clock
                )

    def switch_tenant(self, organization: str, *, on: bool) -> None:
        """A tenant database goes, or comes back."""
        self.site.tenants[organization].switch(on=on)
        self.troubled.add(organization)
        if on:
            whose = self._seen.incidents.items()
            self._seen.may_end |= {number for number, org in whose if org == organization}

    def switch_app(self, *, on: bool) -> None:
        """The application database goes, or comes back."""
        self.site.app.switch(on=on)

    def lose_answer(self, database: str) -> None:
        """The next statement is committed, but its connection breaks before the answer."""
        self.lost_answers.add(database)

    def pause(self, organization: str) -> None:
        """An operator holds an organization's events."""
        self.operator.incidents.pause(organization, actor="jane", reason="migrating")
        self.paused.add(organization)

    def unpause(self, organization: str) -> None:
        """An operator lets them go."""
        self.operator.incidents.unpause(organization, actor="jane", reason="done")
        self.paused.discard(organization)

    def requeue(self, row: int) -> None:
        """An operator gives a failed row another chance."""
        self.site.app.rows(
            "update subscriber_subscriberfailedevent set status = 'pending', retry_count = 0,"
            " next_retry_at = now(), alerted_at = null where id = %(row)s and status = 'failed'",
            row=row,
        )

    def resolve(self, row: int) -> None:
        """An operator writes a row off."""
        self.site.app.rows(
            "update subscriber_subscriberfailedevent set status = 'resolved', next_retry_at = null,"
            " resolution = 'operator', resolved_at = now(), lease_token = null, leased_until = null"
            " where id = %(row)s and status in ('pending', 'failed') and lease_token is null",
            row=row,
        )

    def connect_late(self, *, requeue: bool) -> None:
        """The shop that was unknown is connected, by the command or behind its back."""
        self._connect(LATE)
        self.connected.add(LATE)
        if requeue:
            self.operator.failures.requeue_shop(LATE, SHOPS[LATE], actor="jane")

    def pass_time(self, minutes: float, *, for_processes: bool = True) -> None:
        """Nothing happens for a while: all that is written down becomes so much older."""
        self.seconds += 60 * minutes if for_processes else 0
        passed = timedelta(minutes=minutes)
        self.site.app.rows(
            "update subscriber_subscriberfailedevent set created_at = created_at - %(t)s,"
            " next_retry_at = next_retry_at - %(t)s, leased_until = leased_until - %(t)s,"
            " last_attempted_at = last_attempted_at - %(t)s, resolved_at = resolved_at - %(t)s,"
            " updated_at = updated_at - %(t)s",
            t=passed,
        )
        self.site.app.rows(
            "update subscriber_tenantincident set started_at = started_at - %(t)s,"
            " next_probe_at = next_probe_at - %(t)s, last_probe_at = last_probe_at - %(t)s,"
            " ended_at = ended_at - %(t)s",
            t=passed,
        )

    def clock(self) -> float:
        """The time of every process."""
        return self.seconds

    def failed_events(self) -> list[dict[str, Any]]:
        """The failure ledger."""
        return self.site.app.rows("select * from subscriber_subscriberfailedevent order by id")

    # What must hold

    def check(self) -> None:
        """The invariants."""
        assert not self.violations, self.violations
        rows = self.failed_events()
        ledgers = {name: self._ledger(name) for name in self.site.tenants}
        self._check_ledgers(ledgers)
        self._check_rows(rows, ledgers)
        self._check_charges(rows)
        self._check_incidents()
        for name, ledger in ledgers.items():
            self._check_snapshots(name, ledger)
        for one in self.acknowledged:
            assert stored(ledgers, one) or kept(rows, one), f"acknowledged and lost: {one}"
        waiting = {identity(message) for message in self.bag}
        outbox = self.site.app.rows("select * from shopify_shopifyevent where needs_publish")
        for one in self.accepted - self.acknowledged - waiting:
            assert kept(rows, one) or kept(outbox, one), f"answered 200 and lost: {one}"

    def settle(self) -> None:
        """All is well again for as long as it takes; then nothing is left undone."""
        self._mend()
        self.check()
        if self.tasks:
            self.pass_time(2.5)  # longer than a lease
            self.run()
        while self.tasks:  # and now the late ones
            self.advance(self.tasks[0])
            self.check()
        self._until_quiet()
        given_up = [row["id"] for row in self.failed_events() if row["status"] == "failed"]
        in_vain = [row for row in given_up if self._last_error(row) in CONNECTION_ERRORS]
        assert not in_vain, f"given up during an outage and left so: {in_vain}"
        for row in given_up:
            self.requeue(row)
        if given_up:
            self._until_quiet()
        self._check_the_end()

    def close(self) -> None:
        """Leaves nothing running."""
        for task in list(self.tasks):
            self.kill(task)
        for core in self._all_cores:  # what an older process did last may have opened some more
            core.application.close()
            core.tenants.close()

    def step(self, name: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """One step of a process, watched; then its gate."""
        task = self.current
        if task and task.killed:
            raise Killed
        before = self._before(name, args)
        try:
            result = method(*args, **options)
        except Exception:
            if task:
                task.gate(name)
            raise
        self._after(name, args, before, result)
        if task:
            task.gate(name)
        return result

    # Helpers: what happens

    def _task(self, work: Callable[[], Any]) -> Task:
        task = Task(work)
        self.tasks.append(task)
        return task

    def _finished(self, task: Task) -> None:
        if task.message is None:
            assert task.error is None or isinstance(task.error, db.UNREACHABLE), task.error
            return
        assert task.error is None, task.error
        if task.result:
            self.acknowledged.add(identity(task.message))
            if not task.is_acknowledgement_lost and task.message in self.bag:
                self.bag.remove(task.message)

    def _core(self) -> bootstrap.Core:
        """A process: real, but for its clock, its gates and its wires."""
        core = bootstrap.core(self.site.environ)
        core.application._clock = core.tenants._clock = core.directory._clock = self.clock
        self._wire(core.application, "app")
        pool_of = core.tenants.pool
        names = {tenant.url.rsplit("/", 1)[1]: org for org, tenant in self.site.tenants.items()}

        def pool(target: db.Target) -> db.Pool:
            found = pool_of(target)
            name = next(org for name, org in names.items() if f"dbname={name}" in target.conninfo)
            self._wire(found, name)
            return found

        core.tenants.pool = pool  # type: ignore[method-assign]
        self._all_cores.append(core)
        parts = ("failures", "leases", "incidents", "pipeline")
        return replace(core, **{name: Part(getattr(core, name), self) for name in parts})

    def _wire(self, pool: db.Pool, database: str) -> None:
        """The wire to a database, which can break between a commit and its answer."""
        if "run" in vars(pool):
            return
        run = pool.run

        def over_the_wire(work: Callable[[Any], Any]) -> Any:
            def broken(connection: psycopg.Connection[Any]) -> Any:
                result = work(connection)
                if database in self.lost_answers:
                    self.lost_answers.discard(database)
                    self.troubled.add(database)
                    connection.close()
                    raise psycopg.OperationalError("the connection was lost after the commit")
                return result

            return run(broken)

        pool.run = over_the_wire  # type: ignore[method-assign, assignment]

    def _connect(self, shop: str) -> None:
        organization = SHOPS[shop]
        url = make_conninfo(self.site.tenants[organization].url, sslmode="disable")
        self.operator.application.run(
            lambda connection: directory.connect_shop(
                connection,
                self.operator.keyring,
                shop_domain=shop,
                organization_id=organization,
                target=db.Target(conninfo=url),
            )
        )

    def _mend(self) -> None:
        self.lost_answers.clear()
        for database in (self.site.app, *self.site.tenants.values()):
            if database.is_down:
                database.switch(on=True)
        self._seen.may_end.update(self._seen.incidents)
        for organization in sorted(self.paused):
            self.unpause(organization)
        self.forget("webhook", "subscriber", "retry")

    def _until_quiet(self) -> None:
        for _ in range(20):
            self.republish()
            for message in list(self.bag):
                self.pull(message)
            self.pass_time(120, for_processes=False)  # or they would connect anew every time
            self.run()
            self.check()
            waiting = [row for row in self.failed_events() if row["status"] == "pending"]
            if not self.bag and not waiting:
                return
        raise AssertionError(f"it never comes to rest: {self.bag} {waiting}")

    # Helpers: what must hold

    def _before(self, name: str, args: tuple[Any, ...]) -> Any:
        match name:
            case "start" | "resolve" | "reschedule":
                return self._row(args[1])
            case "claim":
                return {row["id"]: row for row in self.failed_events()}, self._open_incidents()
        return None

    def _after(self, name: str, args: tuple[Any, ...], before: Any, result: Any) -> None:
        match name:
            case "start" | "resolve" | "reschedule":
                self._judge_verdict(name, args, before, result)
            case "claim":
                self._judge_claim(args, *before, result)

    def _judge_verdict(
        self, name: str, args: tuple[Any, ...], before: dict[str, Any], result: Any
    ) -> None:
        if before["lease_token"] != args[0]:
            changed = self._row(args[1]) != before
            if changed or result not in (None, Verdict.LOST):
                self.violations.append(f"{name} of row {args[1]} under a lost lease: {result}")
        elif name == "reschedule" and isinstance(args[3], TenantPaused):
            self.violations.append(f"row {args[1]} is charged for a pause")

    def _judge_claim(
        self,
        args: tuple[Any, ...],
        rows: dict[int, dict[str, Any]],
        incidents: dict[str, dict[str, Any]],
        claims: Any,
    ) -> None:
        (now,) = self.site.app.rows("select now()")[0].values()
        is_named = len(args) > 2 and args[2] is not None
        for claim in claims:
            row, incident = rows[claim.id], incidents.get(claim.tenant)
            if row["status"] != "pending" or row["lease_token"] or row["due_at"] > now:
                self.violations.append(f"row {claim.id} was not there to be claimed")
            if claim.tenant in self.paused:
                self.violations.append(f"row {claim.id} of a paused tenant was claimed")
            if incident is None:
                continue
            if sum(other.tenant == claim.tenant for other in claims) > 1:
                self.violations.append(f"more than a canary of {claim.tenant}")
            if not is_named and incident["next_probe_at"] > now:
                self.violations.append(f"a canary of {claim.tenant} before its time")

    def _check_the_end(self) -> None:
        rows = self.failed_events()
        ledgers = {name: self._ledger(name) for name in self.site.tenants}
        for row in rows:
            assert row["lease_token"] is None
            if self._is_storable(self._sent(row)):
                assert row["status"] == "resolved", f"never landed: {row}"
        written_off = [row for row in rows if row["resolution"] == "operator"]
        for one in self.acknowledged:
            if self._is_storable(self.known[one]) and not kept(written_off, one):
                places = stored(ledgers, one)
                assert places, f"never landed: {one}"
                assert len(places) == 1, f"twice in the ledger: {one} as {places}"

    def _check_ledgers(self, ledgers: dict[str, list[dict[str, Any]]]) -> None:
        present = {
            (name, row["shop_domain"], row["event_id"]): (
                *(row["topic"], row["payload"], row["payload_sha256"]),
                *(row["source_updated_at"], row["triggered_at"]),
            )
            for name, ledger in ledgers.items()
            for row in ledger
        }
        for key, row in self._seen.ledger.items():
            assert present.get(key) == row, f"{key} changed in the ledger"
        self._seen.ledger = present
        for name, ledger in ledgers.items():
            for row in ledger:
                sent = self._sent(row)
                delivery = sent.delivery
                assert row["organization_id"] == name == SHOPS[row["shop_domain"]]
                assert row["topic"] == delivery.topic
                assert row["resource_id"] == delivery.resource_id, (row, delivery)
                if row["payload_raw"] is not None:
                    assert row["payload_raw"] == sent.payload
                else:
                    assert row["payload"] == json.loads(sent.payload)
                if row["resource_id"] and delivery.clock is not None and delivery.topic in CLOCKED:
                    assert row["source_updated_at"] == minute(delivery.clock)
                elif delivery.triggered is not None:
                    assert row["source_updated_at"] == minute(delivery.triggered)

    def _check_rows(
        self, rows: list[dict[str, Any]], ledgers: dict[str, list[dict[str, Any]]]
    ) -> None:
        present = {row["id"]: row for row in rows}
        assert self._seen.rows.keys() <= present.keys(), "a failed event is gone"
        for row in rows:
            sent = self._sent(row)
            expected = b"*" * (sent.delivery.kind == "garbled") + sent.payload
            assert row["payload"] == expected
            assert row["organization_id"] in (None, SHOPS[row["shop_domain"]])
            assert row["retry_count"] <= row["max_retries"]
            match row["status"]:
                case "failed":
                    assert row["retry_count"] == row["max_retries"], "given up too early"
                case "pending":
                    assert row["retry_count"] < row["max_retries"], "spent, and pending"
                case "resolved" if row["resolution"] == "replayed":
                    one = self._identity(row)
                    assert stored(ledgers, one), f"resolved, and not stored: {one}"
        self._seen.rows = present

    def _check_charges(self, rows: list[dict[str, Any]]) -> None:
        attempts = self.site.app.rows("select * from subscriber_replayattempt order by id")
        charged: dict[int, int] = {}
        for attempt in attempts:
            row = self._seen.rows[attempt["failed_event_id"]]
            if attempt["outcome"] in ("rescheduled", "failed", "lost"):
                charged[row["id"]] = charged.get(row["id"], 0) + 1
            if attempt["finished_at"] is None:
                assert row["lease_token"] == attempt["lease_token"], "an attempt without a lease"
        for row in rows:
            count = charged.get(row["id"], 0)
            if row["retry_count"] == 0:
                self._seen.uncharged_at[row["id"]] = count
            since = count - self._seen.uncharged_at.get(row["id"], 0)
            assert row["retry_count"] <= since, f"row {row['id']} is charged for nothing"

    def _check_incidents(self) -> None:
        opened = {row["id"]: row for row in self._open_incidents().values()}
        ended = self._seen.incidents.keys() - opened.keys()
        assert ended <= self._seen.may_end, "an incident ended while the tenant was down"
        self._seen.incidents = {number: owner(row["tenant"]) for number, row in opened.items()}
        self._seen.may_end |= {
            number
            for number, row in opened.items()
            if row["kind"] == "paused" or not self.site.tenants[owner(row["tenant"])].is_down
        }
        for row in opened.values():
            if row["kind"] == "unavailable":
                assert owner(row["tenant"]) in self.troubled, "an incident of a sound tenant"
            else:
                assert row["tenant"] in self.paused

    def _check_snapshots(self, organization: str, ledger: list[dict[str, Any]]) -> None:
        newest: dict[tuple[str, str, str], dict[str, Any]] = {}
        for row in ledger:
            table = TABLES[row["topic"]]
            if table and row["resource_id"]:
                key = (table, row["shop_domain"], row["resource_id"])
                newest[key] = max(newest.get(key, row), row, key=version)
        snapshots = self.site.tenants[organization].rows(
            "select 'shopify_orders' as place, * from shopify_orders union all"
            " select 'shopify_inventory_levels', * from shopify_inventory_levels"
        )
        held = {(row["place"], row["shop_domain"], row["shopify_id"]): row for row in snapshots}
        assert held.keys() == newest.keys()
        for key, row in newest.items():
            snapshot = held[key]
            assert snapshot["event_id"] == row["event_id"], f"not the newest: {key}"
            assert snapshot["is_deleted"] == (row["topic"] in DELETIONS)
            for name in ("topic", "event_type", "payload", "parsed_payload", "source_updated_at"):
                assert snapshot[name] == row[name]
            assert snapshot["source_triggered_at"] == row["triggered_at"]

    def _ledger(self, organization: str) -> list[dict[str, Any]]:
        return self.site.tenants[organization].rows("select * from shopify_events order by id")

    def _row(self, row: int) -> dict[str, Any]:
        (found,) = self.site.app.rows(
            "select * from subscriber_subscriberfailedevent where id = %(row)s", row=row
        )
        return found

    def _last_error(self, row: int) -> str | None:
        """What the last replay died of; deliveries since then may have brought another error."""
        attempts = self.site.app.rows(
            "select error_type from subscriber_replayattempt where failed_event_id = %(row)s"
            " and finished_at is not null order by id desc limit 1",
            row=row,
        )
        return attempts[0]["error_type"] if attempts else None

    def _open_incidents(self) -> dict[str, dict[str, Any]]:
        rows = self.site.app.rows(
            "select id, tenant, kind, case when kind = 'unavailable' then next_probe_at"
            " else '9999-01-01' end as next_probe_at"
            " from subscriber_tenantincident where ended_at is null"
        )
        return {row["tenant"]: row for row in rows}

    def _identity(self, row: Mapping[str, Any]) -> Identity:
        event_id = row["event_id"].partition("#")[0]
        return Identity(row["shop_domain"], event_id, row["payload_sha256"])

    def _sent(self, row: Mapping[str, Any]) -> Sent:
        one = self._identity(row)
        assert one in self.known, f"nobody sent {one}"
        return self.known[one]

    def _is_storable(self, sent: Sent) -> bool:
        return sent.delivery.kind in STORABLE and sent.delivery.shop in self.connected


def owner(tenant: str) -> str:
    """The organization of a tenant, which may be known by its shop only."""
    return SHOPS.get(tenant, tenant)


def version(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The source version of an event, as the design defines it."""
    return (
        row["source_updated_at"],
        row["topic"] in DELETIONS,
        row["triggered_at"] or LONG_AGO,
        row["event_id"].encode(),
    )


def stored(ledgers: Mapping[str, list[dict[str, Any]]], one: Identity) -> list[str]:
    """The ids under which an event is in its tenant's ledger."""
    return [row["event_id"] for row in ledgers[SHOPS[one.shop]] if is_of(row, one)]


def kept(rows: list[dict[str, Any]], one: Identity) -> bool:
    """Whether an event is in the failure ledger."""
    return any(is_of(row, one) for row in rows)


def is_of(row: Mapping[str, Any], one: Identity) -> bool:
    """Whether a row of either ledger holds that event, under its id or that of a collision."""
    suffix = f"#{one.sha256.hex()[:16]}"
    return (
        row["shop_domain"] == one.shop
        and row["payload_sha256"] == one.sha256
        and row["event_id"] in (one.event_id, one.event_id + suffix)
    )
