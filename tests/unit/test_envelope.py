"""An envelope says who, what and when, whatever the headers or the message were like."""

import base64
import gzip
import hashlib
import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import envelope as envelopes
from shared.errors import UndecodableMessageError
from shared.message import Message
from shared.model import Encoding, Source

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
TRACE = "0af7651916cd43dd8448eb211c80319c"
BODY = b'{"id": 820982911946154508}'
HEADERS = {
    "X-Shopify-Topic": "orders/create",
    "X-Shopify-Shop-Domain": "acme.myshopify.com",
    "X-Shopify-Webhook-Id": "b54557e4-bdd9-4b37-8a5f-bf7d70bcd043",
    "X-Shopify-Event-Id": "98880550-7158-44d4-b7cd-2c97c8a091b5",
    "X-Shopify-Triggered-At": "2026-11-30T11:59:58.257929387Z",
    "X-Shopify-API-Version": "2026-04",
}


def of_webhook(body=BODY, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return envelopes.from_webhook({**HEADERS, **named}.items(), body, NOW)


def as_message(envelope, **extra):
    data = base64.b64encode(envelopes.message_data(envelope)).decode()
    return Message(data=data, attributes=envelopes.message_attributes(envelope), **extra)


def test_a_delivery_is_identified_by_its_webhook_id_and_correlated_by_its_event_id():
    envelope = of_webhook()
    assert envelope.event_id == HEADERS["X-Shopify-Webhook-Id"]
    assert envelope.source_event_id == HEADERS["X-Shopify-Event-Id"]
    assert envelope.payload_sha256 == hashlib.sha256(BODY).digest()


@pytest.mark.parametrize("case", [str.lower, str.upper, str.title])
def test_header_names_are_read_in_any_case(case):
    pairs = [(case(name), value) for name, value in HEADERS.items()]
    assert envelopes.from_webhook(pairs, BODY, NOW) == of_webhook()


def test_only_webhook_id_topic_and_shop_are_needed():
    optional = ("X-Shopify-Event-Id", "X-Shopify-Triggered-At", "X-Shopify-API-Version")
    pairs = [(name, value) for name, value in HEADERS.items() if name not in optional]
    envelope = envelopes.from_webhook(pairs, BODY, NOW)
    assert (envelope.source_event_id, envelope.triggered_at, envelope.api_version) == (None,) * 3


def test_without_a_webhook_id_the_content_is_the_identity():
    bare = of_webhook(X_Shopify_Webhook_Id="")
    assert bare.event_id.startswith("sha256:")
    assert bare == of_webhook(X_Shopify_Webhook_Id="")
    others = [
        of_webhook(b"{}", X_Shopify_Webhook_Id=""),
        of_webhook(X_Shopify_Webhook_Id="", X_Shopify_Topic="orders/paid"),
        of_webhook(X_Shopify_Webhook_Id="", X_Shopify_Shop_Domain="other.myshopify.com"),
        of_webhook(X_Shopify_Webhook_Id="", X_Shopify_Triggered_At="2026-11-30T12:00:00Z"),
    ]
    assert len({bare.event_id, *(other.event_id for other in others)}) == 5


def test_a_webhook_id_too_long_for_an_index_counts_as_none():
    assert of_webhook(X_Shopify_Webhook_Id="x" * 300).event_id.startswith("sha256:")


def test_the_message_carries_the_envelope_unchanged():
    sent = of_webhook(traceparent=f"00-{TRACE}-b7ad6b7169203331-01")
    message = as_message(sent, message_id="1", publish_time="2026-11-30T12:00:01Z")
    received = envelopes.from_message(message, NOW + timedelta(hours=1))
    for field in ("event_id", "shop_domain", "topic", "payload", "payload_sha256", "received_at"):
        assert getattr(received, field) == getattr(sent, field)
    assert received.source is Source.WEBHOOK
    assert received.trace_id == TRACE
    assert received.published_at == NOW + timedelta(seconds=1)


def test_a_large_body_travels_compressed_and_arrives_whole():
    body = json.dumps({"text": "ünï" * 500_000}).encode()
    sent = of_webhook(body)
    data = envelopes.message_data(sent)
    assert envelopes.message_attributes(sent)["content-encoding"] == "gzip"
    assert len(data) < len(body) / 10
    assert data == envelopes.message_data(sent), "the same body makes the same bytes"
    assert envelopes.from_message(as_message(sent), NOW).payload == body


def test_a_native_message_has_shopifys_own_receipt_time_and_makes_no_audit_row():
    message = Message(data=base64.b64encode(BODY).decode(), attributes=HEADERS)
    envelope = envelopes.from_message(message, NOW)
    assert (envelope.source, envelope.received_at, envelope.audited) == (Source.PUBSUB, NOW, True)


def test_attributes_are_shopifys_headers_in_shopifys_casing():
    lower = [(name.lower(), value) for name, value in HEADERS.items()]
    envelope = envelopes.from_webhook(
        [*lower, ("x-shopify-order-id", "1"), ("cookie", "x")], BODY, NOW
    )
    assert envelope.attributes == {**HEADERS, "X-Shopify-Order-Id": "1"}


def test_a_header_longer_than_pubsub_allows_is_cut_at_a_character():
    cut = of_webhook(X_Shopify_Name="é" * 2000).attributes["X-Shopify-Name"]
    assert cut == "é" * 512


def test_what_pubsubs_limits_cut_or_leave_out_is_counted():
    def counted(headers):
        given = list(headers.items())
        envelope = envelopes.from_webhook(given, BODY, NOW)
        assert len(envelope.attributes) <= envelopes.ATTRIBUTES_MAX
        return envelopes.not_whole(given, envelope)

    others = {f"x-shopify-{n}": "1" for n in range(envelopes.ATTRIBUTES_MAX)}
    assert counted(HEADERS) == 0
    assert counted(HEADERS | {"x-shopify-name": "é" * 513, "cookie": "x" * 2000}) == 1
    assert counted(HEADERS | {"x-shopify-" + "a" * 300: "1"}) == 1
    assert counted(others | HEADERS) == len(HEADERS)


def test_what_identifies_an_event_is_never_left_out_for_other_headers():
    others = {f"x-shopify-{n}": "1" for n in range(envelopes.ATTRIBUTES_MAX)}
    envelope = envelopes.from_webhook((others | HEADERS).items(), BODY, NOW)
    assert HEADERS.items() <= envelope.attributes.items()


def test_an_id_made_of_a_time_that_is_cut_is_the_same_on_both_sides():
    sent = of_webhook(X_Shopify_Webhook_Id="", X_Shopify_Triggered_At="2026" * 500)
    assert envelopes.from_message(as_message(sent), NOW).event_id == sent.event_id


def test_of_attributes_alike_but_for_case_the_first_with_a_value_counts():
    message = Message(
        data="",
        attributes={"x-shopify-topic": "", "X-Shopify-Topic": "a/b", "X-SHOPIFY-TOPIC": "c/d"},
    )
    assert envelopes.from_message(message, NOW).topic == "a/b"


@pytest.mark.parametrize(
    ("data", "attributes", "encoding"),
    [
        ("not base64!", {}, Encoding.BASE64),
        ("é", {}, Encoding.BASE64),
        ("YWJj", {"content-encoding": "gzip"}, Encoding.GZIP),
        (
            base64.b64encode(gzip.compress(b"x" * 100, mtime=0)[:-6]).decode(),
            {"Content-Encoding": "GZIP"},
            Encoding.GZIP,
        ),
    ],
)
def test_data_that_cannot_be_decoded_is_kept_and_said_so_when_opened(data, attributes, encoding):
    envelope = envelopes.from_message(Message(data=data, attributes=attributes), NOW)
    assert envelope.encoding is encoding
    assert envelope.payload
    again = envelopes.from_json(envelopes.to_json(envelope), envelope.payload)
    with pytest.raises(UndecodableMessageError):
        envelopes.opened(again)


def test_a_small_message_cannot_fill_the_memory():
    bomb = gzip.compress(b"\0" * (envelopes.BODY_BYTES + 1))
    message = Message(data=base64.b64encode(bomb).decode(), attributes={"content-encoding": "gzip"})
    envelope = envelopes.from_message(message, NOW)
    assert envelope.encoding is Encoding.GZIP
    assert envelope.payload == bomb


anything = st.text() | st.text(st.characters(categories=["Cs", "Cc"]))


@given(
    st.builds(
        Message,
        data=anything | st.binary().map(lambda b: base64.b64encode(b).decode()),
        attributes=st.dictionaries(
            st.sampled_from([*HEADERS, "hookledger-source", "hookledger-received-at"]) | anything,
            anything | st.just("webhook"),
        ),
        message_id=st.none() | st.text(),
        publish_time=st.none() | anything,
        delivery_attempt=st.none() | st.integers(),
    )
)
def test_any_message_at_all_becomes_an_envelope_that_survives_the_ledgers_json(message):
    envelope = envelopes.from_message(message, NOW)
    kept = json.dumps(envelopes.to_json(envelope))
    assert "\\u0000" not in kept
    assert envelopes.from_json(json.loads(kept), envelope.payload) == envelope


def test_not_even_pubsubs_own_number_can_hold_what_the_ledger_refuses():
    envelope = envelopes.from_message(Message(data="", message_id="7\x00\ud800"), NOW)
    assert envelope.message_id == "7\ufffd"


def test_a_second_body_gets_an_id_of_its_own_once():
    once = envelopes.collided(of_webhook())
    assert once.event_id == f"{of_webhook().event_id}#{once.payload_sha256.hex()[:16]}"
    assert envelopes.collided(once) == once


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-11-30T12:00:00Z", NOW),
        ("2026-11-30T07:00:00-05:00", NOW),
        ("2026-11-30T12:00:00.000000999Z", NOW),
        ("2026-11-30 12:00:00", NOW),
        ("2026-11-30", NOW.replace(hour=0)),
        ("0001-01-01T00:00:00+14:00", None),
        ("yesterday", None),
        ("", None),
        (None, None),
        (1764504000, None),
    ],
)
def test_times_are_instants_in_utc_or_absent(text, moment):
    assert envelopes.timestamp(text) == moment


@pytest.mark.parametrize(
    ("domain", "good"),
    [
        ("acme.myshopify.com", True),
        ("a-1.myshopify.com", True),
        ("ACME.myshopify.com", False),
        ("-acme.myshopify.com", False),
        ("acme.myshopify.com.evil.example", False),
        ("acme.example.com", False),
        ("a.b.myshopify.com", False),
        ("acme.myshopify.com\n", False),
        ("", False),
    ],
)
def test_a_shop_is_known_by_its_myshopify_name(domain, good):
    assert envelopes.is_shop_domain(domain) is good


@pytest.mark.parametrize(
    ("lower", "trace"),
    [
        ({"x-cloud-trace-context": f"{TRACE.upper()}/123;o=1"}, TRACE),
        ({"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}, TRACE),
        ({"traceparent": "nonsense"}, None),
        ({}, None),
    ],
)
def test_the_trace_is_googles(lower, trace):
    assert envelopes.trace_id(lower) == trace
