"""The questions of a conversation to the person at the terminal, and its notices. Only a typed answer counts as a
yes, and whatever is no answer is the person's next message."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, TypeVar

from palaestra_chat.terminal.prompt import Prompt
from palaestra_chat.terminal.screen import Screen
from palaestra_chat.terminal.styles import DIM, GREEN, PLAIN, YELLOW
from palaestra_slots.core.errors import InfraError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.printable import escaped, one_line, printable, quoted

if TYPE_CHECKING:
    from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest
    from palaestra_chat.conversation import Conversation, People
    from palaestra_chat.folder_changes import Edit, FolderChange
    from palaestra_chat.terminal.message_queue import MessageQueue
    from palaestra_chat.turn_events import Notice


T = TypeVar("T")

_SHOWN = 10
"""The number of edits that are shown before the question whether to write them."""
_COUNT_S = 10.0
_ASKED = {"y": "yes", "o": "one", "a": "always", "n": "", "yes": "yes", "always": "always", "no": "", "": ""}
_ASKED_ONE = {"y": "yes", "yes": "yes", "n": "no", "no": "no", "": "no", "q": "", "quit": ""}


class TerminalPeople:
    """Asks the person through the prompt. `stop` is called if the person answers with Ctrl-C."""

    def __init__(self, screen: Screen, prompt: Prompt, queue: MessageQueue, stop: Callable[[], bool]) -> None:
        self._screen = screen
        self._prompt = prompt
        self._queue = queue
        self._stop = stop

    def people(self) -> People:
        """Return the callbacks of a conversation."""
        from palaestra_chat.conversation import People

        return People(self._approve, self._ask_choice, self.notice, self._queue.take_messages)

    def notice(self, notice: Notice) -> None:
        """Show a notice."""
        self._screen.prose(f"{YELLOW}note: {printable(notice.text)}{PLAIN}")

    async def line(self, question: str, keys: str = "") -> str:
        """Ask for one line, or for one of `keys` alone. Ctrl-C gives an empty line and stops a running turn."""
        self._screen.settle()
        line = await self._prompt.ask(question, keys)
        for text in self._prompt.take_entered():
            self._later(text, "you entered this before the question")
        if line is None:
            self._stop()
        return line or ""

    async def choose(self, question: str, answers: Mapping[str, T], *, keys: str = "") -> T | None:
        """Ask until the line is one of the `answers`, which have the empty line among them. Any other text is the
        person's next message: it waits in the queue. Without `keys`, this also answers the question, with None."""
        while True:
            line = await self.line(question, keys)
            if line.lower() in answers and not (line and self._prompt.interrupted_a_sentence):
                return answers[line.lower()]
            self._later(self._prompt.whole(line), "this is no answer")
            if not keys:
                return None

    def _later(self, text: str, why: str) -> None:
        """Let a text wait as the person's next message, and say so."""
        self._queue.add(text)
        self._screen.line(f"{DIM}{why}, so it is your next message: {one_line(text, 60)}{PLAIN}")

    async def _approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        from palaestra.tools.human.approval import ApprovalAnswer

        question = f"{YELLOW}{escaped(request.question)}{PLAIN}"
        self._screen.line(request.asked(question, quoted(request.command)))
        answers = {
            "y": ApprovalAnswer.ONCE, "yes": ApprovalAnswer.ONCE, "s": ApprovalAnswer.SESSION,
            "a": ApprovalAnswer.ALWAYS, "n": ApprovalAnswer.DENY, "no": ApprovalAnswer.DENY, "": ApprovalAnswer.DENY,
        }  # fmt: skip
        what = "Run it? y: once, s: this session, a: always in this folder"
        if request.server:
            answers["v"] = ApprovalAnswer.SERVER
            what += ", v: always, all tools of this server"
        keys = "".join(key for key in answers if len(key) == 1)
        return await self.choose(f"{what}, n: no [n] ", answers, keys=keys) or ApprovalAnswer.DENY

    async def _ask_choice(self, question: str, choices: Sequence[str]) -> str | None:
        self._screen.line(f"{YELLOW}{printable(question)}{PLAIN}")
        for number, choice in enumerate(choices, 1):
            self._screen.line(f"  {number}: {printable(choice)}")
        line = await self.line("Your answer: ")
        if line.isascii() and line.isdigit() and 1 <= int(line) <= len(choices):
            return choices[int(line) - 1]
        return line or None


