"""An evaluation set: `palaestra eval A B C --model M1 --model M2` evaluates every model on every environment.

The set is a folder with one run per environment and model, and `set.json`, which lists them. The runs are played one
after the other, each as `palaestra eval` plays it alone, so that they share one budget (`--max-cost`). `palaestra
resume SET` continues what is not finished. All lines are parsed before the first run begins. `set.json` can name code
and settings of this machine, so only its maker's copy is resumed (`journal/origin.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from palaestra.envs.config.command_line import Answer, flags_of, has_settings, is_flag, setting_of
from palaestra.envs.config.dotenv import exported, read_keys, shell_variables
from palaestra.envs.config.layers import ENVIRONMENT
from palaestra.envs.config.secret_flags import by_flag, has_secret, missing_settings, split_secrets
from palaestra.envs.discovery import load_environment
from palaestra.envs.form import Form
from palaestra.envs.run.command import command_line, take_variables
from palaestra.envs.run.run import run
from palaestra.envs.run.run_folder import RunLine, run_place
from palaestra.envs.run.run_table import about, as_json, as_text, set_rows, spent
from palaestra.envs.run.set_file import (
    SET_SCHEMA,
    SETS,
    EvaluationSet,
    Member,
    find_set,
    keep_reason,
    not_one,
    read_set,
    runs_by_model,
    runs_of,
    write_set,
)
from palaestra.rollouts.finished_run import Run, open_run
from palaestra.rollouts.journal.journal import without_secrets
from palaestra.rollouts.journal.origin import made_here, mark_origin
from palaestra.rollouts.journal.reader import JOURNAL_NAME, RUNS, SET_NAME
from palaestra.rollouts.limits import INTERRUPTED_BY
from palaestra.rollouts.observe.status import RunReader, filtered_words
from palaestra.rollouts.schedule import escaped
from palaestra_slots.core.config import is_secret
from palaestra_slots.core.errors import ConfigError, PalaestraError
from palaestra_slots.core.exits import DONE, TOO_MANY_FAILURES, ended_by_second_interrupt, plural
from palaestra_slots.core.printable import printable
from palaestra_slots.core.redaction import HIDDEN, redacted
from palaestra_slots.core.types import JSON, Blame

_POLICY = ("--policy",)
_MODEL = ("--model", "-m", "--openai.model_name", *_POLICY)
_ADDRESS = ("--base-url", "--openai.base_url")
_TASK, _FAILED_OF = ("--task", "--env.only_tasks"), "--failed-of"


@dataclass(frozen=True, slots=True)
class _Line:
    """A member with its parsed command line."""

    member: Member
    form: Form
    parsed: RunLine

    @property
    def model(self) -> str:
        return str(self.parsed.server_configs[0].model_name)


def split_words(first: str, words: Sequence[str]) -> tuple[list[str], list[list[str]], list[str]]:
    """Split the words of `palaestra eval` into the environments, the settings of each model (`--model` or `--policy`,
    with its `--base-url` if each model has one, and with the settings after its name in the same word), and the
    settings of all runs."""
    environments, rest = [first], list(words)
    while rest and not is_flag(rest[0]):
        environments.append(rest.pop(0))
    flags = flags_of(rest)
    models = [each for each in flags if _is_named(each, _MODEL)]
    addresses = [each for each in flags if _is_named(each, _ADDRESS)]
    if len(models) < 2 and not any(map(_own_settings, models)):
        return environments, [], rest
    served = [each for each in models if not _is_named(each, _POLICY) and not _has_address(_own_settings(each))]
    shared = [word for each in flags if each not in (*models, *addresses) for word in each]
    if len(addresses) not in (0, 1, len(served)):
        raise ConfigError(
            f"{plural(len(served), 'model')} but {len(addresses)} addresses: give one --base-url for all, or one after "
            "each --model"
        )
    # A policy needs no server, so it takes no address.
    places = iter(addresses * len(served) if len(addresses) == 1 else addresses)
    return (
        environments,
        [
            [*_without_settings(each), *(next(places, []) if each in served else []), *_own_settings(each)]
            for each in models
        ],
        shared,
    )


def _own_settings(model: Sequence[str]) -> list[str]:
    """Return the settings after a model's name, in the same word: `"good --env.prompt_price 10"`."""
    word = model[0].partition("=")[2] or model[-1]
    return shlex.split(word)[1:] if has_settings(word) else []


def _without_settings(model: Sequence[str]) -> list[str]:
    if not _own_settings(model):
        return list(model)
    flag, _, word = model[0].partition("=")
    return [flag, shlex.split(word or model[-1])[0]]


def _has_address(words: Sequence[str]) -> bool:
    return any(_is_named(each, _ADDRESS) for each in flags_of(words))


