"""Under load nothing that was accepted is lost: every id that got a 200 is found afterwards."""

import json
import threading
import time
import uuid

import psycopg
import pytest

from dev import deliveries, samples
from dev.stack import SUBSCRIPTION, Stack

pytestmark = pytest.mark.slow

CONNECTIONS = 16
SECONDS = 15
OUTAGE_SECONDS = 3


def ids(url: str, query: str) -> set[str]:
    with psycopg.connect(url) as connection:
        return {row[0] for row in connection.execute(query)}  # type: ignore[call-overload]


def test_every_accepted_delivery_is_found_although_the_tenant_went_away_meanwhile(tmp_path):
    with Stack(tmp_path, environ={"PATH": "/usr/bin:/bin"}, retry_every=0) as stack:
        assert stack.pubsub is not None
        described = stack.describe()
        order = json.loads(samples.load("orders/updated", described["shop_domain"]))
        accepted: set[str] = set()
        end = time.monotonic() + SECONDS

        def deliver() -> None:
            while time.monotonic() < end:
                event_id = str(uuid.uuid4())
                body = json.dumps({**order, "id": hash(event_id) % 50}).encode()
                headers = deliveries.attributes(
                    "orders/updated", described["shop_domain"], event_id=event_id
                )
                signed = deliveries.signed(headers, body, described["client_secret"])
                if deliveries.post(described["webhook_url"], body, signed).status == 200:
                    accepted.add(event_id)

        workers = [threading.Thread(target=deliver) for _ in range(CONNECTIONS)]
        for worker in workers:
            worker.start()
        time.sleep(SECONDS / 3)
        stack.tenant_database.stop("immediate")
        time.sleep(OUTAGE_SECONDS)
        stack.tenant_database.start()
        for worker in workers:
            worker.join()
        while stack.pubsub.broker.depth(SUBSCRIPTION):
            time.sleep(0.1)

        stored = ids(described["tenant_database_url"], "select event_id from shopify_events")
        failed = ids(
            described["app_database_url"], "select event_id from subscriber_subscriberfailedevent"
        )
        assert accepted
        assert failed, "the outage was felt"
        assert accepted <= stored | failed

        while deliveries.post(described["retry_url"]).json()["retried"]:
            pass
        stored = ids(described["tenant_database_url"], "select event_id from shopify_events")
        unresolved = ids(
            described["app_database_url"],
            "select event_id from subscriber_subscriberfailedevent where status <> 'resolved'",
        )
        assert accepted <= stored
        assert unresolved == set()
