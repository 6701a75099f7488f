"""python -m trainer.export RUN_DIR OUTPUT: a checkpoint as a plain Hugging Face folder.

torch keeps a checkpoint's index in a pickle, so export only runs that you trust.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

import torch.distributed.checkpoint as dcp
import typer
from torch import nn
from transformers.utils.logging import disable_progress_bar

from modeling.adapters import LoraShape, add_adapter, merge_adapter, save_adapter
from modeling.fingerprint import weights_hash
from modeling.load import DTYPES, LoadedModel, ModelError, load_model, save_model
from preceptor.config_errors import ConfigError
from preceptor.manifest import CorruptFolder, verify_folder
from trainer.checkpoint import TENSORS, best_checkpoint, newest_first, read_state
from trainer.settings import TrainerConfig
from trainer.snapshot import read_tensors

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class ExportError(RuntimeError):
    """A checkpoint that cannot be exported, and why."""


@app.command()
def main(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's folder (run.dir).")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="A folder that is not there.")],
    checkpoint: Annotated[
        str, typer.Option(metavar="best|newest|STEP", help="Which one; best: in evaluation.")
    ] = "newest",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the weights. Default: what the run computed in."),
    ] = None,
    student: Annotated[
        Path | None,
        typer.Option(help="The run's initial student, if it is elsewhere than the run found it."),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a LoRA run, the adapter alone, as peft has it.")
    ] = False,
) -> None:
    """Write a checkpoint as a plain Hugging Face folder, LoRA adapters merged."""
    disable_progress_bar()
    try:
        chosen = export(run, output, checkpoint, dtype, student, adapter_alone=adapter)
    except (ExportError, ConfigError, CorruptFolder, ModelError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    print(f"{output} holds step {read_state(chosen).step} ({chosen.name})")


def export(
    run: Path,
    output: Path,
    which: str = "newest",
    dtype: str | None = None,
    student: Path | None = None,
    *,
    adapter_alone: bool = False,
) -> Path:
    """Write a checkpoint of a run as a folder that `from_pretrained` loads.

    The folder appears whole or not at all. It holds weights, config, tokenizer and whatever else
    the initial student's folder has besides weights. Memory: the model in float32, without
    optimiser state.

    Args:
        run: the run's folder.
        output: must not exist.
        which: "best" in evaluation, "newest", or a step.
        dtype: a key of modeling.load.DTYPES; None: what the run computed in.
        student: the initial student; None: where the run had it.
        adapter_alone: write a LoRA adapter instead of merging it.

    Returns:
        The checkpoint's folder.

    Raises:
        ExportError: no such checkpoint, the output exists, no adapter, or another student.
        preceptor.manifest.CorruptFolder: the checkpoint is damaged.
        preceptor.config_errors.ConfigError, modeling.load.ModelError: the run's settings or student
            cannot be read.
    """
    if output.exists():
        raise ExportError(f"{output} exists; name a folder that is not there")
    settings = TrainerConfig.recorded(run / "config.yaml").trainer
    if adapter_alone and not settings.lora.rank:
        raise ExportError(f"{run} trained all weights (trainer.lora.rank 0); it has no adapter")
    chosen = _choose(run / "checkpoints", which)
    verify_folder(chosen)
    origin = student or settings.student
    loaded = load_model(origin, trust_remote_code=settings.trust_remote_code)
    if weights_hash(loaded.folder) != read_state(chosen).identity["trainer.student"]:
        raise ExportError(
            f"{origin} has other weights than the run's student; name it by --student"
        )
    if settings.lora.rank:
        lora = settings.lora
        add_adapter(loaded, LoraShape(lora.rank, lora.alpha, lora.targets), seed=0)
    _load(loaded.model, chosen / TENSORS)
    if settings.lora.rank and not adapter_alone:
        # In float32, before anything is rounded.
        merge_adapter(loaded)

    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.tmp-{os.getpid()}")
    try:
        _write(loaded, temporary, dtype or settings.scale.compute_dtype, adapter_alone)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return chosen


def _choose(folder: Path, which: str) -> Path:
    found = newest_first(folder)
    if not found:
        raise ExportError(f"{folder} has no checkpoint yet (trainer.checkpoint.every_steps)")
    if which == "newest":
        return found[0]
    if which == "best":
        best = best_checkpoint(found)
        if best is None:
            raise ExportError(f"no checkpoint in {folder} was evaluated (trainer.data.evaluation)")
        return best
    by_step = {str(int(one.name.split("-")[0])): one for one in reversed(found)}
    if which not in by_step:
        raise ExportError(
            f"no checkpoint {which!r} in {folder}; there are best, newest, {', '.join(by_step)}"
        )
    return by_step[which]


def _load(model: nn.Module, tensors: Path) -> None:
    """Put the checkpoint's weights into the model, in place."""
    own = {f"weights/{name}": value.detach() for name, value in model.named_parameters()}
    saved = dcp.FileSystemReader(tensors).read_metadata().state_dict_metadata
    names = [name for name in saved if name.startswith("weights/")]
    if strange := sorted(set(names) - own.keys()):
        raise ExportError(f"{tensors} has weights that the student has not: {strange[:3]}")
    read_tensors(tensors, {name: own[name] for name in names})


def _write(loaded: LoadedModel, folder: Path, dtype: str, adapter_alone: bool) -> None:
    model: nn.Module = loaded.model
    model.to(DTYPES[dtype])
    if adapter_alone:
        save_adapter(loaded, folder)
        return
    save_model(loaded, folder, original_names=True)
    for path in loaded.folder.iterdir():
        weights = ".safetensors" in path.suffixes or path.suffix in (".bin", ".pt", ".pth")
        if path.is_file() and not weights and not (folder / path.name).exists():
            shutil.copy2(path, folder)


if __name__ == "__main__":
    app(prog_name="preceptor export")
