"""preceptor export: what a run trained, as other programs load it."""

from __future__ import annotations

import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from modeling.load import load_model, save_model
from preceptor.manifest import CorruptFolder
from tests.tiny_models import make_llama, make_llava
from tests.trainer.small_loop import STEPS, ThreadWorker, small_loop
from trainer.export import ExportError, app, export

IDS = torch.tensor([[7, 8, 9, 30, 31, 40]])


class Trained:
    """The folder of a finished run, and its student's logits."""

    def __init__(self, tmp_path, llama, redis_client, **settings):
        self.folder = tmp_path / "run"
        with small_loop(self.folder, llama, redis_client) as loop, ThreadWorker(redis_client):
            run = loop.run(evaluation=3, **settings)
            assert run.run()
        self.model = run._crew.student.loaded.model

    def logits(self):
        return logits_of(self.model)


@pytest.fixture
def trained(tmp_path, llama, redis_client):
    return Trained(tmp_path, llama, redis_client)


@torch.no_grad()
def logits_of(model):
    return model(input_ids=IDS).logits.float()


def test_the_newest_is_what_the_run_ended_with(trained, tmp_path, llama):
    output = tmp_path / "exported"
    chosen = export(trained.folder, output)
    assert chosen.name == f"{STEPS:06d}-0"
    model = AutoModelForCausalLM.from_pretrained(output)
    assert torch.equal(logits_of(model), trained.logits())
    assert not torch.equal(logits_of(model), logits_of(load_model(llama).model))
    assert AutoTokenizer.from_pretrained(output).decode([40, 41]) == "CD"


def test_a_step_is_chosen_by_its_number(trained, tmp_path):
    assert export(trained.folder, tmp_path / "four", "4").name == "000004-0"
    assert export(trained.folder, tmp_path / "five", "5").name == "000005-0"
    states = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("four", "five")]
    assert not torch.equal(*map(logits_of, states))
    with pytest.raises(ExportError, match=r"no checkpoint .3. .* best, newest, 4, 5"):
        export(trained.folder, tmp_path / "three", "3")


def test_the_best_is_the_newest_of_the_best_evaluated(trained, tmp_path):
    # A random student answers nothing right, before or after: equals, of which the last was kept.
    assert export(trained.folder, tmp_path / "best", "best").name == f"{STEPS:06d}-0"
    for folder in (trained.folder / "checkpoints").glob(f"{STEPS:06d}-*"):
        shutil.rmtree(folder)
    with pytest.raises(ExportError, match=r"was evaluated \(trainer\.data\.evaluation\)"):
        export(trained.folder, tmp_path / "none", "best")


def test_the_type_is_chosen(trained, tmp_path):
    export(trained.folder, tmp_path / "half", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert model.dtype == torch.bfloat16
    weight = model.model.layers[0].mlp.up_proj.weight
    own = trained.model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight, own.to(torch.bfloat16))


def test_an_adapter_is_merged_or_written_alone(tmp_path, llama, redis_client):
    trained = Trained(tmp_path, llama, redis_client, lora={"rank": 4})
    export(trained.folder, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(merged), trained.logits(), atol=2e-5, rtol=1e-5)
    export(trained.folder, tmp_path / "adapter", adapter_alone=True)
    base = AutoModelForCausalLM.from_pretrained(llama)
    before = logits_of(base)
    adapted = logits_of(PeftModel.from_pretrained(base, tmp_path / "adapter"))
    torch.testing.assert_close(adapted, trained.logits(), atol=2e-5, rtol=1e-5)
    assert float((adapted - before).abs().max()) > 1e-3
    assert not (tmp_path / "adapter" / "model.safetensors").exists()


def test_no_adapter_where_all_weights_were_trained(trained, tmp_path):
    with pytest.raises(ExportError, match=r"trainer\.lora\.rank 0"):
        export(trained.folder, tmp_path / "adapter", adapter_alone=True)


def test_what_else_the_students_folder_holds_comes_along(tmp_path, redis_client):
    student = make_llama(tmp_path / "student")
    (student / "README.md").write_text("a card")
    trained = Trained(tmp_path, student, redis_client)
    export(trained.folder, tmp_path / "exported")
    assert (tmp_path / "exported" / "README.md").read_text() == "a card"
    weights = [path.name for path in (tmp_path / "exported").glob("*.safetensors*")]
    assert weights == ["model.safetensors"]


@pytest.mark.pitfall("T1")
def test_a_damaged_checkpoint_is_refused_and_nothing_stays(trained, tmp_path):
    path = trained.folder / "checkpoints" / f"{STEPS:06d}-0" / "tensors" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    places = sorted(tmp_path.iterdir())
    with pytest.raises(CorruptFolder, match="__0_0"):
        export(trained.folder, tmp_path / "exported")
    assert sorted(tmp_path.iterdir()) == places


def test_a_failed_write_leaves_nothing(trained, tmp_path, monkeypatch):
    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer.export.save_model", full_disk)
    places = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space"):
        export(trained.folder, tmp_path / "exported")
    assert sorted(tmp_path.iterdir()) == places


def test_another_student_is_refused(trained, tmp_path):
    other = make_llama(tmp_path / "other", seed=5)
    with pytest.raises(ExportError, match="other weights than the run's student"):
        export(trained.folder, tmp_path / "exported", student=other)


@pytest.mark.parametrize(("arguments", "message"), [
    (["{run}", "{run}"], "exists; name a folder that is not there"),
    (["{run}/none", "{run}/out"], "config.yaml"),
    (["{run}", "{run}/out", "--checkpoint", "7"], "no checkpoint '7'"),
])  # fmt: skip
def test_the_command_says_what_is_wrong(trained, arguments, message):
    from typer.testing import CliRunner

    given = [one.format(run=trained.folder) for one in arguments]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert message in result.stderr
    done = CliRunner().invoke(app, [str(trained.folder), str(trained.folder / "out")])
    assert done.exit_code == 0
    assert f"holds step {STEPS} ({STEPS:06d}-0)" in done.stdout


def test_a_vision_model_under_the_names_its_architecture_publishes(tmp_path):
    loaded = load_model(make_llava(tmp_path / "llava"))
    save_model(loaded, tmp_path / "out", original_names=True)
    again = load_model(tmp_path / "out")
    ours, theirs = loaded.model.state_dict(), again.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    one = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert one.config.model_type == "llava"
    assert again.image_processor is not None
