"""How often the teacher itself is right: its own greedy answers to the evaluation prompts."""

from __future__ import annotations

from pathlib import Path

from modeling.load import load_model
from services.rollout.engines.torch import SampleRequest, generate
from services.rollout.sampling import Sampling
from trainer.data import read_prompts
from trainer.rewards import numeric


def teacher_accuracy(model: Path, evaluation: Path, max_new_tokens: int, batch: int = 100) -> float:
    """Share of right answers, greedy, graded as the student's are."""
    loaded = load_model(model)
    prompts = read_prompts(evaluation, loaded)
    suppressed = (loaded.image_placeholder_id,) if loaded.image_placeholder_id is not None else ()
    sampling = Sampling(max_new_tokens, loaded.eos_ids, suppressed, temperature=0.0)
    right = 0.0
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        requests = [SampleRequest(one.ids, samples=1, seed=0, images=one.images) for one in part]
        for prompt, [answer] in zip(part, generate(loaded, requests, sampling), strict=True):
            text = loaded.tokenizer.decode(answer.ids.tolist(), skip_special_tokens=True)
            right += numeric(str(text), str(prompt.answer))
    return right / len(prompts)
