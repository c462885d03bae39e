"""Demonstrations for a warm start: conversations that earned a reward, as rows to train before the first rollouts.

The rows are those that rollouts of the same conversations would have: the same prompts, tokens and masks, made by
`demonstration_rows`. The cross entropy of a row is trained as a policy gradient with the advantage 1, whose ratio of
probabilities is 1, so every trainer can do it and its optimizer and checkpoints are the same. Rows are written to the
training run's folder before the first step, so a resumed training run takes the same steps.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from palaestra.rollouts.export.exporter import ExportReport, taught
from palaestra.rollouts.export.token_rows import ExportedRow
from palaestra.rollouts.journal.reader import JOURNAL_NAME, journal_of, open_recording
from palaestra.rollouts.records import Group
from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import UNREADABLE, read_lines, replaced, writing
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.engines.scripted import without_closing
from palaestra_tokens.engines.token_engine import TokenChat, template_text
from palaestra_tokens.ledger import ENCODED
from palaestra_tokens.templates import ChatFormat
from palaestra_tokens.token_exact.demonstrations import demonstration_rows
from palaestra_train.trainer import TrainedRow, sequence_row

logger = logging.getLogger(__name__)

ORACLE = "oracle"
"""The source that plays the reference solutions of the environment's own tasks."""

ROWS = "warm-start.jsonl"
"""The file in the folder of a training run that holds the rows."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One conversation to learn. The first `examples` replies belong to the prompt."""

    name: str
    task: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, JSON]]
    examples: int = 0


def demonstrations_in(groups: Iterable[Group]) -> Iterator[Demonstration]:
    """Yield the rollouts that earned the highest reward of their group, if it is above 0."""
    for group in groups:
        best = max((each.reward or 0.0 for each in group.scored), default=0.0)
        for trajectory in group.scored:
            if best <= 0 or trajectory.reward != best:
                continue
            messages = taught(trajectory, ExportReport())
            replies = sum(message.get("role") == "assistant" for message in trajectory.messages)
            if messages:
                examples = replies - len(trajectory.turns)
                yield Demonstration(trajectory.rollout_id, trajectory.task_id, messages, group.tools, examples)


def located(source: str) -> str:
    """Return a source as the same path for every working directory and every later run. Raises `ConfigError` if there
    is no such run or file."""
    path = local_path(source).absolute()
    if source == ORACLE or (path.suffix == ".jsonl" and path.is_file()):
        return source if source == ORACLE else str(path)
    if path.suffix == ".jsonl":
        raise ConfigError(f"there is no file {path} for the warm start")
    return str(journal_of(source).absolute())


def demonstrations_of(source: str) -> Iterator[Demonstration]:
    """Yield the demonstrations of a run's journal, or of a file in the format of `export --to openai`, as `located`
    names them. Lines of the file with a reward that is not above 0 are left out. Raises `ConfigError`."""
    path = Path(source)
    if path.name == JOURNAL_NAME:
        yield from demonstrations_in(open_recording(source))
        return
    for number, raw in enumerate(path.read_bytes().splitlines(), 1):
        if not raw.strip():
            continue
        try:
            line = msgspec.json.decode(raw, type=dict[str, JSON])
            tools, messages = line.get("tools") or [], line.get("messages")
            if (line.get("reward", 1.0) or 0) <= 0:
                continue
            tools = json.loads(tools) if isinstance(tools, str) else tools
            messages = msgspec.convert(messages, list[dict[str, JSON]])
            tools = msgspec.convert(tools, list[dict[str, JSON]])
        except (*UNREADABLE, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error}. Each line needs `messages`, and `tools` as a list or its JSON text, "
                "as `palaestra export --to openai` writes them"
            ) from None
        name, task = str(line.get("id") or number), str(line.get("task_id") or "")
        yield Demonstration(name, task, without_closing(messages), tools)


