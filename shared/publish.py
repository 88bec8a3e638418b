"""Publishes messages and waits for Pub/Sub's word that it has them."""

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shared.errors import PublishError

if TYPE_CHECKING:
    from google.pubsub_v1 import PublisherClient


class Publisher:
    """One topic. The client is made on first use: the server forks after import."""

    def __init__(self, pubsub_topic: str) -> None:
        self._pubsub_topic = pubsub_topic
        self._client: PublisherClient | None = None
        self._lock = threading.Lock()

    def publish(self, data: bytes, attributes: Mapping[str, str], *, timeout: float) -> str:
        """The message's id, once Pub/Sub has confirmed it within `timeout` seconds.

        Raises PublishError when it refused or did not answer: it may or may not have the message.
        """
        # One unary call: no batching thread, no timer, and nothing left to do when it returns, for
        # an instance has no processor between requests.
        from google.api_core.exceptions import GoogleAPICallError, RetryError  # noqa: PLC0415
        from google.api_core.retry import Retry  # noqa: PLC0415
        from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415
        from google.pubsub_v1 import PubsubMessage  # noqa: PLC0415

        try:
            answer = self._open().publish(
                topic=self._pubsub_topic,
                messages=[PubsubMessage(data=data, attributes=dict(attributes))],
                timeout=timeout,
                retry=Retry(initial=0.05, maximum=0.5, timeout=timeout),
            )
        except (GoogleAPICallError, RetryError, GoogleAuthError) as error:
            raise PublishError(
                f"Pub/Sub did not confirm the message within {timeout:.1f} s: {_cause(error)}."
            ) from error
        return answer.message_ids[0]

    def _open(self) -> "PublisherClient":
        with self._lock:
            if self._client is None:
                self._client = _client()
            return self._client


def _client() -> "PublisherClient":
    from google.pubsub_v1 import PublisherClient  # noqa: PLC0415 - half a second of every start

    emulator = os.environ.get("PUBSUB_EMULATOR_HOST")
    if not emulator:
        return PublisherClient()
    import grpc  # noqa: PLC0415
    from google.pubsub_v1.services.publisher.transports import (  # noqa: PLC0415
        PublisherGrpcTransport,
    )

    return PublisherClient(
        transport=PublisherGrpcTransport(channel=grpc.insecure_channel(emulator))
    )


def _cause(error: Exception) -> str:
    cause = error.__cause__ if type(error).__name__ == "RetryError" else error
    return type(cause or error).__name__
