"""What a trajectory server that keeps nothing has of an environment's groups, and what its end loses. No I/O.

The original server has groups in memory and does not say which of them its trainer took. Two things are known all the
same: groups of one size leave it in the order in which they came, so that the number that waits says which ones wait;
and while all that it has makes up no batch, nothing leaves it. That is why it is given one batch at a time.

Invariant: a group is sent again only where, when the server was last asked, it waited, or where it cannot have left.
What made a batch full after that question may have been taken, so it is not sent again.
"""

from __future__ import annotations

from dataclasses import dataclass

from palaestra.core.types import JSON


@dataclass(slots=True)
class Given:
    """A group that the server took and that, for all we know, waits there. `number` is its place among all that were
    given; `waited` says that it was seen waiting."""

    number: int
    delivery_id: str
    line: dict[str, JSON]
    waited: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """The moment of a question: how many groups had been given, and whether another was on its way."""

    given: int
    busy: bool


class Memory:
    """The groups of one environment in one life of a server. They are given to it one after the other.

    Groups that came out short are put together by the server in ways that it does not tell: after the first of them
    nothing is remembered any more, nor held back.
    """

    def __init__(self, group_size: int) -> None:
        self.given: list[Given] = []
        self._group_size = group_size
        self._short = False
        self._count = 0
        self._busy = False

    def room(self, batch_size: int) -> bool:
        """Whether one more group may be given: with it there is one batch at most."""
        return self._short or not self.given or (len(self.given) + 1) * self._group_size <= batch_size

    def begin(self) -> None:
        """A group is on its way."""
        self._count += 1
        self._busy = True

    def end(self, delivery_id: str, line: dict[str, JSON], *, taken: bool) -> None:
        """The server took it or did not."""
        self._busy = False
        if len(line["tokens"]) != self._group_size:
            self._short = True
            self.given.clear()
        elif taken and not self._short:
            self.given.append(Given(self._count, delivery_id, line))

    def asking(self) -> Asked:
        """The server is asked now; `heard` takes its answer."""
        return Asked(self._count, self._busy)

    def heard(self, waiting: int, asked: Asked) -> None:
        """So many groups of ours wait, the server said."""
        older = sum(each.number <= asked.given for each in self.given)
        del self.given[: max(0, older - waiting)]
        if not asked.busy and not self._busy and self._count == asked.given:
            for each in self.given:
                each.waited = True

    def lost(self, batch_size: int, *, alone: bool) -> tuple[list[Given], list[Given]]:
        """The server is gone: what to send again, and what its trainer may have and that is therefore not sent again.

        `alone` says that no other environment's groups were there to fill a batch with.
        """
        given, self.given, self._short = self.given, [], False
        untouched = alone and len(given) * self._group_size < batch_size
        if untouched or all(each.waited for each in given):
            return given, []
        return [], given
