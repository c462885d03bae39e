"""The ten `rl_*` tools: an agent chooses an environment, then configures, starts, watches and stops a training run.

The project's interface contract fixes names, arguments and reply keys. A training run is a separate process, `palaestra
train` (`tools/training/`), with the trainers of this package. The settings, not the agent, choose the model, the
trainer and the folder.

Invariant: a training run is identified by its task, environment, model, trainer and settings. A resumed rollout that
repeats a call therefore starts no second run. A start with the settings of a stopped run continues the stopped run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from palaestra.tools import parameters
from palaestra.tools.human.approval import Permit
from palaestra.tools.tool import FunctionTool, Tool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.errors import ToolUnavailable
from palaestra_slots.core.io.file_lock import file_lock
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.types import JSON
from palaestra_toolsets.settings import ToolsetSettings
from palaestra_toolsets.training_process import (
    FAILED,
    INTERRUPTED,
    RUNNING,
    STARTING,
    TRAIN,
    TrainingProcess,
    TrainingRequest,
    trainings,
    words_of,
)

COMMAND_S = 120.0
"""The maximum time, in seconds, for a command that lists or shows environments."""
TEST_S = 600.0
"""The maximum time, in seconds, for the test of one model."""
HISTORY = 10
"""The maximum number of steps in the results of a training run."""

_RUN = {"run_id": parameters.text("The ID of the training run, from rl_start_training or rl_list_runs.")}

# fmt: off
_SCHEMAS = {schema.name: schema for schema in (
    ToolSchema("rl_list_environments", "List the environments available for training."),
    ToolSchema(
        "rl_select_environment", "Select the environment to train on. This resets all settings to its defaults.",
        {"name": parameters.text("The environment's name, from rl_list_environments.")}, ("name",)),
    ToolSchema(
        "rl_get_current_config",
        "Show the training settings of the selected environment: editable ones and locked ones."),
    ToolSchema(
        "rl_edit_config", "Change one training setting.",
        {"field": parameters.text("The setting's name, from rl_get_current_config."),
         "value": {"description": "The new value."}}, ("field", "value")),
    ToolSchema(
        "rl_start_training",
        "Start a training run with the current settings. It takes hours: monitor it with rl_check_status. Calling this "
        "again with the same settings resumes a stopped run and never starts a second one."),
    ToolSchema(
        "rl_check_status", "Get the status of a training run. Call this at most once every 30 minutes.",
        _RUN, ("run_id",)),
    ToolSchema("rl_stop_training", "Stop a training run. Its checkpoints are kept.", _RUN, ("run_id",)),
    ToolSchema("rl_get_results", "Get the metrics and checkpoints of a training run.", _RUN, ("run_id",)),
    ToolSchema("rl_list_runs", "List all training runs, active and finished."),
    ToolSchema(
        "rl_test_inference",
        "Run the selected environment without training, to check that it works and how difficult it is. Use it before "
        "rl_start_training.",
        {"num_steps": parameters.integer("Number of tasks.", default=3, minimum=1),
         "group_size": parameters.integer("Number of rollouts per task.", default=16, minimum=1),
         "models": {"type": "array", "items": {"type": "string"},
                    "description": "The models to test. Default: all allowed models."}}),
)}
# fmt: on

_ASKS = ("rl_start_training", "rl_stop_training", "rl_test_inference")
"""The tools that start or stop processes on this machine, outside every sandbox."""

_SELECTION = "rl_selection"
"""The session of the tools that make or show the agent's choices. In a resumed rollout, these tools run again."""


@dataclass(slots=True)
class Setup:
    """The choices of a conversation, and the training runs that must end with it."""

    environment: str = ""
    reference: str = ""
    rows: dict[str, dict[str, JSON]] = field(default_factory=dict)
    """Maps each setting of a training run to its `value` and its description, `about`. `training` marks settings of the
    training run, as opposed to those of the environment."""
    edits: dict[str, JSON] = field(default_factory=dict)
    looked: dict[str, float] = field(default_factory=dict)
    started: list[TrainingProcess] = field(default_factory=list)

    async def aclose(self) -> None:
        """Stop the training runs in `started`."""
        async with asyncio.TaskGroup() as group:
            for each in self.started:
                group.create_task(each.stop(INTERRUPTED))


