"""run_subscriber: takes messages from Pub/Sub without Cloud Functions."""

import signal
from dataclasses import asdict
from typing import Annotated

import typer

from cli import context, render
from shared import log
from shared.errors import ConfigurationError


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("run_subscriber")(run_subscriber)


def run_subscriber(
    *,
    threads: Annotated[int, typer.Option(min=1, help="Messages at a time.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Take messages by streaming pull until SIGTERM or Ctrl-C, for hosts outside Cloud Functions.

    PUBSUB_SUBSCRIPTION must be one that does not push. Messages that have started are finished,
    the others given back. Several may run at once.

    Example: python manage.py run_subscriber --threads 16
    """
    core = context.core()
    if not core.settings.pubsub_subscription:
        raise ConfigurationError("PUBSUB_SUBSCRIPTION is missing: which one is to be pulled?")
    subscriber = core.subscriber(threads=threads)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: subscriber.stop())
    log.info("subscriber.started", subscription=core.settings.pubsub_subscription, threads=threads)
    taken = subscriber.run()
    log.info("subscriber.stopped", **asdict(taken))
    if as_json:
        render.as_json(taken)
