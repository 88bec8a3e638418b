"""Publishes messages and waits for Pub/Sub's word that it has them."""

import os
import threading
from collections.abc import Mapping
from typing import Final

import grpc
from google.api_core.exceptions import GoogleAPICallError, InvalidArgument, RetryError
from google.api_core.retry import Retry
from google.auth.exceptions import GoogleAuthError
from google.pubsub_v1 import PublisherClient, PubsubMessage
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

from shared.errors import PublishError, UnpublishableBodyError

# A refusal is not asked about for longer: the outbox is there for that.
RETRY_SECONDS: Final = 1.0


class Publisher:
    """One topic. The client is made on first use: the server forks after import."""

    def __init__(self, pubsub_topic: str) -> None:
        self._pubsub_topic = pubsub_topic
        self._client: PublisherClient | None = None
        self._lock = threading.Lock()

    def publish(self, data: bytes, attributes: Mapping[str, str], *, timeout: float) -> str:
        """The message's id, once Pub/Sub has confirmed it within `timeout` seconds.

        Raises PublishError when it did not answer or is not there: it may or may not have the
        message; UnpublishableBodyError when it refuses this message and always will.
        """
        # One unary call: no batching thread, no timer, and nothing left to do when it returns, for
        # an instance has no processor between requests.
        try:
            answer = self.prepare().publish(
                topic=self._pubsub_topic,
                messages=[PubsubMessage(data=data, attributes=dict(attributes))],
                timeout=timeout,
                retry=Retry(initial=0.05, maximum=0.5, timeout=min(timeout, RETRY_SECONDS)),
            )
        except InvalidArgument as error:
            raise UnpublishableBodyError(
                "Pub/Sub refuses this message as invalid; a replay stores its event."
            ) from error
        except (GoogleAPICallError, RetryError, GoogleAuthError) as error:
            raise PublishError(
                f"Pub/Sub did not confirm the message within {timeout:.1f} s: {_cause(error)}."
            ) from error
        return answer.message_ids[0]

    def prepare(self) -> PublisherClient:
        """The client, made now if need be: the first one looks for credentials."""
        with self._lock:
            if self._client is None:
                self._client = _client()
            return self._client


def _client() -> PublisherClient:
    emulator = os.environ.get("PUBSUB_EMULATOR_HOST")
    if not emulator:
        return PublisherClient()
    channel = grpc.insecure_channel(emulator)
    return PublisherClient(transport=PublisherGrpcTransport(channel=channel))


def _cause(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, RetryError) else error
    return type(cause or error).__name__
