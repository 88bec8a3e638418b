"""Shopify's signature: base64 of HMAC-SHA256 over the raw body, keyed by an app's client secret."""

import base64
import hashlib
import hmac
from collections.abc import Iterable


def verify(body: bytes, signature: str | None, secrets: Iterable[str]) -> bool:
    """Whether any of `secrets` signed `body`. Malformed signatures are simply wrong."""
    given = (signature or "").encode("utf-8", "replace")
    # Every secret is tried, so the time taken does not tell which one fitted.
    return sum(hmac.compare_digest(given, _signed(body, secret)) for secret in secrets) > 0


def header(body: bytes, secret: str) -> str:
    """The `X-Shopify-Hmac-Sha256` value that Shopify would send with `body`."""
    return _signed(body, secret).decode("ascii")


def _signed(body: bytes, secret: str) -> bytes:
    return base64.b64encode(hmac.digest(secret.encode(), body, hashlib.sha256))
