"""A Secret Manager for the official client: a few secrets, and the ways in which it can fail."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final, Self

import grpc
from google.cloud.secretmanager import (
    AccessSecretVersionRequest,
    AccessSecretVersionResponse,
    SecretManagerServiceClient,
)
from google.cloud.secretmanager_v1.services.secret_manager_service.transports import (
    SecretManagerServiceGrpcTransport,
)

_SERVICE: Final = "google.cloud.secretmanager.v1.SecretManagerService"


class SecretManager:
    """Serves `secrets`, by the names of their versions, on loopback."""

    def __init__(self) -> None:
        self.secrets: dict[str, bytes] = {}
        self.refuses: grpc.StatusCode | None = None
        self.is_silent = False
        self.asked: list[str] = []
        self._released = threading.Event()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            threads = stack.enter_context(ThreadPoolExecutor(4))
            server = grpc.server(threads)
            server.add_generic_rpc_handlers([self._handlers()])
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            stack.callback(lambda: server.stop(None).wait())
            stack.callback(self._released.set)
            channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))
            transport = SecretManagerServiceGrpcTransport(channel=channel)
            self.client = SecretManagerServiceClient(transport=transport)
            self._running = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def speak(self) -> None:
        """Ends the silence, for those that wait too."""
        self.is_silent = False
        self._released.set()

    def _handlers(self) -> grpc.GenericRpcHandler:
        method = grpc.unary_unary_rpc_method_handler(
            self._access,
            request_deserializer=AccessSecretVersionRequest.deserialize,
            response_serializer=AccessSecretVersionResponse.serialize,
        )
        return grpc.method_handlers_generic_handler(_SERVICE, {"AccessSecretVersion": method})

    def _access(
        self, request: AccessSecretVersionRequest, context: grpc.ServicerContext
    ) -> AccessSecretVersionResponse:
        self.asked.append(request.name)
        if self.is_silent:
            self._released.wait()
        if self.refuses:
            context.abort(self.refuses, "planted-refusal")
        if request.name not in self.secrets:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such secret")
        payload = {"data": self.secrets[request.name]}
        return AccessSecretVersionResponse(name=request.name, payload=payload)
