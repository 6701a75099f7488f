from preceptor.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrajectoryStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAJECTORY_STATUS_UNSPECIFIED: _ClassVar[TrajectoryStatus]
    TRAJECTORY_STATUS_OK: _ClassVar[TrajectoryStatus]
    TRAJECTORY_STATUS_INVALID_ARGUMENT: _ClassVar[TrajectoryStatus]
    TRAJECTORY_STATUS_UNIMPLEMENTED: _ClassVar[TrajectoryStatus]
    TRAJECTORY_STATUS_INTERNAL: _ClassVar[TrajectoryStatus]

class Refusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_UNSPECIFIED: _ClassVar[Refusal]
    REFUSAL_EMPTY_PROMPT: _ClassVar[Refusal]
    REFUSAL_EMPTY_RESPONSE: _ClassVar[Refusal]
    REFUSAL_ID_OUT_OF_RANGE: _ClassVar[Refusal]
    REFUSAL_TOO_LONG: _ClassVar[Refusal]
    REFUSAL_IMAGE_UNREADABLE: _ClassVar[Refusal]
    REFUSAL_IMAGE_TOO_LARGE: _ClassVar[Refusal]
    REFUSAL_IMAGE_HASH_MISMATCH: _ClassVar[Refusal]
    REFUSAL_PLACEHOLDER_COUNT: _ClassVar[Refusal]
    REFUSAL_PLACEHOLDER_IN_RESPONSE: _ClassVar[Refusal]
    REFUSAL_IMAGES_NOT_SUPPORTED: _ClassVar[Refusal]
    REFUSAL_MALFORMED_ARRAY: _ClassVar[Refusal]
    REFUSAL_DUPLICATE_ID: _ClassVar[Refusal]
    REFUSAL_OPTION_NOT_SUPPORTED: _ClassVar[Refusal]
    REFUSAL_INVALID_SCORE: _ClassVar[Refusal]
    REFUSAL_ENGINE_FAILED: _ClassVar[Refusal]
TRAJECTORY_STATUS_UNSPECIFIED: TrajectoryStatus
TRAJECTORY_STATUS_OK: TrajectoryStatus
TRAJECTORY_STATUS_INVALID_ARGUMENT: TrajectoryStatus
TRAJECTORY_STATUS_UNIMPLEMENTED: TrajectoryStatus
TRAJECTORY_STATUS_INTERNAL: TrajectoryStatus
REFUSAL_UNSPECIFIED: Refusal
REFUSAL_EMPTY_PROMPT: Refusal
REFUSAL_EMPTY_RESPONSE: Refusal
REFUSAL_ID_OUT_OF_RANGE: Refusal
REFUSAL_TOO_LONG: Refusal
REFUSAL_IMAGE_UNREADABLE: Refusal
REFUSAL_IMAGE_TOO_LARGE: Refusal
REFUSAL_IMAGE_HASH_MISMATCH: Refusal
REFUSAL_PLACEHOLDER_COUNT: Refusal
REFUSAL_PLACEHOLDER_IN_RESPONSE: Refusal
REFUSAL_IMAGES_NOT_SUPPORTED: Refusal
REFUSAL_MALFORMED_ARRAY: Refusal
REFUSAL_DUPLICATE_ID: Refusal
REFUSAL_OPTION_NOT_SUPPORTED: Refusal
REFUSAL_INVALID_SCORE: Refusal
REFUSAL_ENGINE_FAILED: Refusal

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("card",)
    CARD_FIELD_NUMBER: _ClassVar[int]
    card: TeacherCard
    def __init__(self, card: _Optional[_Union[TeacherCard, _Mapping]] = ...) -> None: ...

