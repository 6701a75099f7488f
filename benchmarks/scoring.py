"""make bench: cost of scoring prompt groups, each way beside the others in the same run.

A randomly initialised model of SmolLM2-135M's shape (the cost does not depend on the weights), W1:
2 prompts x 8 samples, 256 prompt and 64 response tokens, float32. Ways:

    full logits    one padded batch of whole sequences, [tokens, vocabulary] logits
    head on demand the same, head on response positions only
    shared prompt  modeling.shared_prefix: each prompt once
    service        the same through gRPC, from a client in this process

Machines are noisy: the ratios to the first row count, medians over interleaved rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from modeling.groups import TokenGroup
from modeling.load import LoadedModel, load_model
from modeling.shared_prefix import group_logprobs
from preceptor.client import TeacherClient
from preceptor.codec import prompt_group
from preceptor.v1 import teacher_pb2

PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 2, 8, 256, 64
VOCABULARY = 49152


def make_model(folder: Path) -> None:
    """Random weights in SmolLM2-135M's shape, with a tokenizer of as many ids."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {f"t{index}": index for index in range(VOCABULARY)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="t2", bos_token="t1")
    tokenizer.save_pretrained(folder)


def make_groups() -> list[TokenGroup]:
    """W1, seeded."""
    random = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray:
        return random.integers(3, VOCABULARY, count).astype(np.int32)

    return [
        TokenGroup(ids(PROMPT_TOKENS), tuple(ids(RESPONSE_TOKENS) for _ in range(SAMPLES)))
        for _ in range(PROMPTS)
    ]


@torch.inference_mode()
def whole_sequences(loaded: LoadedModel, groups: list[TokenGroup], keep: int) -> np.ndarray:
    """Each sample as a sequence of its own; `keep` last positions get logits, 0 is all."""
    rows = [np.concatenate([g.prompt_ids, r]) for g in groups for r in g.responses]
    ids_BT = torch.from_numpy(np.stack(rows).astype(np.int64))
    logits_BTV = loaded.model(input_ids=ids_BT, logits_to_keep=keep, use_cache=False).logits
    logits_BRV = logits_BTV[:, -RESPONSE_TOKENS - 1 : -1].float()
    chosen_BR1 = ids_BT[:, -RESPONSE_TOKENS:, None]
    return logits_BRV.log_softmax(-1).gather(-1, chosen_BR1)[..., 0].numpy()


@torch.inference_mode()
def shared(loaded: LoadedModel, groups: list[TokenGroup]) -> np.ndarray:
    """Each prompt once."""
    return np.stack([row.numpy() for group in group_logprobs(loaded, groups) for row in group])


def through_service(client: TeacherClient, groups: list[TokenGroup]) -> np.ndarray:
    """The service's answer; raises what it refuses."""
    requests = [prompt_group(str(i), g.prompt_ids, g.responses) for i, g in enumerate(groups)]
    rows = []
    for scores in client.scores(requests):
        for score in scores:
            if isinstance(score, Exception):
                raise score
            rows.append(score.logprobs)
    return np.stack(rows)


def start_teacher(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The service on a free port, with the same number of threads as this process."""
    port_file = folder / "address"
    settings = {
        "teacher": {
            "model": str(folder),
            "port": 0,
            "port_file": str(port_file),
            "threads": torch.get_num_threads(),
        }
    }
    (folder / "teacher.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "services.teacher", str(folder / "teacher.yaml")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not port_file.exists():
        if process.poll() is not None:
            raise RuntimeError(f"the teacher service exited with {process.returncode}")
        time.sleep(0.1)
    return process, port_file.read_text().strip()


def measure(ways: dict[str, Callable[[], np.ndarray]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every way in each round, interleaved; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in track(range(rounds + 1), description="rounds"):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def wire_bytes(groups: list[TokenGroup]) -> tuple[float, float]:
    """Request bytes per distinct token and reply bytes per response token."""
    requests = [prompt_group(str(i), g.prompt_ids, g.responses) for i, g in enumerate(groups)]
    request = teacher_pb2.ScoreRequest(student="bench", groups=requests).ByteSize()
    distinct = PROMPTS * (PROMPT_TOKENS + SAMPLES * RESPONSE_TOKENS)
    result = teacher_pb2.GroupResult(group_id="0", identity="0" * 64, temperature=1.0)
    for index in range(SAMPLES):
        result.trajectories.add(
            trajectory_id=str(index),
            status=teacher_pb2.TRAJECTORY_STATUS_OK,
            logprobs=bytes(4 * RESPONSE_TOKENS),
        )
    return request / distinct, result.ByteSize() / (SAMPLES * RESPONSE_TOKENS)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    console = Console()
    groups = make_groups()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        loaded = load_model(folder)
        process, address = start_teacher(folder)
        try:
            with TeacherClient(address, student="bench") as client:
                client.describe()
                ways: dict[str, Callable[[], np.ndarray]] = {
                    "full logits": lambda: whole_sequences(loaded, groups, 0),
                    "head on demand": lambda: whole_sequences(loaded, groups, RESPONSE_TOKENS + 1),
                    "shared prompt": lambda: shared(loaded, groups),
                    "service": lambda: through_service(client, groups),
                }
                wanted = ways["full logits"]()
                worst = {n: float(np.abs(way() - wanted).max()) for n, way in ways.items()}
                seconds = measure(ways, rounds)
        finally:
            process.terminate()
            process.wait()
    tokens = PROMPTS * SAMPLES * RESPONSE_TOKENS
    table = Table(title=f"W1, {torch.get_num_threads()} threads, median of {rounds} rounds")
    for column in ("way", "response tokens/s", "ratio", "largest difference, nat"):
        table.add_column(column, justify="left" if column == "way" else "right")
    base = statistics.median(seconds["full logits"])
    for name, values in seconds.items():
        median = statistics.median(values)
        speed, ratio = f"{tokens / median:.0f}", f"{base / median:.2f}"
        table.add_row(name, speed, ratio, f"{worst[name]:.1e}")
    console.print(table)
    request, reply = wire_bytes(groups)
    console.print(f"request: {request:.2f} bytes per distinct token")
    console.print(f"reply: {reply:.2f} bytes per response token")


if __name__ == "__main__":
    main()
