"""The questions of a conversation to the person at the terminal, and its notices. Only a typed answer counts as a
yes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from palaestra.doors.chat.terminal.prompt import Prompt
from palaestra.doors.chat.terminal.screen import Screen
from palaestra.doors.chat.terminal.styles import DIM, GREEN, PLAIN, YELLOW
from palaestra_slots.core.exits import plural
from palaestra_slots.core.printable import escaped, printable, quoted

if TYPE_CHECKING:
    from palaestra.doors.chat.conversation import Conversation, People
    from palaestra.doors.chat.terminal.message_queue import MessageQueue
    from palaestra.doors.chat.turn_events import Notice
    from palaestra.doors.chat.workdir import FolderChange
    from palaestra.tools.human.approval import ApprovalAnswer, ApprovalRequest


class TerminalPeople:
    """Asks the person through the prompt. `stop` is called if the person answers with Ctrl-C."""

    def __init__(self, screen: Screen, prompt: Prompt, queue: MessageQueue, stop: Callable[[], bool]) -> None:
        self._screen = screen
        self._prompt = prompt
        self._queue = queue
        self._stop = stop

    def people(self) -> People:
        """Return the callbacks of a conversation."""
        from palaestra.doors.chat.conversation import People

        return People(self._approve, self._answer, self.notice, self._queue.take_messages)

    def notice(self, notice: Notice) -> None:
        """Show a notice."""
        self._screen.prose(f"{YELLOW}note: {printable(notice.text)}{PLAIN}")

    async def line(self, question: str, keys: str = "") -> str:
        """Ask for one line, or for one of `keys` alone. Ctrl-C gives an empty line and stops a running turn."""
        self._screen.settle()
        line = await self._prompt.ask(question, keys)
        if line is None:
            self._stop()
        return line or ""

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
        while True:
            line = await self.line(f"{what}, n: no [n] ", "".join(key for key in answers if len(key) == 1))
            if line.lower() in answers:
                return answers[line.lower()]

    async def _answer(self, question: str, choices: Sequence[str]) -> str | None:
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
        self._left_out: set[tuple[str, str]] = set()

    async def of(self, talk: Conversation) -> list[FolderChange]:
        """Return the changes of this conversation."""
        slot, folder = talk.seat.slot, talk.slots.folder
        return [] if slot is None or folder is None else await folder.changes(slot)

    async def offer(self, talk: Conversation, mode: str) -> None:
        """Write the changes of a turn back, after asking if the setting `write` is ask."""
        if mode == "no" or talk.slots.folder is None:
            return
        changes = await self.of(talk)
        self.report_left([change for change in changes if change.problem])
        changes = [change for change in changes if not change.problem]
        if not changes:
            return
        names = ", ".join(f"{change.kind} {change.path}" for change in changes[:10])
        more = f" and {len(changes) - 10} more" if len(changes) > 10 else ""
        if mode == "ask":
            for change in changes[:10]:
                self._screen.diff(change.diff())
            question = f"Write to {talk.slots.folder.root}: {names}{more}? y: yes, n: not now [n] "
            if (await self._people.line(question, "yn")).lower() not in ("y", "yes"):
                self._screen.line(f"{DIM}not written; /sandbox write does it later{PLAIN}")
                return
        self.write(talk, changes)

    def write(self, talk: Conversation, changes: Sequence[FolderChange]) -> None:
        """Write these changes to the shared folder."""
        folder = talk.slots.folder
        assert folder is not None
        left = folder.apply(changes)
        self._screen.line(f"{GREEN}wrote {plural(len(changes) - len(left), 'file')} to {folder.root}{PLAIN}")
        self._left_out.clear()
        self.report_left(left)

    def report_left(self, changes: Sequence[FolderChange]) -> None:
        """Report each file that is not written, but only once for each reason."""
        for change in changes:
            if (change.path, change.problem) not in self._left_out:
                self._left_out.add((change.path, change.problem))
                self._screen.line(f"{YELLOW}left out {printable(change.path)}: {printable(change.problem)}{PLAIN}")
