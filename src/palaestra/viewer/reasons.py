"""Why a rollout has its reward, in one line each: its failure, its limit, its labels, tests and calls that failed.

The terminal viewer shows these lines first, as the page does (`page/rollout.js` and `page/reasons.js`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from palaestra.core.exits import plural
from palaestra.core.types import JSON
from palaestra.rollouts.environment import MISSING
from palaestra.viewer.check_evidence import CUT

_SHOWN = 5
_MAIN = ("command", "code", "path", "query")

OUTCOMES = {
    "max_turns": "It reached the limit of turns before the model ended.",
    "length": "A reply or the context reached its length limit.",
    "budget": "It used up its budget.",
    "cancelled": "It was cancelled.",
    "api_error": "The model server failed. This rollout has no score of the model's own making.",
    "infra_error": "The infrastructure failed. This rollout is not scored.",
}


class Reason(NamedTuple):
    """One reason. `kind` is `bad`, `warn` or `info`; `head` is its first words, and `text` the evidence."""

    kind: str
    head: str
    text: str = ""


def reasons(record: dict[str, JSON]) -> list[Reason]:
    """Return the reasons for the reward of a rollout, as `rollout_record` describes it, the most important first."""
    if record["in_flight"]:
        return [Reason("info", "This rollout is running.")]
    return [*_ending(record), *_evidence(record), *_earlier(record)]


def _ending(record: dict[str, JSON]) -> Iterator[Reason]:
    if text := (record.get("check") or {}).get("breaks"):
        yield Reason("bad", "The check fails over this work:", text)
    if record.get("difference"):
        yield Reason("warn", "The reward differs from the official verdict.", record["difference"])
    blame, outcome = record.get("blame"), record.get("outcome") or "natural"
    if record.get("error"):
        yield Reason("bad", f"Failed ({blame})." if blame else "Failed.", beginning(record["error"]))
    elif outcome != "natural":
        most = record.get("most_turns")
        limit = (
            f"It reached the limit of {plural(most, 'turn')} before the model ended." if most else OUTCOMES["max_turns"]
        )
        yield Reason("warn", limit if outcome == "max_turns" else OUTCOMES.get(outcome, f"It ended with {outcome}."))
    for label in record.get("labels") or []:
        yield Reason("warn", f"{label['name']}{' (certain)' if label.get('certain') else ''}", label["evidence"])


def _evidence(record: dict[str, JSON]) -> Iterator[Reason]:
    reward = record.get("reward")
    if reward is not None and reward >= 1:
        return
    check = record.get("check") or {}
    if failed := check.get("failed"):
        more = " …" if check["failures"] > _SHOWN else ""
        yield Reason("warn", failed_words(check), "\n".join(map(_test_words, failed[:_SHOWN])) + more)
    missing = (record.get("detail") or {}).get(MISSING)
    if isinstance(missing, list) and missing:
        yield Reason("warn", "The check could not run:", "; ".join(map(str, missing[:_SHOWN])))
    errors = record.get("tool_errors") or []
    if errors:
        first = errors[0]
        where = f"{first['tool']}, turn {first['turn']}" if first.get("tool") else f"turn {first['turn']}"
        yield Reason("warn", f"{plural(len(errors), 'call')} failed.", f"{where}: {beginning(first['error'])}")
    if (contrast := record.get("contrast")) is not None:
        yield _unexplained(contrast)
    if exits := (record.get("exits") or {}).get("count"):
        first = record["exits"]["first"]
        text = f"{first['tool']}, turn {first['turn']}: exit code {first['code']}: {_command(first['arguments'])}"
        yield Reason("warn", f"{plural(exits, 'call')} ended with a nonzero exit code.", text)
    said = any(message.get("role") == "assistant" for message in record.get("messages") or [])
    if not record.get("turns") and not record.get("error") and not said:
        yield Reason("warn", "The model did not reply.")


def _command(arguments: str) -> str:
    """Return the command, the code or the path in the arguments of a call, or else all of them."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    texts = [found[name] for name in _MAIN if isinstance(found.get(name), str)] if isinstance(found, dict) else []
    return str(texts[0]) if texts else arguments


def failed_words(check: dict[str, JSON]) -> str:
    """Return how many tests failed, of how many if the record has that number."""
    n, total = check["failures"], check["total"]
    return f"{n:,} of {plural(total, 'test')} failed:" if total else f"{plural(n, 'test')} failed:"


def _test_words(test: list[str]) -> str:
    name, status, output = test
    return f"{name}{f' ({status})' if status != 'failed' else ''}" + (f": {output}" if output else "")


def _unexplained(contrast: dict[str, JSON]) -> Reason:
    head = "No test is listed; see the grading." if contrast["evidence"] else "The check recorded only a number."
    if "id" not in contrast:
        return Reason(
            "warn", head, "" if contrast["evidence"] else "A check records why with Score(reward, detail={…})."
        )
    text = f"The sibling #{contrast['id'].rpartition('/')[2]} has the reward {contrast['reward']:g}"
    call = contrast.get("call")
    if call is None:
        return Reason("warn", head, f"{text} with the same calls.")
    own, other = (f"{each[0]} {_command(each[1])}" if each else "no call" for each in (call["own"], call["other"]))
    return Reason("warn", head, f"{text}; call {call['number']} is {own} here and {other} there.")


def _earlier(record: dict[str, JSON]) -> Iterator[Reason]:
    for attempt in record.get("attempts") or []:
        yield Reason("info", f"An earlier attempt was discarded: {attempt['outcome']}.", attempt["error"])
    if parent := record.get("parent"):
        yield Reason("info", f"It continues rollout #{parent['index']} after turn {parent['turn']}.")
    if origin := record.get("origin"):
        where = f"after turn {origin['turn']}" if origin["turn"] else "from its beginning"
        yield Reason("info", "Counterfactual.", f"It continues {origin['rollout_id']} of {origin['run_id']} {where}.")


def beginning(value: JSON) -> str:
    """Return the beginning of a text of a record, which may be cut."""
    return str(value["head"] if isinstance(value, dict) and CUT in value else value)
