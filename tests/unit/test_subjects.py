"""Who an event is about, and what the compliance topics ask for."""

import json

import pytest

from dev import samples
from shared import subjects
from shared.errors import ConfigurationError
from shared.parse import parse
from shared.subjects import Hasher, Kind, RequestKind, Subject
from tests.world import SHOP, envelope

SELF = Subject(Kind.SHOP, SHOP)


def of(topic: str, body: dict):
    event = parse(envelope(body, topic))
    return set(subjects.of(SHOP, topic, event.parsed))


def customer(id_: str) -> Subject:
    return Subject(Kind.CUSTOMER, id_)


def order(id_: str) -> Subject:
    return Subject(Kind.ORDER, id_)


def email(text: str) -> Subject:
    return Subject(Kind.EMAIL, text)


@pytest.mark.parametrize(
    ("topic", "body", "found"),
    [
        ("products/update", {"id": 1}, set()),
        ("customers/update", {"id": 7}, {customer("7")}),
        ("customers/update", {"id": 7, "email": " A@B.c "}, {customer("7"), email("a@b.c")}),
        ("customer.tags_added", {"customerId": "gid://shopify/Customer/7"}, {customer("7")}),
        ("customers_marketing_consent/update", {"id": 7}, {customer("7")}),
        ("customer_payment_methods/create", {"token": "t", "customer_id": 7}, {customer("7")}),
        ("customers/redact", {"customer": {"id": 7}}, {customer("7")}),
        (
            "customers/merge",
            {
                "admin_graphql_api_customer_kept_id": "gid://shopify/Customer/1",
                "admin_graphql_api_customer_deleted_id": "gid://shopify/Customer/2",
            },
            {customer("1"), customer("2")},
        ),
        ("orders/create", {"id": 1, "customer": {"id": 7}}, {customer("7"), order("1")}),
        ("orders/delete", {"id": 1}, {order("1")}),
        ("orders/edited", {"order_edit": {"id": 5, "order_id": 1}}, {order("1")}),
        ("refunds/create", {"id": 5, "order_id": 1}, {order("1")}),
        ("returns/request", {"id": 5, "order": {"id": 1}}, {order("1")}),
        ("fulfillments/create", {"id": 5, "order_id": 1, "email": "x@y.z"},
         {order("1"), email("x@y.z")}),
        ("checkouts/create", {"id": 5, "email": "x@y.z"},
         {email("x@y.z"), Subject(Kind.GUEST, "x@y.z")}),
        ("checkouts/create", {"id": 5, "email": "x@y.z", "customer": {"id": 7}},
         {email("x@y.z"), customer("7")}),
        ("words/unknown", {"id": 5, "customer": {"id": 7}}, {customer("7")}),
    ],
)  # fmt: skip
def test_an_event_is_about_whom_its_body_names(topic, body, found):
    assert of(topic, body) == found | {SELF}


def wish(topic: str, body: dict, shop: str = SHOP):
    return subjects.wish(topic, shop, body)


REDACT = {"shop_id": 1, "shop_domain": SHOP, "customer": {"id": 7, "email": "A@b.c"},
          "orders_to_redact": [1, "2", 1]}  # fmt: skip


def test_a_customer_is_meant_by_id_and_an_address_only_where_no_customer_is_named():
    asked = wish("customers/redact", REDACT)
    assert asked is not None
    assert asked.targets(SHOP) == (
        customer("7"), Subject(Kind.GUEST, "a@b.c"), order("1"), order("2"),
    )  # fmt: skip
    nameless = wish("customers/redact", REDACT | {"customer": {"email": "a@b.c"}})
    assert nameless is not None
    assert email("a@b.c") in nameless.targets(SHOP)


def test_the_samples_are_understood():
    asked = wish(
        "customers/redact", json.loads(samples.load("customers/redact")), samples.SHOP_DOMAIN
    )
    assert asked is not None
    assert (asked.kind, asked.customer_id) == (RequestKind.CUSTOMER_REDACT, "9203318845570162779")
    assert wish("orders/create", {"id": 1}) is None


@pytest.mark.parametrize(
    ("topic", "body"),
    [
        # A captured body that is validly signed, under a topic that is not its own.
        ("shop/redact", {"id": 1}),
        ("shop/redact", REDACT),
        ("shop/redact", {"shop_id": 1, "shop_domain": "other.myshopify.com"}),
        ("shop/redact", {"shop_id": 1}),
        ("customers/redact", {"id": 1, "customer": {"id": 7}}),
        ("customers/redact", {"shop_domain": SHOP, "customer": {"id": 7}, "orders_requested": []}),
        ("customers/data_request", REDACT),
        ("customers/redact", {"shop_domain": SHOP, "customer": {}, "orders_to_redact": []}),
    ],
)
def test_a_body_of_another_kind_erases_nothing(topic, body):
    with pytest.raises(ValueError, match=topic):
        wish(topic, body)


def test_hashes_depend_on_key_shop_and_kind_and_old_keys_still_find():
    old, new = Hasher(["old"]), Hasher(["new", "old"])
    one = customer("7")
    assert old.digest(SHOP, one) in new.digests(SHOP, [one])
    assert new.digest(SHOP, one) != old.digest(SHOP, one)
    assert old.digest(SHOP, one) != old.digest("other.myshopify.com", one)
    assert old.digest(SHOP, one) != old.digest(SHOP, order("7"))
    assert Hasher().digests(SHOP, [one]) == []
    with pytest.raises(ConfigurationError, match="PRIVACY_HASH_KEY"):
        Hasher().digest(SHOP, one)


def test_only_ids_of_persons_are_hidden_and_once():
    hasher = Hasher(["k"])
    assert hasher.hidden(SHOP, "orders", "1") == "1"
    hidden = hasher.hidden(SHOP, "customers", "7")
    assert hidden is not None
    assert hidden.startswith("erased:")
    assert "7" != hidden == hasher.hidden(SHOP, "customers", hidden)