def rl_tools(settings: ToolsetSettings, command: Sequence[str] = TRAIN) -> tuple[Tool, ...]:
    """Return the tools that train with these settings. `command` takes the arguments of `palaestra train`."""
    functions: dict[str, Callable[..., Awaitable[ToolReply]]] = {
        "rl_list_environments": _list_environments,
        "rl_select_environment": _select,
        "rl_get_current_config": _current_config,
        "rl_edit_config": _edit,
        "rl_start_training": partial(_start_training, command),
        "rl_check_status": _check_status,
        "rl_stop_training": _stop_training,
        "rl_get_results": _results,
        "rl_list_runs": _list_runs,
        "rl_test_inference": _test_inference,
    }
    of_selection = ("rl_select_environment", "rl_get_current_config", "rl_edit_config")
    return tuple(
        FunctionTool(
            _SCHEMAS[name],
            partial(run, settings),
            toolset="rl",
            missing=partial(_lack, settings),
            touches_world=True,
            world_session=_SELECTION if name in of_selection else "",
            asks=Permit(f"the tool {name}", f"tool:{name}") if name in _ASKS else None,
        )
        for name, run in functions.items()
    )


def _lack(settings: ToolsetSettings) -> str | None:
    if settings.rl_dir is None:
        return "no folder for training runs is set: set rl_dir (--env.rl_dir FOLDER)"
    if settings.rl_model is None:
        return "no model to train is set: set rl_model (--env.rl_model FOLDER)"
    return None


def _folder(settings: ToolsetSettings) -> Path:
    assert settings.rl_dir is not None, "the tool is missing without it"
    return Path(settings.rl_dir).expanduser().absolute()


