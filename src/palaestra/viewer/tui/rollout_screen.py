"""One rollout in the terminal: why it has its reward, and its steps, whose long texts are folded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from typing import ClassVar, NamedTuple

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from palaestra.core.types import JSON
from palaestra.viewer.reasons import reasons
from palaestra.viewer.rollout_record import rollout_record, text_at
from palaestra.viewer.run_index import Condition
from palaestra.viewer.runs import OpenRuns
from palaestra.viewer.token_texts import TokenTexts
from palaestra.viewer.tui.safe_text import coloured, line
from palaestra.viewer.tui.siblings_screen import SiblingsScreen
from palaestra.viewer.tui.steps import Step, StepText, steps
from palaestra.viewer.tui.view_screen import ViewScreen, figure, reward_text

_FOLD_LINES, _FOLD_CHARS = 10, 1_200
_OPEN_CHARS = 200_000
_STYLES = {"reasoning": "dim italic", "call": "bold", "result": "", "failed": "red", "good": "green", "bad": "red"}
_ROLES = {"assistant": "bold blue", "tool": "bold cyan", "user": "bold", "system": "bold dim", "end": "bold magenta"}
_KINDS = {"bad": "red", "warn": "yellow", "info": "cyan"}


class RolloutList(NamedTuple):
    """The list from which a rollout was opened: its filter, its order, and the rollout's place in it."""

    where: Sequence[Condition]
    sort: str
    descending: bool
    place: int


class StepView(Static, can_focus=True):
    """One step, which opens and folds its long texts. `whole` is a text that the record has cut, by its path."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,space", "unfold", "open or fold", show=False)]

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.opened = False
        self.whole: dict[str, str] = {}

    def on_mount(self) -> None:
        """Draw the step."""
        self.draw()

    def draw(self) -> None:
        """Draw the step, opened or folded."""
        self.update(step_text(self.step, self.opened, self.whole))

    def action_unfold(self) -> None:
        """Open or fold the long texts."""
        self.opened = not self.opened
        self.draw()


class RolloutScreen(ViewScreen):
    """One rollout."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "other('after')", "next", key_display="n"),
        Binding("p", "other('before')", "previous", show=False, key_display="p"),
        Binding("s", "siblings", "compare"),
        Binding("o", "unfold", "open"),
        Binding("a", "unfold_all", "open all", show=False),
        Binding("f", "failed", "fail"),
    ]

    HELP_LINES = (
        "n and p go through the rollouts of the list, j and k through the steps of this one.",
        "s compares the rollout with its siblings.",
        "o opens or folds the long texts of a step; f goes to the next call or test that failed.",
    )

    def __init__(
        self, runs: OpenRuns, texts: TokenTexts, name: str, rollout_id: str, listing: RolloutList | None = None
    ) -> None:
        super().__init__()
        self._runs, self._texts, self._run, self._rollout = runs, texts, name, rollout_id
        self._listing = listing if listing and (listing.where or listing.sort or listing.descending) else None
        self._record: dict[str, JSON] = {}

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield Static(classes="path")
        yield Static(classes="note")
        with VerticalScroll(id="steps", can_focus=False):
            yield Static(classes="part")
        yield Footer()

    def on_mount(self) -> None:
        """Read the rollout."""
        self.reload()

    def follows(self, changed: Set[str]) -> bool:
        """Follow a rollout that has not ended."""
        return self._run in changed and bool(self._record.get("in_flight", True))

    async def load(self) -> None:
        """Show the rollout. What was opened stays open."""
        index = self._runs[self._run]
        self._record = record = await asyncio.to_thread(rollout_record, index, self._rollout)
        judged = await asyncio.to_thread(self._runs.marks(self._run).of, self._rollout)
        self.show_path("runs", self._run, f"{record['task_id']} #{record['index']}")
        self.query_one(".note", Static).update("")
        self.query_one(".part", Static).update(_head(record, judged))
        place = self.query_one("#steps", VerticalScroll)
        shown = list(self.query(StepView))
        for view, step in zip(shown, steps(record), strict=False):
            view.step = step
            view.draw()
        await place.mount_all([StepView(step) for step in steps(record)[len(shown) :]])
        for view in shown[len(steps(record)) :]:
            await view.remove()
        if not isinstance(self.focused, StepView) and (first := self.query(StepView)):
            first.first().focus(scroll_visible=False)

    def action_down(self) -> None:
        """Go to the next step."""
        self._go(1)

    def action_up(self) -> None:
        """Go to the step before."""
        self._go(-1)

    def action_first(self) -> None:
        """Go to the first step, and show the head."""
        self._go(-(10**9))
        self.query_one("#steps", VerticalScroll).scroll_home(animate=False)

    def action_last(self) -> None:
        """Go to the last step."""
        self._go(10**9)

    def action_failed(self) -> None:
        """Go to the next step that failed."""
        views = list(self.query(StepView))
        at = self._at(views)
        wanted = [
            place for place, view in enumerate(views) if any(part.kind in ("failed", "bad") for part in view.step.parts)
        ]
        if not wanted:
            self.show_note("no call and no test failed")
            return
        self._go(next((place for place in wanted if place > at), wanted[0]) - at)

    def _at(self, views: list[StepView]) -> int:
        return next((place for place, view in enumerate(views) if view.has_focus), 0)

    def _go(self, by: int) -> None:
        views = list(self.query(StepView))
        if views:
            view = views[max(0, min(len(views) - 1, self._at(views) + by))]
            view.focus(scroll_visible=False)
            view.scroll_visible(top=True, animate=False)

    async def action_unfold(self) -> None:
        """Open or fold the step that has the focus."""
        if isinstance(self.focused, StepView):
            await self._toggle(self.focused)

    async def action_unfold_all(self) -> None:
        """Open all steps, or fold them."""
        views = list(self.query(StepView))
        opened = not all(view.opened for view in views)
        for view in views:
            if view.opened != opened:
                await self._toggle(view)

    async def _toggle(self, view: StepView) -> None:
        index = self._runs[self._run]
        for part in view.step.parts if not view.opened else []:
            if part.path and part.path not in view.whole:
                found = await asyncio.to_thread(text_at, index, self._rollout, part.path, 0, _OPEN_CHARS)
                view.whole[part.path] = found
        view.action_unfold()

    def action_other(self, which: str) -> None:
        """Go to the rollout before or after this one."""
        other, listing = self._record.get(which), self._listing
        if listing is not None:
            listing = listing._replace(place=listing.place + (1 if which == "after" else -1))
            where, sort, descending, place = listing
            _, found = (
                (0, list[dict[str, JSON]]())
                if place < 0
                else self._runs[self._run].rows(where, sort=sort, descending=descending, offset=place, limit=1)
            )
            other = found[0]["id"] if found else None
        if other is None:
            self.show_note(f"there is no rollout {which} this one{' in the filtered list' if listing else ''}")
            return
        self.app.switch_screen(RolloutScreen(self._runs, self._texts, self._run, str(other), listing))

    def action_siblings(self) -> None:
        """Compare the rollout with its siblings."""
        members = [str(member[0]) for member in self._record.get("group", {}).get("members", [])]
        if len(members) < 2:
            self.show_note("this rollout has no siblings that have ended")
            return
        self.app.push_screen(SiblingsScreen(self._runs, self._texts, self._run, self._rollout, members, self._show))

    def _show(self, rollout_id: str) -> None:
        self.app.push_screen(RolloutScreen(self._runs, self._texts, self._run, rollout_id))


