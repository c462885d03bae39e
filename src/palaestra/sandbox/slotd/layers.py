"""How long layers stay: as long as anybody stands on them, slots and other layers alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Counted:
    """A layer with a count of its users, which begins at one. Subclasses say what goes with the last of them."""

    _users: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        for layer in self.beneath():
            layer.keep()

    def beneath(self) -> Sequence[Counted]:
        """The layers this one lies on. It is a user of each."""
        raise NotImplementedError

    def drop_files(self) -> None:
        """Nobody uses the files of this layer any more."""
        raise NotImplementedError

    def keep(self) -> None:
        """One user more."""
        self._users += 1

    def release(self) -> None:
        """One user less; with the last one the files go."""
        self._users -= 1
        if self._users == 0:
            self.drop_files()
            for layer in self.beneath():
                layer.release()