class FolderChanges:
    """Shows the agent's changes to the shared folder, and writes them back if the person agrees."""

    def __init__(self, screen: Screen, people: TerminalPeople) -> None:
        self._screen = screen
        self._people = people
        self._reported: set[tuple[str, str]] = set()
        self._declined: set[tuple[str, bytes | None]] = set()
        self.unwritten = 0
        """The number of changes that are not written, until `would_be_lost` has said so."""
        self._inside = 0
        """The number of files in a sandbox that belongs to no folder, until then."""

    def would_be_lost(self) -> bool:
        """Return whether changes would end with the sandbox. Says so, and returns False the next time, because then the
        person means it."""
        if self.unwritten:
            lost = plural(self.unwritten, "change")
            self._screen.line(
                f"{YELLOW}not written: {lost}. /sandbox write does it; the same again ends the sandbox, and keeps the "
                f"changes outside your folder{PLAIN}"
            )
        if self._inside:
            self._screen.line(
                f"{YELLOW}{plural(self._inside, 'file')} would end with the sandbox, and no folder belongs to it. "
                f"!cat FILE shows one; a chat that begins in a folder can write there. The same again ends it{PLAIN}"
            )
        lost_now = bool(self.unwritten or self._inside)
        self.unwritten = self._inside = 0
        return lost_now

    async def of(self, talk: Conversation) -> list[FolderChange]:
        """Return the changes of this conversation."""
        slot, folder = talk.seat.slot, talk.slots.folder
        return [] if slot is None or folder is None else await folder.changes(slot)

    async def offer(self, talk: Conversation, mode: str, remember: Callable[[str], None]) -> None:
        """Write the changes of a turn back. If `mode`, the setting `write`, is ask, ask before, but not again about
        what the person did not want. `remember` is called with the mode yes if the person always wants them."""
        from palaestra_chat.folder_changes import edits
        from palaestra_chat.git_files import history_of
        from palaestra_chat.one_shot import change_names

        if talk.slots.folder is None:
            self._inside = await _files_of(talk)
            return
        changes = everything = await self.of(talk)
        # Before the question, because the terminal may be closed instead of an answer.
        self.keep(talk, everything)
        if mode == "no":
            return
        self.report_left([change for change in changes if change.problem])
        changes = [change for change in changes if not change.problem]
        if mode == "ask":
            # By edits, because a commit without the objects of a declined one would break the repository.
            new = [change for edit in edits(changes) if not self._knows(edit) for change in edit.changes]
            # Without the files that it has, a commit would leave a folder that takes its work back.
            changes = changes if any(history_of(change.path) is not None for change in new) else new
        if not changes:
            return
        if mode == "ask":
            for edit in edits(changes)[:_SHOWN]:
                self._screen.diff(edit.diff())
            question = f"Write to {talk.slots.folder.root}: {change_names(changes, _SHOWN)}?"
            question += " y: yes, o: one by one, a: always here, n: not now [n] "
            answer = await self._people.choose(question, _ASKED)
            if answer == "always":
                remember("yes")
            wanted = await self._one_by_one(changes) if answer == "one" else changes if answer else []
            paths = {each.path for each in wanted}
            self._declined |= {(each.path, each.after) for each in changes if each.path not in paths}
            if declined := len(edits(changes)) - len(edits(wanted)):
                left = plural(declined, "change")
                self._screen.line(f"{DIM}not written: {left}; /sandbox write does it later{PLAIN}")
            changes = wanted
        if changes:
            left_out = {change.path: change for change in self.write(talk, changes)}
            written = {change.path for change in changes} - left_out.keys()
            self.keep(talk, [left_out.get(each.path, each) for each in everything if each.path not in written])

    def keep(self, talk: Conversation, changes: Sequence[FolderChange]) -> None:
        """Keep changes that are not written, in case that the sandbox is lost."""
        from palaestra_chat.folder_changes import edits
        from palaestra_chat.unwritten_changes import kept

        self.unwritten = len(edits(kept(changes)))
        if talk.slots.folder is not None:
            talk.slots.unwritten.save(talk.slots.folder.root, changes)

    async def settled(self, talk: Conversation, changes: Sequence[FolderChange]) -> list[FolderChange]:
        """Return what is to be written, after a question about each file that changed on this machine, too."""
        from palaestra_chat.folder_changes import FolderChange
        from palaestra_chat.git_files import history_of
        from palaestra_chat.workdir import CHANGED_HERE

        found: list[FolderChange] = []
        folder, other = talk.slots.folder, ""
        assert folder is not None
        for change in changes:
            if change.problem != CHANGED_HERE or history_of(change.path) is not None:
                found.append(change)
                continue
            self._screen.diff(change.diff())
            question = f"{change.name}: {CHANGED_HERE}. k: keep yours, t: take the agent's"
            answers = {"k": "keep", "keep": "keep", "": "keep", "t": "take", "take": "take"}
            if change.after is not None:
                other = next(name for name in _names_beside(change.path) if not os.path.lexists(folder.root / name))
                question += f", b: keep both, the agent's as {escaped(other)}"
                answers |= {"b": "both", "both": "both"}
            answer = await self._people.choose(f"{question} [k] ", answers)
            if answer == "take":
                found.append(replace(change, problem=""))
            elif answer == "both":
                found.append(FolderChange(other, "new", None, change.after, change.mode))
            if answer in ("keep", "both"):
                folder.decline(change)
        return found

    def _knows(self, edit: Edit) -> bool:
        """Return whether the person has declined the whole edit as it is."""
        return all((change.path, change.after) in self._declined for change in edit.changes)

    async def _one_by_one(self, changes: Sequence[FolderChange]) -> list[FolderChange]:
        """Return the changes that the person wants, after a question about each edit."""
        from palaestra_chat.folder_changes import edits

        wanted: list[FolderChange] = []
        found = edits(changes)
        for number, edit in enumerate(found, 1):
            self._screen.diff(edit.diff())
            question = f"Write {edit.name} ({number} of {len(found)})? y: yes, n: no, q: no, nor what follows [n] "
            answer = await self._people.choose(question, _ASKED_ONE)
            if answer == "yes":
                wanted += edit.changes
            elif answer != "no":
                break
        return wanted

    def write(self, talk: Conversation, changes: Sequence[FolderChange]) -> Sequence[FolderChange]:
        """Write these changes to the shared folder. Returns what was left out."""
        from palaestra_chat.one_shot import change_names

        folder = talk.slots.folder
        assert folder is not None
        left = folder.apply(changes)
        paths = {change.path for change in left}
        written = [change for change in changes if change.path not in paths]
        what = f": {change_names(written, _SHOWN)}" if written else ""
        self._screen.line(f"{GREEN}wrote {plural(len(written), 'file')} to {folder.root}{printable(what)}{PLAIN}")
        self._reported.clear()
        self.report_left(left)
        return left

    def report_left(self, changes: Sequence[FolderChange]) -> None:
        """Report what is not written, but only once for each reason."""
        from palaestra_chat.folder_changes import edits

        for edit in edits(changes):
            problem = edit.changes[0].problem
            if (edit.name, problem) not in self._reported:
                self._reported.add((edit.name, problem))
                self._screen.line(f"{YELLOW}left out: {printable(edit.name)}: {printable(problem)}{PLAIN}")


def _names_beside(path: str) -> Iterator[str]:
    """Yield the names that the agent's version of a file may have beside the person's."""
    yield f"{path}.agent"
    yield from (f"{path}.agent{number}" for number in count(2))


async def _files_of(talk: Conversation) -> int:
    """Return the number of files that the agent made in a sandbox without a folder."""
    if (slot := talk.seat.slot) is None:
        return 0
    with suppress(InfraError, ValueError):
        return int((await slot.execute("find . -type f | wc -l", timeout_s=_COUNT_S)).output)
    return 0
