"""The model's side of a TeacherCard. Teacher and student are described by the same function."""

from __future__ import annotations

from modeling.fingerprint import (
    config_fingerprint,
    digest,
    image_processor_fingerprint,
    tokenizer_fingerprint,
    weights_hash,
)
from modeling.load import LoadedModel
from preceptor.codec import encode_ids
from preceptor.v1 import teacher_pb2

# Log-softmax of the unmodified logits over the whole vocabulary, in float32.
LOGPROB_MODE = "raw"


def describe_model(loaded: LoadedModel) -> teacher_pb2.TeacherCard:
    """A card with everything that depends on the model alone, identity included.

    The engine adds its name, build, limits and whether prompts are shared. The identity is over the
    weights as they lie in `loaded.folder`, not as a trainer may have changed them since.
    """
    card = teacher_pb2.TeacherCard(
        model_id=loaded.model_id,
        revision=loaded.revision,
        tokenizer_fingerprint=tokenizer_fingerprint(loaded.tokenizer),
        eos_ids=encode_ids(loaded.eos_ids),
        bos_id=loaded.bos_id,
        pad_id=loaded.pad_id,
        image_placeholder_id=loaded.image_placeholder_id,
        tokenizer_size=len(set(loaded.tokenizer.get_vocab().values())),
        embedding_rows=loaded.embedding_rows,
        max_sequence_tokens=loaded.max_sequence_tokens,
        modalities=["text"] if loaded.image_processor is None else ["text", "image"],
        image_processor_fingerprint=image_processor_fingerprint(loaded.image_processor),
        dtype=loaded.dtype,
        logprob_mode=LOGPROB_MODE,
    )
    card.identity = digest(
        {
            "weights": weights_hash(loaded.folder),
            "config": config_fingerprint(loaded.model.config),
            "tokenizer": card.tokenizer_fingerprint,
            "eos_ids": list(loaded.eos_ids),
            "bos_id": loaded.bos_id,
            "pad_id": loaded.pad_id,
            "image_placeholder_id": loaded.image_placeholder_id,
            "image_processor": card.image_processor_fingerprint,
            "dtype": loaded.dtype,
            "logprob_mode": LOGPROB_MODE,
        }
    )
    return card
