"""Routing: from a shop to its organization's database, or a failure that says what is missing."""

import threading

import pytest
from cryptography.fernet import Fernet
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from shared import db, secrets
from shared.directory import FOUND_SECONDS, MISSED_SECONDS, Directory
from shared.errors import (
    AmbiguousShopError,
    ConfigurationError,
    DirectoryUnavailableError,
    PermanentError,
    StorageConfigurationError,
    UnknownShopError,
)
from tests.world import ORGANIZATION, SHOP, World, message


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def find(world: World, clock: Clock):
    """The route of a shop, as a process that remembers sees it."""
    directory = Directory(
        world.core.application,
        world.core.keyring,
        resolve_secret=lambda reference: f"resolved {reference}",
        clock=clock,
    )
    return directory.route


def target(route) -> dict[str, str]:
    return conninfo_to_dict(route.target.conninfo)


def test_connection_database_and_credential_lead_to_the_tenant(world, find):
    route = find(SHOP)
    assert route.organization_id == ORGANIZATION
    wanted = conninfo_to_dict(world.tenant_url)
    found = target(route)
    assert {name: found[name] for name in wanted} == wanted
    stored = world.app("select password_encrypted from databases_databasecredential")
    assert wanted["password"] not in stored[0]["password_encrypted"]


def test_the_domain_is_matched_exactly(find):
    with pytest.raises(UnknownShopError):
        find("acme2.myshopify.com")


@pytest.mark.parametrize(
    ("statuses", "found"),
    [
        (["active"], 0),
        (["uninstalled"], 0),
        (["uninstalled", "active"], 1),
        (["disconnected", "active", "uninstalled"], 1),
        (["disconnected", "uninstalled"], 1),
        (["active", "active"], AmbiguousShopError),
        (["uninstalled", "uninstalled"], AmbiguousShopError),
        (["disconnected"], UnknownShopError),
        ([], UnknownShopError),
    ],
)
def test_one_active_connection_beats_all_that_are_not(world, find, statuses, found):
    world.app("delete from shopify_shopifyconnection")
    for place, status in enumerate(statuses):
        world.app(
            "insert into shopify_shopifyconnection (organization_id, myshopify_domain, status)"
            " values (%(owner)s, %(shop)s, %(status)s)",
            owner=f"owner-{place}",
            shop=SHOP,
            status=status,
        )
        world.connect_shop("x.myshopify.com", f"owner-{place}")
        world.app("delete from shopify_shopifyconnection where myshopify_domain like 'x.%%'")
    if isinstance(found, int):
        assert find(SHOP).organization_id == f"owner-{found}"
    else:
        with pytest.raises(found):
            find(SHOP)


def databases(world: World, *rows: tuple[str, str, bool]) -> None:
    """Replaces the organization's databases by (type, name, deleted), all with a credential."""
    world.app("delete from databases_database")
    for place, (kind, name, deleted) in enumerate(rows):
        world.app(
            "with d as (insert into databases_database"
            " (organization_id, type, database_name, deleted_at)"
            " values (%(owner)s, %(kind)s, %(name)s, case when %(deleted)s then now() end)"
            " returning id)"
            " insert into databases_databasecredential (database_id, host, username, password_ref)"
            " select id, %(host)s, 'u', '_env:P' from d",
            owner=ORGANIZATION,
            kind=kind,
            name=name,
            deleted=deleted,
            host=f"host-{place}",
        )


@pytest.mark.parametrize(
    ("rows", "host"),
    [
        ([("shopify", "a", False)], "host-0"),
        ([("ShopIFY", "a", False)], "host-0"),
        ([("shopify", "a", True), ("shopify", "b", False)], "host-1"),
        ([("shopify", "a", False), ("shopify", "b", False)], "host-0"),
        ([("other", "SHOPIFY", False), ("shopify", "b", False)], "host-1"),
        ([("other", "Shopify", False), ("other", "shopify", False)], "host-0"),
    ],
)
def test_type_shopify_comes_before_name_shopify_and_the_lowest_id_first(world, find, rows, host):
    databases(world, *rows)
    assert target(find(SHOP))["host"] == host


@pytest.mark.parametrize("rows", [[], [("other", "orders", False)], [("shopify", "a", True)]])
def test_without_a_database_the_failure_says_so(world, find, rows):
    databases(world, *rows)
    with pytest.raises(StorageConfigurationError, match="no database"):
        find(SHOP)


def test_without_a_credential_the_failure_says_so(world, find):
    world.app("delete from databases_databasecredential")
    with pytest.raises(StorageConfigurationError, match="no credential"):
        find(SHOP)


def test_a_password_may_be_a_reference_in_place_of_a_ciphertext(world, find):
    databases(world, ("shopify", "a", False))
    assert target(find(SHOP))["password"] == "resolved _env:P"


def test_a_credential_that_says_nothing_of_tls_means_it(world, find):
    databases(world, ("shopify", "a", False))
    world.app("update databases_databasecredential set sslmode = ''")
    assert target(find(SHOP))["sslmode"] == "require"


