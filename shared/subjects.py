"""Who an event is about: the shop, customer, address or order whose erasure takes it along.

Ids are only ever compared as keyed hashes (HMAC-SHA256 under `PRIVACY_HASH_KEY`): what remembers an
erasure must not itself say who was erased.
"""

import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from shared import fields, topics
from shared.errors import ConfigurationError
from shared.fields import Body

ERASED: Final = "erased:"  # begins an id that stands for one that was erased

# Resources whose own id is the customer's, and those whose id is personal in another way.
_CUSTOMERS: Final = frozenset(
    {"customers", "customer", "customers_marketing_consent", "customers_email_marketing_consent"}
)
_PERSONAL_IDS: Final = _CUSTOMERS | {"customer_payment_methods"}
_CUSTOMER_FIELDS: Final = ("customer_id", "deleted_customer_id")
_ORDER_FIELDS: Final = ("order_id", "origin_order_id")
# Their bodies name the customer if there is one, so an address without a customer is a guest's.
_GUESTS: Final = frozenset({"shopify_orders", "shopify_draft_orders", "shopify_checkouts"})
# What may stay of an erased order and its like: nothing of it tells whose it was.
_IMPERSONAL: Final = frozenset(
    {
        *("id", "order_id", "currency", "presentment_currency", "financial_status", "status"),
        *("fulfillment_status", "shipment_status", "cancel_reason", "kind", "gateway", "test"),
        *("total_price", "subtotal_price", "total_tax", "total_discounts", "total_outstanding"),
        *("current_total_price", "current_subtotal_price", "current_total_tax", "total_shipping"),
        *("total_tip_received", "total_line_items_price", "total_duties", "amount"),
        *("created_at", "updated_at", "processed_at", "cancelled_at", "closed_at", "completed_at"),
        *("line_items_count", "fulfillments_count", "refunds_count", "refund_line_items_count"),
        *("transactions_count", "confirmed", "taxes_included", "restock"),
    }
)


class Kind(StrEnum):
    """What a subject is."""

    SHOP = "shop"
    CUSTOMER = "customer"
    EMAIL = "email"  # of whomever
    GUEST = "guest"  # an e-mail address where the body names no customer
    ORDER = "order"
    ID = "id"  # any other personal id; nobody asks for it, it is only hidden


class Subject(NamedTuple):
    """One that an event is about. A tuple, for every event makes some."""

    kind: Kind
    id: str


class RequestKind(StrEnum):
    """The compliance topics."""

    DATA_REQUEST = "customers/data_request"
    CUSTOMER_REDACT = "customers/redact"
    SHOP_REDACT = "shop/redact"

    @property
    def is_erasure(self) -> bool:
        """Whether something is to be removed."""
        return self is not RequestKind.DATA_REQUEST


