"""Settings, from environment variables; all that is wrong with them is said at once, by name."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final, Literal, get_args

from shared import secrets
from shared.errors import ConfigurationError, SecretUnavailableError

PoolerMode = Literal["none", "session", "transaction"]

POOLER_MODES: Final = get_args(PoolerMode)
_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off", "")


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("must be a whole number of at least 1")
    return int(text)


def _flag(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError("must be true or false")
    return text.lower() in _TRUE


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _pooler(text: str) -> str:
    if text not in POOLER_MODES:
        raise ValueError(f"must be one of {', '.join(POOLER_MODES)}")
    return text


def _path(shape: str) -> Callable[[str], str]:
    """A parser of names as Google writes them: `projects/PROJECT/topics/TOPIC`."""
    words = shape.split("/")

    def parse(text: str) -> str:
        parts = text.split("/")
        if len(parts) != len(words) or parts[0::2] != words[0::2] or not all(parts):
            raise ValueError(f"must look like {shape}")
        return text

    return parse


def _level(text: str) -> str:
    if text.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError("must be one of DEBUG, INFO, WARNING, ERROR")
    return text.upper()


def _setting(
    default: Any, about: str, *, parse: Callable[[str], Any] = str, secret: bool = False
) -> Any:
    return field(
        default=default,
        repr=not secret,
        metadata={"about": about, "parse": parse, "secret": secret},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting. A field's name in capitals is its environment variable."""

    app_database_url: str = _setting("", "the application database", secret=True)
    app_pooler_mode: PoolerMode = _setting(  # noqa: RUF009 - dataclasses.field, by our own name
        "none", "the pooler in front of it: none, session or transaction", parse=_pooler
    )
    shopify_storage_database_url: str = _setting(
        "", "one tenant database for all organizations, in place of their own", secret=True
    )
    shopify_client_secrets: tuple[str, ...] = _setting(
        (), "comma-separated; any of them verifies a signature", parse=_words, secret=True
    )
    credential_keys: tuple[str, ...] = _setting(
        (),
        "Fernet keys, comma-separated: the first encrypts, all decrypt",
        parse=_words,
        secret=True,
    )
    privacy_hash_key: tuple[str, ...] = _setting(
        (),
        "comma-separated: the first makes the hashes of who was erased, all find them",
        parse=_words,
        secret=True,
    )
    google_cloud_project: str = _setting("", "names the project in log lines' trace")
    pubsub_topic: str = _setting(
        "", "projects/P/topics/T", parse=_path("projects/PROJECT/topics/TOPIC")
    )
    pubsub_subscription: str = _setting(
        "",
        "projects/P/subscriptions/S, for `run_subscriber` and `preflight`",
        parse=_path("projects/PROJECT/subscriptions/SUBSCRIPTION"),
    )
    pubsub_dead_letter_subscription: str = _setting(
        "",
        "projects/P/subscriptions/S, for `dead_letters` and `preflight`",
        parse=_path("projects/PROJECT/subscriptions/SUBSCRIPTION"),
    )
    scheduler_job: str = _setting(
        "",
        "projects/P/locations/L/jobs/J, for `scheduler` and `preflight`",
        parse=_path("projects/PROJECT/locations/LOCATION/jobs/JOB"),
    )
    pubsub_emulator_host: str = _setting("", "host:port of a stand-in for Pub/Sub")
    webhook_max_body_bytes: int = _setting(20 * 1024 * 1024, "larger bodies get 413", parse=_whole)
    retry_batch_limit: int = _setting(50, "failed events in one claim", parse=_whole)
    retry_time_budget_seconds: int = _setting(
        50, "no replay starts after this long in one run", parse=_whole
    )
    retry_max_retries: int = _setting(
        5, "failed replays until a new failed event is given up", parse=_whole
    )
    replay_parallelism: int = _setting(8, "tenants replayed at the same time", parse=_whole)
    lease_seconds: int = _setting(
        120, "how long a claim holds; longer than the longest single replay", parse=_whole
    )
    tenant_pool_size: int = _setting(
        4, "connections to one tenant database in one process", parse=_whole
    )
    tenant_pools_max: int = _setting(
        50, "tenant databases that one process stays connected to", parse=_whole
    )
    tenant_connect_timeout_seconds: int = _setting(2, "at least 2", parse=_whole)
    tenant_statement_timeout_seconds: int = _setting(3, "for one event", parse=_whole)
    maintenance_time_budget_seconds: int = _setting(
        20, "no step of maintenance starts after this long in one run", parse=_whole
    )
    notifier_time_budget_seconds: int = _setting(
        50, "no notification is sent after this long in one run", parse=_whole
    )
    notifier_alert_channel: str = _setting("ops", "the channel that alerts go to")
    notifier_fallback_channel: str = _setting(
        "", "the channel that hears of alerts which could not be delivered"
    )
    retention_resolved_payload_days: int = _setting(
        30, "days until payload and traceback of a resolved failed event go", parse=_whole
    )
    retention_resolved_days: int | None = _setting(
        None, "days until a resolved failed event goes; unset keeps it", parse=_whole
    )
    retention_audit_days: int | None = _setting(
        None, "days until an audit row goes; unset keeps it", parse=_whole
    )
    retention_event_payload_days: int | None = _setting(
        None, "days until payloads in the tenants' event ledgers go; unset keeps them", parse=_whole
    )
    retention_notification_days: int = _setting(
        28, "days until a notification that has ended goes", parse=_whole
    )
    pubsub_retention_days: int = _setting(7, "Pub/Sub's own, of a message", parse=_whole)
    dead_letter_retention_days: int = _setting(
        14, "that of the dead-letter subscription", parse=_whole
    )
    auto_migrate: bool = _setting(
        False, "the retry function applies pending application and notifier migrations", parse=_flag
    )
    log_level: str = _setting("INFO", "DEBUG, INFO, WARNING or ERROR", parse=_level)