def test_after_a_rotation_the_new_password_is_used_within_a_minute(world, find, clock):
    old = find(SHOP)
    world.connect_shop(url=make_conninfo(world.tenant_url, password="new"))
    clock.now = FOUND_SECONDS - 1
    assert find(SHOP) == old, "connections that are open go on serving"
    clock.now = FOUND_SECONDS
    new = find(SHOP)
    assert target(new)["password"] == "new"
    assert world.core.tenants.pool(new.target) is not world.core.tenants.pool(old.target), (
        "what failed with the old one is not held against the new one"
    )


def test_a_ciphertext_that_no_key_opens_says_which_setting_lacks_one(world):
    directory = Directory(
        world.core.application,
        secrets.Keyring([Fernet.generate_key().decode()]),
        resolve_secret=str,
    )
    with pytest.raises(StorageConfigurationError, match="CREDENTIAL_KEYS"):
        directory.route(SHOP)


def test_one_database_for_all_overrides_their_own(world, clock):
    world.app("delete from databases_database")
    url = "postgresql://elsewhere/all"
    directory = Directory(
        world.core.application, secrets.Keyring([]), resolve_secret=str, override_url=url
    )
    found = conninfo_to_dict(directory.route(SHOP).target.conninfo)
    assert found == {"host": "elsewhere", "dbname": "all", "sslmode": "require"}
    with pytest.raises(UnknownShopError):
        directory.route("nobody.myshopify.com")


def test_what_was_found_is_remembered_for_a_minute(world, find, clock):
    find(SHOP)
    world.app("delete from shopify_shopifyconnection")
    clock.now = FOUND_SECONDS - 1
    find(SHOP)
    clock.now = FOUND_SECONDS
    with pytest.raises(UnknownShopError):
        find(SHOP)


def test_what_was_missed_is_remembered_for_seconds_only(world, find, clock):
    with pytest.raises(UnknownShopError):
        find("new.myshopify.com")
    world.connect_shop("new.myshopify.com")
    with pytest.raises(UnknownShopError):
        find("new.myshopify.com")
    clock.now = MISSED_SECONDS
    assert find("new.myshopify.com")


def test_a_stale_answer_is_used_while_the_application_database_is_gone(world, find, clock):
    known = find(SHOP)
    application = world.core.application
    gone = make_conninfo(application.target.conninfo, port=1)
    application.target = db.Target(conninfo=gone)
    application.close()
    clock.now = 10 * FOUND_SECONDS
    assert find(SHOP) == known
    with pytest.raises(DirectoryUnavailableError):
        find("other.myshopify.com")


def test_connecting_again_renews_the_credential_and_adds_no_rows(world, find, clock):
    world.connect_shop(url=world.tenant_url.replace("127.0.0.1", "localhost"))
    assert target(find(SHOP))["host"] == "localhost"
    for table in (
        "shopify_shopifyconnection",
        "databases_database",
        "databases_databasecredential",
    ):
        assert world.app(f"select count(*) from {table}") == [{"count": 1}]


def test_connecting_an_uninstalled_shop_reactivates_it(world):
    world.app("update shopify_shopifyconnection set status = 'uninstalled'")
    world.connect_shop()
    assert world.app("select status from shopify_shopifyconnection") == [{"status": "active"}]


def test_a_shop_is_not_taken_from_another_organization(world):
    with pytest.raises(AmbiguousShopError, match=f"organization {ORGANIZATION}"):
        world.connect_shop(organization="thief")


def test_two_operators_at_once_make_one_connection(world):
    faults: list[PermanentError] = []

    def connect():
        try:
            world.connect_shop("twice.myshopify.com", "twice")
        except PermanentError as error:
            faults.append(error)

    workers = [threading.Thread(target=connect) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    count = world.app(
        "select count(*) from shopify_shopifyconnection where organization_id = 'twice'"
    )
    assert (count, faults) == ([{"count": 1}], [])


def test_without_keys_nothing_is_encrypted():
    with pytest.raises(ConfigurationError, match="CREDENTIAL_KEYS"):
        secrets.Keyring([]).encrypt("x")
    with pytest.raises(ConfigurationError, match="CREDENTIAL_KEYS"):
        secrets.Keyring(["short"]).encrypt("x")


def test_a_rotated_password_is_noticed_within_seconds(world, postgres):
    clock = Clock()
    world.core.directory._clock = clock
    assert world.ingester.ingest(message())
    wrong = make_conninfo(world.tenant_url, password="rotated")
    world.connect_shop(url=wrong)
    world.core.tenants.close()
    clock.now = FOUND_SECONDS
    assert world.ingester.ingest(message())
    assert world.failed_event()["error_type"] == "InvalidPassword"
    world.connect_shop()
    clock.now += MISSED_SECONDS
    assert world.ingester.ingest(message())
    assert len(world.tenant("select 1 from shopify_events")) == 2
