"""The table of topics: complete, and right about what is a snapshot and what is a deletion."""

from collections import Counter

import pytest

from shared.topics import SNAPSHOT_TABLES, TOPICS, lookup

OPERATIONS = {
    "app": 2, "app_purchases_one_time": 1, "app_subscriptions": 2, "audit_events": 1,
    "bulk_operations": 1, "carts": 2, "channels": 1, "checkouts": 3, "collection_listings": 3,
    "collection_publications": 3, "collections": 3, "companies": 3, "company_contact_roles": 2,
    "company_contacts": 3, "company_locations": 3, "customer": 4, "customer_account_settings": 1,
    "customer_groups": 3, "customer_payment_methods": 3, "customers": 9,
    "customers_email_marketing_consent": 1, "customers_marketing_consent": 1,
    "delivery_promise_settings": 1, "discounts": 5, "disputes": 2, "domains": 3,
    "draft_orders": 3, "finance_app_staff_member": 4, "finance_kyc_information": 1,
    "fulfillment_events": 2, "fulfillment_holds": 2, "fulfillment_orders": 20, "fulfillments": 2,
    "inventory_items": 3, "inventory_levels": 3, "inventory_shipments": 8,
    "inventory_transfers": 6, "locales": 3, "locations": 5, "markets": 3,
    "markets_backup_region": 1, "metafield_definitions": 3, "metaobjects": 3,
    "order_transactions": 1, "orders": 11, "payment_schedules": 1, "payment_terms": 3,
    "product_feeds": 5, "product_listings": 3, "product_publications": 3, "products": 3,
    "profiles": 3, "refunds": 1, "returns": 8, "reverse_deliveries": 1,
    "reverse_fulfillment_orders": 1, "scheduled_product_listings": 3, "segments": 3,
    "selling_plan_groups": 3, "shipping_addresses": 2, "shop": 2,
    "subscription_billing_attempts": 3, "subscription_billing_cycle_edits": 3,
    "subscription_billing_cycles": 2, "subscription_contracts": 7, "tax_services": 2,
    "tender_transactions": 1, "themes": 4, "variants": 2,
}  # fmt: skip

SNAPSHOTS = {
    "orders": "cancelled create delete fulfilled link_requested paid partially_fulfilled updated",
    "products": "create delete update",
    "customers": "create delete disable enable update",
    "inventory_items": "create delete update",
    "inventory_levels": "connect disconnect update",
    "locations": "activate create deactivate delete update",
    "fulfillments": "create update",
    "refunds": "create",
    "order_transactions": "create",
    "draft_orders": "create delete update",
    "checkouts": "create delete update",
    "collections": "create delete update",
}


def test_the_table_has_every_topic_of_the_reference() -> None:
    assert len(TOPICS) == 219
    assert Counter(topic.resource for topic in TOPICS.values()) == OPERATIONS


def test_a_topic_is_named_after_its_resource_and_operation() -> None:
    for name, topic in TOPICS.items():
        assert name == topic.name
        assert name in (
            f"{topic.resource}/{topic.operation}",
            f"{topic.resource}.{topic.operation}",
        )


def test_only_the_customer_resource_has_topics_in_dot_form() -> None:
    assert {topic.resource for topic in TOPICS.values() if "." in topic.name} == {"customer"}


def test_exactly_the_topics_with_a_whole_resource_have_a_snapshot() -> None:
    found = {name: topic.table for name, topic in TOPICS.items() if topic.table}
    assert found == {
        f"{resource}/{operation}": f"shopify_{resource}"
        for resource, operations in SNAPSHOTS.items()
        for operation in operations.split()
    }


def test_the_snapshot_tables_are_a_closed_set_of_twelve() -> None:
    assert len(SNAPSHOT_TABLES) == 12
    assert {topic.table for topic in TOPICS.values() if topic.table} == SNAPSHOT_TABLES


def test_of_the_snapshots_delete_and_disconnect_are_deletions() -> None:
    for topic in TOPICS.values():
        if topic.table:
            assert topic.is_deletion == (topic.operation in ("delete", "disconnect")), topic.name


def test_no_deletion_of_a_snapshot_has_a_clock_and_every_other_state_has() -> None:
    for topic in TOPICS.values():
        if topic.table:
            assert bool(topic.clock) != topic.is_deletion, topic.name


def test_all_topics_of_a_snapshot_find_the_id_in_the_same_way() -> None:
    for table in SNAPSHOT_TABLES:
        assert len({topic.id for topic in TOPICS.values() if topic.table == table}) == 1


@pytest.mark.parametrize(
    ("name", "resource", "operation"),
    [
        ("moons/risen", "moons", "risen"),
        ("customer.waved", "customer", "waved"),
        ("orders/teleported", "orders", "teleported"),
        ("a_1/b_2", "a_1", "b_2"),
    ],
)
def test_an_unknown_topic_is_ledgered_by_its_name(name: str, resource: str, operation: str) -> None:
    topic = lookup(name)
    assert (topic.name, topic.resource, topic.operation) == (name, resource, operation)
    assert topic.table is None


@pytest.mark.parametrize(
    "name", ["", "orders", "a/b/c", "Orders/Create", "orders/", "ö/ä", "a/b\n"]
)
def test_a_name_of_another_form_is_a_resource_without_operation(name: str) -> None:
    topic = lookup(name)
    assert (topic.name, topic.resource, topic.operation) == (name, name, "")
    assert topic.table is None


def test_an_unknown_deletion_is_a_deletion() -> None:
    assert lookup("moons/delete").is_deletion
    assert not lookup("moons/disconnect").is_deletion
