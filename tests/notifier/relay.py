"""A notifier for tests: one application database, its channels, and processors for its queue."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, LiteralString, Self

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from shared import db
from shared.notifier.model import Message, Profile, Result, Verdict
from shared.notifier.processor import Processor

SENT = Verdict(result=Result.SENT, code="smtp_250", text="250 taken")
BUSY = Verdict(result=Result.TRANSIENT, code="smtp_451", text="451 try later")
REFUSED = Verdict(result=Result.PERMANENT, code="smtp_550", text="550 no")


class Sender:
    """Gives verdicts as told, the last one again and again, and keeps what it was to send."""

    def __init__(self, *verdicts: Verdict | Callable[[Message], Verdict]) -> None:
        self._verdicts = list(verdicts) or [SENT]
        self._lock = threading.Lock()
        self.messages: list[Message] = []
        self.profiles: list[Profile] = []

    def __call__(self, profile: Profile, message: Message) -> Verdict:
        with self._lock:
            self.messages.append(message)
            self.profiles.append(profile)
            first = len(self._verdicts) == 1
            verdict = self._verdicts[0] if first else self._verdicts.pop(0)
        return verdict(message) if callable(verdict) else verdict


class Relay:
    """Looks into the notifier of one database and acts for operators and callers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.connection = psycopg.connect(url, autocommit=True, row_factory=dict_row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def rows(self, query: LiteralString, **parameters: Any) -> list[dict[str, Any]]:
        """The rows of a statement, if it has any."""
        cursor = self.connection.execute(query, parameters)
        return cursor.fetchall() if cursor.description else []

    def channel(
        self,
        name: str = "ops",
        *,
        recipients: tuple[str, ...] = ("ops@example.com",),
        max_retries: int = 3,
        profile: str = "",
        transport: str = "smtp",
        settings: Mapping[str, Any] | None = None,
        timeout_seconds: float = 30,
        expire_after: str | None = None,
    ) -> None:
        """A channel with a profile of its own, unless one is named."""
        values = {
            "name": name,
            "profile": profile or name,
            "transport": transport,
            "settings": Jsonb(settings or {}),
            "timeout": timeout_seconds,
            "recipients": list(recipients),
            "max_retries": max_retries,
            "expire_after": expire_after,
        }
        self.rows(
            "insert into notifier.profiles (name, transport, settings, timeout_seconds)"
            " values (%(profile)s, %(transport)s, %(settings)s, %(timeout)s)"
            " on conflict do nothing",
            **values,
        )
        self.rows(
            "insert into notifier.channels (name, profile, recipients, max_retries, expire_after)"
            " values (%(name)s, %(profile)s, %(recipients)s, %(max_retries)s, %(expire_after)s)",
            **values,
        )

    def notify(self, channel: str = "ops", subject: str = "A subject", **named: Any) -> int:
        """A notification's id."""
        (row,) = self.rows(
            "select notifier.notify(%(channel)s, %(subject)s, 'A body',"
            " idempotency_key => %(key)s, expire_after => %(expire_after)s) as id",
            channel=channel,
            subject=subject,
            key=named.get("key"),
            expire_after=named.get("expire_after"),
        )
        return row["id"]

    def notification(self, id: int) -> dict[str, Any]:
        (row,) = self.rows("select * from notifier.notifications where id = %(id)s", id=id)
        return row

    def status(self, id: int) -> str:
        return self.notification(id)["status"]

    def queue(self, id: int) -> list[dict[str, Any]]:
        """The events of a notification, the first attempt first."""
        return self.rows(
            "select * from pgrelay.queue where notification_id = %(id)s order by attempt", id=id
        )

    def outcomes(self, id: int) -> list[str | None]:
        return [event["outcome"] for event in self.queue(id)]

    def attempts(self, id: int) -> list[dict[str, Any]]:
        return self.rows(
            "select * from notifier.attempts where notification_id = %(id)s order by attempt", id=id
        )

    def make_due(self, id: int) -> None:
        """Lets the next attempt come due now."""
        self.rows(
            "update pgrelay.queue set due_at = now() - interval '1 second'"
            " where notification_id = %(id)s and done_at is null",
            id=id,
        )

    def expire_lease(self, id: int) -> None:
        """Lets a lease run out now."""
        self.rows(
            "update pgrelay.queue set leased_until = now() - interval '1 second'"
            " where notification_id = %(id)s and done_at is null",
            id=id,
        )

    def processor(self, sender: Callable[[Profile, Message], Verdict], **named: Any) -> Processor:
        return Processor(db.Target(conninfo=self.url), attempt=sender, **named)

    def run(
        self, sender: Callable[[Profile, Message], Verdict], budget_seconds: float = 1
    ) -> dict[str, int]:
        """One run of a fresh processor; how many attempts ended how."""
        return self.processor(sender).run_once(budget_seconds=budget_seconds)

    def exhaust(self, id: int, sender: Callable[[Profile, Message], Verdict]) -> list[str]:
        """The status after each attempt, with a fresh processor for each."""
        statuses = []
        while self.notification(id)["finished_at"] is None:
            self.make_due(id)
            self.run(sender)
            statuses.append(self.status(id))
        return statuses
