"""Signals over a NATS server: those of one store only, and only hints; its loss costs latency and nothing else."""

import asyncio
import datetime
import gc
import ipaddress
import threading
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import holdfast
from holdfast.errors import ConfigurationError
from holdfast.proof.storm.nats_server import NatsServer
from holdfast.settings import Settings
from holdfast.storage.port import RunCommit
from holdfast.storage.postgres import PostgresStore
from tests.storage.postgres.test_opening import database
from tests.storage.postgres.test_races import message, run
from tests.storage.postgres.test_signals import Heard, connected

SECRET = "do-not-print-me"

# If nats-py does not connect, it leaves the socket to the garbage collection.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What a test leaves to the garbage collection is collected before the next test."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


@asynccontextmanager
async def nodes(nats: str, *urls: str) -> AsyncIterator[list[Any]]:
    stores: list[Any] = [PostgresStore(url, lease_s=30.0, nats=nats) for url in urls]
    for n, store in enumerate(stores):
        await store.open(node_id=f"n{n}", at=1.0)
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


def test_nodes_hear_what_others_have_changed_but_not_what_they_changed_themselves(
    server: NatsServer, postgres_url: str
) -> None:
    async def main() -> None:
        async with nodes(server.url(), postgres_url, postgres_url) as (one, two):
            await connected((one, two))
            own, heard = Heard(one), Heard(two)
            claim = (await one.send(message(0))).claim
            assert await heard.until("changed") == [claim.lease.session]
            await one.send(message(1))
            await one.commit_run(RunCommit(lease=claim.lease, status="completed", at=9.0))
            assert await heard.until("ready") == [claim.lease.session]
            other = (await two.send(message(2, key="other"))).session
            assert await own.until("changed") == [other]
            assert one.cluster.signals.sent > 0
            assert own.kinds.pop("created", [other]) == [other]
            assert own.kinds == {}

    run(main)


def test_nodes_of_another_store_hear_nothing(server: NatsServer, postgres_url: str, postgres_database: str) -> None:
    async def main() -> None:
        with database(postgres_database, "nats_other") as other:
            async with nodes(server.url(), postgres_url, postgres_url, other) as (one, two, stranger):
                await connected((one, two, stranger))
                heard, strange = Heard(two), Heard(stranger)
                await one.send(message(0))
                await heard.until("changed")
                assert (strange.kinds, stranger.cluster.signals.received) == ({}, 0)

    run(main)


def test_foreign_messages_on_the_subject_do_no_harm(server: NatsServer, postgres_url: str) -> None:
    async def main() -> None:
        async with nodes(server.url(), postgres_url) as (one,):
            await connected((one,))
            heard = Heard(one)
            client = await nats.connect(server.url())
            for text in (b"", b"\xff\x00", b"drop everything", b"changed x y", b"changed " + b"9" * 30, b"ready"):
                await client.publish(f"holdfast.{one.backend.cluster_id}.signals", text)
            await client.publish(f"holdfast.{one.backend.cluster_id}.signals", b"changed 7")
            await client.flush()
            while 7 not in heard.kinds.get("changed", []):
                await asyncio.sleep(0.005)
            assert set(heard.kinds) <= {"changed", "ready"}
            await client.close()

    run(main)


def test_hosts_go_on_without_the_server_and_use_it_again(postgres_url: str) -> None:
    async def echo(run: holdfast.Run) -> str:
        return f"echo {run.text}"

    async def main() -> None:
        with NatsServer() as server:
            settings = Settings(cluster_poll_s=0.05, nats=server.url())
            async with (
                holdfast.Host(echo, store=postgres_url, settings=settings) as one,
                holdfast.Host(echo, store=postgres_url, settings=settings) as two,
            ):
                await connected((one.store, two.store))
                assert await one.session("a").ask("1") == "echo 1"
                server.stop()
                while one.store.cluster is not None and one.store.cluster.signals.problem is None:
                    await two.session("a").ask("2")
                receipt = await one.session("a").send("3")
                assert (await two.session("a").wait(receipt.message_id)).text == "echo 3"
                server.start()
                await connected((one.store, two.store))
                assert await two.session("a").ask("4") == "echo 4"

    run(main)


