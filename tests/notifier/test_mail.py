"""A mail as a server receives it: whatever the texts hold, it says that and nothing else."""

import email
import email.message
import re
from collections.abc import Iterator
from dataclasses import replace
from email import policy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.notifier import mail
from shared.notifier.model import Message, Result
from tests.notifier import post
from tests.notifier.servers import Smtp

HEADERS = {
    *("From", "To", "Subject", "Message-ID", "Date", "Auto-Submitted", "References"),
    *("In-Reply-To", "Content-Type", "Content-Transfer-Encoding", "MIME-Version"),
}

anything = st.text(st.characters(codec=None), max_size=300)
lines = st.lists(
    st.text(max_size=1200) | st.sampled_from([".", "..", "", ".x", "From me", "RCPT TO:<x@y>"]),
    max_size=8,
)
words = st.text(st.characters(categories=("L", "N", "P", "S", "Zs", "M")), max_size=200)
names = st.sampled_from(["", "Hookledger", "Bücher, Läden", 'The "best" shop', "李雷 (shop)"])
local_parts = st.from_regex(
    r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}(\.[a-z0-9]{1,9})?", fullmatch=True
)
addresses = st.builds(
    lambda local, domain: f"{local}@{domain}",
    local_parts | st.sampled_from(["ädä", "李", "o'neil"]),
    st.sampled_from(["example.com", "mail.example.org", "bücher.example", "xn--bcher-kva.example"]),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Smtp]:
    with Smtp(extensions=("SMTPUTF8",)) as server:
        yield server


def received(server: Smtp, message: Message, sender_name: str = "") -> email.message.EmailMessage:
    """The mail, parsed, and checked for what holds of every mail."""
    given = {"sender_name": sender_name} if sender_name.strip() else {}
    verdict = post.attempt(post.smtp(server.port, **given), message)
    assert verdict.result is Result.SENT, verdict
    taken = server.mails[-1]
    assert taken.recipients == tuple(mail.address(who) for who in message.pending)
    assert all(len(line) <= 998 for line in taken.data.split(b"\r\n"))
    assert not re.search(rb"(?<!\r)\n|\r(?!\n)", taken.data)
    found = parsed(taken.data)
    assert sorted(found.keys()) == sorted(HEADERS)
    assert not found.defects
    return found


def parsed(wire: bytes) -> email.message.EmailMessage:
    """Decoded first: Python's parser takes headers in UTF-8 only as text."""
    found = email.message_from_string(wire.decode(), policy=policy.default)
    assert isinstance(found, email.message.EmailMessage)
    return found


@settings(deadline=None, max_examples=40)
@given(subject=words, name=names, body=lines, to=st.lists(addresses, min_size=1, max_size=5))
def test_what_was_written_is_what_arrives(
    server: Smtp, subject: str, name: str, body: list[str], to: list[str]
) -> None:
    text = "\n".join(body).replace("\r", "").replace("\0", "")
    unique = tuple(dict.fromkeys(to))
    message = post.to(recipients=unique, pending=unique, subject=subject, body=text)
    found = received(server, message, name)
    assert squeezed(found["subject"]) == squeezed(subject)
    assert squeezed(found["from"].addresses[0].display_name) == squeezed(name)
    assert found["from"].addresses[0].addr_spec == "hook@example.com"
    assert [a.addr_spec for a in found["to"].addresses] == [mail.address(who) for who in unique]
    arrived = found.get_content().replace("\r\n", "\n")
    assert arrived.removesuffix("\n") == text.removesuffix("\n")


@settings(deadline=None, max_examples=50)
@given(subject=anything, body=anything, who=anything, key=st.none() | anything)
def test_no_text_makes_another_header_or_an_error_of_another_kind(
    subject: str, body: str, who: str, key: str | None
) -> None:
    for to in (("ada@example.com",), (who,), (f"{who}@example.com",), (f"ada@{who}",)):
        message = post.to(recipients=to, pending=to, subject=subject, body=body, dedupe_key=key)
        try:
            wire = mail.build(message, sender="hook@example.com").wire
        except mail.MalformedMessageError:
            continue
        keys = parsed(wire).keys()
        assert HEADERS - {"References", "In-Reply-To"} <= set(keys) <= HEADERS
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    "value",
    [
        *("", "@", "a", "a@", "@example.com", "a b@example.com", "a@b@example.com"),
        *("a..b@example.com", ".a@example.com", "a.@example.com", '"a b"@example.com'),
        *("a@[127.0.0.1]", "a@127.0.0.1", "a@exa mple.com", "a@example..com", "a@-", "a@"),
        *(
            "Ada <ada@example.com>",
            "a@example.com,b@example.com",
            "a@example.com\n",
            "a\0@example.com",
        ),
        *("a(b)@example.com", "a\ud800@example.com", "x" * 65 + "@example.com"),
        "a@" + "x" * 64 + ".example",
        "a@" + "x." * 130 + "example",
    ],
)
def test_what_is_no_address_is_refused(value: str) -> None:
    with pytest.raises(mail.MalformedMessageError):
        mail.address(value)


def test_a_domain_of_any_script_is_sent_as_dns_takes_it() -> None:
    assert mail.address("ada@Bücher.example") == "ada@xn--bcher-kva.example"
    assert mail.address("ops@host1") == "ops@host1"


def test_two_databases_never_give_two_messages_one_name() -> None:
    other = post.MESSAGE.created_at.replace(microsecond=1)
    assert mail.stable_id(post.MESSAGE) != mail.stable_id(replace(post.MESSAGE, created_at=other))
    assert mail.stable_id(post.MESSAGE) == mail.stable_id(replace(post.MESSAGE, pending=()))


def squeezed(text: str) -> str:
    """Folding a header may change its white space, and no more."""
    return "".join(text.split())
