"""Serves the Pub/Sub stand-in over gRPC, to the official client, by PUBSUB_EMULATOR_HOST."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Self

import grpc
from google.api_core.exceptions import GoogleAPICallError
from google.protobuf.empty_pb2 import Empty
from google.pubsub_v1 import types
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from dev.pubsub import Broker
from dev.pubsub_queue import Lease

# Pub/Sub's limit of 10 MB is the broker's to enforce: gRPC would answer with another code.
_OPTIONS: Final = [("grpc.max_receive_message_length", 32_000_000), ("grpc.so_reuseport", 0)]
_THREADS: Final = 64  # a hanging publish, a waiting pull and a stream hold one each
_PULL_WAIT_SECONDS: Final = 1.0

# By method: the type of its request, and what answers it. None is answered as Empty.
Methods = Mapping[str, tuple[Any, Callable[[Any], Any]]]


class PubSubServer:
    """The stand-in on a port of 127.0.0.1 (0: a free one), until it is closed.

    Raises `RuntimeError` if the port is taken.
    """

    def __init__(self, *, port: int = 0) -> None:
        self.broker: Final = Broker()
        self._threads: Final = ThreadPoolExecutor(_THREADS, thread_name_prefix="pubsub")
        self._server: Final = grpc.server(self._threads, options=_OPTIONS)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.host: Final = f"127.0.0.1:{bound}"  # what PUBSUB_EMULATOR_HOST is to be
        streaming = _streaming(self.broker)
        self._server.add_generic_rpc_handlers(
            [
                _handler("Publisher", _publisher(self.broker)),
                _handler("Subscriber", _subscriber(self.broker), StreamingPull=streaming),
            ]
        )
        self._server.start()

    def close(self) -> None:
        """Stop at once; calls under way are cancelled, and no thread is left."""
        stopped = self._server.stop(grace=None)
        self.broker.close()
        stopped.wait()
        self._threads.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _publisher(broker: Broker) -> Methods:
    def list_topics(request: types.ListTopicsRequest) -> types.ListTopicsResponse:
        return types.ListTopicsResponse(topics=broker.list_topics(request.project))

    def publish(request: types.PublishRequest) -> types.PublishResponse:
        ids = broker.publish(request.topic, request.messages)
        return types.PublishResponse(message_ids=ids)

    return {
        "CreateTopic": (types.Topic, broker.create_topic),
        "GetTopic": (types.GetTopicRequest, lambda r: broker.get_topic(r.topic)),
        "ListTopics": (types.ListTopicsRequest, list_topics),
        "DeleteTopic": (types.DeleteTopicRequest, lambda r: broker.delete_topic(r.topic)),
        "Publish": (types.PublishRequest, publish),
    }


def _subscriber(broker: Broker) -> Methods:
    def get(request: types.GetSubscriptionRequest) -> types.Subscription:
        return broker.get_subscription(request.subscription)

    def list_all(request: types.ListSubscriptionsRequest) -> types.ListSubscriptionsResponse:
        found = broker.list_subscriptions(request.project)
        return types.ListSubscriptionsResponse(subscriptions=found)

    def delete(request: types.DeleteSubscriptionRequest) -> None:
        broker.delete_subscription(request.subscription)

    def pull(request: types.PullRequest) -> types.PullResponse:
        leases = broker.pull(request.subscription, request.max_messages, wait=_PULL_WAIT_SECONDS)
        return types.PullResponse(received_messages=[_received(lease) for lease in leases])

    def acknowledge(request: types.AcknowledgeRequest) -> None:
        broker.acknowledge(request.subscription, request.ack_ids)

    def modify(request: types.ModifyAckDeadlineRequest) -> None:
        seconds = request.ack_deadline_seconds
        broker.modify_ack_deadline(request.subscription, request.ack_ids, seconds)

    return {
        "CreateSubscription": (types.Subscription, broker.create_subscription),
        "GetSubscription": (types.GetSubscriptionRequest, get),
        "ListSubscriptions": (types.ListSubscriptionsRequest, list_all),
        "DeleteSubscription": (types.DeleteSubscriptionRequest, delete),
        "Pull": (types.PullRequest, pull),
        "Acknowledge": (types.AcknowledgeRequest, acknowledge),
        "ModifyAckDeadline": (types.ModifyAckDeadlineRequest, modify),
    }


def _received(lease: Lease) -> types.ReceivedMessage:
    return types.ReceivedMessage(
        ack_id=lease.ack_id, message=lease.message, delivery_attempt=lease.attempt or 0
    )


def _streaming(broker: Broker) -> grpc.RpcMethodHandler:
    def behaviour(
        requests: Iterator[types.StreamingPullRequest], context: grpc.ServicerContext
    ) -> Iterator[types.StreamingPullResponse]:
        try:
            stream = broker.stream(next(requests), context.is_active)
            context.add_callback(stream.wake)
            # What comes later are heartbeats: the client acknowledges by calls of their own.
            for lease in stream.leases():
                yield types.StreamingPullResponse(
                    received_messages=[_received(lease)], subscription_properties=stream.properties
                )
        except GoogleAPICallError as error:
            _abort(context, error)

    return grpc.stream_stream_rpc_method_handler(
        behaviour,
        request_deserializer=types.StreamingPullRequest.deserialize,
        response_serializer=_serialize,
    )


def _handler(
    service: str, methods: Methods, **more: grpc.RpcMethodHandler
) -> grpc.GenericRpcHandler:
    handlers = {name: _unary(*method) for name, method in methods.items()} | more
    return grpc.method_handlers_generic_handler(f"google.pubsub.v1.{service}", handlers)


def _unary(request_type: Any, answer: Callable[[Any], Any]) -> grpc.RpcMethodHandler:
    def behaviour(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return answer(request)
        except GoogleAPICallError as error:
            _abort(context, error)

    return grpc.unary_unary_rpc_method_handler(
        behaviour, request_deserializer=request_type.deserialize, response_serializer=_serialize
    )


def _abort(context: grpc.ServicerContext, error: GoogleAPICallError) -> None:
    code = error.grpc_status_code or grpc.StatusCode.UNKNOWN
    status = Status(code=code.value[0], message=error.message)
    for detail in error.details:
        status.details.add().Pack(detail)
    context.abort_with_status(rpc_status.to_status(status))


def _serialize(response: Any) -> bytes:
    return Empty().SerializeToString() if response is None else type(response).serialize(response)
