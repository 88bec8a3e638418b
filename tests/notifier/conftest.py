"""The notifier's tests: application databases that have it installed."""

import itertools
from collections.abc import Iterator

import pytest

from dev.postgres import Server
from shared import db, migrate
from shared.notifier import install
from tests.notifier.relay import Relay

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def notifier_template(postgres: Server, templates: dict[migrate.Series, str]) -> str:
    """An application database with the notifier, to copy from."""
    name = "template_with_notifier"
    url = postgres.create_database(name, template=templates[migrate.Series.APP])
    with db.connect(db.Target(conninfo=url), migrate.LIMITS) as connection:
        install.install(connection)
    return name


@pytest.fixture
def app_url(postgres: Server, notifier_template: str) -> str:
    """A fresh application database with the notifier."""
    return postgres.create_database(f"notifier_{next(_numbers)}", template=notifier_template)


@pytest.fixture
def relay(app_url: str) -> Iterator[Relay]:
    """The notifier of one application database."""
    with Relay(app_url) as relay:
        yield relay
