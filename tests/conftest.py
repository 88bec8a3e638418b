"""What tests stand on: one real PostgreSQL per worker, and fresh databases made from templates."""

import itertools
import os
from collections.abc import Iterator

import pytest
from cryptography.fernet import Fernet
from hypothesis import settings

from dev.postgres import Server
from shared import bootstrap, db, migrate
from tests.world import World

_numbers = itertools.count(1)

# No deadline: a busy machine is not a fault of the code.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if "CI" in os.environ else "here")


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A PostgreSQL that gives up durability for speed."""
    server = Server(tmp_path_factory.mktemp("postgres"), durable=False)
    with server:
        yield server
    server.remove()


@pytest.fixture(scope="session")
def templates(postgres: Server) -> dict[migrate.Series, str]:
    """A migrated database of each kind, to copy from."""
    names = {series: f"template_{series}" for series in migrate.Series}
    for series, name in names.items():
        url = postgres.create_database(name)
        with db.connect(db.Target(conninfo=url), migrate.LIMITS) as connection:
            migrate.apply(connection, series)
    return names


@pytest.fixture
def empty_url(postgres: Server) -> str:
    """A database without any table."""
    return postgres.create_database(f"empty_{next(_numbers)}")


@pytest.fixture
def app_url(postgres: Server, templates: dict[migrate.Series, str]) -> str:
    """A fresh application database."""
    return postgres.create_database(f"app_{next(_numbers)}", template=templates[migrate.Series.APP])


@pytest.fixture
def tenant_url(postgres: Server, templates: dict[migrate.Series, str]) -> str:
    """A fresh tenant database."""
    return postgres.create_database(
        f"tenant_{next(_numbers)}", template=templates[migrate.Series.TENANT]
    )


@pytest.fixture
def environ(app_url: str) -> dict[str, str]:
    """The settings of a subscriber or retry function; a test may add to them before `world`."""
    return {
        "APP_DATABASE_URL": app_url,
        "CREDENTIAL_KEYS": Fernet.generate_key().decode("ascii"),
        "PRIVACY_HASH_KEY": "a key of the tests",
    }


@pytest.fixture
def world(environ: dict[str, str], tenant_url: str) -> Iterator[World]:
    """The parts around the pipeline, and one shop connected to one tenant database."""
    with World(bootstrap.core(environ), environ=environ, tenant_url=tenant_url) as world:
        world.connect_shop()
        yield world
