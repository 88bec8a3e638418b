"""From a row of the database to the mail server, over the processor and the transports."""

import email

from shared.bootstrap import _attempt
from tests.notifier.relay import Relay
from tests.notifier.servers import Smtp, drip

TWO = ("ada@example.com", "bob@example.com")


def settings(server: Smtp) -> dict[str, object]:
    return {"host": "127.0.0.1", "port": server.port, "tls": "none", "sender": "hook@example.com"}


def test_a_notification_reaches_the_mail_server(relay: Relay) -> None:
    with Smtp() as server:
        relay.channel(settings=settings(server), recipients=TWO)
        id = relay.notify(subject="Grüße")
        assert relay.exhaust(id, _attempt) == ["sent"]
    (mail,) = server.mails
    assert mail.recipients == TWO
    assert email.message_from_bytes(mail.data)["message-id"].startswith(f"<{id}.")


def test_who_accepted_gets_no_second_copy_while_another_is_tried_again(relay: Relay) -> None:
    with Smtp({"RCPT:bob@example.com": ["450 later", "250 ok"]}) as server:
        relay.channel(settings=settings(server), recipients=TWO)
        id = relay.notify()
        assert relay.exhaust(id, _attempt) == ["retry", "sent"]
    assert [mail.recipients for mail in server.mails] == [(TWO[0],), (TWO[1],)]
    first, second = (email.message_from_bytes(mail.data) for mail in server.mails)
    assert first["message-id"] == second["message-id"]
    assert relay.notification(id)["partial"] is None


def test_a_notification_that_one_refused_for_good_is_sent_and_says_so(relay: Relay) -> None:
    with Smtp({"RCPT:bob@example.com": "550 no"}) as server:
        relay.channel(settings=settings(server), recipients=TWO)
        id = relay.notify()
        assert relay.exhaust(id, _attempt) == ["sent"]
    assert relay.notification(id)["partial"] == {"refused": {TWO[1]: "smtp_550"}}


def test_a_server_that_drips_ends_in_a_retry_that_succeeds(relay: Relay) -> None:
    with Smtp({"MAIL": [drip(b"250"), "250 ok"]}) as server:
        relay.channel(settings=settings(server), timeout_seconds=1)
        id = relay.notify()
        assert relay.exhaust(id, _attempt) == ["retry", "sent"]
    assert relay.attempts(id)[0]["error_code"] == "timeout"
    assert len(server.mails) == 1


def test_a_profile_that_cannot_be_used_fails_at_once(relay: Relay) -> None:
    relay.channel(settings={"host": "127.0.0.1"})
    id = relay.notify()
    assert relay.exhaust(id, _attempt) == ["failed"]
    assert relay.notification(id)["error_code"] == "profile_malformed"
