"""`palaestra train ENV`: train a model on the rollouts of an environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from palaestra.cli.completion import SettingsCommand, complete_settings
from palaestra.envs.config.host_path import HostPath
from palaestra_slots.core.errors import ConfigError

if TYPE_CHECKING:
    from palaestra_train.config import TrainerName, TrainingConfig


def _training_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add one option per setting of a training run. An option that is left out is None, so that a resumed training run
    keeps its recorded value."""
    # Decorators apply from the last one up, and the options are to be in the order of the table.
    for name, kind in reversed(_OPTIONS.items()):
        field = "async_steps" if name == "--async" else name[2:].replace("-", "_")  # async is a keyword of Python
        command = click.option(name, field, type=kind, hidden=True)(command)
    return command


_OF_BEGINNING = frozenset({"warm_start", "warm_steps", "only"})
"""Settings of the beginning of a training run, which a resumed run cannot change."""

_OF_TASKS = _OF_BEGINNING | {"async_steps", "least_rate", "most_rate", "replay"}
"""Settings of a training run that chooses its tasks itself."""

_OPTIONS: dict[str, type] = {
    "--steps": int,
    "--groups": int,
    "--most-draws": float,
    "--learning-rate": float,
    "--schedule": str,
    "--warmup": int,
    "--advantage": str,
    "--scale-advantages": bool,
    "--loss": str,
    "--clip-low": float,
    "--clip-high": float,
    "--kl-weight": float,
    "--importance-cap": float,
    "--importance-limit": float,
    "--async": int,
    "--least-rate": float,
    "--most-rate": float,
    "--replay": float,
    "--max-off-policy": int,
    "--max-difference": float,
    "--eval-every": int,
    "--eval-tasks": int,
    "--eval-samples": int,
    "--save-every": int,
    "--keep": int,
    "--patience": int,
    "--target": float,
    "--warm-start": str,
    "--warm-steps": int,
    "--only": str,
    "--pass-memory": float,
    "--max-tasks": int,
    "--lora-rank": int,
}
"""The settings of `TrainingConfig`, which checks and documents them. The command's help is written by hand."""


