"""The teacher's section of RUN.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from modeling.image_limits import MAX_BYTES, MAX_PIXELS
from preceptor.config import RunConfig, Section


class TeacherSettings(Section):
    """Which model scores, where it listens, and how much it takes on at once."""

    model: str
    """Folder in Hugging Face layout, or hub id."""

    revision: str | None = None
    """Branch, tag or commit of a hub id."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights. Part of the teacher's identity: all replicas use the same."""

    device: str = "cpu"
    """Torch device, such as cpu or cuda:0."""

    threads: int = Field(0, ge=0)
    """CPU threads of the engine. 0: as many as torch thinks right, which is too many where other
    parts share the cores: a tiny model on 2 contended cores is 20 times faster with 1."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models you have read."""

    host: str = "127.0.0.1"
    """Address to listen on. Other machines reach the teacher only if this says so."""

    port: int = Field(50051, ge=0, le=65535)
    """TCP port; 0 takes a free one (see port_file)."""

    port_file: Path | None = None
    """Written once the port is bound, with HOST:PORT in it. Readiness is the health service's."""

    max_message_bytes: int = Field(64 * 2**20, ge=2**16, lt=2**30)
    """Largest request and largest reply."""

    max_batch_tokens: int = Field(16384, ge=1)
    """Tokens held by the engine at once: sequences x (longest prompt + longest response). Bounds
    memory. A longer sequence runs alone."""

    max_queued_tokens: int = Field(4_000_000, ge=1)
    """Prompt and response tokens accepted and not yet answered. Beyond, calls are told to come back
    later."""

    max_top_k: int = Field(64, ge=0)
    """Largest top_k a caller may ask for, and most named_ids a response position."""

    max_image_bytes: int = Field(MAX_BYTES, ge=1)
    """Largest encoded image."""

    max_image_pixels: int = Field(MAX_PIXELS, ge=1)
    """Largest image, width x height, read from its header before it is decoded. Trainer and rollout
    workers have the default."""

    max_request_pixels: int = Field(2**28, ge=1)
    """Pixels of all images of a request together: decoding them is work that no count of tokens
    foresees. Groups beyond are refused."""

    minimum_deadline_seconds: float = Field(0.1, ge=0)
    """Work whose caller will be gone sooner than this is not started."""

    stall_seconds: float = Field(120.0, gt=0)
    """A batch that runs longer makes the health service answer NOT_SERVING until it ends."""

    drain_seconds: float = Field(30.0, ge=0)
    """After SIGTERM or SIGINT, how long calls in flight may take to finish."""


class TeacherConfig(RunConfig):
    """RUN.yaml as the teacher reads it."""

    teacher: TeacherSettings  # type: ignore[assignment]
