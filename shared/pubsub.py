"""Google's clients for Pub/Sub, or for what stands in for it at `emulator_host`.

Whoever imports this pays half a second: the functions do so only where they need it.
"""

from contextlib import suppress
from typing import Any, Final

import grpc
from google.api_core.exceptions import RetryError
from google.api_core.retry import Retry
from google.cloud.pubsub_v1 import SubscriberClient
from google.pubsub_v1 import PublisherClient
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

# A message may have 10 MB, and gRPC's own limit is 4 MiB.
_OPTIONS: Final = [("grpc.max_receive_message_length", -1)]

# By themselves they are tried again for a minute; a stream that is gone would end no sooner.
_RETRY: Final = Retry(initial=0.1, maximum=2.0, timeout=10.0)


class _Subscriber(SubscriberClient):
    """The client of streaming pull, whose acknowledgements have an end."""

    def acknowledge(self, *args: Any, **named: Any) -> None:
        """As the client's own."""
        super().acknowledge(*args, **({"retry": _RETRY} | named))

    def modify_ack_deadline(self, *args: Any, **named: Any) -> None:
        """As the client's own; but a lease that cannot be renewed just ends.

        The error would end the client's thread that renews leases, and not the stream.
        """
        with suppress(RetryError):
            super().modify_ack_deadline(*args, **({"retry": _RETRY} | named))


def publisher(emulator_host: str) -> PublisherClient:
    """Without an emulator it looks for credentials, and raises GoogleAuthError without any."""
    if not emulator_host:
        return PublisherClient()
    channel = grpc.insecure_channel(emulator_host, options=_OPTIONS)
    return PublisherClient(transport=PublisherGrpcTransport(channel=channel))


def subscriber(emulator_host: str) -> SubscriberClient:
    """With streaming pull; raises as `publisher` does."""
    if not emulator_host:
        return _Subscriber()
    channel = grpc.insecure_channel(emulator_host, options=_OPTIONS)
    return _Subscriber(transport=SubscriberGrpcTransport(channel=channel))