@click.command(
    "train",
    cls=SettingsCommand,
    context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]},
    help="""Train a model on an environment's rollouts, with policy gradients.

    \b
      palaestra train my_env.py --model FOLDER --steps 20 --group 8
      palaestra train my_env.py --model Qwen/Qwen3-4B-Instruct-2507 --trainer tinker
      palaestra train --resume last --steps 200
      palaestra train --batches-from http://127.0.0.1:8000 --trainer tinker --model FOLDER

    Each step samples tasks with the current weights, compares the scored rollouts of each task, and trains on
    exactly the sampled tokens. Held-out tasks are never trained on. docs/train.md explains every setting.

    \b
    --trainer trl       train all weights with TRL's loss and optimizer on this machine (default with a GPU)
    --trainer tinker    train an adapter with the Tinker service, or with the server at --tinker-url; without URL and
                        TINKER_API_KEY, `palaestra serve tinker` starts here (default without a GPU, if installed)
    --model M           a folder, or the OWNER/NAME of a model on the hub; --lora-rank 32
    --steps 100         steps after a warm start, each of --groups 8 tasks with --group N rollouts; --learning-rate 1e-4
    --most-draws 3      draw up to 3 times --groups tasks per step, to replace groups with equal scores
    --async N           roll out up to N steps ahead while the trainer takes a step (0)
    --loss NAME         importance_sampling (default), ppo, dapo (default if rows may be off policy), cispo or gspo;
                        --clip-low, --clip-high
    --advantage NAME    grpo (default) or rloo; --scale-advantages false: without the standard deviation
    --kl-weight 0       weight of the KL divergence from the model before training
    --schedule NAME     constant (default), linear or cosine; --warmup 0 steps
    --replay 1          share of draws that choose among all tasks; the others choose among tasks with a mean reward
                        between --least-rate 0.1 and --most-rate 0.9
    --importance-cap 2  maximum importance weight of a token; tokens that differ by a factor above
                        --importance-limit 8 between sampler and trainer are not trained
    --max-difference    most nats between sampler and trainer, on average (0.1; 2 if rows may be off policy)
    --max-off-policy    drop groups whose weights are more than this many versions old (as --async)
    --eval-every 10     steps between evaluations (0: none) on --eval-tasks 16, --eval-samples 1 times each
    --patience N        stop after N evaluations without improvement; --target R: at this mean reward
    --save-every 1      steps between checkpoints (--keep 2 and the best); --max-tasks 1000 of an environment
    --warm-start FROM   first train on oracle (the reference solutions), a run or a JSONL file of conversations,
                        for --warm-steps 10; --only warm-start ends there
    --pass-memory G     most GiB of one forward and backward pass (0.125 on a CPU)
    --resume RUN        continue a training run that ended or was killed; no step counts twice
    --unchecked ENV     train even if `palaestra env check` fails for this environment
    --batches-from URL  train on the batches of a trajectory API: --batch 64 sequences of
                        --most-tokens 16384; weights are served at --port 8001
    --out FOLDER        the run's folder (default: a new one below runs/); --merge FOLDER writes the trained model

    Further settings (--group N, --concurrency N, --on ray, --env.FIELD V, --json) work as in `palaestra run`.
    """,
)
@click.option("--trainer", type=click.Choice(["trl", "tinker"]), hidden=True)
@click.option("--tinker-url", metavar="URL", hidden=True)
@click.option("--resume", metavar="RUN", hidden=True)
@click.option("--unchecked", multiple=True, metavar="ENV", hidden=True)
@click.option("--batches-from", metavar="URL", hidden=True)
@click.option("--batch", type=click.IntRange(min=2), default=64, hidden=True)
@click.option("--most-tokens", type=click.IntRange(min=2), default=16384, hidden=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8001, hidden=True)
@click.option("--merge", type=HostPath(file_okay=False), hidden=True)
@click.option("--out", type=HostPath(file_okay=False), hidden=True)
@_training_options
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="ENV [SETTINGS]", shell_complete=complete_settings)
@click.pass_context
def command(
    context: click.Context,
    /,
    trainer: str | None,
    tinker_url: str | None,
    resume: str | None,
    unchecked: tuple[str, ...],
    merge: Path | None,
    out: Path | None,
    words: tuple[str, ...],
    **given: Any,
) -> None:
    from palaestra.envs.config.command_line import Answer
    from palaestra.envs.config.dotenv import exported, read_keys, shell_variables
    from palaestra.envs.discovery import load_environment
    from palaestra.envs.run.command import command_line, take_variables
    from palaestra.rollouts.journal.reader import RUNS
    from palaestra_slots.core.exits import ended_by_second_interrupt
    from palaestra_tokens.config import APIServerConfig
    from palaestra_train.checkpoints import training_named
    from palaestra_train.config import OFF_POLICY_NATS, TrainingConfig
    from palaestra_train.models.merge import merge as merge_weights
    from palaestra_train.models.merge import weights_folder
    from palaestra_train.train_run import make_trainer, train_line

    api, served = given.pop("batches_from"), {name: given.pop(name) for name in ("batch", "most_tokens", "port")}
    settings = {name: value for name, value in given.items() if value is not None}
    if api is not None:
        if config_only := sorted(_OF_TASKS & settings.keys()):
            raise ConfigError(
                f"{config_only[0]} does not apply to --batches-from: its environments choose tasks and roll out by "
                "themselves. Limit how old their weights may be with --max-off-policy"
            )
        model, rest = _model(words)
        if merge is not None or unchecked:
            raise ConfigError(
                "--merge and --unchecked cannot be combined with --batches-from: use palaestra model merge"
            )
        if trainer not in (None, "tinker") or resume is not None or rest:
            raise ConfigError(
                "--batches-from cannot be combined with an environment"
                f"{f' ({rest[0]})' if rest else ''}, --resume or a trainer other than tinker. To continue a training "
                "run, set the same --out again"
            )
        config = TrainingConfig(**{"max_difference": OFF_POLICY_NATS, **settings})
        folder = out or Path("runs/batches")
        asyncio.run(_train_batches(BatchSource(api, **served), model, tinker_url, config, folder))
        return
    dotenv = read_keys(Path.cwd())
    with exported(dotenv):
        recorded = None
        if resume is None:
            from palaestra.envs.config.command_line import first_word

            environment, others = first_word(words, "ENV")
            form = load_environment(environment, Path.cwd())
        else:
            resume = training_named(resume)
            environment, others = f"--resume {resume}", ["--resume", resume, *words]
            form, recorded, before = _recorded(resume)
            trainer = trainer or before["trainer"]
            for name in sorted(_OF_BEGINNING & settings.keys()):
                if settings[name] != before["training"].get(name):
                    raise ConfigError(
                        f"{name} belongs to the beginning of a training run: leave it out, or begin a new run"
                    )
            settings = before["training"] | settings
        if merge is not None and merge.exists():
            raise ConfigError(f"--merge {merge} exists: choose another folder")
        if resume is not None and out is not None:
            raise ConfigError("--out is only for a new training run: --resume continues in the run's own folder")
        config = TrainingConfig(**settings)
        server = APIServerConfig(health_check=False)
        line = command_line(form, f"palaestra train {environment}", "process", [server])
        parsed = line.parse(others, shell_variables(dotenv), dotenv, recorded)
        if isinstance(parsed, Answer):
            click.echo(parsed.text, nl=False)
            return
        take_variables(parsed, dotenv)
        for notice in parsed.notices:
            click.echo(f"note: {notice}", err=True)
        chosen = make_trainer(cast("TrainerName | None", trainer), parsed, config, tinker_url, Path(RUNS))
        if resume is None and not {environment, form.name} & set(unchecked):
            _check_environment(form, environment)
        training = train_line(form, parsed, chosen, config, folder=out, tinker_url=tinker_url)
        report = asyncio.run(ended_by_second_interrupt(training))
    result = report.result
    if result.before is not None and result.after is not None:
        click.echo(
            f"held-out tasks: {result.before:.3f} before, {result.after:.3f} after {result.steps} steps", err=True
        )
    best = result.best if result.best is not None and result.best.is_dir() else result.last
    click.echo(f"{result.reason}; best checkpoint {best}", err=True)
    with contextlib.suppress(ConfigError):  # the weights of a service are not on this machine
        click.echo(f"its weights are in {weights_folder(best)}", err=True)
    if merge is not None:
        click.echo(f"the trained model is in {merge_weights(best, merge)}", err=True)
    sys.stdout.write(f"{json.dumps(report.to_json()) if parsed.as_json else report.run.folder}\n")
    context.exit(report.run.exit_code)