COMPLIANCE: Final = frozenset(RequestKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a compliance event asks for: whose data, and which orders by name."""

    kind: RequestKind
    customer_id: str | None = None
    email: str | None = None
    orders: tuple[str, ...] = ()

    def targets(self, shop: str) -> tuple[Subject, ...]:
        """The subjects meant. By id where there is one: an address may be shared by others."""
        if self.kind is RequestKind.SHOP_REDACT:
            return (Subject(Kind.SHOP, shop),)
        found = []
        if self.customer_id:
            found.append(Subject(Kind.CUSTOMER, self.customer_id))
        if self.email:
            found.append(Subject(Kind.GUEST if self.customer_id else Kind.EMAIL, self.email))
        return (*found, *(Subject(Kind.ORDER, order) for order in self.orders))


def wish(topic: str, shop: str, body: Body) -> Wish | None:
    """What the body of a compliance topic asks for; None for all other topics.

    The signature covers the body only, and the topic is but a claim: a body that is not just what
    the topic's bodies are must not erase anything. Raises ValueError, without a value in it.
    """
    if topic not in COMPLIANCE:
        return None
    kind = RequestKind(topic)
    if not _fits(kind, shop, body):
        raise ValueError(f"The body is not what {topic} sends. Nothing is done because of it.")
    if kind is RequestKind.SHOP_REDACT:
        return Wish(kind=kind)
    named = Wish(
        kind=kind,
        customer_id=_plain(fields.resource_id(body, ("customer.id",))),
        email=_address(fields.resource_id(body, ("customer.email",))),
        orders=_orders(body.get("orders_to_redact") or body.get("orders_requested")),
    )
    if not named.targets(shop):
        raise ValueError(f"The body of {topic} names neither a customer nor an order.")
    return named


def of(shop: str, name: str, parsed: Mapping[str, Any]) -> tuple[Subject, ...]:
    """The subjects of an event of topic `name`, from its parsed fields."""
    topic = topics.lookup(name)
    customers = _CUSTOMER_FIELDS + ("id",) * (topic.resource in _CUSTOMERS)
    orders = _ORDER_FIELDS + ("id",) * (topic.table == "shopify_orders")
    found = [Subject(Kind.SHOP, shop)]
    found += [Subject(Kind.CUSTOMER, id) for f in customers if (id := _plain(parsed.get(f)))]
    is_guest = len(found) == 1 and topic.table in _GUESTS
    found += [Subject(Kind.ORDER, id) for f in orders if (id := _plain(parsed.get(f)))]
    if email := _address(parsed.get("email")):
        found.append(Subject(Kind.EMAIL, email))
        if is_guest:
            found.append(Subject(Kind.GUEST, email))
    return tuple(dict.fromkeys(found))


def of_body(shop: str, name: str, body: Body) -> tuple[Subject, ...]:
    """The subjects of an event, from its body: also of topics whose address is in no field."""
    parsed = fields.parsed(body, topics.lookup(name))
    email = fields.resource_id(body, ("email", "contact_email", "customer.email"))
    return of(shop, name, {"email": email} | parsed)


def is_personal(resource: str) -> bool:
    """Whether the id of such a resource is itself about a person."""
    return resource in _PERSONAL_IDS


def impersonal(parsed: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parsed fields that may stay."""
    return {name: value for name, value in (parsed or {}).items() if name in _IMPERSONAL}


class Hasher:
    """Turns subjects into what an erasure is remembered by."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        """The first key makes new hashes, all of them find old ones."""
        self._keys = [key.encode() for key in keys]

    @property
    def has_key(self) -> bool:
        """Whether anybody who was erased can be recognised."""
        return bool(self._keys)

    def digest(self, shop: str, subject: Subject) -> str:
        """The subject's hash, 64 hex digits; raises ConfigurationError without a key."""
        if not self._keys:
            raise ConfigurationError(
                "PRIVACY_HASH_KEY is missing: no erasure can be remembered without it. "
                "See docs/configuration.md."
            )
        return _digest(self._keys[0], shop, subject)

    def digests(self, shop: str, subjects: Iterable[Subject]) -> list[str]:
        """Every hash under which one of the subjects may have been erased."""
        return [
            _shop_digest(key, shop) if subject.kind is Kind.SHOP else _digest(key, shop, subject)
            for subject in subjects
            for key in self._keys
        ]

    def hidden(self, shop: str, resource: str, id: str | None) -> str | None:
        """An id as it may stay once its resource is erased."""
        if id is None or id.startswith(ERASED) or not self._keys or not is_personal(resource):
            return id
        return ERASED + self.digest(shop, Subject(Kind.ID, id))[:32]


def _digest(key: bytes, shop: str, subject: Subject) -> str:
    text = f"{subject.kind.value}\0{shop}\0{subject.id}"
    return hmac.digest(key, text.encode(), "sha256").hex()


@lru_cache(maxsize=1024)
def _shop_digest(key: bytes, shop: str) -> str:
    """Every event of a shop asks for the same one."""
    return _digest(key, shop, Subject(Kind.SHOP, shop))


def _fits(kind: RequestKind, shop: str, body: Body) -> bool:
    named = body.get("shop_domain")
    if not isinstance(named, str) or named.strip().lower() != shop:
        return False
    match kind:
        case RequestKind.SHOP_REDACT:
            return body.keys() <= {"shop_id", "shop_domain"}
        case RequestKind.CUSTOMER_REDACT:
            return isinstance(body.get("customer"), dict) and "orders_to_redact" in body
        case RequestKind.DATA_REQUEST:
            return isinstance(body.get("customer"), dict) and "orders_to_redact" not in body


def _orders(named: object) -> tuple[str, ...]:
    if not isinstance(named, list):
        return ()
    found = (_plain(fields.resource_id({"id": each}, ("id",))) for each in named)
    return tuple(dict.fromkeys(each for each in found if each))


def _plain(id: object) -> str | None:
    """The number in `gid://shopify/Customer/1`; any other id as it is."""
    if not isinstance(id, str) or not id:
        return None
    return id.rsplit("/", 1)[-1].partition("?")[0] if id.startswith("gid://") else id


def _address(email: object) -> str | None:
    return email.strip().lower() or None if isinstance(email, str) else None