def _without_secrets(line: _Line) -> Member:
    """Return the member without the flags of settings that the record of a run hides. A resumed set needs them again,
    in variables or flags."""
    member, hidden = line.member, _hidden_settings(line.parsed)
    kept, secret = split_secrets(member.words, hidden)
    words, left_out = [*kept, *_of_variables(line.parsed, hidden)], [*dict.fromkeys(map(setting_of, secret))]
    return Member(member.environment, words, member.folder, left_out, line.form.name, line.model)


def _of_variables(parsed: RunLine, hidden: Collection[str]) -> Iterator[str]:
    """Yield a flag for each setting that a variable gives, so that a resumed set has it too; none for secrets."""
    for setting, source in by_flag(parsed.sources).items():
        group, _, name = setting.partition(".")
        # Flags and files are recorded as they were written; only variables of the shell would be gone.
        if source != ENVIRONMENT or f"{group}.{name}" in hidden or is_secret(name):
            continue
        values = (parsed.env_config if group == "env" else parsed.server_configs[0]).recorded()
        value = values.get(name)
        text = value if isinstance(value, str) else json.dumps(value)
        if value is not None and not has_secret(text):
            yield f"--{group}.{name}={text}"


def _hidden_settings(parsed: RunLine) -> set[str]:
    """Return the settings of which the record of a run hides some text."""

    def hidden(group: str, values: Mapping[str, JSON]) -> set[str]:
        texts = {name: json.dumps(value) for name, value in without_secrets(values).items()}
        return {f"{group}.{name}" for name, text in texts.items() if HIDDEN in text or "***" in text}

    servers = [hidden("openai", each.recorded()) for each in parsed.server_configs]
    return hidden("env", parsed.env_config.recorded()).union(*servers)


def _check_given_again(line: _Line) -> None:
    """Raise `ConfigError` if a setting of the line, which `set.json` does not record, is not given again."""
    named = [each for each in line.member.left_out if each.startswith(("env.", "openai."))]
    missing = missing_settings(named, (), line.parsed.sources)
    if missing:
        group, _, name = missing[0].partition(".")
        raise ConfigError(
            f"{SET_NAME} does not record secrets, and {line.form.name} needs {' and '.join(missing)} again: add "
            f"--{missing[0]} VALUE, or set PALAESTRA_{group.upper()}_{name.upper()}"
        )


def _is_named(flag: Sequence[str], names: Sequence[str]) -> bool:
    return flag[0].partition("=")[0] in names


def evaluate_set(environments: Sequence[str], models: Sequence[Sequence[str]], words: Sequence[str]) -> int:
    """Evaluate every model on every environment, and return the exit code. An environment may have settings of its own,
    in one word: `"my_env.py --env.n 20"`. Raises `ConfigError`."""
    failed_of, words = _without(words, _FAILED_OF)
    if len(environments) > 1 and any(_is_named([word], _TASK) for word in words):
        raise ConfigError(
            "--task names tasks of one environment: write it beside the environment, in quotes, such as "
            f'"{environments[0]} --task ID"'
        )
    lines = []
    for environment in environments:
        name, *own = shlex.split(environment)
        for model in models or [[]]:
            lines.append(_parse_member(Member(name, ["evaluate", *words, *own, *model], "")))
    if failed_of is not None:
        lines = [*_those_failed(lines, find_set(failed_of), failed_of)]
    taken: set[str] = set()
    members = []
    for line in lines:
        place = run_place(Path(), line.form.name, line.model).name
        # Two members may have the same environment and model, with different settings.
        name = next(name for name in (place, *(f"{place}-{n}" for n in range(2, 10**6))) if name not in taken)
        taken.add(name)
        line.member.folder = name
        members.append(line.member)
    _check_keys(lines, words)
    if lines[0].parsed.dry_run:
        return _plan(lines)
    if len({_budget(line) for line in lines}) > 1:
        raise ConfigError("--max-cost is the budget of the whole set: give it once, for all environments")
    folder = RUNS / f"{SETS}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.urandom(2).hex()}"
    kept = [_without_secrets(line) for line in lines]
    found = EvaluationSet(SET_SCHEMA, str(Path.cwd()), kept)
    # Before anything is played, so that a set which is killed can be resumed.
    write_set(folder, found)
    mark_origin(folder, found.facts())
    return _play_runs(folder, members, [])


def resume_set(folder: Path, settings: Sequence[str]) -> int:
    """Continue the runs of a set that are not finished, or all of them if `settings` change some. Raises
    `ConfigError`."""
    folder = folder.resolve()
    found = read_set(folder)
    if not made_here(folder, found.facts()):
        raise ConfigError(
            f"{folder} was not started here by you, or its {SET_NAME} has changed, so its environments are not run; "
            "resume its runs one by one"
        )
    if Path(found.place).is_dir():
        os.chdir(found.place)
    return _play_runs(folder, found.members, settings)


