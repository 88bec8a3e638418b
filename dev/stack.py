"""The whole system on one machine: databases, Pub/Sub, the three functions, the scheduler."""

import contextlib
import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import psycopg
from google.api_core.exceptions import AlreadyExists, NotFound
from google.protobuf.duration_pb2 import Duration
from google.pubsub_v1.types import DeadLetterPolicy, PushConfig, RetryPolicy, Subscription
from psycopg.conninfo import make_conninfo

from dev.deliveries import post
from dev.functions import TARGETS, Function
from dev.postgres import Server
from dev.pubsub_grpc import PubSubServer
from dev.samples import SHOP_DOMAIN
from shared import bootstrap, db, directory, migrate, pubsub

PROJECT: Final = "local"
PUBSUB_TOPIC: Final = f"projects/{PROJECT}/topics/shopify-events"
SUBSCRIPTION: Final = f"projects/{PROJECT}/subscriptions/shopify-events-push"
DEAD_LETTERS: Final = f"projects/{PROJECT}/topics/shopify-events-dead-letters"
DEAD_LETTER_SUBSCRIPTION: Final = f"projects/{PROJECT}/subscriptions/shopify-events-dead-letters"
ORGANIZATION: Final = "demo"
# In the cloud 10 to 600 s; here somebody is watching.
BACKOFF_SECONDS: Final = (1, 60)
ACK_DEADLINE_SECONDS: Final = 60
MAX_DELIVERY_ATTEMPTS: Final = 100

Say = Callable[[str], None]


class Stack:
    """Everything that runs, in one folder; `start` it, use its addresses, `stop` it.

    `port_base` 0 takes free ports; otherwise webhook, subscriber, retry, Pub/Sub, application and
    tenant database listen on the six ports from there on. `retry_every` is in seconds, 0 is never.
    An APP_DATABASE_URL or PUBSUB_EMULATOR_HOST in `environ` is used in place of our own.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        environ: Mapping[str, str],
        retry_every: float = 60,
        port_base: int = 0,
        say: Say = lambda _: None,
    ) -> None:
        self.data_dir: Final = data_dir.absolute()
        self.tenant_database: Final = Server(self.data_dir / "tenant", port=_port(port_base, 5))
        self.functions: dict[str, Function] = {}
        self.pubsub: PubSubServer | None = None
        self.env: dict[str, str] = {}
        self._environ: Final = environ
        self._retry_every: Final = retry_every
        self._port_base: Final = port_base
        self._say: Final = say
        self._servers: dict[str, Server] = {}
        self._stopping: Final = threading.Event()
        self._undo: Final = contextlib.ExitStack()

    def start(self) -> Self:
        """Starts everything, in the order of the flow's dependencies, and writes stack.json."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        try:
            self.env = self._secrets()
            self._start_databases()
            self._start_pubsub()
            self._connect_shop()
            self._start_functions()
            self._start_scheduler()
            self._write_description()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stops everything that `start` started, the last first."""
        self._stopping.set()
        self._undo.close()

    def remove(self) -> None:
        """Stops everything and deletes the databases."""
        self.stop()
        for server in self._servers.values():
            server.remove()

    def describe(self) -> dict[str, Any]:
        """What stack.json says."""
        return {
            "webhook_url": self.functions["webhook"].url,
            "subscriber_url": self.functions["subscriber"].url,
            "retry_url": self.functions["retry"].url,
            "app_database_url": self.env["APP_DATABASE_URL"],
            "tenant_database_url": self.tenant_url,
            "pubsub_emulator_host": self.env["PUBSUB_EMULATOR_HOST"],
            "pubsub_topic": PUBSUB_TOPIC,
            "client_secret": self.env["SHOPIFY_CLIENT_SECRETS"],
            "shop_domain": SHOP_DOMAIN,
            "organization_id": ORGANIZATION,
            "env": self.env,
            "smtp": None,
            "pids": self._pids(),
        }

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def tenant_url(self) -> str:
        """The merchant's database."""
        return self.tenant_database.url("merchant")

    def _secrets(self) -> dict[str, str]:
        """Secrets of this folder, made once: credentials stored earlier stay readable."""
        path = self.data_dir / "secrets.json"
        if not path.exists():
            from cryptography.fernet import Fernet  # noqa: PLC0415 - needed once a folder

            path.touch(mode=0o600)
            made = {
                "SHOPIFY_CLIENT_SECRETS": secrets.token_hex(16),
                "CREDENTIAL_KEYS": Fernet.generate_key().decode("ascii"),
                "PRIVACY_HASH_KEY": secrets.token_hex(32),
            }
            path.write_text(json.dumps(made))
        return json.loads(path.read_text())

    def _start_databases(self) -> None:
        self._say("application database")
        url = self._environ.get("APP_DATABASE_URL") or self._own_application_database()
        self.env |= {"APP_DATABASE_URL": url}
        self._say("tenant database")
        self._servers["tenant_database"] = self._undo.enter_context(self.tenant_database)
        self.tenant_database.create_database("merchant")

    def _own_application_database(self) -> str:
        server = Server(self.data_dir / "application", port=_port(self._port_base, 4))
        self._servers["application_database"] = self._undo.enter_context(server)
        return server.create_database("hookledger")

    def _start_pubsub(self) -> None:
        self._say("Pub/Sub")
        host = self._environ.get("PUBSUB_EMULATOR_HOST")
        if not host:
            self.pubsub = self._undo.enter_context(PubSubServer(port=_port(self._port_base, 3)))
            host = self.pubsub.host
        self.env |= {
            "PUBSUB_EMULATOR_HOST": host,
            "PUBSUB_TOPIC": PUBSUB_TOPIC,
            "PUBSUB_SUBSCRIPTION": SUBSCRIPTION,
            "PUBSUB_DEAD_LETTER_SUBSCRIPTION": DEAD_LETTER_SUBSCRIPTION,
            "GOOGLE_CLOUD_PROJECT": PROJECT,
        }

    def _connect_shop(self) -> None:
        """What an operator does with `manage.py migrate` and `manage.py connect_shop`."""
        self._say("schemas and a connected shop")
        core = bootstrap.core(self.env)
        bootstrap.migrate_application(core.settings)
        bootstrap.migrate_notifier(core.settings)
        target = db.Target(conninfo=make_conninfo(self.tenant_url, sslmode="disable"))
        with db.connect(target, migrate.LIMITS) as tenant:
            migrate.apply(tenant, migrate.Series.TENANT)
        with psycopg.connect(self.env["APP_DATABASE_URL"]) as application:
            directory.connect_shop(
                application,
                core.keyring,
                shop_domain=SHOP_DOMAIN,
                organization_id=ORGANIZATION,
                target=target,
            )

    def _start_functions(self) -> None:
        logs = self.data_dir / "logs"
        logs.mkdir(exist_ok=True)
        for place, name in enumerate(TARGETS):
            self._say(f"{name} function")
            function = Function(
                name,
                {**self._environ, **self.env},
                log_path=logs / f"{name}.log",
                port=_port(self._port_base, place),
            )
            self.functions[name] = self._undo.enter_context(function)
        _subscribe(self.env["PUBSUB_EMULATOR_HOST"], self.functions["subscriber"].url)

    def _start_scheduler(self) -> None:
        if self._retry_every > 0:
            tick = threading.Thread(target=self._tick, name="scheduler", daemon=True)
            tick.start()
            self._undo.callback(tick.join)

    def _tick(self) -> None:
        while not self._stopping.wait(self._retry_every):
            with contextlib.suppress(OSError):
                post(self.functions["retry"].url, b"", {"X-CloudScheduler": "true"})

    def _write_description(self) -> None:
        path = self.data_dir / "stack.json"
        draft = path.with_suffix(".tmp")
        draft.touch(mode=0o600)  # it holds the passwords
        draft.write_text(json.dumps(self.describe(), indent=2) + "\n")
        draft.replace(path)
        self._undo.callback(path.unlink, missing_ok=True)

    def _pids(self) -> dict[str, int | None]:
        children = {**self.functions, **self._servers}
        return {"dev": os.getpid(), **{name: child.pid for name, child in children.items()}}


