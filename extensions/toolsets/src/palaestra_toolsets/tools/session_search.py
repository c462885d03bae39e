"""The `session_search` tool and the earlier conversations that it searches: files in one folder, one per conversation,
each a JSON object of the schema `palaestra.session/1`, which programs write with `Sessions.save`.

The tool shows excerpts and does not summarise. If `sessions_dir` is not set, and the program shares no `Sessions` with
the tool, calls are refused.

Invariants: a file is replaced atomically; a search reads at most the newest `MAX_SESSIONS` files of the folder, and
skips files of more than `MAX_SESSION_BYTES`; the same folder and query give the same answer.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from palaestra.tools import parameters
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import replaced
from palaestra_slots.core.types import JSON, Message
from palaestra_toolsets.settings import ToolsetSettings

SESSION_SCHEMA = "palaestra.session/1"
MAX_SESSIONS = 1000
MAX_SESSION_BYTES = 8 << 20
EXCERPT_CHARS = 400
EXCERPTS = 3
_YEAR_9999_S = 253_370_764_800
"""The latest start time, in seconds since the epoch, that can be formatted."""
_WORD = re.compile(r"\w+")
_NAME = re.compile(r"[\w.-]{1,128}")

SCHEMA = ToolSchema(
    name="session_search",
    description=(
        "Search past conversations by keywords. Returns the best matches first, with excerpts. Use it when the "
        "user refers to earlier work, or when you may have solved a similar problem before."
    ),
    parameters={
        "query": parameters.text("Keywords to search for."),
        "role_filter": parameters.text("Only messages with these roles, comma-separated: user, assistant, tool."),
        "limit": parameters.integer(
            "Maximum number of conversations to return.", {"minimum": 1, "maximum": 20, "default": 3}
        ),
    },
    required=("query",),
)


class PastSession(msgspec.Struct, kw_only=True):
    """One conversation. `started_at` is in seconds since the epoch."""

    schema: str = SESSION_SCHEMA
    session_id: str
    started_at: float
    messages: list[Message]
    title: str = ""


@dataclass(frozen=True, slots=True)
class SessionMatch:
    """One conversation that matches, with its best excerpts. An excerpt has the message's role and the text around the
    words."""

    session: PastSession
    excerpts: list[dict[str, str]]
    score: float


class SessionSource(Protocol):
    """Earlier conversations in a store other than a folder."""

    def search(self, query: str, roles: Collection[str], limit: int, *, current: str) -> list[SessionMatch]:
        """Search as `Sessions.search` does. May be called in any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Sessions:
    """The conversations of one folder or of a `source`. If neither is set, no conversations are kept. `current` is the
    id of the conversation that searches; searches leave it out.

    Methods block. A file that cannot be read as a session is left out of searches.
    """

    folder: Path | None = None
    current: str = ""
    source: SessionSource | None = None

    def save(self, session: PastSession) -> Path:
        """Write a conversation and return the path of its file. Raises `OSError`, and `ConfigError` if `folder` is None
        or the id cannot be a file's name."""
        if self.folder is None:
            raise ConfigError("no folder for sessions is set: create Sessions with a folder")
        if _NAME.fullmatch(session.session_id) is None or session.session_id.startswith("."):
            raise ConfigError(
                f"session id {session.session_id!r} cannot be used: use at most 128 letters, digits, - and _"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{session.session_id}.json"
        with replaced(path) as file:
            file.write(msgspec.json.encode(session))
        return path

    def search(self, query: str, roles: Collection[str] = (), limit: int = 3) -> list[SessionMatch]:
        """Return at most `limit` conversations that contain words of `query`, best first. If `roles` is given, only
        messages with these roles count; system messages never do.

        A word that few conversations contain weighs more (as in BM25), and repetitions add little.
        """
        if self.source is not None:
            return self.source.search(query, roles, limit, current=self.current)
        words = list(dict.fromkeys(_folded_words(query)))
        texts = [(session, _texts(session, roles)) for session in self._newest()]
        counted = [
            (session, said, Counter(word for _, text in said for word in _folded_words(text)))
            for session, said in texts
        ]
        weights = {word: _rarity(sum(word in count for _, _, count in counted), len(counted)) for word in words}
        found = []
        for session, said, count in counted:
            score = sum(weights[word] * count[word] / (count[word] + 1.2) for word in words)
            if score > 0:
                found.append(SessionMatch(session, _excerpts(said, words), round(score, 6)))
        best = sorted(found, key=lambda each: (-each.score, -each.session.started_at, each.session.session_id))
        return best[:limit]

    def _newest(self) -> Iterator[PastSession]:
        if self.folder is None or not self.folder.is_dir():
            return
        # A link could show a file outside the folder.
        files = [path for path in self.folder.glob("*.json") if path.stem != self.current and not path.is_symlink()]
        sized = [(path.stat(), path) for path in files if path.is_file()]
        # Names decide between equal times, so that the same folder gives the same answer.
        sized.sort(key=lambda each: (-each[0].st_mtime_ns, each[1].name))
        for status, path in sized[:MAX_SESSIONS]:
            if status.st_size > MAX_SESSION_BYTES:
                continue
            try:
                session = msgspec.json.decode(path.read_bytes(), type=PastSession)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError):
                continue
            if session.schema == SESSION_SCHEMA and 0 <= session.started_at < _YEAR_9999_S:
                yield session