def _play_runs(folder: Path, members: Sequence[Member], settings: Sequence[str]) -> int:
    """Play the runs that are not finished, one after the other, and print the table. Returns the first exit code that
    is not 0."""
    lines = [_parse_member(each, settings) for each in members]
    _check_keys(lines, settings)
    left = [each for each in lines if settings or not _is_finished(folder / each.member.folder)]
    if lines[0].parsed.dry_run:
        return _plan([_resumed(each, folder / each.member.folder) for each in left])
    # Before the first run starts: a person who has to give a key again is here now, and may not be later.
    for line in left:
        _check_given_again(line)
    finished = False
    _announce(folder, len(lines))
    try:
        code = _play_in_turn(folder, lines, again=bool(settings))
        finished = all(_is_finished(folder / each.folder) for each in members)
    finally:
        # The table is printed after an interrupt, too: the finished runs have been paid for.
        rows = set_rows(folder)
        as_data = any(line.parsed.as_json for line in lines)
        sys.stderr.write("" if as_data or not rows else f"\n{as_text(rows)}{about(rows)}\n")
        if not finished:
            sys.stderr.write(f"the set is not finished; continue with palaestra resume {folder}\n")
    data = {"set": str(folder), "exit_code": code, "runs": [as_json(row) for row in rows]}
    sys.stdout.write(f"{json.dumps(data) if as_data else folder}\n")
    return code


def _announce(folder: Path, runs: int) -> None:
    """Say what is played, and which rollouts are not asked again."""
    sys.stderr.write(f"evaluation set {folder}: {plural(runs, 'run')}\n")
    if filtered := sum(RunReader(each / JOURNAL_NAME).read().filtered for each in runs_of(folder)):
        sys.stderr.write(f"{filtered_words(filtered, folder)}\n")


def _play_in_turn(folder: Path, lines: Sequence[_Line], *, again: bool) -> int:
    """Play the runs that are not finished, or all of them `again`, until the budget is spent or one is interrupted."""
    code = DONE
    for number, line in enumerate(lines, 1):
        place, budget = folder / line.member.folder, _budget(line)
        if _is_finished(place) and not again:
            continue
        if budget is not None:
            # A run that is resumed counts what it has spent itself, so its budget leaves out only the other runs.
            others = sum(_spent(folder / each.member.folder) for each in lines if each is not line)
            if budget - others <= _spent(place):
                spent = f"the budget of the set is spent: {others + _spent(place):.4f} of {budget:g}"
                sys.stderr.write(f"{spent}\n")
                for each in lines[number - 1 :]:
                    keep_reason(folder, each.member.folder, spent)
                return code or TOO_MANY_FAILURES
            line = replace(line, parsed=_with_budget(line.parsed, budget - others))
        sys.stderr.write(f"[{number}/{len(lines)}] {line.form.name} with {line.model}\n")
        ended = _play_run(line, folder)
        code = code or ended
        if _run_state(place) == INTERRUPTED_BY:
            break
    return code


def _parse_member(member: Member, settings: Sequence[str] = ()) -> _Line:
    """Return the member with its command line, parsed as `palaestra eval` would parse it."""
    dotenv, words = read_keys(Path.cwd()), [*member.words, *settings]
    with exported(dotenv):
        form = load_environment(member.environment, Path.cwd())
        line = command_line(form, f"palaestra eval {member.environment}", None, argv=words)
        parsed = line.parse(words, shell_variables(dotenv), dotenv)
    if isinstance(parsed, Answer) or parsed.resume is not None:
        raise ConfigError(
            "--help, --show-config and --resume are for one environment and one model; `palaestra resume` continues a "
            "set"
        )
    return _Line(member, form, parsed)


def _play_run(line: _Line, folder: Path) -> int:
    """Play one run of the set in a folder, and return its exit code. If it cannot begin, the error is printed, and the
    other runs are still played."""
    dotenv, place = read_keys(Path.cwd()), folder / line.member.folder
    parsed = _resumed(line, place).parsed
    with exported(dotenv):
        take_variables(parsed, dotenv)
        for notice in parsed.notices:
            sys.stderr.write(f"note: {notice}\n")
        try:
            return asyncio.run(ended_by_second_interrupt(run(line.form, parsed, folder=place))).exit_code
        except PalaestraError as error:
            sys.stderr.write(f"error: {printable(f'{line.form.name} with {line.model}: {error}')}\n")
            keep_reason(folder, line.member.folder, redacted(str(error)))
            return error.exit_code


def _resumed(line: _Line, place: Path) -> _Line:
    """Return the line that continues the run at a place, if it has begun."""
    return replace(line, parsed=replace(line.parsed, resume=place)) if _begun(place) else line


