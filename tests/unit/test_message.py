"""A Pub/Sub message is read out of each shape in which it can arrive, whole or not."""

import base64
import json

import pytest

from shared.message import Message, NotAMessageError, read

DATA = base64.b64encode(b'{"id": 1}').decode()
INNER = {
    "data": DATA,
    "attributes": {"X-Shopify-Topic": "orders/create"},
    "messageId": "7",
    "publishTime": "2026-11-30T10:00:00.5Z",
}
WRAPPED = {"message": INNER, "subscription": "projects/p/subscriptions/s", "deliveryAttempt": 3}
READ = Message(
    data=DATA,
    attributes={"X-Shopify-Topic": "orders/create"},
    message_id="7",
    publish_time="2026-11-30T10:00:00.5Z",
    delivery_attempt=3,
)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(WRAPPED, id="push, or Eventarc in binary mode"),
        pytest.param({"specversion": "1.0", "id": "7", "data": WRAPPED}, id="structured event"),
        pytest.param(
            {
                "specversion": "1.0",
                "data_base64": base64.b64encode(json.dumps(WRAPPED).encode()).decode(),
            },
            id="structured event in base64",
        ),
    ],
)
def test_all_shapes_hold_the_same_message(body):
    assert read(json.dumps(body).encode()) == READ


def test_snake_case_names_do_as_well():
    message = {"data": DATA, "message_id": "8", "publish_time": "2026-11-30T10:00:00Z"}
    assert read(json.dumps({"message": message}).encode()) == Message(
        data=DATA, message_id="8", publish_time="2026-11-30T10:00:00Z"
    )


@pytest.mark.parametrize("absent", [{}, {"attributes": None, "data": None}, {"attributes": []}])
def test_a_message_without_attributes_or_data_is_still_a_message(absent):
    assert read(json.dumps({"message": absent}).encode()) == Message(data="")


def test_attribute_values_that_are_no_text_become_text_and_null_is_absent():
    attributes = {"a": 1, "b": None, "c": ["x"], "d": True}
    read_attributes = read(json.dumps({"message": {"attributes": attributes}}).encode()).attributes
    assert read_attributes == {"a": "1", "c": '["x"]', "d": "true"}


def test_bytes_that_are_not_utf8_do_not_hide_the_message():
    body = json.dumps(WRAPPED).encode().replace(b"orders/create", b"orders/\xff")
    assert read(body).attributes == {"X-Shopify-Topic": "orders/\ufffd"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"[]",
        b"7",
        b"{}",
        b'{"message": "text"}',
        b'{"data": {"no": "message"}}',
        b'{"data_base64": "!"}',
        b"[" * 100_000,
    ],
)
def test_what_holds_no_message_is_refused(body):
    with pytest.raises(NotAMessageError):
        read(body)
