"""Shopify's signature: base64 of HMAC-SHA256 over the raw body, keyed by an app's client secret."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable


def verify(body: bytes, signature: str | None, secrets: Iterable[str]) -> bool:
    """Whether any of `secrets` signed `body`. Malformed signatures are simply wrong."""
    given = _digest(signature)
    if given is None:
        return False
    # Every secret is tried, so the time taken does not tell which one fitted.
    return sum(hmac.compare_digest(given, _sign(body, secret)) for secret in secrets) > 0


def header(body: bytes, secret: str) -> str:
    """The `X-Shopify-Hmac-Sha256` value that Shopify would send with `body`."""
    return base64.b64encode(_sign(body, secret)).decode("ascii")


def _sign(body: bytes, secret: str) -> bytes:
    return hmac.digest(secret.encode(), body, hashlib.sha256)


def _digest(signature: str | None) -> bytes | None:
    if not signature:
        return None
    try:
        digest = binascii.a2b_base64(signature.encode("ascii"), strict_mode=True)
    except (UnicodeEncodeError, binascii.Error):
        return None
    return digest if len(digest) == hashlib.sha256().digest_size else None
