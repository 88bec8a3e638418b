"""Schemas: each file once, whole, in order and checked, whoever else is applying them."""

import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest

from shared import db, migrate
from shared.migrate import MigrationError, Series

APP_TABLES = {
    "shopify_shopifyconnection": "id organization_id myshopify_domain status created_at updated_at",
    "databases_database": "id organization_id type database_name deleted_at",
    "databases_databasecredential": "id database_id host port username password_encrypted"
    " password_ref sslmode pooler_mode sslrootcert",
    "shopify_shopifyevent": "id organization_id topic shop_domain payload event_id payload_sha256"
    " triggered_at received_at needs_publish outbox_envelope outbox_body",
    "subscriber_subscriberfailedevent": "id event_id payload_sha256 source topic event_type"
    " shop_domain organization_id envelope payload error_type error_class error_code error_message"
    " traceback fingerprint status retry_count max_retries next_retry_at due_at tenant"
    " last_attempted_at resolved_at resolution occurrences lease_token leased_until alerted_at"
    " created_at updated_at redacted_at",
    "subscriber_replayattempt": "id failed_event_id attempt lease_token started_at finished_at"
    " outcome error_type error_message",
    "subscriber_retrystate": "id last_tenant last_run_started_at last_run_finished_at"
    " last_maintenance_at heartbeat_at",
    "subscriber_tenantretention": "tenant after_id visited_at",
    "subscriber_operatoraction": "id acted_at actor action reason scope count",
    "subscriber_tenantincident": "id tenant kind started_at last_probe_at next_probe_at probe_count"
    " ended_at cause opened_alerted_at closed_alerted_at",
    "privacy_request": "id kind shop_domain organization_id event_id customer_id email orders"
    " subject_hash requested_at recorded_at due_at attempted_at alerted_at overdue_logged_at"
    " exported_at done_at",
    "privacy_receipt": "id request_id database organization_id state reason progress counts"
    " started_at finished_at",
    "subscriber_schema_version": "version name checksum applied_at",
}
EVENTS = (
    "id event_id organization_id shop_domain topic event_type resource_type resource_id payload"
    " parsed_payload received_at inserted_at source_event_id api_version triggered_at"
    " source_updated_at payload_sha256 payload_raw trace_id"
)
SNAPSHOT = (
    "id organization_id shop_domain shopify_id topic event_type payload parsed_payload is_deleted"
    " first_seen_at last_seen_at source_updated_at source_triggered_at event_id"
)
RESOURCES = (
    "orders products customers inventory_items inventory_levels locations fulfillments refunds"
    " order_transactions draft_orders checkouts collections"
)
TENANT_TABLES = {
    "shopify_events": EVENTS,
    **{f"shopify_{resource}": SNAPSHOT for resource in RESOURCES.split()},
    "shopify_erasures": "subject_hash event_id shop_domain subject_kind erased_at recorded_at"
    " progress",
    "shopify_schema_version": "version name checksum applied_at",
}


@pytest.fixture
def series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder of migrations of our own, in place of the product's."""
    monkeypatch.setattr(migrate, "FOLDER", tmp_path)
    (tmp_path / Series.APP).mkdir()

    def write(**files: str) -> Series:
        for name, text in files.items():
            (tmp_path / Series.APP / f"{name[1:]}.sql").write_text(text)
        migrate.files.cache_clear()
        return Series.APP

    yield write
    migrate.files.cache_clear()


@pytest.fixture
def connection(empty_url: str):
    with db.connect(db.Target(conninfo=empty_url), migrate.LIMITS) as connection:
        yield connection


def rows(connection: psycopg.Connection[Any], query: Any) -> list[tuple[Any, ...]]:
    return connection.execute(query).fetchall()


def versions(connection: psycopg.Connection[Any]) -> list[int]:
    found = rows(connection, "select version from subscriber_schema_version order by version")
    return [version for (version,) in found]


@pytest.mark.parametrize(
    ("kind", "expected"), [(Series.APP, APP_TABLES), (Series.TENANT, TENANT_TABLES)]
)
def test_the_schema_that_the_migrations_add_up_to_is_the_one_agreed_on(connection, kind, expected):
    migrate.apply(connection, kind)
    found: dict[str, set[str]] = {}
    for table, column in rows(
        connection,
        "select table_name, column_name from information_schema.columns"
        " where table_schema = 'public'",
    ):
        found.setdefault(table, set()).add(column)
    assert found == {table: set(columns.split()) for table, columns in expected.items()}


def test_all_times_are_instants(connection):
    for kind in Series:
        migrate.apply(connection, kind)
    found = rows(
        connection,
        "select distinct data_type from information_schema.columns where table_schema = 'public'"
        " and (column_name like '%\\_at' or column_name = 'leased_until')",
    )
    assert found == [("timestamp with time zone",)]


