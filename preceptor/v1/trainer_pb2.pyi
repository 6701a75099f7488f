from preceptor.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrainSample(_message.Message):
    __slots__ = ("response_ids", "behaviour_logprobs", "loss_mask", "teacher_logprobs", "named_ids", "named_teacher_logprobs", "reward")
    RESPONSE_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOUR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    TEACHER_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NAMED_IDS_FIELD_NUMBER: _ClassVar[int]
    NAMED_TEACHER_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    response_ids: bytes
    behaviour_logprobs: bytes
    loss_mask: bytes
    teacher_logprobs: bytes
    named_ids: bytes
    named_teacher_logprobs: bytes
    reward: float
    def __init__(self, response_ids: _Optional[bytes] = ..., behaviour_logprobs: _Optional[bytes] = ..., loss_mask: _Optional[bytes] = ..., teacher_logprobs: _Optional[bytes] = ..., named_ids: _Optional[bytes] = ..., named_teacher_logprobs: _Optional[bytes] = ..., reward: _Optional[float] = ...) -> None: ...

class TrainGroup(_message.Message):
    __slots__ = ("prompt", "slot", "label", "samples")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    prompt: _common_pb2.Prompt
    slot: int
    label: int
    samples: _containers.RepeatedCompositeFieldContainer[TrainSample]
    def __init__(self, prompt: _Optional[_Union[_common_pb2.Prompt, _Mapping]] = ..., slot: _Optional[int] = ..., label: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[TrainSample, _Mapping]]] = ...) -> None: ...

class MicroBatch(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[TrainGroup]
    def __init__(self, groups: _Optional[_Iterable[_Union[TrainGroup, _Mapping]]] = ...) -> None: ...

class Minibatch(_message.Message):
    __slots__ = ("micro_batches",)
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    micro_batches: _containers.RepeatedCompositeFieldContainer[MicroBatch]
    def __init__(self, micro_batches: _Optional[_Iterable[_Union[MicroBatch, _Mapping]]] = ...) -> None: ...

class TrainOrder(_message.Message):
    __slots__ = ("step", "minibatches", "label_count")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_FIELD_NUMBER: _ClassVar[int]
    LABEL_COUNT_FIELD_NUMBER: _ClassVar[int]
    step: int
    minibatches: _containers.RepeatedCompositeFieldContainer[Minibatch]
    label_count: int
    def __init__(self, step: _Optional[int] = ..., minibatches: _Optional[_Iterable[_Union[Minibatch, _Mapping]]] = ..., label_count: _Optional[int] = ...) -> None: ...

class GatherOrder(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeOrder(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveOrder(_message.Message):
    __slots__ = ("folder",)
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    folder: str
    def __init__(self, folder: _Optional[str] = ...) -> None: ...

class RunningStatistics(_message.Message):
    __slots__ = ("count", "mean", "m2")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    M2_FIELD_NUMBER: _ClassVar[int]
    count: float
    mean: float
    m2: float
    def __init__(self, count: _Optional[float] = ..., mean: _Optional[float] = ..., m2: _Optional[float] = ...) -> None: ...

class RestoreOrder(_message.Message):
    __slots__ = ("folder", "running")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    folder: str
    running: RunningStatistics
    def __init__(self, folder: _Optional[str] = ..., running: _Optional[_Union[RunningStatistics, _Mapping]] = ...) -> None: ...

class EndOrder(_message.Message):
    __slots__ = ("exit_code",)
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    def __init__(self, exit_code: _Optional[int] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("train", "gather", "probe", "save", "restore", "end")
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    GATHER_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    train: TrainOrder
    gather: GatherOrder
    probe: ProbeOrder
    save: SaveOrder
    restore: RestoreOrder
    end: EndOrder
    def __init__(self, train: _Optional[_Union[TrainOrder, _Mapping]] = ..., gather: _Optional[_Union[GatherOrder, _Mapping]] = ..., probe: _Optional[_Union[ProbeOrder, _Mapping]] = ..., save: _Optional[_Union[SaveOrder, _Mapping]] = ..., restore: _Optional[_Union[RestoreOrder, _Mapping]] = ..., end: _Optional[_Union[EndOrder, _Mapping]] = ...) -> None: ...
