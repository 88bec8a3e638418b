"""Each function in a real server; databases, Pub/Sub and servers are shared within a module.

Tests keep apart by shops and event ids of their own, so that a module pays once for its servers.
"""

import itertools
from collections.abc import Iterator

import pytest
from cryptography.fernet import Fernet

from dev.postgres import Server
from dev.pubsub_grpc import PubSubServer
from shared import bootstrap, migrate
from tests.functions.rig import Inbox, Starter
from tests.world import World

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def app_url(postgres: Server, templates: dict[migrate.Series, str]) -> str:
    """The module's application database."""
    template = templates[migrate.Series.APP]
    return postgres.create_database(f"functions_app_{next(_numbers)}", template=template)


@pytest.fixture(scope="module")
def tenant_url(postgres: Server, templates: dict[migrate.Series, str]) -> str:
    """The module's tenant database."""
    template = templates[migrate.Series.TENANT]
    return postgres.create_database(f"functions_tenant_{next(_numbers)}", template=template)


@pytest.fixture
def other_tenant_url(postgres: Server, templates: dict[migrate.Series, str]) -> str:
    """A tenant database that a test may do anything to."""
    template = templates[migrate.Series.TENANT]
    return postgres.create_database(f"functions_other_{next(_numbers)}", template=template)


@pytest.fixture(scope="module")
def environ(app_url: str) -> dict[str, str]:
    """The settings of the module's subscriber and retry functions."""
    return {"APP_DATABASE_URL": app_url, "CREDENTIAL_KEYS": Fernet.generate_key().decode("ascii")}


@pytest.fixture(scope="module")
def world(environ: dict[str, str], tenant_url: str) -> Iterator[World]:
    """A view of the module's databases, with one shop connected."""
    with World(bootstrap.core(environ), environ=environ, tenant_url=tenant_url) as world:
        world.connect_shop()
        yield world


@pytest.fixture(scope="module")
def inbox() -> Iterator[Inbox]:
    """The module's Pub/Sub."""
    with PubSubServer() as server:
        yield Inbox(server)


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """Starts functions that last as long as the module."""
    starter = Starter(tmp_path_factory.mktemp("functions"))
    yield starter
    starter.close()


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """Starts functions that last as long as the test."""
    starter = Starter(tmp_path_factory.mktemp("functions"))
    yield starter
    starter.close()
