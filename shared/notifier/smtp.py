"""Mail over SMTP: one login at most, an answer for each recipient, a verdict at the final reply."""

import base64
import contextlib
import smtplib
import ssl
from collections.abc import Callable
from typing import Any, Final

from shared.notifier import mail, settings, verdicts
from shared.notifier.deadline import Deadline
from shared.notifier.model import Acceptance, Decision, Message, Profile, Result, Verdict
from shared.notifier.references import Secrets

PORTS: Final = {"starttls": 587, "tls": 465, "none": 25}
MECHANISMS: Final = ("plain", "login")
PASSWORD: Final = "password"  # noqa: S105 - the key of one
# What is decided is decided: nobody waits for a farewell.
FAREWELL_SECONDS: Final = 1.0

_TAKEN: Final = (250, 251)
_CLOSING: Final = 421


class Smtp:
    """The transport `smtp`."""

    def __init__(self, profile: Profile) -> None:
        """Raises MalformedProfileError."""
        given = settings.Settings(profile)
        self.host = given.host("host")
        self.mode = given.choice("tls", tuple(PORTS), "starttls")
        self.port = given.port("port", PORTS[self.mode])
        self.username = given.text("username", "")
        self.mechanism = given.choice("auth", MECHANISMS, "")
        self.ca_file = given.text("ca_file", "")
        self.sender_name = given.text("sender_name", "")
        self.sender = sender(given)
        self.ehlo_name = given.host("ehlo_name", self.sender.rpartition("@")[2])
        given.finish(secrets=(PASSWORD,), required=(PASSWORD,) if self.username else ())
        if PASSWORD in profile.secrets and not self.username:
            raise settings.MalformedProfileError("The profile has a password, and no username.")
        if self.username and self.mode == "none" and not settings.is_loopback(self.host):
            raise settings.MalformedProfileError(
                "The profile would send its password unencrypted: set tls to starttls or tls."
            )

    def prepare(self, message: Message, secrets: Secrets) -> Callable[[Deadline], Verdict]:
        """What sends `message`; raises MalformedMessageError and MalformedProfileError."""
        context = settings.tls_context(self.ca_file)
        letter = mail.build(message, sender=self.sender, sender_name=self.sender_name)
        return lambda deadline: self._send(letter, letter.stuffed, context, secrets, deadline)

    def _send(
        self,
        letter: mail.Letter,
        data: bytes,
        context: ssl.SSLContext,
        secrets: Secrets,
        deadline: Deadline,
    ) -> Verdict:
        client = _Client(self, context, deadline)
        try:
            self._open(client, context, secrets)
            return _deliver(client, letter, data)
        finally:
            _part(client)

    def _open(self, client: "_Client", context: ssl.SSLContext, secrets: Secrets) -> None:
        _greet(client)
        if self.mode == "starttls":
            client.starttls(context=context)
            _greet(client)
        if self.username:
            self._log_in(client, secrets)

    def _log_in(self, client: "_Client", secrets: Secrets) -> None:
        """One mechanism, one try: every further one would count towards a lock-out."""
        offered = client.esmtp_features.get("auth", "").lower().split()
        wanted = (self.mechanism,) if self.mechanism else MECHANISMS
        mechanism = next((name for name in wanted if name in offered), None)
        if mechanism is None:
            raise smtplib.SMTPNotSupportedError(f"a login by {' or '.join(wanted)}")
        name, password = self.username, secrets.get(PASSWORD) or ""
        if mechanism == "plain":
            both = _encoded(f"\0{name}\0{password}")
            secrets.hide(both)
            status, reply = client.docmd("AUTH", f"PLAIN {both}")
        else:
            status, reply = client.docmd("AUTH", "LOGIN")
            for part in (name, password):
                if status == 334:
                    status, reply = client.docmd(_encoded(part))
        if status != 235:
            raise smtplib.SMTPAuthenticationError(status, reply)


class _Client(smtplib.SMTP):
    """Connects within the deadline, to TLS at once where that is the mode."""

    def __init__(self, smtp: Smtp, context: ssl.SSLContext, deadline: Deadline) -> None:
        self._context = context if smtp.mode == "tls" else None
        self._deadline = deadline
        # Its own name is given: looking one up has no end that anybody could set.
        try:
            super().__init__(smtp.host, smtp.port, local_hostname=smtp.ehlo_name)
        except BaseException:
            self.close()
            raise

    def _get_socket(self, host: str, port: int, timeout: Any) -> Any:  # noqa: ARG002 - see Deadline
        sock = self._deadline.connect(host, port)
        return self._context.wrap_socket(sock, server_hostname=host) if self._context else sock

    def getreply(self) -> tuple[int, bytes]:
        """As it was, but half a reply, cut off by the watchdog, is none."""
        reply = super().getreply()
        self._deadline.check()
        return reply