def _model(words: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the value of `--model`, and the other words. Raises `ConfigError` if there is no `--model`."""
    rest = list(words)
    for place, word in enumerate(rest):
        flag, equals, value = word.partition("=")
        if flag == "--model" and (equals or place + 1 < len(rest)):
            model = value or rest[place + 1]
            del rest[place : place + (1 if equals else 2)]
            return model, rest
    raise ConfigError("set --model to the model to train")


@dataclass(frozen=True, slots=True)
class BatchSource:
    """Where batches come from: a trajectory API, the size of a batch in sequences, the most tokens of one, and the port
    at which the current weights are served to the API's environments."""

    api: str
    batch: int
    most_tokens: int
    port: int


async def _train_batches(
    source: BatchSource, model: str, tinker_url: str | None, config: TrainingConfig, folder: Path
) -> None:
    """Train on the batches of a trajectory API with Tinker, and serve the current weights."""
    from palaestra_tokens.config import APIServerConfig
    from palaestra_tokens.serving.model_server import ModelServer
    from palaestra_train.atropos.batch_trainer import BatchTrainer
    from palaestra_train.atropos.connection import TrajectoryClient
    from palaestra_train.tinker_client import TinkerTrainer

    local = folder / "tinker-states" if tinker_url is None and not os.environ.get("TINKER_API_KEY") else None
    trainer = TinkerTrainer(APIServerConfig(model_name=model), config, url=tinker_url, local=local)
    client = TrajectoryClient(source.api)
    try:
        await trainer.open()
        await trainer.engine.start()
        async with ModelServer(trainer.engine, port=source.port) as server:
            click.echo(server.url)
            click.echo(f"the weights are served at {server.url}, for --openai.server_type sglang", err=True)
            batches = BatchTrainer(
                trainer,
                config,
                client,
                folder / "training",
                sequences=source.batch,
                most_tokens=source.most_tokens,
                note=lambda text: click.echo(text, err=True),
            )
            await batches.run()
    finally:
        await client.aclose()
        await trainer.aclose()


def _check_environment(form: Any, environment: str) -> None:
    """Check the environment as `palaestra env check` does, with one task. Raises `ConfigError` if the check fails."""
    from palaestra_audit.cheats.proof import check_environment

    click.echo(f"checking {form.name} as `palaestra env check` does", err=True)
    proof = check_environment(environment, [], tasks=1, only=(), quiet=True)
    if not proof.holds:
        failed = ", ".join(each.policy for each in proof.lines if not each.ok)
        raise ConfigError(
            f"{form.name} fails its check ({failed}), so a model would learn to cheat or would learn nothing. See "
            f"`palaestra env check {environment}`, or train anyway with --unchecked {form.name}"
        )
    click.echo(f"the check holds on {', '.join(proof.tasks)}", err=True)


def _recorded(run: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the environment of a run to resume, the run's recorded settings, and its training settings."""
    from palaestra.cli.resume import settings_of
    from palaestra.envs.run.replay_run import recorded_form
    from palaestra.rollouts.journal.reader import open_recording
    from palaestra_train.checkpoints import read_settings

    recording = open_recording(run)
    before, form = read_settings(recording.path.parent), recorded_form(recording, None)
    return form, settings_of(recording, form), before
