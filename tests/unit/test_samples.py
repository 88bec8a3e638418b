"""The sample payloads: there for the topics that matter, and worth trying things with."""

import json
import re

import pytest

from dev import samples
from shared.parse import claimed_shop
from shared.topics import TOPICS


def test_every_sample_is_of_a_known_topic() -> None:
    assert len(samples.topics()) >= 28
    assert set(samples.topics()) <= set(TOPICS)


def test_every_snapshot_resource_has_a_sample() -> None:
    resources = {TOPICS[topic].resource for topic in samples.topics()}
    assert {topic.resource for topic in TOPICS.values() if topic.table} <= resources


def test_a_topic_without_sample_is_named() -> None:
    with pytest.raises(LookupError, match="moons/risen"):
        samples.load("moons/risen")


def test_a_topic_cannot_leave_the_folder() -> None:
    with pytest.raises(LookupError):
        samples.load("../../pyproject.toml")


@pytest.mark.parametrize("topic", ["customers/redact", "app/uninstalled", "shop/update"])
def test_a_sample_that_names_its_shop_names_the_one_asked_for(topic: str) -> None:
    assert claimed_shop(samples.load(topic)) == samples.SHOP_DOMAIN
    assert claimed_shop(samples.load(topic, "other.myshopify.com")) == "other.myshopify.com"


def test_the_samples_hold_what_breaks_careless_readers() -> None:
    body = samples.load("orders/create").decode()
    order = json.loads(body)
    assert order["id"] > 2**53
    assert order["currency"] == "JPY"
    assert "." not in order["total_price"]
    assert re.search("[\U0001f300-\U0001faff]", body), "an emoji"
    assert r"\"" in body
    assert r"\\" in body
    assert r"\u0026" in body
    assert r"\/" in body


def test_the_samples_hold_nobody_real() -> None:
    for topic in samples.topics():
        body = samples.load(topic).decode()
        assert set(re.findall(r"[\w.]+@([\w.]+)", body)) <= {"example.com"}
