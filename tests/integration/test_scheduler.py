"""scheduler: the official client, against a server of Cloud Scheduler on loopback."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

import grpc
import pytest
from google.cloud.scheduler_v1 import CloudSchedulerClient
from google.cloud.scheduler_v1.services.cloud_scheduler.transports import (
    CloudSchedulerGrpcTransport,
)
from google.cloud.scheduler_v1.types import (
    GetJobRequest,
    Job,
    PauseJobRequest,
    ResumeJobRequest,
    RunJobRequest,
)
from google.rpc.status_pb2 import Status
from typer.testing import CliRunner, Result

from cli import scheduler
from cli.main import app
from shared.errors import HookledgerError

JOB: Final = "projects/acme/locations/europe-west1/jobs/hookledger-retry"
LAST: Final = datetime.now(UTC) - timedelta(minutes=1)


class Scheduler:
    """Cloud Scheduler with one job."""

    def __init__(self) -> None:
        self.job = Job(
            name=JOB,
            schedule="* * * * *",
            time_zone="Etc/UTC",
            state=Job.State.ENABLED,
            schedule_time=LAST + timedelta(minutes=2),
            last_attempt_time=LAST,
            status=Status(code=0),
        )
        self.refuses: grpc.StatusCode | None = None
        self.ran = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            threads = stack.enter_context(ThreadPoolExecutor(2))
            server = grpc.server(threads)
            server.add_generic_rpc_handlers([self._handlers()])
            self.port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            stack.callback(lambda: server.stop(None).wait())
            self._running = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def client(self) -> CloudSchedulerClient:
        channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        return CloudSchedulerClient(transport=CloudSchedulerGrpcTransport(channel=channel))

    def _handlers(self) -> grpc.GenericRpcHandler:
        kinds = {
            "GetJob": GetJobRequest,
            "PauseJob": PauseJobRequest,
            "ResumeJob": ResumeJobRequest,
            "RunJob": RunJobRequest,
        }
        methods = {name: self._method(name, kind) for name, kind in kinds.items()}
        return grpc.method_handlers_generic_handler(
            "google.cloud.scheduler.v1.CloudScheduler", methods
        )

    def _method(self, name: str, kind: Any) -> grpc.RpcMethodHandler:
        def answer(request: Any, context: grpc.ServicerContext) -> Job:
            if self.refuses:
                context.abort(self.refuses, "refused")
            if request.name != self.job.name:
                context.abort(grpc.StatusCode.NOT_FOUND, "no such job")
            match name:
                case "PauseJob":
                    self.job.state = Job.State.PAUSED
                case "ResumeJob":
                    self.job.state = Job.State.ENABLED
                case "RunJob":
                    self.ran += 1
            return self.job

        return grpc.unary_unary_rpc_method_handler(
            answer, request_deserializer=kind.deserialize, response_serializer=Job.serialize
        )


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    monkeypatch.setenv("APP_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setenv("SCHEDULER_JOB", JOB)
    with Scheduler() as cloud:
        monkeypatch.setattr(scheduler, "connected", cloud.client)
        yield cloud


def command(*words: str) -> Result:
    return CliRunner().invoke(app, ["scheduler", *words])


def test_the_status_says_what_is_on_and_how_it_went(cloud: Scheduler) -> None:
    done = command("status", "--json")
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert (said["job"], said["state"], said["last_result"]) == (JOB, "ENABLED", "OK")
    assert datetime.fromisoformat(said["last_at"]) == LAST
    shown = command("status")
    assert "* * * * * Etc/UTC" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("state", Job.State.PAUSED, "PAUSED"),
        ("status", Status(code=14), "UNAVAILABLE"),
        ("status", Status(code=7), "PERMISSION_DENIED"),
    ],
)
def test_a_job_that_is_off_or_failed_exits_1(
    cloud: Scheduler, field: str, value: Any, shown: str
) -> None:
    setattr(cloud.job, field, value)
    done = command("status")
    assert done.exit_code == 1
    assert shown in done.stdout


def test_a_job_that_never_ran_is_no_failure(cloud: Scheduler) -> None:
    cloud.job = Job(name=JOB, state=Job.State.ENABLED)
    done = command("status", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["last_result"] is None


def test_it_is_paused_resumed_and_run(cloud: Scheduler) -> None:
    assert json.loads(command("pause", "--json").stdout)["state"] == "PAUSED"
    assert command("run").exit_code == 0
    assert cloud.ran == 1
    assert cloud.job.state == Job.State.PAUSED
    assert json.loads(command("resume", "--json").stdout)["state"] == "ENABLED"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (grpc.StatusCode.NOT_FOUND, "does not exist"),
        (grpc.StatusCode.PERMISSION_DENIED, "gcloud auth application-default login"),
        (grpc.StatusCode.FAILED_PRECONDITION, "FailedPrecondition"),
    ],
)
def test_a_refusal_names_cause_and_remedy(
    cloud: Scheduler, code: grpc.StatusCode, words: str
) -> None:
    cloud.refuses = code
    done = command("pause")
    assert isinstance(done.exception, HookledgerError)
    assert words in str(done.exception)


def test_the_local_stack_has_none_and_that_is_said(
    cloud: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SCHEDULER_JOB")
    assert "SCHEDULER_JOB is missing" in str(command("status").exception)
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", "127.0.0.1:1")
    assert "local stack has no Cloud Scheduler" in str(command("status").exception)