def _head(record: dict[str, JSON], judged: dict[str, JSON]) -> Text:
    text = line(f"{record['task_id'] or record['id']} #{record['index']}", "bold", 100)
    text.no_wrap = False
    if not record["in_flight"]:
        text.append("  reward ").append_text(reward_text(record.get("reward"), record.get("outcome")))
        if record.get("official") is not None:
            text.append(f"  {record['official_name'] or 'official'} ").append_text(reward_text(record["official"]))
        if (grade := judged.get("grade")) is not None:
            text.append("  graded again ").append_text(reward_text(grade.get("reward")))
    facts = [str(record.get("outcome") or "running"), f"{len(record.get('turns') or [])} turns"]
    facts += [f"{record['tool_calls_attempted']} calls"] if record.get("tool_calls_attempted") else []
    tokens = [int(record.get(f"{name}_tokens") or 0) for name in ("prompt", "completion")]
    facts += [f"tokens {tokens[0]:,} read, {tokens[1]:,} written"] if any(tokens) else []
    facts += [f"{record['beside']['duration_s']:.1f} s"] if (record.get("beside") or {}).get("duration_s") else []
    text.append("\n").append_text(line("; ".join(facts), "dim"))
    for kind, head, evidence in reasons(record):
        text.append("\n").append_text(line(f"! {head}", f"bold {_KINDS[kind]}")).append(" ").append_text(
            coloured(evidence[:600].strip())
        )
    if metrics := record.get("metrics"):
        text.append("\n").append_text(
            line("; ".join(f"{name} {figure(value)}" for name, value in metrics.items()), most=400)
        )
    said = judged["judgement"]
    for each in ([f"judged: {said['verdict']}"] if said.get("verdict") else []) + [
        f"tag: {tag}" for tag in said.get("tags") or []
    ]:
        text.append("\n").append_text(line(each, "cyan"))
    for note in said.get("notes") or []:
        text.append("\n").append_text(line(f"note of {note['author']}: {note['text']}", "cyan", 400))
    return text


def step_text(step: Step, opened: bool, whole: dict[str, str]) -> Text:
    """Return a step as text. Unless it is opened, long texts have only their first lines."""
    text = line(step.title, _ROLES.get(step.role, "bold"))
    if step.notes:
        text.append("  ").append_text(line(step.notes, "dim"))
    for part in step.parts:
        text.append("\n").append_text(_part(part, opened, whole))
    text.no_wrap, text.overflow = False, "fold"
    return text


def _part(part: StepText, opened: bool, whole: dict[str, str]) -> Text:
    shown = whole.get(part.path, part.text).rstrip("\n") if opened else part.text.rstrip("\n")
    mark = {"call": "$ ", "result": "", "failed": "✕ "}.get(part.kind, "")
    if opened:
        return coloured(mark + shown[:_OPEN_CHARS], _STYLES.get(part.kind, ""))
    lines = shown.split("\n")
    head = "\n".join(lines[:_FOLD_LINES])[:_FOLD_CHARS]
    text = coloured(mark + head, _STYLES.get(part.kind, ""))
    if len(head) < len(shown):
        more = len(lines) - head.count("\n") - 1
        text.append(
            f"\n… {more:,} more lines (o opens)"
            if more
            else f"\n… {len(shown) - len(head):,} more characters (o opens)",
            "dim",
        )
    return text
