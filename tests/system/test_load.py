"""Under load nothing that was accepted is lost: every id that got a 200 is found afterwards."""

import http.client
import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from dev import deliveries, samples
from dev.stack import SUBSCRIPTION, Stack

pytestmark = pytest.mark.slow

TOPIC = "orders/updated"
OUTAGE_SECONDS = 3
ORDERS = 50


@dataclass
class Load:
    """What was sent until now: the ids that were accepted, and the answers by their status."""

    accepted: set[str] = field(default_factory=set)
    answers: Counter[int] = field(default_factory=Counter)


@contextmanager
def load(stack: dict[str, Any], *, connections: int, seconds: float) -> Iterator[Load]:
    """Deliveries over so many kept connections, for so long; the block ends with the last one."""
    done, end = Load(), time.monotonic() + seconds
    send = sender(stack, done)

    def deliver() -> None:
        address = urlsplit(stack["webhook_url"]).netloc
        with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
            while time.monotonic() < end:
                send(connection)

    workers = [threading.Thread(target=deliver) for _ in range(connections)]
    for worker in workers:
        worker.start()
    try:
        yield done
    finally:
        for worker in workers:
            worker.join()


def sender(stack: dict[str, Any], done: Load) -> Callable[[http.client.HTTPConnection], None]:
    """Sends one delivery of a new event of one of ORDERS orders; no answer counts as status 0."""
    shop, secret = stack["shop_domain"], stack["client_secret"]
    order, counting = json.loads(samples.load(TOPIC, shop)), threading.Lock()

    def send(connection: http.client.HTTPConnection) -> None:
        event_id = str(uuid.uuid4())
        body = json.dumps({**order, "id": hash(event_id) % ORDERS}).encode()
        headers = deliveries.attributes(TOPIC, shop, event_id=event_id)
        try:
            connection.request("POST", "/", body, deliveries.signed(headers, body, secret))
            answer = connection.getresponse()
            answer.read()
            status = answer.status
        except (OSError, http.client.HTTPException):
            connection.close()
            status = 0
        with counting:
            done.answers[status] += 1
            if status == 200:
                done.accepted.add(event_id)

    return send


def ids(url: str, query: str) -> set[str]:
    with psycopg.connect(url) as connection:
        return {row[0] for row in connection.execute(query)}  # type: ignore[call-overload]


def stored(stack: dict[str, Any]) -> set[str]:
    return ids(stack["tenant_database_url"], "select event_id from shopify_events")


def failed(stack: dict[str, Any], where: str = "true") -> set[str]:
    query = f"select event_id from subscriber_subscriberfailedevent where {where}"
    return ids(stack["app_database_url"], query)


def drain(running: Stack) -> None:
    """Until Pub/Sub has delivered all that it was given."""
    assert running.pubsub is not None
    while running.pubsub.broker.depth(SUBSCRIPTION):
        time.sleep(0.1)


def test_under_64_connections_for_a_minute_no_delivery_is_lost(tmp_path):
    with Stack(tmp_path, environ={"PATH": "/usr/bin:/bin"}, retry_every=0) as running:
        stack = running.describe()
        with load(stack, connections=64, seconds=60) as done:
            pass
        assert set(done.answers) == {200}, "every one of them was accepted"
        drain(running)
        assert done.accepted <= stored(stack) | failed(stack)
        audited = ids(stack["app_database_url"], "select event_id from shopify_shopifyevent")
        assert done.accepted <= audited
        waiting = ids(
            stack["app_database_url"],
            "select event_id from shopify_shopifyevent where needs_publish",
        )
        assert waiting == set()


def test_every_accepted_delivery_is_found_although_the_tenant_went_away_meanwhile(tmp_path):
    with Stack(tmp_path, environ={"PATH": "/usr/bin:/bin"}, retry_every=0) as running:
        stack = running.describe()
        with load(stack, connections=16, seconds=15) as done:
            time.sleep(5)
            running.tenant_database.stop("immediate")
            time.sleep(OUTAGE_SECONDS)
            running.tenant_database.start()
        drain(running)
        assert done.accepted
        assert failed(stack), "the outage was felt"
        assert done.accepted <= stored(stack) | failed(stack)

        while deliveries.post(stack["retry_url"]).json()["retried"]:
            pass
        assert done.accepted <= stored(stack)
        assert failed(stack, "status <> 'resolved'") == set()
