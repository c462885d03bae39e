"""The Modal backend, with Modal's own client, against the stand-in of its API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from palaestra.sandbox.backends.modal import ModalBackend, ModalSandboxConfig
from palaestra.sandbox.slot import Backend, Slot
from palaestra.testing.backend_conformance import BackendConformance
from palaestra.testing.fake_modal import FakeModal

pytestmark = [pytest.mark.slots, pytest.mark.xdist_group("backends")]


class TestModal(BackendConformance):
    fake: ClassVar[FakeModal]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls) -> Iterator[None]:
        with FakeModal() as cls.fake, pytest.MonkeyPatch.context() as patch:
            for name, value in cls.fake.variables.items():
                patch.setenv(name, value)
            yield

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _running(cls, _server: None) -> Iterator[None]:
        yield from cls.running()
        assert not cls.fake.running

    @classmethod
    def make_backend(cls) -> Backend:
        return ModalBackend(ModalSandboxConfig())

    async def end_place(self, slot: Slot) -> None:
        for sandbox in self.fake.running:
            self.fake.end(sandbox.sandbox_id)
