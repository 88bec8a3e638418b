"""Secrets: the official client resolves references; passwords stay readable after a rotation."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from cryptography.fernet import Fernet
from google.cloud.secretmanager import (
    AccessSecretVersionRequest,
    AccessSecretVersionResponse,
    SecretManagerServiceClient,
)
from google.cloud.secretmanager_v1.services.secret_manager_service.transports import (
    SecretManagerServiceGrpcTransport,
)

from shared import secrets
from shared.errors import ConfigurationError, StorageConfigurationError

NAME = "projects/p/secrets/shopify/versions/3"


@pytest.fixture(scope="module")
def client():
    """Google's client, talking to a server of ours that knows one secret."""

    def access(request: AccessSecretVersionRequest, context: grpc.ServicerContext):
        if request.name != NAME:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such secret")
        return AccessSecretVersionResponse(name=NAME, payload={"data": b"s3cret\n"})

    method = grpc.unary_unary_rpc_method_handler(
        access,
        request_deserializer=AccessSecretVersionRequest.deserialize,
        response_serializer=AccessSecretVersionResponse.serialize,
    )
    service = "google.cloud.secretmanager.v1.SecretManagerService"
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {"AccessSecretVersion": method})]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            transport = SecretManagerServiceGrpcTransport(channel=channel)
            yield SecretManagerServiceClient(transport=transport)
        server.stop(None).wait()


def test_a_reference_is_replaced_by_the_secrets_value(client):
    assert secrets.resolve(f"_secret:{NAME}", {}, client) == "s3cret"


@pytest.mark.parametrize(
    ("reference", "cause"),
    [
        ("_secret:projects/p/secrets/other/versions/1", "NotFound"),
        ("_secret:shopify", "must look like"),
    ],
)
def test_a_reference_that_leads_nowhere_says_why(client, reference, cause):
    with pytest.raises(ConfigurationError, match=cause):
        secrets.resolve(reference, {}, client)


def test_other_values_are_what_they_are():
    assert secrets.resolve("plain", {}) == "plain"
    assert secrets.resolve("_env:X", {"X": "y"}) == "y"


def test_the_first_key_encrypts_and_every_key_decrypts():
    old, new = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    token = secrets.Keyring([old]).encrypt("p\u00e4ss")
    rotated = secrets.Keyring([new, old])
    assert rotated.decrypt(token) == "päss"
    assert secrets.Keyring([new]).decrypt(rotated.encrypt("x")) == "x"
    with pytest.raises(StorageConfigurationError, match="CREDENTIAL_KEYS"):
        secrets.Keyring([new]).decrypt(token)
