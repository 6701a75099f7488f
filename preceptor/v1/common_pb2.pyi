from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Image(_message.Message):
    __slots__ = ("data", "sha256")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    sha256: bytes
    def __init__(self, data: _Optional[bytes] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("token_ids", "images")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    images: _containers.RepeatedCompositeFieldContainer[Image]
    def __init__(self, token_ids: _Optional[bytes] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ...) -> None: ...

class PolicyVersion(_message.Message):
    __slots__ = ("incarnation", "step")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    step: int
    def __init__(self, incarnation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class PolicySpan(_message.Message):
    __slots__ = ("version", "count")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    version: PolicyVersion
    count: int
    def __init__(self, version: _Optional[_Union[PolicyVersion, _Mapping]] = ..., count: _Optional[int] = ...) -> None: ...

class SamplingSettings(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_new_tokens", "eos_ids", "suppressed_ids", "seed", "named_top_k")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NAMED_TOP_K_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    eos_ids: bytes
    suppressed_ids: bytes
    seed: int
    named_top_k: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., eos_ids: _Optional[bytes] = ..., suppressed_ids: _Optional[bytes] = ..., seed: _Optional[int] = ..., named_top_k: _Optional[int] = ...) -> None: ...
