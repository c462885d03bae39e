"""Earlier conversations, kept as files of one folder: what the `session_search` tool looks through.

Not the journal of a run and not for going on with a conversation: a session is written once it is over, or again when
it has gone on, and read to be searched. Each file is one JSON object, `palaestra.session/1`.

Invariants: a file is replaced whole; what a search costs is bounded (the newest `MAX_SESSIONS` of the folder, so many
bytes of each); equal folders and questions give equal answers.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON, Message

SESSION_SCHEMA = "palaestra.session/1"
MAX_SESSIONS = 1000
MAX_SESSION_BYTES = 8 << 20
EXCERPT_CHARS = 400
EXCERPTS = 3
_YEAR_9999_S = 253_370_764_800
"""What times can be told: later ones are none."""
_WORD = re.compile(r"\w+")
_NAME = re.compile(r"[\w.-]{1,128}")


class Session(msgspec.Struct, kw_only=True):
    """One conversation. `started_at` is in seconds since the epoch."""

    schema: str = SESSION_SCHEMA
    session_id: str
    started_at: float
    messages: list[Message]
    title: str = ""


class Found(msgspec.Struct, kw_only=True):
    """One conversation that fits, with the places that fit best: role and text around the words."""

    session_id: str
    started_at: float
    title: str
    excerpts: list[dict[str, str]]
    score: float


@dataclass(frozen=True, slots=True)
class Sessions:
    """The conversations of one folder; None where none are kept. `current` is the one that asks: it is not searched.

    Methods block. A file that cannot be read as a session is left out of searches.
    """

    folder: Path | None = None
    current: str = ""

    def save(self, session: Session) -> Path:
        """Write one, or write it again. Raises `ConfigError` for an id that is no file name, and `OSError`."""
        if self.folder is None:
            raise ConfigError("there is no folder for sessions")
        if _NAME.fullmatch(session.session_id) is None or session.session_id.startswith("."):
            raise ConfigError(f"session id {session.session_id!r}: use letters, digits, - and _ (128 at most)")
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{session.session_id}.json"
        unfinished = path.with_name(f".{path.name}.tmp")
        unfinished.write_bytes(msgspec.json.encode(session))
        unfinished.replace(path)
        return path

    def search(self, query: str, roles: Collection[str] = (), limit: int = 3) -> list[Found]:
        """The conversations in which the words of `query` stand, best first; `roles` names whose messages count.

        A word that stands in few conversations weighs more (as in BM25), and one that is repeated hardly more.
        """
        words = list(dict.fromkeys(_words(query)))
        texts = [(session, _texts(session, roles)) for session in self._newest()]
        counted = [
            (session, said, Counter(word for _, text in said for word in _words(text))) for session, said in texts
        ]
        weights = {word: _rarity(sum(word in count for _, _, count in counted), len(counted)) for word in words}
        found = []
        for session, said, count in counted:
            score = sum(weights[word] * count[word] / (count[word] + 1.2) for word in words)
            if score > 0:
                found.append(
                    Found(
                        session_id=session.session_id,
                        started_at=session.started_at,
                        title=session.title,
                        excerpts=_excerpts(said, words),
                        score=round(score, 6),
                    )
                )
        return sorted(found, key=lambda each: (-each.score, -each.started_at, each.session_id))[:limit]

    def _newest(self) -> Iterator[Session]:
        if self.folder is None or not self.folder.is_dir():
            return
        files = [path for path in self.folder.glob("*.json") if path.stem != self.current and not path.is_symlink()]
        sized = [(path.stat(), path) for path in files if path.is_file()]
        sized.sort(key=lambda each: (-each[0].st_mtime_ns, each[1].name))
        for status, path in sized[:MAX_SESSIONS]:
            if status.st_size > MAX_SESSION_BYTES:
                continue
            try:
                session = msgspec.json.decode(path.read_bytes(), type=Session)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError):
                continue
            if session.schema == SESSION_SCHEMA and 0 <= session.started_at < _YEAR_9999_S:
                yield session


def _texts(session: Session, roles: Collection[str]) -> list[tuple[str, str]]:
    said = ((str(message.get("role") or ""), _text(message.get("content"))) for message in session.messages)
    return [(role, text) for role, text in said if text and role != "system" and (not roles or role in roles)]


def _text(content: JSON) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "\n".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def _rarity(having: int, of: int) -> float:
    return math.log(1 + (of - having + 0.5) / (having + 0.5))


def _excerpts(said: Sequence[tuple[str, str]], words: Sequence[str]) -> list[dict[str, str]]:
    """The messages with most of the words, in the order in which they were said, cut to around the first of these."""
    scored = [(len(set(words) & set(_words(text))), place) for place, (_, text) in enumerate(said)]
    best = sorted(sorted((-score, place) for score, place in scored if score)[:EXCERPTS], key=lambda each: each[1])
    return [{"role": said[place][0], "text": _around(said[place][1], words)} for _, place in best]


def _around(text: str, words: Sequence[str]) -> str:
    if len(text) <= EXCERPT_CHARS:
        return text
    at = next((match.start() for match in _WORD.finditer(text) if match[0].casefold() in words), 0)
    start = min(max(0, at - EXCERPT_CHARS // 3), len(text) - EXCERPT_CHARS)
    cut = text[start : start + EXCERPT_CHARS]
    return f"{'…' if start else ''}{cut}{'…' if start + EXCERPT_CHARS < len(text) else ''}"