async def run_session_search(settings: ToolsetSettings, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Search; the reply has the `results` and their `count`."""
    sessions = run.found_state(Sessions) or Sessions(Path(settings.sessions_dir) if settings.sessions_dir else None)
    if sessions.folder is None and sessions.source is None:
        raise ToolMistake("No earlier conversations are kept here: no folder is set")
    if not arguments["query"].strip():
        raise ToolMistake("query is empty; give words to search for")
    roles = {role.strip() for role in arguments.get("role_filter", "").split(",") if role.strip()}
    found = await asyncio.to_thread(sessions.search, arguments["query"], roles, arguments.get("limit", 3))
    return {"query": arguments["query"], "results": [_match_fields(each) for each in found], "count": len(found)}


def _match_fields(match: SessionMatch) -> dict[str, JSON]:
    session = match.session
    started = datetime.fromtimestamp(session.started_at, UTC).isoformat(timespec="seconds")
    shown: dict[str, JSON] = {"session_id": session.session_id, "started_at": started}
    return shown | ({"title": session.title} if session.title else {}) | {"excerpts": match.excerpts}


def _texts(session: PastSession, roles: Collection[str]) -> list[tuple[str, str]]:
    said = ((str(message.get("role") or ""), message_text(message.get("content"))) for message in session.messages)
    return [(role, text) for role, text in said if text and role != "system" and (not roles or role in roles)]


def message_text(content: JSON) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "\n".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _folded_words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def _rarity(having: int, of: int) -> float:
    return math.log(1 + (of - having + 0.5) / (having + 0.5))


def _excerpts(said: Sequence[tuple[str, str]], words: Sequence[str]) -> list[dict[str, str]]:
    """Return the messages that contain the most of these words, in the conversation's order. Each is cut to the text
    around the first of the words."""
    scored = [(len(set(words) & set(_folded_words(text))), place) for place, (_, text) in enumerate(said)]
    best = sorted(sorted((-score, place) for score, place in scored if score)[:EXCERPTS], key=lambda each: each[1])
    return [{"role": said[place][0], "text": _around(said[place][1], words)} for _, place in best]


def _around(text: str, words: Sequence[str]) -> str:
    if len(text) <= EXCERPT_CHARS:
        return text
    at = next((match.start() for match in _WORD.finditer(text) if match[0].casefold() in words), 0)
    start = min(max(0, at - EXCERPT_CHARS // 3), len(text) - EXCERPT_CHARS)
    cut = text[start : start + EXCERPT_CHARS]
    return f"{'…' if start else ''}{cut}{'…' if start + EXCERPT_CHARS < len(text) else ''}"


def session_search_tool(settings: ToolsetSettings) -> FunctionTool:
    return FunctionTool(SCHEMA, partial(run_session_search, settings), "session_search", touches_world=True)
