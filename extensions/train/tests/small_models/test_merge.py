"""A merged checkpoint is a model folder that computes what the trained model computes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from palaestra_slots.core.errors import ConfigError
from palaestra_train.models.merge import best_checkpoint, merge, weights_folder

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs the extra 'tinker'")


@needs_peft
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("unembed", [True, False])
def test_a_merged_adapter_computes_what_the_trained_model_computes(tmp_path: Path, unembed: bool) -> None:
    import torch

    from palaestra_tokens.engines.torch_decoder import load_model
    from palaestra_tokens.testing.tiny_model import make_tiny
    from palaestra_tokens.tokenizers import load_tokenizer
    from palaestra_train.tinker.checkpoints import CheckpointFolder, CheckpointPath
    from palaestra_train.tinker.forward_pass import forward
    from palaestra_train.tinker.model import BaseModel, LoraSettings, TrainedModel

    make_tiny(tmp_path / "tiny", hidden=64, layers=2)
    trained = TrainedModel(
        BaseModel(str(tmp_path / "tiny"), device="cpu"), LoraSettings(4, seed=0, train_unembed=unembed)
    )
    with torch.no_grad():
        for tensor in trained.trained().values():
            tensor.add_(torch.randn_like(tensor) * 0.05)
    states = CheckpointFolder(tmp_path / "states")
    saved = states.save(trained, CheckpointPath("run:train:0", "weights", "state"), optimizer=False)
    checkpoint = tmp_path / "step-000001"
    checkpoint.mkdir()
    (checkpoint / "tinker.json").write_text(json.dumps({"path": saved.path, "folder": str(states.folder_of(saved))}))
    out = merge(checkpoint, tmp_path / "out")
    ids = [load_tokenizer(str(out)).encode("run the tests of the file")]
    with torch.no_grad():
        torch.testing.assert_close(
            forward(load_model(str(out)), ids), forward(trained.module, ids), atol=1e-4, rtol=1e-4
        )
    with pytest.raises(ConfigError, match="exists"):
        merge(checkpoint, out)
    (tmp_path / "tiny" / "tokenizer.json").write_text("{")
    with pytest.raises(Exception, match=r"."):  # after the weights have been written
        merge(checkpoint, tmp_path / "second")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "states", "step-000001", "tiny"]


def test_a_checkpoint_of_full_weights_is_copied(tmp_path: Path) -> None:
    model = tmp_path / "run" / "training" / "checkpoints" / "step-000002" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model.parent / "state.json").write_text("{}")
    assert weights_folder(best_checkpoint(str(model.parent))) == model
    assert (merge(model.parent, tmp_path / "out") / "config.json").read_text() == "{}"


@pytest.mark.parametrize("content", [None, "", "{}", '{"folder": null}', '{"folder": "/no/such/folder"}'])
def test_weights_that_are_elsewhere_are_one_clear_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tinker.json").write_text(content)
    with pytest.raises(ConfigError, match=r"weights"):
        merge(tmp_path, tmp_path / "out")
