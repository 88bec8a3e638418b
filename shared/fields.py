"""What a body says about its resource: id, clock, parents, and the fields that people query.

Every reader takes whatever stands there. Absent, null, malformed, out of range: all are None, and
nothing raises.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Final

from shared.envelope import timestamp
from shared.jsontext import Number, plain
from shared.text import KEY_CHARACTERS
from shared.topics import Rules, Topic, named_rules

Body = Mapping[str, Any]
Reader = Callable[[object], object]
Place = str | tuple[str, ...]  # a key at the top, or the steps to a place further down

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DIGITS_AT_END: Final = re.compile(r"[/#]([0-9]+)\Z")
_DECIMAL: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of `parsed`: its name, where it stands, and how it is read."""

    name: str
    rules: Rules
    read: Reader


def resource_id(body: Body, rules: Rules) -> str | None:
    """The id by the first rule that finds one: integers and text, as text of 255 at most."""
    return next((text for rule in rules if (text := _joined(body, rule))), None)


def instant(body: Body, rules: Rules) -> datetime | None:
    """The time by the first rule that finds one, in UTC."""
    return next((moment for rule in rules if (moment := _moment(body, rule))), None)


def parsed(body: Body, topic: Topic) -> dict[str, Any]:
    """The fields of a body, ready for JSON: `id`, parent ids, `admin_graphql_api_id`, and for the
    resources that have a snapshot those of FIELDS.

    A field is there if the body has a well-formed value for it, and else left out: the bodies of
    deletions hold little more than an id. Ids are text, money is decimal text beside its currency,
    times are UTC in ISO 8601 with Z. No value is a float.
    """
    found = {
        "id": resource_id(body, topic.id),
        **{name: resource_id(body, rules) for name, rules in topic.parents.items()},
        "admin_graphql_api_id": _text(body.get("admin_graphql_api_id")),
    }
    if topic.table:
        found |= _read(body, topic.resource)
    return {name: value for name, value in found.items() if value is not None}


def _read(body: Body, resource: str) -> dict[str, object]:
    """The resource's FIELDS that are there. Runs some forty times an event: no call too many."""
    found: dict[str, object] = {}
    for name, places, read in _plan(resource):
        for place in places:
            value = body.get(place) if isinstance(place, str) else _within(body, place)
            if value is None:
                continue
            if isinstance(value, Number):
                value = plain(value)
            if (value := read(value)) is not None:
                found[name] = value
                break
    return found


@cache
def _plan(resource: str) -> tuple[tuple[str, tuple[Place, ...], Reader], ...]:
    return tuple(
        (field.name, tuple(_place(rule) for rule in field.rules), field.read)
        for field in FIELDS[resource]
    )


@cache
def _place(path: str) -> Place:
    return tuple(path.split(".")) if "." in path else path


def _at(body: Body, path: str) -> object:
    """What stands at a place. A number counts by its value, as in jsonb, not by its spelling."""
    place = _place(path)
    value = body.get(place) if isinstance(place, str) else _within(body, place)
    return plain(value) if isinstance(value, Number) else value


def _within(body: object, steps: tuple[str, ...]) -> object:
    for step in steps:
        match body:
            case dict():
                body = body.get(step)
            case list() if step.isdecimal():
                body = body[int(step)] if int(step) < len(body) else None
            case _:
                return None
    return body


def _joined(body: Body, rule: str) -> str | None:
    parts = [_id_at(body, part) for part in rule.split("+")]
    if not all(parts):
        return None
    text = ":".join(part or "" for part in parts)
    return text if len(text) <= KEY_CHARACTERS else None


def _id_at(body: Body, part: str) -> str | None:
    if not part.startswith("#"):
        return _id(_at(body, part))
    end = _DIGITS_AT_END.search(_text(_at(body, part[1:])) or "")
    return end.group(1) if end else None


def _moment(body: Body, rule: str) -> datetime | None:
    if rule.startswith("@"):
        return _since_epoch(_at(body, rule[1:]))
    return timestamp(_at(body, rule))


def _since_epoch(seconds: object) -> datetime | None:
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        return None
    try:
        return _EPOCH + timedelta(seconds=seconds)
    except OverflowError:
        return None