def sender(given: settings.Settings) -> str:
    """The setting of this name, an address; raises MalformedProfileError."""
    try:
        return mail.address(given.text("sender"))
    except mail.MalformedMessageError:
        raise settings.MalformedProfileError(
            "The profile's sender must be an address like alerts@example.com."
        ) from None


def _greet(client: _Client) -> None:
    """HELO only where EHLO is unknown: a server that is busy is asked nothing more."""
    status, reply = client.ehlo()
    if 500 <= status <= 599:
        status, reply = client.helo()
    if not 200 <= status <= 299:
        raise smtplib.SMTPHeloError(status, reply)


def _deliver(client: _Client, letter: mail.Letter, data: bytes) -> Verdict:
    options = ("SMTPUTF8",) if letter.needs_utf8 else ()
    status, reply = client.mail(letter.sender, options)
    if status != 250:
        raise smtplib.SMTPSenderRefused(status, reply, letter.sender)
    replies = _offer(client, letter)
    decisions = {who: _decision(status) for who, (status, _) in replies.items()}
    taken = [who for who, d in decisions.items() if d.acceptance is Acceptance.ACCEPTED]
    if not taken or any(status == _CLOSING for status, _ in replies.values()):
        return _unsent(replies, decisions)
    verdict = _handed_over(client, data)
    state = {Result.SENT: Acceptance.ACCEPTED, Result.PERMANENT: Acceptance.REFUSED}.get(
        verdict.result, Acceptance.PENDING
    )
    decided = dict.fromkeys(taken, Decision(acceptance=state, code=verdict.code))
    return _concluded(verdict, decisions | decided, replies)


def _offer(client: _Client, letter: mail.Letter) -> dict[str, tuple[int, bytes]]:
    """The server's word on each recipient, as long as it has one."""
    replies: dict[str, tuple[int, bytes]] = {}
    for who, address in letter.recipients.items():
        replies[who] = client.rcpt(address)
        if replies[who][0] == _CLOSING:
            break
    return replies


def _handed_over(client: _Client, data: bytes) -> Verdict:
    status, reply = client.docmd("DATA")
    if status == 354:
        client.send(data)
        try:
            status, reply = client.getreply()
        except Exception as error:
            raise verdicts.UnansweredError from error
    elif 200 <= status <= 399:
        status = -1  # neither yes nor no
    if status == 250:
        return Verdict(result=Result.SENT, code="smtp_250", text=f"250 {verdicts.shown(reply)}")
    code, text, result = verdicts.of_smtp(status, reply)
    return Verdict(result=result, code=code, text=text)


def _decision(status: int) -> Decision:
    if status in _TAKEN:
        return Decision(acceptance=Acceptance.ACCEPTED, code=f"smtp_{status}")
    code, _, result = verdicts.of_smtp(status, b"")
    state = Acceptance.REFUSED if result is Result.PERMANENT else Acceptance.PENDING
    return Decision(acceptance=state, code=code)


def _unsent(replies: dict[str, tuple[int, bytes]], decisions: dict[str, Decision]) -> Verdict:
    """Nothing was handed over: nobody has it, whoever would have taken it."""
    pending = {
        who: Decision(acceptance=Acceptance.PENDING, code=decision.code)
        for who, decision in decisions.items()
        if decision.acceptance is not Acceptance.REFUSED
    }
    worst = next((who for who in reversed(replies) if who in pending), next(iter(replies)))
    code, text, result = verdicts.of_smtp(*replies[worst])
    return Verdict(result=result, code=code, text=text, recipients=decisions | pending)


def _concluded(
    verdict: Verdict, decisions: dict[str, Decision], replies: dict[str, tuple[int, bytes]]
) -> Verdict:
    """A message that was taken for some is to be tried again for those who are still pending."""
    result, code, text = verdict.result, verdict.code, verdict.text
    pending = [who for who, d in decisions.items() if d.acceptance is Acceptance.PENDING]
    if result is Result.SENT and pending:
        code, text, result = verdicts.of_smtp(*replies[pending[0]])
    return Verdict(result=result, code=code, text=text, recipients=decisions)


def _part(client: _Client) -> None:
    """Takes leave, whatever the server makes of that."""
    with contextlib.suppress(Exception):
        if client.sock:
            client.sock.settimeout(FAREWELL_SECONDS)
            client.putcmd("QUIT")
            client.sock.recv(512)  # once: a reply that drips is not waited for
    with contextlib.suppress(Exception):
        client.close()


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