def load(environ: Mapping[str, str], *, require: tuple[str, ...] = ()) -> Settings:
    """The settings in `environ`. `require` names variables that must not be empty.

    Raises ConfigurationError that lists every missing and every malformed setting, and
    SecretUnavailableError when nothing else is in the way than secrets that cannot be had for now.
    """
    faults: list[str] = []
    unavailable: list[str] = []
    values: dict[str, Any] = {}
    for item in fields(Settings):
        name = item.name.upper()
        try:
            text = secrets.resolve(environ.get(name, "").strip(), environ)
            if text:
                values[item.name] = item.metadata["parse"](text)
        except SecretUnavailableError as fault:
            unavailable.append(f"{name} {fault}")
        except (ValueError, ConfigurationError) as fault:
            faults.append(f"{name} {fault}")
        else:
            if name in require and not text:
                faults.append(f"{name} is missing")
    settings = Settings(**values)
    faults += _forgotten_too_soon(settings)
    if faults:
        raise ConfigurationError(_said([*faults, *unavailable]))
    if unavailable:
        raise SecretUnavailableError(_said(unavailable))
    return settings


def client_secrets(environ: Mapping[str, str]) -> tuple[str, ...]:
    """SHOPIFY_CLIENT_SECRETS as it is now: a reference is followed again once it is stale.

    Raises as `secrets.resolve` does.
    """
    return _words(secrets.resolve(environ.get("SHOPIFY_CLIENT_SECRETS", "").strip(), environ))


def described() -> list[tuple[str, str, str]]:
    """Name, default and meaning of every setting, for documentation."""
    return [
        (item.name.upper(), _shown(item.default), item.metadata["about"])
        for item in fields(Settings)
        if item.default is not MISSING
    ]


def _said(faults: list[str]) -> str:
    return "Settings: " + "; ".join(faults) + ". See docs/configuration.md."


def _forgotten_too_soon(settings: Settings) -> list[str]:
    """An identity that goes before its message can come back for the last time.

    A message waits in Pub/Sub, then as a dead letter, and once more in Pub/Sub when it is redriven.
    """
    pubsub, dead = settings.pubsub_retention_days, settings.dead_letter_retention_days
    needed = pubsub + dead + pubsub
    return [
        f"{name} is {days}, but must be at least {needed}: {pubsub} (PUBSUB_RETENTION_DAYS) + "
        f"{dead} (DEAD_LETTER_RETENTION_DAYS) + {pubsub} (a redrive), or a message that comes "
        "back would be taken for a new one"
        for name, days in (
            ("RETENTION_RESOLVED_DAYS", settings.retention_resolved_days),
            ("RETENTION_AUDIT_DAYS", settings.retention_audit_days),
        )
        if days is not None and days < needed
    ]


def _shown(default: Any) -> str:
    match default:
        case bool():
            return str(default).lower()
        case "" | () | None:
            return ""
        case _:
            return str(default)
