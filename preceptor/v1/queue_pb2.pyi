from preceptor.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TaskKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_KIND_UNSPECIFIED: _ClassVar[TaskKind]
    TASK_KIND_TRAIN: _ClassVar[TaskKind]
    TASK_KIND_EVALUATION: _ClassVar[TaskKind]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
TASK_KIND_UNSPECIFIED: TaskKind
TASK_KIND_TRAIN: TaskKind
TASK_KIND_EVALUATION: TaskKind
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class TaskId(_message.Message):
    __slots__ = ("run", "incarnation", "step", "slot")
    RUN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    run: str
    incarnation: int
    step: int
    slot: int
    def __init__(self, run: _Optional[str] = ..., incarnation: _Optional[int] = ..., step: _Optional[int] = ..., slot: _Optional[int] = ...) -> None: ...

class PromptTask(_message.Message):
    __slots__ = ("schema_version", "id", "kind", "prompt", "samples", "policy", "sampling")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    id: TaskId
    kind: TaskKind
    prompt: _common_pb2.Prompt
    samples: int
    policy: _common_pb2.PolicyVersion
    sampling: _common_pb2.SamplingSettings
    def __init__(self, schema_version: _Optional[int] = ..., id: _Optional[_Union[TaskId, _Mapping]] = ..., kind: _Optional[_Union[TaskKind, str]] = ..., prompt: _Optional[_Union[_common_pb2.Prompt, _Mapping]] = ..., samples: _Optional[int] = ..., policy: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingSettings, _Mapping]] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("sample", "response_ids", "behaviour_logprobs", "finish_reason", "policy_spans", "loss_mask", "named_ids")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOUR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    POLICY_SPANS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    NAMED_IDS_FIELD_NUMBER: _ClassVar[int]
    sample: int
    response_ids: bytes
    behaviour_logprobs: bytes
    finish_reason: FinishReason
    policy_spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.PolicySpan]
    loss_mask: bytes
    named_ids: bytes
    def __init__(self, sample: _Optional[int] = ..., response_ids: _Optional[bytes] = ..., behaviour_logprobs: _Optional[bytes] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., policy_spans: _Optional[_Iterable[_Union[_common_pb2.PolicySpan, _Mapping]]] = ..., loss_mask: _Optional[bytes] = ..., named_ids: _Optional[bytes] = ...) -> None: ...

class RolloutGroup(_message.Message):
    __slots__ = ("schema_version", "id", "kind", "prompt", "rollouts", "sampling", "worker", "generation_seconds")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    id: TaskId
    kind: TaskKind
    prompt: _common_pb2.Prompt
    rollouts: _containers.RepeatedCompositeFieldContainer[Rollout]
    sampling: _common_pb2.SamplingSettings
    worker: str
    generation_seconds: float
    def __init__(self, schema_version: _Optional[int] = ..., id: _Optional[_Union[TaskId, _Mapping]] = ..., kind: _Optional[_Union[TaskKind, str]] = ..., prompt: _Optional[_Union[_common_pb2.Prompt, _Mapping]] = ..., rollouts: _Optional[_Iterable[_Union[Rollout, _Mapping]]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingSettings, _Mapping]] = ..., worker: _Optional[str] = ..., generation_seconds: _Optional[float] = ...) -> None: ...

class DeadLetter(_message.Message):
    __slots__ = ("schema_version", "source_stream", "source_entry", "deliveries", "reason", "payload", "dead_at_unix_ms")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_STREAM_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ENTRY_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    DEAD_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    source_stream: str
    source_entry: str
    deliveries: int
    reason: str
    payload: bytes
    dead_at_unix_ms: int
    def __init__(self, schema_version: _Optional[int] = ..., source_stream: _Optional[str] = ..., source_entry: _Optional[str] = ..., deliveries: _Optional[int] = ..., reason: _Optional[str] = ..., payload: _Optional[bytes] = ..., dead_at_unix_ms: _Optional[int] = ...) -> None: ...
