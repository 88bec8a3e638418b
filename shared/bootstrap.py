"""Puts a function's parts together, once per process and at the first request; guards its entry."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from shared import config, db, log, migrate, secrets
from shared.directory import Directory
from shared.errors import ConfigurationError
from shared.failures import Failures
from shared.incidents import Incidents
from shared.ingest import Ingester
from shared.leases import Leases
from shared.outbox import Outbox
from shared.pipeline import Pipeline
from shared.privacy import Privacy
from shared.replay import Replayer
from shared.retention import Policy, Retention
from shared.subjects import Hasher

if TYPE_CHECKING:
    from shared.erasure import Erasure
    from shared.export import Export
    from shared.notifier.digest import Digest
    from shared.notifier.model import Message, Profile, Verdict
    from shared.notifier.processor import Processor
    from shared.publish import Publisher
    from shared.receive import Receiver
    from shared.streaming import Subscriber

T = TypeVar("T")

APPLICATION_POOL_SIZE: Final = 4
APPLICATION_LIMITS: Final = db.Limits(statement=5)
UPGRADE_LIMITS: Final = db.Limits(statement=20, lock=2)  # of the notifier, beside the replays

_WEBHOOK: Final = ("APP_DATABASE_URL", "SHOPIFY_CLIENT_SECRETS", "PUBSUB_TOPIC")
_SUBSCRIBER: Final = ("APP_DATABASE_URL",)


class Once(Generic[T]):
    """Builds a thing when it is first asked for: never at import, since the server forks after."""

    def __init__(self, build: Callable[[Mapping[str, str]], T]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._built: T | None = None

    def __call__(self) -> T:
        """The thing; raises what `config.load` does as long as a setting cannot be had."""
        with self._lock:
            if self._built is None:
                self._built = self._build(os.environ)
            return self._built


def guarded(entry: Callable[..., Any]) -> Callable[..., Any]:
    """An entry point that answers 500 without a body, and logs redacted, whatever escapes it.

    functions-framework would print the traceback as it is, values and all.
    """

    @wraps(entry)
    def call(request: Any) -> Any:
        try:
            return entry(request)
        except Exception as error:  # noqa: BLE001 - the last line of defence
            log.error("function.failed", error)
            return "", 500

    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """The parts of the webhook function."""

    settings: config.Settings
    receiver: "Receiver"


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The parts that the subscriber, the retry function and the commands share."""

    settings: config.Settings
    application: db.Pool
    failures: Failures
    leases: Leases
    incidents: Incidents
    keyring: secrets.Keyring
    directory: Directory
    tenants: db.Tenants
    privacy: Privacy
    pipeline: Pipeline

    def replayer(self) -> Replayer:
        """Replays failed events."""
        return Replayer(
            self.application,
            self.leases,
            self.incidents,
            self.pipeline,
            batch_limit=self.settings.retry_batch_limit,
            parallelism=self.settings.replay_parallelism,
        )

    def outbox(self) -> Outbox:
        """Republishes what Pub/Sub did not confirm."""
        return Outbox(self.application, self.failures, cache(partial(_publisher, self.settings)))

    def retention(self) -> Retention:
        """Takes away what is old enough."""
        settings = self.settings
        return Retention(
            self.application,
            self.directory,
            self.tenants,
            Policy(
                resolved_payload_days=settings.retention_resolved_payload_days,
                resolved_days=settings.retention_resolved_days,
                audit_days=settings.retention_audit_days,
                event_payload_days=settings.retention_event_payload_days,
            ),
            share_one_database=bool(settings.shopify_storage_database_url),
        )

    def erasure(self) -> "Erasure":
        """Carries out what the compliance topics ask for."""
        from shared.erasure import Erasure  # noqa: PLC0415 - a subscriber starts without it

        return Erasure(self.application, self.directory, self.privacy)

    def export(self) -> "Export":
        """Reads what is held of a customer."""
        from shared.export import Export  # noqa: PLC0415 - for one command

        return Export(self.application, self.directory, self.privacy)

    def processor(self) -> "Processor":
        """Carries out notifications, alerts among them; old ones go."""
        from shared.notifier.processor import Processor  # noqa: PLC0415 - not at a cold start
        from shared.notifier.retention import Retention as Forgetting  # noqa: PLC0415

        forgetting = Forgetting(days=self.settings.retention_notification_days)
        return Processor(
            application_target(self.settings),
            attempt=_attempt,
            chores=(self.digest(), forgetting),
        )

    def digest(self) -> "Digest":
        """Turns what operators must know into notifications."""
        from shared.notifier.digest import Digest  # noqa: PLC0415 - not at a cold start

        return Digest(
            alert_channel=self.settings.notifier_alert_channel,
            fallback_channel=self.settings.notifier_fallback_channel,
            project=self.settings.google_cloud_project,
        )

    def notify(self) -> dict[str, int]:
        """Carries out the notifications that are due; how many attempts ended in which status.

        Raises what psycopg raises. An upgrade that failed does not keep back what is queued.
        """
        started = time.monotonic()
        if self.settings.auto_migrate:
            try:
                migrate_notifier(self.settings, UPGRADE_LIMITS)
            except Exception as error:  # noqa: BLE001 - what is installed may do
                log.error("notifier.not_upgraded", error)
        left = self.settings.notifier_time_budget_seconds - (time.monotonic() - started)
        return self.processor().run_once(budget_seconds=left)

    def count(self) -> dict[str, Any]:
        """What is left to do, in numbers."""
        from shared import figures  # noqa: PLC0415 - a subscriber starts without it

        return figures.left(self.application)

    def ingester(self) -> Ingester:
        """Takes in messages."""
        return Ingester(self.application, self.failures, self.pipeline)

    def subscriber(self, *, threads: int) -> "Subscriber":
        """Takes in messages by streaming pull, so many at a time."""
        from shared.streaming import Subscriber  # noqa: PLC0415 - functions are pushed to

        return Subscriber(
            self.ingester().ingest,
            self.settings.pubsub_subscription,
            emulator_host=self.settings.pubsub_emulator_host,
            threads=threads,
        )


