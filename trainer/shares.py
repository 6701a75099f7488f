"""Shares of a step on their way from rank 0 to the other ranks."""

from __future__ import annotations

import numpy as np

from preceptor.codec import IDS, LOGPROBS
from preceptor.policy import Version
from preceptor.v1 import queue_pb2, trainer_pb2
from trainer.deal import Share
from trainer.groups import Group, Sample


def encode_share(share: Share) -> trainer_pb2.TrainOrder:
    """As a message; what the log alone needs stays behind."""
    order = trainer_pb2.TrainOrder(step=share.step, label_count=share.label_count)
    for minibatch in share.minibatches:
        message = order.minibatches.add()
        for batch in minibatch:
            message.micro_batches.add(groups=[_encode(group) for group in batch])
    return order


def decode_share(order: trainer_pb2.TrainOrder) -> Share:
    """From a message."""
    minibatches = [
        [
            [_decode(group, order.step) for group in batch.groups]
            for batch in minibatch.micro_batches
        ]
        for minibatch in order.minibatches
    ]
    return Share(order.step, minibatches, order.label_count)


def _encode(group: Group) -> trainer_pb2.TrainGroup:
    message = trainer_pb2.TrainGroup(
        prompt=group.task.prompt, slot=group.task.id.slot, label=group.label
    )
    for sample in group.samples:
        one = message.samples.add(
            response_ids=sample.ids.tobytes(),
            behaviour_logprobs=sample.behaviour.tobytes(),
            loss_mask=sample.mask.tobytes(),
            named_ids=sample.named_ids.tobytes(),
        )
        if sample.teacher is not None:
            one.teacher_logprobs = sample.teacher.tobytes()
        if sample.named_teacher is not None:
            one.named_teacher_logprobs = sample.named_teacher.tobytes()
        if sample.reward is not None:
            one.reward = sample.reward
    return message


def _decode(message: trainer_pb2.TrainGroup, step: int) -> Group:
    task = queue_pb2.PromptTask(
        id=queue_pb2.TaskId(step=step, slot=message.slot), prompt=message.prompt
    )
    samples = []
    for index, one in enumerate(message.samples):
        ids = np.frombuffer(one.response_ids, IDS)
        named_ids = np.frombuffer(one.named_ids, IDS).reshape(len(ids), -1)
        teacher = named_teacher = None
        if one.HasField("teacher_logprobs"):
            teacher = np.frombuffer(one.teacher_logprobs, LOGPROBS)
            named_teacher = np.frombuffer(one.named_teacher_logprobs, LOGPROBS)
            named_teacher = named_teacher.reshape(named_ids.shape)
        samples.append(
            Sample(
                index=index,
                ids=ids,
                behaviour=np.frombuffer(one.behaviour_logprobs, LOGPROBS),
                mask=np.frombuffer(one.loss_mask, np.bool_),
                truncated=False,
                version=Version(0, 0),
                named_ids=named_ids,
                teacher=teacher,
                named_teacher=named_teacher,
                reward=one.reward if one.HasField("reward") else None,
            )
        )
    return Group(task, tuple(samples), label=message.label)