def warm_start_rows(
    found: Iterable[Demonstration], engine: object, variables: Mapping[str, JSON] | None, left_out: Set[str]
) -> list[ExportedRow]:
    """Return the rows of the demonstrations, as the engine's rollouts would have them, without those of the tasks
    `left_out`. `variables` go to the chat template. A conversation that the template or the parser cannot express is
    left out with a warning. Raises `ConfigError` if there is no row."""
    if not isinstance(engine, TokenChat):
        raise ConfigError("a warm start needs a trainer whose engine records exact tokens")
    chat_format = ChatFormat(engine.tokenizer, template_text(engine.config.chat_template))
    rows: list[ExportedRow] = []
    problems: list[str] = []
    for number, each in enumerate(found):
        if each.task in left_out:
            continue
        try:
            made = demonstration_rows(
                chat_format,
                each.messages,
                each.tools,
                parser=engine.config.tool_parser,
                history=engine.config.history,
                variables=variables,
                examples=each.examples,
                rollout_id=each.name,
            )
        except ConfigError as error:
            problems.append(f"{each.name}: {error}")
            continue
        for place, row in enumerate(made):
            zeros = [0.0] * len(row.tokens)
            as_row = sequence_row(row.tokens, row.masks, zeros, None, f"demonstration-{number}/{place}", ())
            if as_row is not None:
                rows.append(msgspec.structs.replace(as_row, task_id=each.task, source=ENCODED))
    if not rows:
        reason = f" ({problems[0]})" if problems else ""
        raise ConfigError(
            f"the warm start has no demonstration with a reward above 0{reason}. Check the reference solutions with "
            "`palaestra run ENV --policy oracle`, or name a run whose rollouts earned rewards"
        )
    if problems:
        logger.warning("%d demonstrations are left out; the first one: %s", len(problems), problems[0])
    return rows


def keep_rows(rows: Sequence[ExportedRow], folder: Path) -> None:
    """Write the rows into the folder of a training run. Raises `DiskError`."""
    path = folder / ROWS
    with writing(path), replaced(path) as file:
        file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)


def kept_rows(folder: Path) -> list[ExportedRow]:
    """Return the rows that `keep_rows` wrote, or none. Raises `ConfigError` for a damaged line."""
    path = folder / ROWS
    try:
        return [msgspec.convert(line, ExportedRow) for line in read_lines(path)]
    except UNREADABLE as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def rows_of_step(rows: Sequence[ExportedRow], step: int, count: int, seed: int) -> list[TrainedRow]:
    """Return the `count` rows of a step, counted from 0. The order is random and drawn again for each pass over all
    rows."""
    found = []
    for drawn in range(step * count, (step + 1) * count):
        passed, place = divmod(drawn, len(rows))
        order = list(range(len(rows)))
        random.Random(f"{seed}:warm-start:{passed}").shuffle(order)
        found.append(TrainedRow(rows[order[place]], 1.0))
    return found


@dataclass(slots=True)
class CrossEntropy:
    """Weighs the rows of a supervised step. `nats` is then the cross entropy, in nats per trained token."""

    nats: float = math.nan

    def weigh(self, rows: Sequence[TrainedRow], own: Sequence[Sequence[float]]) -> list[TrainedRow]:
        """Return the rows as if the trainer had sampled them with its log-probabilities `own`, so that their policy
        gradient is that of the cross entropy."""
        made: list[TrainedRow] = []
        nats, tokens = 0.0, 0
        for row, theirs in zip(rows, own, strict=True):
            on = row.row.mask
            logprobs = [value if kept else 0.0 for value, kept in zip(theirs, on, strict=True)]
            nats, tokens = nats - sum(logprobs), tokens + row.sampled
            sampled = msgspec.structs.replace(row.row, logprobs=logprobs)
            made.append(replace(row, row=sampled, own=list(theirs), weights=[float(each) for each in on]))
        self.nats = nats / max(1, tokens)
        return made
