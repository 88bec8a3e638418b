"""dead_letters: what Pub/Sub gave up on, listed, and sent to its topic once more."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from cli import context, google, render
from shared import config

if TYPE_CHECKING:
    from shared.deadletters import DeadLetter, DeadLetters

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Limit = Annotated[int, typer.Option(min=1, help="At most so many.")]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    group = typer.Typer(help="Messages that Pub/Sub gave up on.", no_args_is_help=True)
    group.command("list")(list_)
    group.command("redrive")(redrive)
    app.add_typer(group, name="dead_letters")


def list_(*, limit: Limit = 50, as_json: AsJson = False) -> None:
    """List dead letters, which stay where they are.

    Example: python manage.py dead_letters list --limit 10
    """
    with _opened() as (letters, _):
        found = letters.look(limit)
    _show(found, as_json=as_json)


def redrive(
    *,
    limit: Limit = 1000,
    dry_run: Annotated[bool, typer.Option(help="Only list what would be sent.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Send dead letters to their topic again, with the same bytes and attributes.

    Remove first what made Pub/Sub give up. Each is deleted when Pub/Sub has it once more: an
    interrupted run loses nothing, and what it sends twice is a duplicate that changes nothing.

    Example: python manage.py dead_letters redrive --limit 100
    """
    with _opened() as (letters, topic):
        if dry_run:
            _show(letters.look(limit), as_json=as_json)
            return
        if not yes:
            typer.confirm(
                f"Send up to {limit} dead letters to {topic} again?", abort=True, err=True
            )
        done = 0
        try:
            with Progress(console=context.err, transient=True) as progress:
                task = progress.add_task("Sending", total=None)
                for done, _ in enumerate(letters.redrive(limit), start=1):
                    progress.update(task, completed=done)
        finally:
            if as_json:
                render.as_json({"redriven": done, "topic": topic})
            else:
                context.out.print(f"{done} sent again." if done else "Nothing was sent.")


@contextmanager
def _opened() -> Iterator[tuple["DeadLetters", str]]:
    """The dead letters, and the topic that they came from."""
    settings = config.load(
        context.environ(), require=("PUBSUB_TOPIC", "PUBSUB_DEAD_LETTER_SUBSCRIPTION")
    )
    subscription = settings.pubsub_dead_letter_subscription
    from shared.deadletters import DeadLetters  # noqa: PLC0415 - half a second

    with google.asked(f"{subscription} or {settings.pubsub_topic}"):
        letters = DeadLetters(
            subscription, settings.pubsub_topic, emulator_host=settings.pubsub_emulator_host
        )
        with closing(letters):
            yield letters, settings.pubsub_topic


def _show(found: list["DeadLetter"], *, as_json: bool) -> None:
    if as_json:
        render.as_json([_plain(each) for each in found])
    elif not found:
        context.out.print("There are no dead letters.")
    else:
        table = render.table(
            *("published", "shop", "topic", "event", "attempts", "bytes"),
            wide=("shop", "event"),
            numbers=("attempts", "bytes"),
        )
        for each in found:
            render.add(
                table,
                render.ago(each.published_at),
                each.shop_domain.removesuffix(".myshopify.com"),
                each.topic,
                each.event_id,
                "" if each.attempts is None else each.attempts,
                each.size,
            )
        context.out.print(table)


def _plain(letter: "DeadLetter") -> dict[str, Any]:
    names = [each.name for each in fields(letter) if each.name != "received"]
    return {name: getattr(letter, name) for name in names}
