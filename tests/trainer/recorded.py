"""Recorded groups: what a step would get from workers and teacher, made up and seeded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from modeling.load import load_model
from preceptor.codec import decode_ids, encode_ids, prompt_message
from preceptor.policy import Version
from preceptor.v1 import common_pb2, queue_pb2
from tests.tiny_models import BOS, IMAGE, LLAVA_FEATURES, draw_image
from trainer.crew import Crew
from trainer.groups import Group, Sample
from trainer.settings import OptimiserSettings, TrainerSettings
from trainer.student import ALONE, Student

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
        named_ids=np.empty((len(ids), 0), np.int32),
        teacher=np.asarray(teacher, dtype=np.float32),
        named_teacher=np.empty((len(ids), 0), np.float32),
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
            sample = make_sample(index, ids, -random.exponential(3.0, count))
            rows.append(replace(sample, reward=float(random.integers(2))))
        groups.append(Group(make_task(step, slot, samples=samples, prompt=prompt), tuple(rows)))
    return groups


def with_images(groups: list[Group]) -> list[Group]:
    """The groups with an image in front of the prompt, but for every second one."""
    changed = []
    for index, group in enumerate(groups):
        if index % 2 == 0:
            prompt = decode_ids(group.task.prompt.token_ids).tolist()
            task = queue_pb2.PromptTask()
            task.CopyFrom(group.task)
            ids = [BOS, *[IMAGE] * LLAVA_FEATURES, *prompt]
            task.prompt.CopyFrom(prompt_message(ids, [draw_image(index)]))
            group = replace(group, task=task)
        changed.append(group)
    return changed


def run_step(
    student: Student,
    groups,
    step: int = 0,
    micro_batch_tokens: int = 10**6,
    minibatches: int = 1,
    estimator: dict | None = None,
    **loss,
):
    settings = TrainerSettings(
        student="unused",
        data={"train": "unused"},
        prompts_per_step=len(groups),
        steps=STEPS,
        max_new_tokens=12,
        minibatches=minibatches,
        micro_batch_tokens=micro_batch_tokens,
        estimator=estimator or {},
        loss=loss,
    )
    return Crew(ALONE, student, settings).train(groups, step)


def own_logprobs(student: Student, groups: list[Group]) -> list[torch.Tensor]:
    """The student's logprobs, one vector a sample."""
    flat = student.scores([group.tokens for group in groups]).logprobs_T
    return list(flat.split([len(one.ids) for group in groups for one in group.samples]))


def weights_of(student: Student) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in student.parameters.items()}


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)
