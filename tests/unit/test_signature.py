"""A delivery is Shopify's if, and only if, one of our secrets signed its raw bytes."""

import base64
import hashlib
import hmac

import pytest

from shared import signature

BODY = '{"note": "caf\u00e9 \\u2028 \\/ \\u0026",  "a":1, "a":2}'.encode()
SIGNED = base64.b64encode(hmac.new(b"secret", BODY, hashlib.sha256).digest()).decode()


def test_the_raw_bytes_are_what_is_signed():
    assert signature.verify(BODY, SIGNED, ["secret"])
    assert not signature.verify(BODY.replace(b"  ", b" "), SIGNED, ["secret"])


def test_any_of_several_secrets_verifies():
    assert signature.verify(BODY, SIGNED, ["new", "secret", "other-app"])
    assert not signature.verify(BODY, SIGNED, ["new", "other-app"])


def test_without_secrets_nothing_verifies():
    assert not signature.verify(BODY, SIGNED, [])


def test_the_empty_body_has_a_signature_too():
    assert signature.verify(b"", signature.header(b"", "secret"), ["secret"])


def test_header_makes_what_shopify_sends():
    assert signature.header(BODY, "secret") == SIGNED


@pytest.mark.parametrize(
    "malformed",
    [
        None,
        "",
        base64.b64decode(SIGNED).hex(),
        " " + SIGNED,
        SIGNED + "\n",
        SIGNED[:-4],
        SIGNED[:-1],
        "not base64!",
        "é" + SIGNED[1:],
        SIGNED.replace("=", ""),
        base64.b64encode(b"short").decode(),
    ],
)
def test_a_malformed_signature_is_a_wrong_one(malformed):
    assert not signature.verify(BODY, malformed, ["secret"])