def _id(value: object) -> str | None:
    return None if isinstance(value, Number) else _text(value) or None


def _text(value: object) -> str | None:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value)
    return None


def _money(value: object) -> str | None:
    text = _text(value)
    return text if text and _DECIMAL.fullmatch(text) else None


def _time(value: object) -> str | None:
    moment = timestamp(value)
    return moment.isoformat().replace("+00:00", "Z") if moment else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _length(value: object) -> int | None:
    return len(value) if isinstance(value, list) else None


def _words(value: object) -> list[str] | None:
    if not isinstance(value, str):
        return None
    return [word.strip() for word in value.split(",") if word.strip()]


_READERS: Final[Mapping[str, Reader]] = {
    "ids": _id,
    "text": _text,
    "money": _money,
    "times": _time,
    "counts": _count,
    "flags": _flag,
    "lengths": _length,
    "words": _words,
}


def _fields(**kinds: str) -> tuple[Field, ...]:
    return tuple(
        Field(name=name, rules=rules, read=_READERS[kind])
        for kind, text in kinds.items()
        for name, rules in named_rules(text).items()
    )


# By resource. `name=place` where the place is another than the name; ids of parents are in the
# table of topics.
FIELDS: Final[Mapping[str, tuple[Field, ...]]] = {
    "orders": _fields(
        ids="location_id user_id app_id",
        text="name email=email|contact_email phone financial_status fulfillment_status "
        "cancel_reason source_name customer_locale currency presentment_currency",
        money="total_price subtotal_price total_tax total_discounts total_outstanding "
        "total_tip_received current_total_price current_subtotal_price current_total_tax "
        "total_shipping=total_shipping_price_set.shop_money.amount",
        times="created_at updated_at processed_at cancelled_at closed_at",
        counts="order_number",
        flags="test confirmed taxes_included",
        lengths="line_items_count=line_items fulfillments_count=fulfillments refunds_count=refunds",
        words="tags",
    ),
    "products": _fields(
        text="title handle vendor product_type status published_scope",
        times="created_at updated_at published_at",
        lengths="variants_count=variants images_count=images",
        words="tags",
    ),
    "customers": _fields(
        text="email phone first_name last_name state currency "
        "country_code=default_address.country_code",
        money="total_spent",
        times="created_at updated_at",
        counts="orders_count",
        flags="verified_email tax_exempt",
        words="tags",
    ),
    "inventory_items": _fields(
        text="sku country_code_of_origin province_code_of_origin harmonized_system_code",
        money="cost",
        times="created_at updated_at",
        flags="tracked requires_shipping",
    ),
    "inventory_levels": _fields(times="updated_at", counts="available"),
    "locations": _fields(
        text="name address1 address2 city zip province_code country_code phone",
        times="created_at updated_at",
        flags="active legacy",
    ),
    "fulfillments": _fields(
        ids="location_id",
        text="name email status shipment_status service tracking_company tracking_number "
        "tracking_url",
        times="created_at updated_at",
        lengths="line_items_count=line_items",
    ),
    "refunds": _fields(
        ids="user_id",
        text="currency=transactions.0.currency|total_duties_set.shop_money.currency_code",
        money="total_duties=total_duties_set.shop_money.amount",
        times="created_at processed_at",
        flags="restock",
        lengths="refund_line_items_count=refund_line_items transactions_count=transactions",
    ),
    "order_transactions": _fields(
        ids="location_id user_id",
        text="kind status gateway payment_id error_code source_name currency",
        money="amount",
        times="created_at processed_at",
        flags="test",
    ),
    "draft_orders": _fields(
        text="name email status currency",
        money="total_price subtotal_price total_tax",
        times="created_at updated_at invoice_sent_at completed_at",
        flags="tax_exempt taxes_included",
        lengths="line_items_count=line_items",
        words="tags",
    ),
    "checkouts": _fields(
        ids="location_id user_id",
        text="name token cart_token email phone source_name customer_locale currency "
        "presentment_currency",
        money="total_price subtotal_price total_tax total_discounts total_line_items_price",
        times="created_at updated_at completed_at closed_at",
        lengths="line_items_count=line_items",
    ),
    "collections": _fields(
        text="title handle sort_order published_scope",
        times="updated_at published_at",
    ),
}
