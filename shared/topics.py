"""What is known of every Shopify topic, as one table: resource, snapshot, id, clock, parents.

The rules say where something is in a body, in a notation of four signs:

    a.b     the field `b` of the object `a`; in a list, its number: `events.0.time`
    a|b     `a`, or `b` where there is no `a`
    a+b     both, joined by a colon; nothing where one is missing
    #a      the digits at the end of the text `a`, as in `gid://shopify/Order/1` or `#1`

A clock can also be `@a`: seconds since 1970. `shared/fields.py` reads bodies by these rules.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

Rules = tuple[str, ...]  # alternatives: the first that finds something holds; () finds nothing

SNAPSHOT_TABLES: Final = frozenset(
    {
        "shopify_orders",
        "shopify_products",
        "shopify_customers",
        "shopify_inventory_items",
        "shopify_inventory_levels",
        "shopify_locations",
        "shopify_fulfillments",
        "shopify_refunds",
        "shopify_order_transactions",
        "shopify_draft_orders",
        "shopify_checkouts",
        "shopify_collections",
    }
)

_NAME: Final = re.compile(r"([a-z0-9_]+)[/.]([a-z0-9_]+)")
_GID: Final = "admin_graphql_api_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """What the events of one topic are about, and where their bodies say it."""

    name: str
    resource: str
    operation: str  # "" where the name has no such part
    table: str | None  # of the snapshot; None: event ledger only
    is_deletion: bool
    id: Rules
    clock: Rules  # when the state in the body came to be
    parents: Mapping[str, Rules]  # ids of what the resource belongs to, by their names


def lookup(name: str) -> Topic:
    """The topic called `name`. One that the table does not know is event ledger only.

    Nothing is refused: a name other than `word/word` or `word.word` is a resource, operation "".
    """
    if known := TOPICS.get(name):
        return known
    form = _NAME.fullmatch(name)
    resource, operation = form.groups() if form else (name, "")
    return replace(
        _GENERAL,
        name=name,
        resource=resource,
        operation=operation,
        is_deletion=_deletes(name),
    )


def rules(text: str) -> Rules:
    """The alternatives in `a|b`."""
    return tuple(filter(None, text.split("|")))


def named_rules(text: str) -> dict[str, Rules]:
    """Rules by name, from `a b=c|d`: a word alone is its own rule."""
    words = (word.partition("=") for word in text.split())
    return {name: rules(rule or name) for name, _, rule in words}


def _row(
    prefix: str,
    clocked: str = "",
    bare: str = "",
    *,
    snapshot: bool = False,
    id: str = "id",
    clock: str = "updated_at",
    parents: str = "",
) -> list[Topic]:
    """Topics of one resource: its operations whose bodies have the clock, and those without one."""
    resource = prefix[:-1]
    return [
        Topic(
            name=prefix + operation,
            resource=resource,
            operation=operation,
            table=f"shopify_{resource}" if snapshot else None,
            is_deletion=_deletes(prefix + operation),
            id=rules(id),
            clock=rules(clock) if operation in clocked.split() else (),
            parents=MappingProxyType(named_rules(parents)),
        )
        for operation in (clocked + " " + bare).split()
    ]


def _deletes(name: str) -> bool:
    return name == "inventory_levels/disconnect" or name.endswith("/delete")


_GENERAL: Final = _row(
    "word/", "word", id=f"id|{_GID}|token", parents="customer_id=customer_id|customer.id order_id"
)[0]

# A row: resource, operations with a clock, operations without one; then what differs from `id` and
# `updated_at`. A resource has one form of id in all its topics: digits where most bodies have a
# number, so that an index finds all events of a customer or an order together.
# fmt: off
_TABLE: Final = (
    # Orders
    _row("orders/", "create updated paid cancelled fulfilled partially_fulfilled link_requested",
         "delete", snapshot=True, parents="customer_id=customer.id"),
    _row("orders/", "edited", id="order_edit.id", parents="order_id=order_edit.order_id",
         clock="order_edit.committed_at|order_edit.created_at"),
    _row("orders/", "risk_assessment_changed", id="order_id|#admin_graphql_api_order_id",
         clock="created_at", parents="order_id=order_id|#admin_graphql_api_order_id"),
    _row("orders/", "", "shopify_protect_eligibility_changed", id="order_id", parents="order_id"),
    _row("order_transactions/", "create", snapshot=True, clock="processed_at|created_at",
         parents="order_id parent_id"),
    _row("refunds/", "create", snapshot=True, clock="processed_at|created_at",
         parents="order_id return_id=return.id"),
    _row("draft_orders/", "create update", "delete", snapshot=True,
         parents="order_id customer_id=customer.id"),
    # A checkout's deletion names it by a number that its creation may only have in its `name`.
    _row("checkouts/", "create update", "delete", snapshot=True, id="id|#name|token",
         parents="customer_id=customer.id"),
    _row("carts/", "create update", id="id|token"),
    _row("tender_transactions/", "create", clock="processed_at", parents="order_id"),
    _row("disputes/", "create update", clock="initiated_at", parents="order_id"),
    _row("payment_terms/", "create update", "delete"),
    _row("payment_schedules/", "due", parents="payment_terms_id"),

    # Fulfillment and returns
    _row("fulfillments/", "create update", snapshot=True, parents="order_id"),
    _row("fulfillment_events/", "create delete", clock="updated_at|happened_at",
         parents="fulfillment_id order_id"),
    _row("fulfillment_holds/", "", "added released", id="fulfillment_hold.id",
         parents="fulfillment_order_id=fulfillment_order.id"),
    _row("fulfillment_orders/", "",
         "cancellation_request_accepted cancellation_request_rejected cancelled "
         "cancellation_request_submitted fulfillment_request_accepted fulfillment_request_rejected "
         "fulfillment_service_failed_to_complete hold_released line_items_prepared_for_pickup "
         "line_items_prepared_for_local_delivery manually_reported_progress_stopped "
         "order_routing_complete placed_on_hold progress_reported rescheduled "
         "scheduled_fulfillment_order_ready split", id="fulfillment_order.id"),
    _row("fulfillment_orders/", "", "fulfillment_request_submitted",
         id="original_fulfillment_order.id|submitted_fulfillment_order.id"),
    _row("fulfillment_orders/", "", "moved",
         id="original_fulfillment_order.id|moved_fulfillment_order.id"),
    _row("fulfillment_orders/", "", "merged", id="fulfillment_order_merges.fulfillment_order.id"),
    _row("returns/", "", "approve cancel close decline process reopen request update",
         id=f"id|#{_GID}", parents="order_id=order_id|order.id"),
    _row("reverse_deliveries/", "", "attach_deliverable", parents="return_id=return.id"),
    _row("reverse_fulfillment_orders/", "", "dispose"),

    # Products and collections
    _row("products/", "create update", "delete", snapshot=True),
    _row("variants/", "in_stock out_of_stock", parents="product_id"),
    _row("collections/", "create update", "delete", snapshot=True),
    _row("collection_listings/", "add update", "remove", id="collection_listing.collection_id",
         clock="collection_listing.updated_at",
         parents="collection_id=collection_listing.collection_id"),
    _row("product_listings/", "add update", "remove", id="product_listing.product_id",
         clock="product_listing.updated_at", parents="product_id=product_listing.product_id"),
    _row("scheduled_product_listings/", "add update", "remove",
         id="scheduled_product_listing.product_id", clock="scheduled_product_listing.updated_at",
         parents="product_id=scheduled_product_listing.product_id"),
    _row("collection_publications/", "create update", "delete",
         parents="collection_id publication_id"),
    _row("product_publications/", "create update", "delete", parents="product_id publication_id"),
    _row("product_feeds/", "", "create update"),
    _row("product_feeds/", "full_sync full_sync_finish incremental_sync", id="productFeed.id",
         clock="metadata.occurred_at|metadata.occured_at",  # both spellings are Shopify's
         parents="product_id=product.id"),
    _row("selling_plan_groups/", "", "create delete update"),

    # Inventory and locations
    _row("inventory_items/", "create update", "delete", snapshot=True),
    _row("inventory_levels/", "connect update", "disconnect", snapshot=True,
         id="inventory_item_id+location_id", parents="inventory_item_id location_id"),
    _row("inventory_shipments/",
         "add_items create delete mark_in_transit receive_items remove_items "
         "update_item_quantities update_tracking", id="id|shipment_id", clock="happened_at"),
    _row("inventory_transfers/",
         "add_items cancel complete ready_to_ship remove_items update_item_quantities",
         clock="happened_at"),
    _row("locations/", "activate create deactivate update", "delete", snapshot=True),

    # Customers and companies
    _row("customers/", "create update enable disable", "delete", snapshot=True),
    _row("customers/", "", "merge", id="#admin_graphql_api_customer_kept_id",
         parents="deleted_customer_id=#admin_graphql_api_customer_deleted_id"),
    _row("customers/", "purchasing_summary", id="#customerId", clock="occurredAt"),
    _row("customers/", "", "data_request redact", id="customer.id", parents="shop_id"),
    _row("customer.", "", "joined_segment left_segment", id="customer_id",
         parents="customer_id=#customer_id segment_id"),
    _row("customer.", "tags_added tags_removed", id="customerId", clock="occurredAt",
         parents="customer_id=#customerId"),
    _row("customers_email_marketing_consent/", "update", id="customer_id",
         clock="email_marketing_consent.consent_updated_at", parents="customer_id"),
    _row("customers_marketing_consent/", "update",
         clock="sms_marketing_consent.consent_updated_at", parents="customer_id=id"),
    _row("customer_payment_methods/", "", "create revoke update", id=f"{_GID}|token",
         parents="customer_id"),
    _row("customer_groups/", "create update", "delete"),
    _row("customer_account_settings/", "", "update", id=""),
    _row("segments/", "create update", "delete", clock="lastEditDate"),
    _row("companies/", "create delete update", id=_GID),
    _row("company_contacts/", "create delete update", id=_GID,
         parents=f"company_id=company.{_GID} customer_id=#customer_admin_graphql_api_id"),
    _row("company_locations/", "create delete update", id=_GID,
         parents=f"company_id=company.{_GID}"),
    _row("company_contact_roles/", "assign revoke", clock="company_contact.updated_at",
         id=f"company_contact.{_GID}+company_location.{_GID}+company_contact_role.name",
         parents=f"company_contact_id=company_contact.{_GID} "
                 f"company_location_id=company_location.{_GID} "
                 "customer_id=#company_contact.customer_admin_graphql_api_id"),

    # Subscriptions
    _row("subscription_contracts/", "", "activate cancel create expire fail pause update",
         id=f"id|#{_GID}", parents="customer_id origin_order_id"),
    _row("subscription_billing_attempts/", "", "challenged failure success",
         id="id|idempotency_key", parents="order_id subscription_contract_id"),
    _row("subscription_billing_cycles/", "", "skip unskip",
         id="subscription_contract_id+cycle_index", parents="subscription_contract_id"),
    _row("subscription_billing_cycle_edits/", "", "create delete update",
         id="subscription_contract_id+cycle_index", parents="subscription_contract_id"),

    # Discounts and markets
    _row("discounts/", "create update", id=_GID),
    _row("discounts/", "redeemcode_added redeemcode_removed", id=_GID,
         parents="redeem_code_id=redeem_code.id"),
    _row("discounts/", "delete", id=_GID, clock="deleted_at"),
    _row("markets/", "", "create delete update"),
    _row("markets_backup_region/", "", "update", id=_GID),

    # The shop
    _row("shop/", "update"),
    _row("shop/", "", "redact", id="shop_id"),
    _row("domains/", "", "create destroy update"),
    _row("locales/", "", "create destroy update", id="locale"),
    _row("themes/", "create publish update", "delete"),
    _row("profiles/", "", "create delete update"),
    _row("shipping_addresses/", "create update"),
    _row("delivery_promise_settings/", "", "update", id="", parents="shop_id"),
    _row("tax_services/", "", "create update"),
    _row("channels/", "", "delete"),
    _row("metaobjects/", "create update", "delete", parents="definition_id"),
    _row("metafield_definitions/", "create update", "delete"),

    # The app
    # The body of `uninstalled` is the shop, whose own clock does not tell when the app left it.
    _row("app/", "scopes_update", "uninstalled", parents="shop_id"),
    _row("app_purchases_one_time/", "update", id=f"app_purchase_one_time.{_GID}",
         clock="app_purchase_one_time.updated_at",
         parents="shop_id=app_purchase_one_time.admin_graphql_api_shop_id"),
    _row("app_subscriptions/", "approaching_capped_amount update", id=f"app_subscription.{_GID}",
         clock="app_subscription.updated_at",
         parents="shop_id=app_subscription.admin_graphql_api_shop_id"),
    _row("bulk_operations/", "finish", id=_GID, clock="completed_at"),
    _row("audit_events/", "admin_api_activity", id="", clock="@events.0.time"),
    _row("finance_app_staff_member/", "delete grant revoke update"),
    _row("finance_kyc_information/", "update"),
)
# fmt: on

TOPICS: Final[Mapping[str, Topic]] = MappingProxyType(
    {topic.name: topic for row in _TABLE for topic in row}
)
