"""The notifier: installed, whole, ours to use, and of a version that is known; never an error."""

from collections.abc import Iterator

from psycopg.rows import scalar_row

from cli.preflight.finding import Finding, fine, warning
from shared import bootstrap, db, migrate, redact
from shared.notifier import registry
from shared.notifier.digest import Digest

_TIMEOUTS = "select name from notifier.profiles where timeout_seconds > 120 order by name"


def look(core: bootstrap.Core) -> Iterator[Finding]:
    """A broken notifier stops no event, so whatever is found is a warning."""
    target = bootstrap.application_target(core.settings)
    try:
        with db.connect(target, migrate.LIMITS) as connection:
            yield from _looked_at(connection, core.digest())
    except Exception as fault:  # noqa: BLE001 - whatever it is, it is the notifier's
        yield warning(
            "notifier",
            f"{type(fault).__name__}: {redact.message(fault)}",
            "Correct what the message names, then run preflight again.",
        )


def _looked_at(connection: db.BoundedConnection, digest: Digest) -> Iterator[Finding]:
    snapshot = registry.read(connection)
    if snapshot and snapshot.is_uninstalled:
        yield fine("notifier", "The notifier was uninstalled on purpose: nobody is told anything.")
        return
    fault = snapshot.fault if snapshot else registry.ABSENT
    if fault:
        yield warning(fault.code.replace("_", ":"), fault.cause, fault.remedy)
        return
    if pending := migrate.pending(connection, migrate.Series.NOTIFIER):
        names = ", ".join(migration.name for migration in pending)
        yield warning("notifier:schema", f"Not applied yet: {names}.", "Run manage.py migrate.")
        return
    yield fine("notifier", "The notifier is installed and ours to use.")
    for problem in digest.problems(connection):
        yield warning("notifier:alerts", problem.cause, problem.remedy)
    with connection.cursor(row_factory=scalar_row) as cursor:
        for name in cursor.execute(_TIMEOUTS).fetchall():
            yield warning(
                "notifier:timeout",
                f"The profile {name} has a timeout of more than 120 s; an attempt ends then.",
                "Lower timeout_seconds of the profile.",
            )