def webhook(environ: Mapping[str, str]) -> Webhook:
    """The webhook function's parts; raises ConfigurationError."""
    from shared import receive  # noqa: PLC0415 - the other functions do without Google's client
    from shared.publish import Publisher  # noqa: PLC0415

    settings = _settings(environ, _WEBHOOK)
    receiver = receive.Receiver(
        application_pool(settings, receive.AUDIT_LIMITS),
        _failures(settings, application_pool(settings, receive.FAILURE_LIMITS)),
        Publisher(settings.pubsub_topic),
        # Asked anew for each delivery, so that a rotated secret reaches a running instance.
        partial(config.client_secrets, environ),
    )
    return Webhook(settings=settings, receiver=receiver)


def core(environ: Mapping[str, str]) -> Core:
    """The parts around the pipeline; raises ConfigurationError."""
    settings = _settings(environ, _SUBSCRIBER)
    application = application_pool(settings)
    tenants = db.Tenants(
        pools_max=settings.tenant_pools_max,
        pool_size=settings.tenant_pool_size,
        limits=tenant_limits(settings),
    )
    keyring = secrets.Keyring(settings.credential_keys)
    directory = Directory(
        application,
        keyring,
        resolve_secret=partial(secrets.resolve, environ=environ),
        override_url=settings.shopify_storage_database_url,
    )
    privacy = Privacy(
        application,
        Hasher(settings.privacy_hash_key),
        share_one_database=bool(settings.shopify_storage_database_url),
    )
    return Core(
        settings=settings,
        application=application,
        failures=_failures(settings, application),
        leases=Leases(application, lease_seconds=settings.lease_seconds),
        incidents=Incidents(application, lease_seconds=settings.lease_seconds),
        keyring=keyring,
        directory=directory,
        tenants=tenants,
        privacy=privacy,
        pipeline=Pipeline(directory, tenants, application, privacy),
    )


def application_pool(settings: config.Settings, limits: db.Limits = APPLICATION_LIMITS) -> db.Pool:
    """The application database."""
    return db.Pool(application_target(settings), size=APPLICATION_POOL_SIZE, limits=limits)


def application_target(settings: config.Settings) -> db.Target:
    """Where the application database is."""
    return db.Target(
        conninfo=db.with_tls(settings.app_database_url), pooler_mode=settings.app_pooler_mode
    )


def tenant_limits(settings: config.Settings) -> db.Limits:
    """How long a tenant database may take for one event."""
    return db.Limits(
        connect=settings.tenant_connect_timeout_seconds,
        statement=settings.tenant_statement_timeout_seconds,
    )


def migrate_application(settings: config.Settings) -> list[migrate.Migration]:
    """Applies the application database's pending migrations and returns them."""
    with db.connect(application_target(settings), migrate.LIMITS) as connection:
        return migrate.apply(connection, migrate.Series.APP)


def migrate_notifier(
    settings: config.Settings, limits: db.Limits = migrate.LIMITS
) -> list[migrate.Migration]:
    """Installs the notifier or brings it up to date, unless it was uninstalled on purpose.

    Returns the migrations that were applied.
    """
    from shared.notifier import install  # noqa: PLC0415 - not at a cold start

    with db.connect(application_target(settings), limits) as connection:
        return install.upgrade(connection).applied


def _attempt(profile: "Profile", message: "Message") -> "Verdict":
    """One attempt over the network; its tools are loaded when there is something to send."""
    from shared.notifier import references, transports  # noqa: PLC0415 - not at a cold start

    return transports.attempt(
        profile,
        message,
        resolve=references.resolver(os.environ),
        renew=references.resolver(os.environ, is_fresh=True),
    )


def _settings(environ: Mapping[str, str], require: tuple[str, ...]) -> config.Settings:
    settings = config.load(environ, require=require)
    log.setup(
        level=settings.log_level,
        project=settings.google_cloud_project,
        service=environ.get("K_SERVICE", ""),
        revision=environ.get("K_REVISION", ""),
    )
    return settings


def _publisher(settings: config.Settings) -> "Publisher":
    if not settings.pubsub_topic:
        raise ConfigurationError("PUBSUB_TOPIC is missing: the outbox cannot be sent without it.")
    from shared.publish import Publisher  # noqa: PLC0415 - few runs have anything to publish

    return Publisher(settings.pubsub_topic)


def _failures(settings: config.Settings, application: db.Pool) -> Failures:
    return Failures(application, max_retries=settings.retry_max_retries)