def test_a_password_is_needed_where_it_is_asked_for_and_shown_nowhere(postgres_url: str) -> None:
    config = f'authorization {{ user: "holdfast", password: "{SECRET}" }}'

    async def main() -> None:
        with NatsServer(config) as server:
            async with nodes(server.url(f"holdfast:{SECRET}@"), postgres_url) as (one,):
                await connected((one,))
            async with nodes(server.url(f"holdfast:wrong-{SECRET}@"), postgres_url) as (one,):
                while one.cluster.signals.problem == "not connected yet":
                    await asyncio.sleep(0.01)
                assert "127.0.0.1" in one.cluster.signals.problem
                assert SECRET not in one.cluster.signals.problem
        assert SECRET not in repr(Settings(nats=f"nats://holdfast:{SECRET}@h"))

    run(main)
    with pytest.raises(ConfigurationError) as caught:
        PostgresStore("postgresql://h/db", nats=f"http://holdfast:{SECRET}@h:1")
    assert SECRET not in "".join(traceback.format_exception(caught.value)).replace(
        f'http://holdfast:{SECRET}@h:1")', ""
    )


def test_a_tls_server_is_trusted_only_by_its_authority(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = self_signed(tmp_path)
    config = f'tls {{ cert_file: "{certificate}", key_file: "{tmp_path}/key.pem" }}'

    async def main() -> None:
        with NatsServer(config) as server:
            async with nodes(server.url(scheme="tls"), postgres_url) as (one,):
                while one.cluster.signals.problem == "not connected yet":
                    await asyncio.sleep(0.01)
                assert one.cluster.signals.problem is not None
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            async with nodes(server.url(scheme="tls"), postgres_url, postgres_url) as (one, two):
                await connected((one, two))
                heard = Heard(two)
                session = (await one.send(message(0))).session
                assert await heard.until("changed") == [session]

    run(main)


def self_signed(folder: Path) -> Path:
    """Write a certificate for 127.0.0.1 and its key; return the path of the certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nats of a test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return folder / "certificate.pem"


def test_a_server_without_tls_gets_no_password_from_a_node_that_requires_tls(postgres_url: str) -> None:
    config = f'authorization {{ user: "holdfast", password: "{SECRET}" }}'

    async def main() -> None:
        with NatsServer(config) as server:
            async with nodes(server.url(f"holdfast:{SECRET}@", "tls"), postgres_url) as (one,):
                while one.cluster.signals.problem == "not connected yet":
                    await asyncio.sleep(0.01)
                assert "does not work" in one.cluster.signals.problem

    run(main)


def test_a_node_closes_at_once_although_its_server_does_not_answer(postgres_url: str) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            for url in (f"nats://127.0.0.1:{port}", "nats://127.0.0.1:1"):
                store = PostgresStore(postgres_url, nats=url)
                await store.open(node_id="n", at=1.0)
                async with asyncio.timeout(4):  # the time of a connection attempt is 5 s
                    await store.close()

    run(main)


def test_a_peer_that_speaks_nonsense_ends_no_thread(postgres_url: str) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * 200_000)
        await writer.drain()
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with nodes(f"nats://127.0.0.1:{port}", postgres_url) as (one,):
                while one.cluster.signals.problem == "not connected yet":
                    await asyncio.sleep(0.01)
                assert any(thread.name == "holdfast-signals" for thread in threading.enumerate())

    run(main)


@pytest.mark.parametrize("subject", ["other", "holdfast.*.signals"])
def test_a_user_who_may_not_use_all_subjects_is_reported(
    postgres_url: str, caplog: pytest.LogCaptureFixture, subject: str
) -> None:
    rights = f'{{ publish: "{subject}", subscribe: "{subject}" }}'
    config = f'authorization {{ users = [{{ user: "holdfast", password: "x", permissions: {rights} }}] }}'

    async def echo(run: holdfast.Run) -> str:
        return run.text

    async def main() -> None:
        with NatsServer(config) as server:
            settings = Settings(cluster_poll_s=0.05, nats=server.url("holdfast:x@"))
            async with holdfast.Host(echo, store=postgres_url, settings=settings) as host:
                while "does not let this user publish and subscribe" not in caplog.text:
                    await asyncio.sleep(0.01)
                assert host.statistics().counts["incidents_store"] >= 1
                assert await host.session("a").ask("b") == "b"

    run(main)


def test_an_outage_is_reported_once_although_its_reasons_change(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def echo(run: holdfast.Run) -> str:
        return run.text

    async def main() -> None:
        with NatsServer() as server:
            settings = Settings(cluster_poll_s=0.05, nats=server.url())
            async with holdfast.Host(echo, store=postgres_url, settings=settings) as host:
                watch, cluster = host.parts.cluster_watch, host.store.cluster
                assert watch is not None
                assert cluster is not None
                while cluster.signals.problem is not None:
                    await asyncio.sleep(0.01)
                server.stop()
                reasons: set[str] = set()
                while len(reasons) < 2:  # the loss, and a failed attempt
                    if cluster.signals.problem is not None:
                        reasons.add(cluster.signals.problem)
                    await watch._poll()
                assert caplog.text.count("until this is mended") == 1

    run(main)