def _plan(lines: Sequence[_Line]) -> int:
    """Print what the runs would do, and return the exit code."""
    from palaestra.envs.run.dry_run import plan_run  # imported here, because only --dry-run needs it

    dotenv, plans = read_keys(Path.cwd()), []
    for line in lines:
        with exported(dotenv):
            take_variables(line.parsed, dotenv)
            plans.append(asyncio.run(plan_run(line.form, line.parsed)))
    if any(line.parsed.as_json for line in lines):
        sys.stdout.write(f"{json.dumps({'runs': [asdict(each) for each in plans]})}\n")
    else:
        sys.stdout.writelines(f"{each}\n" for each in plans)
    return DONE


_KEY = ("openai.api_key", "openai.api_key_variable")


def _check_keys(lines: Sequence[_Line], shared: Sequence[str]) -> None:
    """Raise `ConfigError` if one key would be sent to the servers of several models with different addresses, unless
    each of these models names this key itself. `shared` are the words for all runs."""
    for_all = any(setting_of(each[0].partition("=")[0]) in _KEY for each in flags_of(shared))
    known: dict[str, dict[frozenset[str], bool]] = {}
    for line in lines:
        own = not for_all and any(setting_of(each[0].partition("=")[0]) in _KEY for each in flags_of(line.member.words))
        servers = [each for each in line.parsed.server_configs if each.server_type != "scripted"]
        for key in {each.api_key for each in servers if each.api_key}:
            # One model may have several servers.
            places = frozenset(_origin(each.base_url) for each in servers if each.api_key == key and each.base_url)
            known.setdefault(key, {}).setdefault(places, True)
            known[key][places] &= own
    for owned in known.values():
        if len(owned) > 1 and not all(owned.values()):
            places = frozenset().union(*owned)
            raise ConfigError(
                f"the same API key would be sent to {' and '.join(map(redacted, sorted(places)))}: name the key of "
                'each model, --model "NAME --base-url URL --openai.api_key_variable VARIABLE" (none sends no key)'
            )


def _origin(address: str) -> str:
    """Return the scheme, host and port of an address."""
    found = urlsplit(address)
    return f"{found.scheme}://{found.netloc.rpartition('@')[2]}"


def _those_failed(lines: Sequence[_Line], earlier: Path | None, name: str) -> Iterator[_Line]:
    """Yield the lines, each with the tasks that failed in the earlier run of the same environment and model, in place
    of those that it chose. This is a run of the set `earlier`, or the run `name`. Lines without such tasks are left
    out."""
    known = {} if earlier is None else runs_by_model(earlier)
    left = 0
    for line in lines:
        if earlier is not None:
            runs = known.get((line.form.name, line.model), [])
            if not runs:
                raise ConfigError(f"{earlier} has no run of {line.form.name} with {line.model} ({_FAILED_OF})")
            if len(runs) > 1:
                raise not_one(earlier, line.form.name, line.model, runs)
            run = runs[0]
            failed = Run(run).failed_tasks()
            if not failed:
                sys.stderr.write(f"note: every rollout of {run} earned the full reward, so it is not played again\n")
                continue
        else:
            failed = open_run(name).failed_tasks()
        left += bool(failed)
        others = [word for each in flags_of(line.member.words) if not _is_named(each, _TASK) for word in each]
        # Escaped, because an id with brackets or stars would be read as a pattern.
        chosen = json.dumps([escaped(each) for each in failed])
        yield _parse_member(Member(line.member.environment, [*others, _TASK[1], chosen], ""))
    if not left:
        raise ConfigError(f"every rollout of {name} earned the full reward, so no task of it has failed")


def _without(words: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """Return the value of a flag in the words, or None, and the other words."""
    rest = list(words)
    for place, word in enumerate(rest):
        name, equals, value = word.partition("=")
        if name == flag and (equals or place + 1 < len(rest)):
            value = value if equals else rest[place + 1]
            del rest[place : place + (1 if equals else 2)]
            return value, rest
    return None, rest


def _budget(line: _Line) -> float | None:
    return line.parsed.env_config.max_cost


def _with_budget(parsed: RunLine, budget: float) -> RunLine:
    return replace(parsed, env_config=parsed.env_config.model_copy(update={"max_cost": budget}))


def _begun(place: Path) -> bool:
    return (place / JOURNAL_NAME).is_file()


def _spent(place: Path) -> float:
    return spent(place) if _begun(place) else 0.0


def _run_state(place: Path) -> str:
    return RunReader(place / JOURNAL_NAME).read().state if _begun(place) else ""


def _is_finished(place: Path) -> bool:
    """Return whether the run is done and a resumed run would repeat none of its rollouts."""
    if not _begun(place):
        return False
    status = RunReader(place / JOURNAL_NAME).read()
    return status.state == "done" and Blame.ENGINE.value not in status.blame
