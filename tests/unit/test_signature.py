"""A delivery is Shopify's if, and only if, one of our secrets signed its raw bytes."""

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shopify_app import ShopifyApp

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
        SIGNED[:-2] + chr(ord(SIGNED[-2]) + 1) + "=",  # the same bytes, but not their base64
        base64.b64encode(b"short").decode(),
    ],
)
def test_a_malformed_signature_is_a_wrong_one(malformed):
    assert not signature.verify(BODY, malformed, ["secret"])


# What a delivery may come with in place of its signature, made of the right one.
_TAMPERED = {
    "right": lambda right: right,
    "none": lambda right: None,
    "empty": lambda right: "",
    "cut": lambda right: right[:-4],
    "longer": lambda right: right + "AAAA",
    "no padding": lambda right: right.rstrip("="),
    "other case": lambda right: right.swapcase(),
    "url-safe": lambda right: right.translate(str.maketrans("+/", "-_")),
    "hexadecimal": lambda right: base64.b64decode(right).hex(),
    "a space": lambda right: " " + right,
    "unused bits": lambda right: right[:-2] + chr(ord(right[-2]) + 1) + "=",
}

secrets = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@given(
    body=st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
    new=secrets,
    old=secrets | st.none(),
    signed_with=secrets | st.none(),
    name=st.sampled_from(["X-Shopify-Hmac-Sha256", "x-shopify-hmac-sha256"]),
    tamper=st.sampled_from(sorted(_TAMPERED)),
)
def test_shopifys_own_package_is_of_the_same_opinion(*, body, new, old, signed_with, name, tamper):
    """Its bodies are text, and it knows one app with two secrets: what both can judge is compared.

    Without `signed_with` it is one of the app's own secrets that signed.
    """
    raw = body.encode()
    value = _TAMPERED[tamper](signature.header(raw, signed_with or old or new))
    headers = {"X-Shopify-Shop-Domain": "acme.myshopify.com"}
    if value is not None:
        headers[name] = value
    theirs = ShopifyApp("id", new, old).verify_webhook_req(
        {"method": "POST", "headers": headers, "url": "https://example.com/", "body": body}
    )
    assert signature.verify(raw, value, [new, old] if old else [new]) == theirs.ok
    assert theirs.ok or tamper != "right" or signed_with
