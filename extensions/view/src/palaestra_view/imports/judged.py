"""What a file says that people have said about a rollout, and its new reward, as our exports write both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from palaestra.rollouts.annotations import ANNOTATION_SCHEMA, MOST_TAGS, Annotation, annotation_problem, is_tag
from palaestra.rollouts.regraded import GRADE_SCHEMA, Grade
from palaestra_slots.core.types import JSON
from palaestra_view.imports.atif import labels_of
from palaestra_view.imports.source import finite, mapping_of, name_of, numbers_of, objects_of, text_of

_NOBODY = "unknown"


def annotations_of(value: JSON) -> list[Annotation]:
    """Return the lines that say what `Judgement.to_dict` returned, without a rollout's id. Parts that cannot be
    annotations are left out."""
    return [each for each in _annotations(mapping_of(value)) if not annotation_problem(each)]


def _annotations(value: Mapping[str, JSON]) -> Iterator[Annotation]:
    given = value.get("tags")
    tags = [tag for tag in given if isinstance(tag, str) and is_tag(tag)] if isinstance(given, list) else []
    for start in range(0, len(tags), MOST_TAGS):
        yield _annotation(_NOBODY, tags=tags[start : start + MOST_TAGS])
    for note in objects_of(value.get("notes")):
        yield _annotation(name_of(note.get("author")), at=finite(note.get("at")) or 0.0, note=text_of(note.get("text")))
    if verdict := text_of(value.get("verdict")):
        yield _annotation(name_of(value.get("verdict_author")), verdict=verdict)


def _annotation(
    author: str, *, at: float = 0.0, tags: list[str] | None = None, note: str = "", verdict: str = ""
) -> Annotation:
    return Annotation(
        schema=ANNOTATION_SCHEMA,
        at=at,
        author=author or _NOBODY,
        rollout_id="",
        tags=tags or [],
        note=note,
        verdict=verdict,
    )


def grade_of(value: JSON) -> Grade | None:
    """Return the new score of a rollout, without the rollout's id; None if there is none."""
    found = mapping_of(value)
    if not found:
        return None
    return Grade(
        schema=GRADE_SCHEMA,
        at=finite(found.get("at")) or 0.0,
        rollout_id="",
        before=finite(found.get("before")),
        reward=finite(found.get("reward")),
        official=finite(found.get("official")),
        labels=labels_of(found.get("labels")),
        metrics=numbers_of(found.get("metrics")),
        error=text_of(found.get("error")),
    )
