"""Tools as functions of their own, as Hermes scripts import them. Each calls `handle_function_call`.

The `rl_*` functions use the settings of the session: `use_session(ToolSession(settings=ToolSettings(rl_dir=FOLDER,
rl_model=MODEL)))`.
"""

from __future__ import annotations

from collections.abc import Sequence

from palaestra_contract.tools.function_calls import (
    default_session,
    handle_function_call,
    handle_function_call_async,
)
from palaestra_slots.core.types import JSON


def terminal_tool(
    command: str,
    background: bool = False,
    timeout: int | None = None,
    task_id: str | None = None,
    force: bool = False,
    workdir: str | None = None,
    check_interval: int | None = None,
    pty: bool = False,
    notify_on_complete: bool = False,
    watch_patterns: Sequence[str] | None = None,
) -> str:
    """Run a command in the task's slot. Returns JSON text with `output`, `exit_code` and `error`. `timeout` is in
    seconds. `force` has no effect: commands run in a sandbox, and none needs an approval."""
    given: dict[str, JSON] = {
        "background": background,
        "timeout": timeout,
        "workdir": workdir,
        "check_interval": check_interval,
        "pty": pty,
        "notify_on_complete": notify_on_complete,
        "watch_patterns": None if watch_patterns is None else list(watch_patterns),
    }
    arguments = {name: value for name, value in given.items() if value not in (None, False)}
    return handle_function_call("terminal", {"command": command, **arguments}, task_id)


async def rl_list_environments() -> str:
    return await handle_function_call_async("rl_list_environments", {})


async def rl_select_environment(name: str) -> str:
    return await handle_function_call_async("rl_select_environment", {"name": name})


async def rl_get_current_config() -> str:
    return await handle_function_call_async("rl_get_current_config", {})


async def rl_edit_config(field: str, value: JSON) -> str:
    return await handle_function_call_async("rl_edit_config", {"field": field, "value": value})


async def rl_start_training() -> str:
    return await handle_function_call_async("rl_start_training", {})


async def rl_check_status(run_id: str) -> str:
    return await handle_function_call_async("rl_check_status", {"run_id": run_id})


async def rl_stop_training(run_id: str) -> str:
    return await handle_function_call_async("rl_stop_training", {"run_id": run_id})


async def rl_get_results(run_id: str) -> str:
    return await handle_function_call_async("rl_get_results", {"run_id": run_id})


async def rl_list_runs() -> str:
    return await handle_function_call_async("rl_list_runs", {})


async def rl_test_inference(num_steps: int = 3, group_size: int = 16, models: Sequence[str] | None = None) -> str:
    given: dict[str, JSON] = {"num_steps": num_steps, "group_size": group_size}
    chosen = {} if models is None else {"models": list(models)}
    return await handle_function_call_async("rl_test_inference", {**given, **chosen})


def check_rl_api_keys() -> bool:
    """Return whether the `rl_*` functions can be used. They need no keys, but the settings `rl_dir` and `rl_model`."""
    return not get_missing_keys()


def get_missing_keys() -> list[str]:
    """Return the settings that the `rl_*` functions still need."""
    settings = default_session().settings
    return [name for name in ("rl_dir", "rl_model") if getattr(settings, name, None) is None]
