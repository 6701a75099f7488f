"""Starts the real service in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from preceptor.v1 import teacher_pb2_grpc

MESSAGES = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
START_SECONDS = 60
REPOSITORY = Path(__file__).parents[2]


@dataclass
class Service:
    """A running teacher."""

    process: subprocess.Popen
    address: str
    log: Path
    channel: grpc.Channel

    @property
    def stub(self) -> teacher_pb2_grpc.TeacherServiceStub:
        return teacher_pb2_grpc.TeacherServiceStub(self.channel)

    def health(self, service: str = "") -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status

    def wait_until_serving(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"the teacher ended:\n{self.log.read_text()}")
            if self.health() == health_pb2.HealthCheckResponse.SERVING:
                return
            time.sleep(0.05)
        pytest.fail(f"the teacher does not serve:\n{self.log.read_text()}")


@contextmanager
def run_service(model: Path, folder: Path, *arguments: str, wait: bool = True) -> Iterator[Service]:
    """Start a teacher on a free port; it is terminated by its pid in the end."""
    port_file, log = folder / "address", folder / "teacher.log"
    command = [sys.executable, "-m", "services.teacher"]
    command += ["--teacher.model", str(model), "--teacher.port", "0", "--teacher.threads", "1"]
    command += ["--teacher.port_file", str(port_file), *arguments]
    with log.open("w") as output:
        process = subprocess.Popen(command, stderr=output, stdout=output, cwd=REPOSITORY)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the teacher did not start:\n{log.read_text()}")
            time.sleep(0.02)
        address = port_file.read_text()
        with grpc.insecure_channel(address, options=MESSAGES) as channel:
            service = Service(process, address, log, channel)
            if wait:
                service.wait_until_serving()
            yield service
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
