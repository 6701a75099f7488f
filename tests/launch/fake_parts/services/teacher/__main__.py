"""A teacher that is only healthy, after a moment."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

if os.environ.get("FAKE_TEACHER_BREAKS"):
    sys.exit("the model folder <teacher> is not there")
time.sleep(0.3)
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port(f"127.0.0.1:{os.environ['PRECEPTOR_TEACHER__PORT']}")
server.start()
server.wait_for_termination()