async def _list_environments(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    found = [
        {
            "name": each["name"],
            "class_name": None
            if each["path"] == each["origin"]
            else str(each["origin"]).rpartition(":")[2].rstrip(")"),
            "file_path": each["path"],
            "description": each["summary"],
        }
        for each in await _palaestra("env", "list", "--json")
    ]
    return {
        "environments": found,
        "count": len(found),
        "tips": [
            "Choose one with rl_select_environment(name).",
            "The file at its file_path shows how it makes tasks and scores them.",
        ],
    }


async def _select(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    name = str(arguments["name"])
    known = {each["name"]: each for each in await _palaestra("env", "list", "--json")}
    if name not in known:
        raise ToolMistake(f"There is no environment {name!r}; nothing was changed", available=list(known))
    about = await _palaestra("env", "show", name, "--json")
    setup = run.state(Setup)
    setup.environment, setup.reference, setup.edits = name, name, {}
    setup.rows = {each["name"]: each for each in (*about["rollouts"], *about["settings"])}
    setup.rows |= {each["name"]: {**each, "training": True} for each in about["training"]}
    return {"message": f"Selected environment: {name}", "environment": name, "file_path": known[name]["path"]}


async def _current_config(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    setup = _selected(run)
    locked = _locked(settings, setup)
    open_fields, locked_fields = [], []
    for name, row in setup.rows.items():
        shown = {"name": name, "type": _type(row["value"]), "default": row["value"], "description": row["about"]}
        if name in locked:
            locked_fields.append({**shown, "current_value": locked[name], "locked_value": locked[name]})
        else:
            open_fields.append({**shown, "current_value": setup.edits.get(name, row["value"])})
    fixed = {"model": settings.rl_model, "trainer": settings.rl_trainer}
    locked_fields += [
        {"name": name, "type": "str", "description": f"The {name}.", "current_value": value, "locked_value": value}
        for name, value in fixed.items()
    ]
    return {
        "environment": setup.environment,
        "configurable_fields": open_fields,
        "locked_fields": locked_fields,
        "tip": "Change a configurable field with rl_edit_config(field, value).",
    }


async def _edit(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    setup, name, value = _selected(run), str(arguments["field"]), arguments["value"]
    locked = {**_locked(settings, setup), "model": settings.rl_model, "trainer": settings.rl_trainer}
    if name in locked:
        raise ToolMistake(f"Field '{name}' is locked and cannot be changed", locked_value=locked[name])
    if name not in setup.rows:
        raise ToolMistake(
            f"Unknown field '{name}'", available_fields=[each for each in setup.rows if each not in locked]
        )
    default = setup.rows[name]["value"]
    if not _fits(value, default):
        raise ToolMistake(f"Field '{name}' needs a value of type {_type(default)}, not {value!r:.100}")
    setup.edits[name] = value
    return {"message": f"Updated {name} = {value}", "field": name, "value": value, "config": dict(setup.edits)}


async def _start_training(
    command: Sequence[str], settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun
) -> ToolReply:
    setup, folder = _selected(run), _folder(settings)
    config = {**{name: value for name, value in setup.edits.items() if value is not None}, **_locked(settings, setup)}
    told = json.dumps([run.task_id, setup.environment, config, settings.rl_model, settings.rl_trainer], sort_keys=True)
    training = TrainingProcess(folder / f"rl_{hashlib.sha256(told.encode()).hexdigest()[:12]}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with file_lock(folder / ".lock"):
        known = training.status() if training.path.is_dir() else FAILED
        if known not in (STARTING, RUNNING) and training.result() is None:
            busy = [each.id for each in trainings(folder) if each.alive()]
            if len(busy) >= settings.rl_max_running:
                raise ToolMistake(
                    f"{len(busy)} of at most {settings.rl_max_running} training runs are active; nothing was started. "
                    "Wait for one to end, or stop it with rl_stop_training",
                    active_runs=busy,
                )
            on_training = {name: value for name, value in config.items() if setup.rows[name].get("training")}
            request = TrainingRequest(
                run_id=training.id,
                owner=run.task_id,
                environment=setup.environment,
                reference=setup.reference,
                config=config,
                settings={name: value for name, value in config.items() if name not in on_training},
                flags=_flags(settings, on_training),
                created=time.time(),
            )
            known = await training.start(request, command)
    if not settings.rl_outlive and training not in setup.started:
        setup.started.append(training)
    if known == FAILED:
        raise ToolMistake(f"The training run did not start: {training.error()}", run_id=training.id, **_files(training))
    return {
        "run_id": training.id,
        "status": "started",
        "environment": setup.environment,
        "config": config,
        "config_path": str(training.config),
        **_files(training),
        "message": "The training run was started. Monitor it with rl_check_status(run_id), at most every 30 minutes.",
    }


async def _check_status(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    training, setup = _training(settings, arguments), run.state(Setup)
    status, now = training.status(), time.monotonic()
    looked = setup.looked.get(training.id)
    if (
        status in (STARTING, RUNNING)
        and looked is not None
        and (left := looked + settings.rl_status_interval_s - now) > 0
    ):
        return {
            "rate_limited": True,
            "run_id": training.id,
            "status": status,
            "message": f"The training run has not ended. Check again in {left / 60:.0f} minutes.",
            "next_check_in_seconds": round(left),
        }
    setup.looked[training.id] = now
    request = training.request()
    reply: dict[str, JSON] = {
        "run_id": training.id,
        "status": status,
        "environment": request.environment,
        "running_time_minutes": round((time.time() - request.started) / 60, 1),
        "processes": {"trainer": "running" if status in (STARTING, RUNNING) else "exited"},
        "metrics": _metrics(training),
        **_files(training),
    }
    return reply | _stop_message(training, status)


def _stop_message(training: TrainingProcess, status: str) -> dict[str, JSON]:
    """Return why a training run failed or stopped, as a message."""
    if status == FAILED:
        return {"message": f"The training run failed: {training.error()}"}
    if status == INTERRUPTED:
        return {
            "message": "The run stopped when its agent ended. Start it again with the same settings to continue it."
        }
    return {}


async def _stop_training(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    training = _training(settings, arguments)
    if not training.alive() and (status := training.status()) != "stopped":
        return {
            "message": f"Run '{training.id}' is not running (status: {status})",
            "run_id": training.id,
            "status": status,
        }
    await training.stop()
    return {
        "message": f"Stopped training run '{training.id}'",
        "run_id": training.id,
        "status": training.status(),
    }


async def _results(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    training = _training(settings, arguments)
    status, lines = training.status(), training.lines()
    steps = [each for each in lines if each.get("kind") == "step"]
    chosen = sorted({round(place * (len(steps) - 1) / (HISTORY - 1)) for place in range(HISTORY)}) if steps else []
    result = training.result() or {}
    checkpoints = sorted((training.run / "training" / "checkpoints").glob("step-" + "[0-9]" * 6))
    return {
        "run_id": training.id,
        "status": status,
        "environment": training.request().environment,
        "final_metrics": steps[-1] if steps else {},
        "history": [steps[place] for place in chosen],
        "evaluations": [{"step": each["step"], "reward": each["reward"]} for each in lines if each["kind"] != "step"],
        "result": result.get("training"),
        "checkpoints": [str(path) for path in checkpoints],
        **_stop_message(training, status),
    }


async def _list_runs(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    found = [
        {"run_id": each.id, "environment": each.request().environment, "status": each.status()}
        for each in trainings(_folder(settings))
    ]
    return {"runs": found, "count": len(found)}


async def _test_inference(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    setup, steps, size = _selected(run), arguments.get("num_steps", 3), arguments.get("group_size", 16)
    allowed = settings.rl_test_models if settings.rl_test_url is not None else [str(settings.rl_model)]
    models = list(arguments.get("models") or allowed)
    if not models:
        raise ToolMistake("There is no model to test: rl_test_models is empty")
    if unknown := [each for each in models if each not in allowed]:
        raise ToolMistake(f"The model {unknown[0]} may not be tested; nothing was run", available=allowed)
    config = {**setup.edits, **_locked(settings, setup)}
    of_env = {
        name: value for name, value in config.items() if value is not None and not setup.rows[name].get("training")
    }
    of_env |= {"group_size": size, "total_steps": steps}
    server = ["--base-url", settings.rl_test_url] if settings.rl_test_url else ["--openai.server_type", "transformers"]
    words = [
        f"--env.{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in of_env.items()
        if value is not None
    ]
    tested = [await _tested(setup, model, [*server, "--model", model, *words]) for model in models]
    worked = [each for each in tested if each["steps_tested"]]
    return {
        "environment": setup.environment,
        "test_config": {
            "num_steps": steps,
            "group_size": size,
            "rollouts_per_model": steps * size,
            "total_rollouts": steps * size * len(models),
        },
        "models_tested": tested,
        "summary": {
            "steps_requested": steps,
            "models_tested": len(models),
            "models_succeeded": len(worked),
            "best_model": max(worked, key=lambda each: each["accuracy"])["model"] if worked else None,
            "environment_working": bool(worked),
        },
    }


async def _tested(setup: Setup, model: str, words: list[str]) -> dict[str, JSON]:
    """Return the test results of one model. `steps` has one entry per task with scored rollouts. A rollout with a score
    above 0 counts as correct."""
    reply: dict[str, JSON] = {"model": model, "steps": [], "steps_tested": 0, "total_completions": 0,
                              "correct_completions": 0, "accuracy": 0.0}  # fmt: skip
    try:
        report = await _palaestra("run", setup.reference, "process", *words, "--json", timeout_s=TEST_S)
    except (ToolMistake, ToolUnavailable) as error:
        return {**reply, "error": str(error)}
    reply["run"] = report["run"]
    reply["unscored_completions"] = report.get("unscored", 0)
    groups = report["groups_file"]
    for line in Path(groups).read_text(encoding="utf-8").splitlines() if groups else ():
        scores = json.loads(line)["scores"]
        correct = sum(score > 0 for score in scores)
        reply["steps"].append(
            {"step": len(reply["steps"]) + 1, "completions": len(scores), "correct": correct, "scores": scores}
        )
        reply["total_completions"] += len(scores)
        reply["correct_completions"] += correct
    reply["steps_tested"] = len(reply["steps"])
    if reply["total_completions"]:
        reply["accuracy"] = round(reply["correct_completions"] / reply["total_completions"], 3)
    return reply


def _selected(run: ToolRun) -> Setup:
    setup = run.state(Setup)
    if not setup.environment:
        raise ToolMistake("No environment is selected: call rl_select_environment(name) first")
    return setup


def _training(settings: ToolsetSettings, arguments: Mapping[str, JSON]) -> TrainingProcess:
    run_id = str(arguments["run_id"])
    known = {each.id: each for each in trainings(_folder(settings))}
    if run_id not in known:
        raise ToolMistake(f"Run '{run_id}' not found", known_runs=list(known))
    return known[run_id]


def _locked(settings: ToolsetSettings, setup: Setup) -> dict[str, JSON]:
    """Return the locked settings that the chosen environment's training has, with their values. If a locked value is
    None, the setting's default is locked."""
    return {
        name: setup.rows[name]["value"] if value is None else value
        for name, value in settings.rl_locked.items()
        if name in setup.rows
    }


def _flags(settings: ToolsetSettings, on_training: Mapping[str, JSON]) -> list[str]:
    unchecked = [f"--unchecked={name}" for name in settings.rl_unchecked]
    url = [] if settings.rl_tinker_url is None else [f"--tinker-url={settings.rl_tinker_url}"]
    chosen = ["--model", str(settings.rl_model), f"--trainer={settings.rl_trainer}"]
    return [*chosen, *url, *unchecked, *words_of(on_training)]


def _metrics(training: TrainingProcess) -> dict[str, JSON]:
    """Return the metrics of the latest step and of the latest evaluation."""
    latest = {str(each.get("kind")): each for each in training.lines()}
    step, evaluation = latest.get("step", {}), latest.get("evaluation", {})
    return {
        "step": step.get("step", 0),
        "reward_mean": step.get("reward"),
        "loss": step.get("loss"),
        "eval_step": evaluation.get("step"),
        "eval_reward_mean": evaluation.get("reward"),
    }


def _files(training: TrainingProcess) -> dict[str, JSON]:
    return {"logs": {"trainer": str(training.log)}, "run_folder": str(training.run)}


def _type(value: JSON) -> str:
    return "unknown" if value is None else type(value).__name__


def _fits(value: JSON, default: JSON) -> bool:
    if default is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    return isinstance(value, (int, float) if isinstance(default, float) else type(default))


async def _palaestra(*words: str, timeout_s: float = COMMAND_S) -> JSON:
    """Return the JSON output of a `palaestra` command. Raises `ToolMistake` with the command's error, and
    `ToolUnavailable` on a timeout."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "palaestra", *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout_s):
            printed, log = await process.communicate()
    except TimeoutError:
        raise ToolUnavailable(f"palaestra {' '.join(words[:2])} did not end within {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    try:
        return json.loads(printed)
    except ValueError:
        text = log.decode("utf-8", "replace").strip()
        with contextlib.suppress(ValueError, LookupError, TypeError):
            text = json.loads(text.rpartition("\n")[2])["error"]["message"]
        raise ToolMistake(f"palaestra {' '.join(words[:2])} failed: {without_middle(text, 2000)}") from None