def _subscribe(emulator_host: str, endpoint: str) -> None:
    """The topics and their subscriptions, by the official client, as Terraform makes them."""
    publisher, subscriber = pubsub.publisher(emulator_host), pubsub.subscriber(emulator_host)
    with publisher, subscriber:
        for topic in (PUBSUB_TOPIC, DEAD_LETTERS):
            with contextlib.suppress(AlreadyExists):
                publisher.create_topic(name=topic)
        with contextlib.suppress(AlreadyExists):
            subscriber.create_subscription(
                name=DEAD_LETTER_SUBSCRIPTION,
                topic=DEAD_LETTERS,
                ack_deadline_seconds=ACK_DEADLINE_SECONDS,
            )
        with contextlib.suppress(NotFound):
            subscriber.delete_subscription(subscription=SUBSCRIPTION)
        shortest, longest = (Duration(seconds=seconds) for seconds in BACKOFF_SECONDS)
        subscriber.create_subscription(
            request=Subscription(
                name=SUBSCRIPTION,
                topic=PUBSUB_TOPIC,
                push_config=PushConfig(push_endpoint=endpoint),
                ack_deadline_seconds=ACK_DEADLINE_SECONDS,
                retry_policy=RetryPolicy(minimum_backoff=shortest, maximum_backoff=longest),
                dead_letter_policy=DeadLetterPolicy(
                    dead_letter_topic=DEAD_LETTERS, max_delivery_attempts=MAX_DELIVERY_ATTEMPTS
                ),
            )
        )


def _port(base: int, place: int) -> int:
    return base + place if base else 0
