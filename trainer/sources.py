"""Where the rows of a data set come from: files, folders of `datasets`, the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet

HUB = "hf:"
# Rows turned from Arrow to Python at a time.
BATCH_ROWS = 1000

Rows = list[dict[str, Any]]


class DataError(ValueError):
    """A data source, or a row of it, that cannot be used."""


def read_rows(source: str) -> tuple[Rows, Path]:
    """All rows of a source, and the folder its relative image paths start from.

    Args:
        source: PATH of a .jsonl or .parquet file; PATH[#SPLIT] of a folder, either written by
            `datasets` with save_to_disk or one that load_dataset(PATH) reads; or
            hf:OWNER/NAME[@REVISION][#SPLIT], which load_dataset fetches from the hub. The split may
            be left out where there is only one.

    Returns:
        Images of `datasets` come as they are stored, {"bytes": ..., "path": ...}: encoded. The
        folder of a hub data set does not exist: it has no relative paths.

    Raises:
        DataError: nothing there, unreadable, a split that is missing or does not exist, or the
            package `datasets` is not installed.
    """
    name, _, split = source.partition("#")
    if name.startswith(HUB):
        return _hub_rows(name.removeprefix(HUB), split), Path(name)
    path = Path(name)
    if path.is_dir():
        return _folder_rows(path, split), path
    if split:
        raise DataError(f"{source}: a file has no splits, leave out #{split}")
    return _file_rows(path), path.parent


def _file_rows(path: Path) -> Rows:
    with _reading(str(path), OSError, ValueError):
        if path.suffix == ".parquet":
            return list(pyarrow.parquet.read_table(path).to_pylist())
        if path.suffix == ".jsonl":
            # Not splitlines(): it also cuts at separators that are legal inside JSON strings.
            lines = path.read_text(encoding="utf-8-sig").split("\n")
            return [_json(path, row, line) for row, line in enumerate(lines, 1) if line.strip()]
    raise DataError(f"{path}: there is no such folder, and a file ends in .jsonl or .parquet")


def _json(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number}: {error}") from error


def _folder_rows(path: Path, split: str) -> Rows:
    datasets = _datasets(str(path))
    # What save_to_disk leaves beside the data, for one data set and for several splits.
    saved = any((path / name).exists() for name in ("state.json", "dataset_dict.json"))
    with _reading(str(path), OSError, ValueError, datasets.exceptions.DatasetsError):
        # Absolute: load_dataset takes json, csv, ... for a reader of its own.
        read = datasets.load_from_disk if saved else datasets.load_dataset
        return _rows(str(path), read(str(path.resolve())), split)


def _hub_rows(name: str, split: str) -> Rows:
    source = f"{HUB}{name}"
    datasets = _datasets(source)
    name, _, revision = name.partition("@")
    with _reading(source, OSError, ValueError, datasets.exceptions.DatasetsError):
        return _rows(source, datasets.load_dataset(name, revision=revision or None), split)


def _rows(source: str, found: Any, split: str) -> Rows:
    """Rows of a `datasets.Dataset`, or of one split of a DatasetDict."""
    if isinstance(found, dict):
        if split not in found and (split or len(found) != 1):
            raise DataError(f"{source} has the splits {sorted(found)}; name one as {source}#SPLIT")
        found = found[split] if split else next(iter(found.values()))
    elif split:
        raise DataError(f"{source} has no splits, leave out #{split}")
    # As Arrow, because any other format decodes images.
    batches = found.with_format("arrow").iter(BATCH_ROWS)
    return [row for batch in batches for row in batch.to_pylist()]


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{source} needs the package datasets: pip install 'preceptor[datasets]' ({error})"
        ) from error
    return datasets


@contextmanager
def _reading(source: str, *errors: type[Exception]) -> Iterator[None]:
    """These errors as a DataError that names the source."""
    try:
        yield
    except DataError:
        raise
    except errors as error:
        raise DataError(f"cannot read {source}: {error}") from error
