"""May this student learn from this teacher? Asked before the first step, of two cards."""

from __future__ import annotations

from collections.abc import Collection

from preceptor.codec import decode_ids
from preceptor.v1.teacher_pb2 import TeacherCard

# What may differ if the run says so by name.
CHECKS = ("tokenizer", "eos", "image_processor")


class IncompatibleTeacher(ValueError):
    """Student and teacher differ where they must not. All differences are in the message."""


def check_compatible(
    student_card: TeacherCard, teacher_card: TeacherCard, allow: Collection[str] = ()
) -> None:
    """Compare what both must agree on; embedding rows may differ, they are padding.

    Args:
        allow: names of CHECKS that may differ (setting `trainer.allow_mismatch`).

    Raises:
        IncompatibleTeacher: naming both sides and the setting to change.
        ValueError: `allow` holds a name that is none of CHECKS.
    """
    unknown = sorted(set(allow) - set(CHECKS))
    if unknown:
        raise ValueError(f"trainer.allow_mismatch knows {', '.join(CHECKS)}; not {unknown}")
    found = {
        "tokenizer": _tokenizer(student_card, teacher_card),
        "eos": _eos(student_card, teacher_card),
        "image_processor": _images(student_card, teacher_card),
    }
    problems = {name: text for name, text in found.items() if text and name not in allow}
    if problems:
        raise IncompatibleTeacher(
            f"student {student_card.model_id} cannot learn from teacher {teacher_card.model_id}: "
            f"{'; '.join(problems.values())}. If that is meant, set trainer.allow_mismatch: "
            f"[{', '.join(problems)}]"
        )


def _tokenizer(student: TeacherCard, teacher: TeacherCard) -> str:
    if student.tokenizer_fingerprint != teacher.tokenizer_fingerprint:
        return (
            f"different tokenizers: the student's has {student.tokenizer_size} ids, fingerprint "
            f"{student.tokenizer_fingerprint[:12]}, the teacher's {teacher.tokenizer_size}, "
            f"{teacher.tokenizer_fingerprint[:12]}"
        )
    return ""


def _eos(student: TeacherCard, teacher: TeacherCard) -> str:
    ours, theirs = (sorted(set(decode_ids(card.eos_ids).tolist())) for card in (student, teacher))
    if ours != theirs:
        return (
            f"different ids end a response: {ours} for the student, {theirs} for the teacher "
            "(generation_config.json and tokenizer); lengths would drift"
        )
    return ""


def _images(student: TeacherCard, teacher: TeacherCard) -> str:
    """Only a student that sees images needs a teacher that sees them alike."""
    if "image" not in student.modalities:
        return ""
    if "image" not in teacher.modalities:
        return "the student takes images, the teacher only text"
    if student.image_placeholder_id != teacher.image_placeholder_id:
        return (
            f"different image placeholders: id {student.image_placeholder_id} for the student, "
            f"{teacher.image_placeholder_id} for the teacher"
        )
    if student.image_processor_fingerprint != teacher.image_processor_fingerprint:
        return (
            "different image processors: fingerprint "
            f"{student.image_processor_fingerprint[:12]} for the student, "
            f"{teacher.image_processor_fingerprint[:12]} for the teacher"
        )
    return ""
