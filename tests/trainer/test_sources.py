"""Rows from files, folders of `datasets`, and the hub."""

import json
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Features, List, Value

from tests.tiny_models import draw_image
from trainer.sources import DataError, read_rows

FEATURES = Features({"prompt": Value("string"), "images": List(datasets.Image())})


@pytest.fixture(autouse=True)
def _quiet(tmp_path_factory, monkeypatch):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def make_dataset(*prompts):
    images = [[{"bytes": draw_image(index), "path": None}] for index in range(len(prompts))]
    return Dataset.from_dict({"prompt": list(prompts), "images": images}, features=FEATURES)


def prompts_of(source):
    return [row["prompt"] for row in read_rows(str(source))[0]]


def test_a_saved_data_set_gives_its_images_encoded_as_they_are(tmp_path):
    make_dataset("a", "b").save_to_disk(tmp_path / "saved")
    rows, folder = read_rows(str(tmp_path / "saved"))
    assert folder == tmp_path / "saved"
    assert rows == [
        {"prompt": "a", "images": [{"bytes": draw_image(0), "path": None}]},
        {"prompt": "b", "images": [{"bytes": draw_image(1), "path": None}]},
    ]


def test_a_split_is_named(tmp_path):
    DatasetDict(train=make_dataset("a"), test=make_dataset("b")).save_to_disk(tmp_path)
    assert prompts_of(f"{tmp_path}#test") == ["b"]
    assert prompts_of(f"{tmp_path}#train") == ["a"]
    for source in (tmp_path, f"{tmp_path}#dev"):
        with pytest.raises(DataError, match=r"splits \['test', 'train'\]; name one as .*#SPLIT"):
            read_rows(str(source))


def test_a_folder_of_parquet_files_is_read_by_load_dataset(tmp_path):
    make_dataset("a").to_parquet(tmp_path / "train.parquet")
    [row] = read_rows(str(tmp_path))[0]
    assert row["images"] == [{"bytes": draw_image(0), "path": None}]
    assert prompts_of(f"{tmp_path}#train") == ["a"]
    make_dataset("b").to_parquet(tmp_path / "test.parquet")
    assert prompts_of(f"{tmp_path}#test") == ["b"]


# The second is the name of a reader in load_dataset.
@pytest.mark.parametrize("name", ["owner/name", "json"])
def test_a_folder_is_never_taken_for_something_else(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "train.jsonl").write_text('{"prompt": "not in the folder"}\n')
    monkeypatch.chdir(tmp_path)
    assert prompts_of(name) == ["a"]


@pytest.mark.parametrize(
    ("source", "name", "revision", "wanted"),
    [
        ("hf:owner/name#test", "owner/name", None, "b"),
        ("hf:owner/name@v1.0#train", "owner/name", "v1.0", "a"),
    ],
)
def test_a_hub_name_is_taken_apart(monkeypatch, source, name, revision, wanted):
    asked = []

    def load_dataset(name, revision):
        asked.append((name, revision))
        return DatasetDict(train=make_dataset("a"), test=make_dataset("b"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows, folder = read_rows(source)
    assert asked == [(name, revision)]
    assert [row["prompt"] for row in rows] == [wanted]
    # A relative image path cannot be found by chance.
    assert not folder.exists()


def test_a_hub_that_is_away_is_named(monkeypatch):
    def load_dataset(name, revision):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="cannot read hf:owner/name: no network"):
        read_rows("hf:owner/name")


def test_files_give_their_rows_and_folder(tmp_path):
    rows = [{"prompt": "a\u2028b"}, {"prompt": "c"}]
    lines = "\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"
    (tmp_path / "p.jsonl").write_text(lines, encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    for name in ("p.jsonl", "p.parquet"):
        assert read_rows(str(tmp_path / name)) == (rows, tmp_path)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("p.jsonl", '{"prompt": 1}\n{"prompt": \n', r"p\.jsonl, line 2: Expecting value"),
        ("p.jsonl", None, r"cannot read .*p\.jsonl: .*No such file"),
        ("p.jsonl#train", '{"prompt": 1}\n', r"a file has no splits, leave out #train"),
        ("p.parquet", "no parquet", r"cannot read .*p\.parquet"),
        ("p.csv", "prompt\n", r"\.jsonl or \.parquet"),
        ("nothing", None, "there is no such folder"),
        ("folder", "", r"cannot read .*folder: .*data files"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(tmp_path, name, text, reason):
    if name == "folder":
        (tmp_path / name).mkdir()
    elif text is not None:
        write(tmp_path / name.partition("#")[0], text)
    with pytest.raises(DataError, match=reason):
        read_rows(str(tmp_path / name))


def test_one_data_set_has_no_split_to_name(tmp_path):
    make_dataset("a").save_to_disk(tmp_path)
    with pytest.raises(DataError, match="has no splits, leave out #train"):
        read_rows(f"{tmp_path}#train")


def test_a_missing_package_is_named_with_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in (str(tmp_path), "hf:owner/name"):
        with pytest.raises(DataError, match=r"pip install 'preceptor\[datasets\]'"):
            read_rows(source)
