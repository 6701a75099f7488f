"""Policies: whole or absent, verified before use."""

from pathlib import Path

import pytest

from preceptor.manifest import CorruptFolder, sweep
from preceptor.policy import PolicyStore, Version


def weights(text: str):
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_text(text)

    return write


def test_a_reader_finds_what_was_published(tmp_path):
    store = PolicyStore(tmp_path)
    assert store.latest() is None
    store.publish(Version(0, 0), weights("zero"))
    store.publish(Version(0, 1), weights("one"))
    assert store.latest() == Version(0, 1)
    folder = store.verified(Version(0, 1))
    assert (folder / "model.safetensors").read_text() == "one"


@pytest.mark.pitfall("T1")
@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "no manifest"])
def test_a_damaged_version_is_never_loaded(tmp_path, damage):
    store = PolicyStore(tmp_path)
    file = store.publish(Version(0, 3), weights("abcdef")) / "model.safetensors"
    if damage == "cut":
        file.write_text("abcde")
    elif damage == "changed":
        file.write_text("abcdeX")
    elif damage == "missing":
        file.unlink()
    else:
        (file.parent / "manifest.json").unlink()
    with pytest.raises(CorruptFolder):
        store.verified(Version(0, 3))


def test_a_failed_publication_leaves_the_old_pointer_and_no_half_folder(tmp_path):
    store = PolicyStore(tmp_path)
    store.publish(Version(0, 0), weights("zero"))

    def full_disk(folder: Path) -> None:
        (folder / "model.safetensors").write_text("ha")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.publish(Version(0, 1), full_disk)
    assert store.latest() == Version(0, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-000000", "latest.json"]


def test_what_a_killed_writer_left_behind_harms_nobody_and_is_swept(tmp_path):
    store = PolicyStore(tmp_path)
    store.publish(Version(3, 15), weights("good"))
    half = tmp_path / ".4-000016.tmp-10969"
    half.mkdir()
    (half / "model.safetensors").write_text("ha")
    (tmp_path / ".latest.json.tmp-10969").write_text("{")
    store.prune(keep=1)
    assert store.latest() == Version(3, 15)
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3-000015", "latest.json"]


def test_a_version_is_never_rewritten(tmp_path):
    store = PolicyStore(tmp_path)
    store.publish(Version(0, 0), weights("zero"))
    with pytest.raises(FileExistsError):
        store.publish(Version(0, 0), weights("again"))


def test_pruning_keeps_the_newest(tmp_path):
    store = PolicyStore(tmp_path)
    for version in [Version(0, 9), Version(0, 10), Version(1, 2), Version(1, 3)]:
        store.publish(version, weights(str(version)))
    store.prune(keep=2)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["1-000002", "1-000003"]
