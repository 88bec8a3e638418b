"""Payloads to try things with: real in shape, invented in every value, all of one shop's week."""

from pathlib import Path
from typing import Final

SHOP_DOMAIN: Final = "harbor-lantern.myshopify.com"  # some bodies name it

_FOLDER: Final = Path(__file__).parent


def topics() -> list[str]:
    """The topics that have a sample, in order of name."""
    return sorted(path.stem.replace("__", "/") for path in _FOLDER.glob("*.json"))


def load(topic: str, shop_domain: str = SHOP_DOMAIN) -> bytes:
    """The sample body for `topic`, as `shop_domain` would send it.

    Raises LookupError where there is none.
    """
    if topic not in topics():
        raise LookupError(f"There is no sample for {topic!r}, only for: {', '.join(topics())}.")
    body = (_FOLDER / f"{topic.replace('/', '__')}.json").read_bytes()
    return body.replace(SHOP_DOMAIN.encode(), shop_domain.encode())
