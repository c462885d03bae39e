"""Tools with which an agent runs trainings itself, which this version does not have; people run `palaestra` instead."""

from __future__ import annotations

from palaestra.tools.absent.base import absent, number, text, texts
from palaestra.tools.schema import FunctionTool

_RUN = {"run_id": text("The training run's id.")}


def _absent(
    action: str,
    description: str,
    parameters: dict[str, dict[str, object]] | None = None,
    required: tuple[str, ...] = (),
) -> FunctionTool:
    reason = "this version starts no trainings from inside an agent"
    return absent(f"rl_{action}", "rl", reason, description, parameters, required)


TRAINING = (
    _absent("list_environments", "List the environments that can be trained on."),
    _absent("select_environment", "Choose the environment to train on.", {"name": text("Its name.")}, ("name",)),
    _absent(
        "get_current_config", "The chosen environment's settings: those that can be changed and those that cannot."
    ),
    _absent(
        "edit_config",
        "Change a setting of the chosen environment.",
        {"field": text("The setting's name."), "value": {"description": "Its new value."}},
        ("field", "value"),
    ),
    _absent("start_training", "Start a training run with the current settings."),
    _absent("check_status", "How a training run is doing, at most every 30 minutes.", _RUN, ("run_id",)),
    _absent("stop_training", "Stop a training run.", _RUN, ("run_id",)),
    _absent("get_results", "The figures of a training run.", _RUN, ("run_id",)),
    _absent("list_runs", "List the training runs, finished ones too."),
    _absent(
        "test_inference",
        "Roll out the chosen environment with a few models, without training.",
        {
            "num_steps": number("How many steps.", default=3, minimum=1),
            "group_size": number("Rollouts per step.", default=16, minimum=1),
            "models": texts("The models to try."),
        },
    ),
)