class TeacherCard(_message.Message):
    __slots__ = ("identity", "build", "model_id", "revision", "tokenizer_fingerprint", "eos_ids", "bos_id", "pad_id", "image_placeholder_id", "tokenizer_size", "embedding_rows", "max_sequence_tokens", "modalities", "image_processor_fingerprint", "dtype", "engine", "engine_version", "logprob_mode", "limits", "shares_prompts")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_ID_FIELD_NUMBER: _ClassVar[int]
    PAD_ID_FIELD_NUMBER: _ClassVar[int]
    IMAGE_PLACEHOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SIZE_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODALITIES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_PROCESSOR_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_MODE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SHARES_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    identity: str
    build: str
    model_id: str
    revision: str
    tokenizer_fingerprint: str
    eos_ids: bytes
    bos_id: int
    pad_id: int
    image_placeholder_id: int
    tokenizer_size: int
    embedding_rows: int
    max_sequence_tokens: int
    modalities: _containers.RepeatedScalarFieldContainer[str]
    image_processor_fingerprint: str
    dtype: str
    engine: str
    engine_version: str
    logprob_mode: str
    limits: Limits
    shares_prompts: bool
    def __init__(self, identity: _Optional[str] = ..., build: _Optional[str] = ..., model_id: _Optional[str] = ..., revision: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., eos_ids: _Optional[bytes] = ..., bos_id: _Optional[int] = ..., pad_id: _Optional[int] = ..., image_placeholder_id: _Optional[int] = ..., tokenizer_size: _Optional[int] = ..., embedding_rows: _Optional[int] = ..., max_sequence_tokens: _Optional[int] = ..., modalities: _Optional[_Iterable[str]] = ..., image_processor_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., logprob_mode: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., shares_prompts: _Optional[bool] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_message_bytes", "max_batch_tokens", "max_top_k", "max_image_bytes", "max_image_pixels", "max_queued_tokens", "max_request_pixels")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_PIXELS_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_batch_tokens: int
    max_top_k: int
    max_image_bytes: int
    max_image_pixels: int
    max_queued_tokens: int
    max_request_pixels: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., max_top_k: _Optional[int] = ..., max_image_bytes: _Optional[int] = ..., max_image_pixels: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., max_request_pixels: _Optional[int] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("student", "expected_identity", "groups", "options")
    STUDENT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    student: str
    expected_identity: str
    groups: _containers.RepeatedCompositeFieldContainer[PromptGroup]
    options: ScoreOptions
    def __init__(self, student: _Optional[str] = ..., expected_identity: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[PromptGroup, _Mapping]]] = ..., options: _Optional[_Union[ScoreOptions, _Mapping]] = ...) -> None: ...

class ScoreOptions(_message.Message):
    __slots__ = ("temperature", "top_k", "suppressed_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    suppressed_ids: bytes
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., suppressed_ids: _Optional[bytes] = ...) -> None: ...

class PromptGroup(_message.Message):
    __slots__ = ("group_id", "prompt", "trajectories", "teacher_prompt")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    TEACHER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    prompt: _common_pb2.Prompt
    trajectories: _containers.RepeatedCompositeFieldContainer[Trajectory]
    teacher_prompt: _common_pb2.Prompt
    def __init__(self, group_id: _Optional[str] = ..., prompt: _Optional[_Union[_common_pb2.Prompt, _Mapping]] = ..., trajectories: _Optional[_Iterable[_Union[Trajectory, _Mapping]]] = ..., teacher_prompt: _Optional[_Union[_common_pb2.Prompt, _Mapping]] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("trajectory_id", "response_ids", "loss_mask", "named_ids")
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_IDS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    NAMED_IDS_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    response_ids: bytes
    loss_mask: bytes
    named_ids: bytes
    def __init__(self, trajectory_id: _Optional[str] = ..., response_ids: _Optional[bytes] = ..., loss_mask: _Optional[bytes] = ..., named_ids: _Optional[bytes] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupResult]
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupResult, _Mapping]]] = ...) -> None: ...

class GroupResult(_message.Message):
    __slots__ = ("group_id", "trajectories", "identity", "temperature", "top_k", "suppressed_ids")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_IDS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    trajectories: _containers.RepeatedCompositeFieldContainer[TrajectoryResult]
    identity: str
    temperature: float
    top_k: int
    suppressed_ids: bytes
    def __init__(self, group_id: _Optional[str] = ..., trajectories: _Optional[_Iterable[_Union[TrajectoryResult, _Mapping]]] = ..., identity: _Optional[str] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., suppressed_ids: _Optional[bytes] = ...) -> None: ...

class TrajectoryResult(_message.Message):
    __slots__ = ("trajectory_id", "status", "refusal", "message", "logprobs", "top_ids", "top_logprobs", "named_logprobs")
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NAMED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    status: TrajectoryStatus
    refusal: Refusal
    message: str
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    named_logprobs: bytes
    def __init__(self, trajectory_id: _Optional[str] = ..., status: _Optional[_Union[TrajectoryStatus, str]] = ..., refusal: _Optional[_Union[Refusal, str]] = ..., message: _Optional[str] = ..., logprobs: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ..., named_logprobs: _Optional[bytes] = ...) -> None: ...