def test_every_tenant_table_has_its_keys_its_indexes_and_row_level_security(connection):
    migrate.apply(connection, Series.TENANT)
    for table in TENANT_TABLES:
        (secured,) = rows(
            connection, f"select relrowsecurity from pg_class where oid = '{table}'::regclass"
        )
        assert secured == (True,), table
    found = {
        (table, definition.split(" USING btree ")[1], "UNIQUE" in definition)
        for table, definition in rows(
            connection, "select tablename, indexdef from pg_indexes where schemaname = 'public'"
        )
    }
    events = "shopify_events"
    assert (events, "(organization_id, shop_domain, event_id)", True) in found
    assert (events, "(organization_id, topic, received_at)", False) in found
    assert (events, "(organization_id, resource_type, resource_id)", False) in found
    for resource in RESOURCES.split():
        table = f"shopify_{resource}"
        assert (table, "(organization_id, shop_domain, shopify_id)", True) in found
        assert (table, "(organization_id, topic)", False) in found


def test_tables_of_the_earlier_system_keep_their_rows_and_get_what_they_lack(connection):
    connection.execute(
        """create table shopify_orders (
             id serial primary key, organization_id text not null, shop_domain text not null,
             shopify_id text not null, topic text, event_type text, payload jsonb,
             parsed_payload jsonb, is_deleted boolean not null default false,
             first_seen_at timestamptz default now(), last_seen_at timestamptz,
             unique (organization_id, shop_domain, shopify_id));
           insert into shopify_orders (organization_id, shop_domain, shopify_id)
             values ('o', 's', '1')"""
    )
    migrate.apply(connection, Series.TENANT)
    (row,) = rows(connection, "select shopify_id, source_updated_at, event_id from shopify_orders")
    assert row == ("1", None, None)
    (secured,) = rows(
        connection, "select relrowsecurity from pg_class where oid = 'shopify_orders'::regclass"
    )
    assert secured == (False,), "whoever made the table decides on its security"


def test_applying_again_changes_nothing(connection):
    for kind in Series:
        assert migrate.apply(connection, kind) == list(migrate.files(kind))
        assert migrate.apply(connection, kind) == []
        assert migrate.pending(connection, kind) == []


def test_only_what_is_pending_is_applied_in_order(connection, series):
    series(_0001_a="create table a (x int)")
    assert [m.name for m in migrate.apply(connection, Series.APP)] == ["0001_a.sql"]
    series(_0002_b="alter table a add y int", _0003_c="alter table a rename y to z")
    assert [m.version for m in migrate.pending(connection, Series.APP)] == [2, 3]
    assert [m.version for m in migrate.apply(connection, Series.APP)] == [2, 3]
    assert versions(connection) == [1, 2, 3]


def test_a_failing_file_leaves_no_trace(connection, series):
    series(_0001_a="create table a (x int)", _0002_b="create table b (x int); select 1/0")
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate.apply(connection, Series.APP)
    assert versions(connection) == [1]
    assert rows(connection, "select to_regclass('b')") == [(None,)]


def test_the_version_row_goes_first(connection, series):
    series(_0001_a="create table a as select version from subscriber_schema_version")
    migrate.apply(connection, Series.APP)
    assert rows(connection, "select * from a") == [(1,)]


@pytest.mark.parametrize("step", [migrate.apply, migrate.pending])
def test_an_applied_file_that_changed_is_refused_by_name(connection, series, step):
    migrate.apply(connection, series(_0001_a="create table a (x int)"))
    series(_0001_a="create table a (x bigint)")
    with pytest.raises(MigrationError, match=r"0001_a\.sql is not the file"):
        step(connection, Series.APP)


def test_numbers_with_a_gap_are_refused(series):
    with pytest.raises(MigrationError, match="not numbered"):
        migrate.files(series(_0001_a="select 1", _0003_c="select 1"))


def test_two_runners_at_once_apply_each_file_once(empty_url, series):
    text = "create table a (x int); select pg_sleep(0.1)"
    kind = series(_0001_a=text, _0002_b="create table b (x int)")
    applied, faults = [], []

    def run():
        try:
            with db.connect(db.Target(conninfo=empty_url), migrate.LIMITS) as connection:
                applied.extend(m.version for m in migrate.apply(connection, kind))
        except psycopg.Error as error:
            faults.append(error)

    runners = [threading.Thread(target=run) for _ in range(4)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    assert (sorted(applied), faults) == ([1, 2], [])


def test_tenant_files_can_all_be_run_again(connection):
    migrate.apply(connection, Series.TENANT)
    connection.execute("drop table shopify_orders")
    migrate.apply_again(connection, Series.TENANT)
    assert rows(connection, "select to_regclass('shopify_orders') is not null") == [(True,)]


def test_looking_for_drift_leaves_the_session_as_it_was(connection):
    migrate.apply(connection, Series.TENANT)
    path = rows(connection, "show search_path")
    assert migrate.drift(connection, Series.TENANT) == migrate.Drift(differences=[], unsecured=[])
    assert rows(connection, "select 1 from pg_class where relpersistence = 't'") == []
    assert rows(connection, "show search_path") == path
