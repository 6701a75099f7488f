"""Recorded groups: what a step would get from workers and teacher, made up and seeded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from modeling.load import load_model
from preceptor.codec import encode_ids, prompt_message
from preceptor.policy import Version
from preceptor.v1 import common_pb2, queue_pb2
from trainer.groups import Group, Sample
from trainer.settings import EstimatorSettings, LossSettings, OptimiserSettings
from trainer.step import train_step
from trainer.student import Student

VOCABULARY = range(5, 96)
STEPS = 12


def make_student(folder: Path, **optimiser: object) -> Student:
    settings = OptimiserSettings(learning_rate=1e-2, **optimiser)
    return Student(load_model(folder), settings, steps=STEPS)


def make_task(
    step: int = 0, slot: int = 0, *, incarnation: int = 0, samples: int = 2, prompt=(7, 8, 9)
) -> queue_pb2.PromptTask:
    return queue_pb2.PromptTask(
        schema_version=1,
        id=queue_pb2.TaskId(run="run", incarnation=incarnation, step=step, slot=slot),
        kind=queue_pb2.TASK_KIND_TRAIN,
        prompt=prompt_message(prompt),
        samples=samples,
        policy=common_pb2.PolicyVersion(incarnation=incarnation, step=step),
        sampling=common_pb2.SamplingSettings(
            temperature=1.0,
            top_p=1.0,
            max_new_tokens=12,
            eos_ids=encode_ids([2]),
            suppressed_ids=encode_ids([3]),
        ),
    )


def make_sample(index: int, ids, teacher, mask=None) -> Sample:
    ids = np.asarray(ids, dtype=np.int32)
    return Sample(
        index=index,
        ids=ids,
        behaviour=np.full(len(ids), -1.0, dtype=np.float32),
        mask=np.ones(len(ids), bool) if mask is None else np.asarray(mask, bool),
        truncated=False,
        version=Version(0, 0),
        teacher=np.asarray(teacher, dtype=np.float32),
    )


def make_groups(step: int, slots: int = 4, samples: int = 3) -> list[Group]:
    """Random prompts and responses of unequal lengths; a teacher of random logprobs."""
    random = np.random.default_rng([1, step])
    groups = []
    for slot in range(slots):
        prompt = random.choice(VOCABULARY, random.integers(1, 9))
        rows = []
        for index in range(samples):
            count = random.integers(1, 12)
            ids = random.choice(VOCABULARY, count)
            rows.append(make_sample(index, ids, -random.exponential(3.0, count)))
        groups.append(Group(make_task(step, slot, samples=samples, prompt=prompt), tuple(rows)))
    return groups


def run_step(student: Student, groups, step: int = 0, micro_batch_tokens: int = 10**6, **loss):
    return train_step(
        student,
        groups,
        step,
        estimator=EstimatorSettings(),
        loss=LossSettings(**loss),
        micro_batch_tokens=micro_batch_tokens,
    )


def weights_of(student: Student) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in student.parameters.items()}


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)
