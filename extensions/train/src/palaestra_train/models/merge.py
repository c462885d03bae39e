"""Writes the model of a checkpoint as a folder of its own, which vLLM, transformers and llama.cpp's converter load.

The checkpoint of the trainer `trl` is such a folder already. An adapter is added to the weights of its base model. If
the output layer has an adapter and shares its weights with the embedding, the two are separated first, because the
adapter changes only the output layer.

Needs the extra `tinker` for adapters.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from palaestra.rollouts.journal.reader import find_run
from palaestra.rollouts.observe.training_steps import FOLDER
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.io.durable_files import new_folder, writing
from palaestra_train.checkpoints import TrainingFiles, TrainingState, training_named


def best_checkpoint(run: str) -> Path:
    """Return the checkpoint of a training run with the best evaluation, or the last one, or `run` itself if it is a
    checkpoint. Raises `ConfigError`."""
    path = Path(run)
    if (path / "state.json").is_file():
        return path
    folder = find_run(training_named(run))
    if not (folder / FOLDER).is_dir():
        raise ConfigError(f"{folder} is not a training run")
    files = TrainingFiles(folder / FOLDER)
    state: TrainingState | None = files.latest()
    if state is None:
        raise ConfigError(f"the training run {folder} has no checkpoint yet")
    best = files.checkpoint(state.best_step)
    return best if state.best is not None and best.is_dir() else files.checkpoint(state.step)


def weights_folder(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint with the model's or the adapter's weights. Raises `ConfigError` if another
    machine has them."""
    if (checkpoint / "model").is_dir():
        return checkpoint / "model"
    try:
        found = json.loads((checkpoint / "tinker.json").read_text())["folder"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{checkpoint} has no weights that this machine knows ({error!r})") from None
    if found is None or not Path(found).is_dir():
        raise ConfigError(f"the server of the training run keeps the weights of {checkpoint}; get them from there")
    return Path(found)


def merge(checkpoint: Path, out: Path) -> Path:
    """Write the model of a checkpoint into the folder `out`, which must not exist. A merge that fails or is killed
    leaves no such folder. Blocks. Raises `ConfigError` and `DiskError`."""
    folder = weights_folder(checkpoint)
    if out.exists():
        raise ConfigError(f"{out} exists: choose another folder")
    if not (folder / "adapter_config.json").is_file():
        with writing(out), new_folder(out) as part:
            shutil.copytree(folder, part, dirs_exist_ok=True)
        return out
    try:
        import torch
        from peft import PeftModel
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"Merging an adapter needs the extra 'tinker' ({error}): {install_command('tinker')}"
        ) from None
    from palaestra_tokens.engines.torch_decoder import load_model, quiet_loading

    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    with quiet_loading():
        model = load_model(base, device="cpu", dtype="float32")
        output = model.get_output_embeddings()
        if output is not None and output.weight is model.get_input_embeddings().weight:
            output.weight = torch.nn.Parameter(output.weight.detach().clone())
            model.config.tie_word_embeddings = False
        merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
        with writing(out), new_folder(out) as part:
            merged.save_pretrained(part)
            AutoTokenizer.from_pretrained(base).save_pretrained(part)
    return out
