"""The stand-in of Modal's API, used through Modal's own client."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import modal
import pytest
from modal.exception import InvalidError, NotFoundError, ResourceExhaustedError, UnimplementedError

from stand_ins.fake_modal import FakeModal

pytestmark = pytest.mark.xdist_group("backends")


@pytest.fixture(params=[True, False], ids=["second version", "first version"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModal]:
    """The client has two versions of sandboxes; it uses the first for those with GPUs, or when it is told to."""
    with FakeModal(missing=["nowhere:1"], secrets={"keys": {"KEY": "hidden"}}) as fake:
        for name, value in {**fake.variables, "MODAL_CONFIG_PATH": os.devnull}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MODAL_SANDBOX_V2", str(int(request.param)))
        yield fake
        modal.Client.from_env().close()
    assert not fake.running


async def make(*words: str, timeout: int = 60, **options: object) -> modal.Sandbox:
    app = await modal.App.lookup.aio("tests", create_if_missing=True)
    image = modal.Image.from_registry("python:3.11")
    return await modal.Sandbox.create.aio(*words, app=app, image=image, timeout=timeout, **options)


async def test_commands_have_streams_variables_and_an_exit_status(fake: FakeModal) -> None:
    sandbox = await make(env={"A": "1"}, secrets=[modal.Secret.from_name("keys")])
    process = await sandbox.exec.aio("sh", "-c", "echo $A $KEY; cat; echo err >&2; exit 3", text=False)
    data = os.urandom(3 << 20)
    for start in range(0, len(data), 1 << 20):
        process.stdin.write(data[start : start + (1 << 20)])
        await process.stdin.drain.aio()
    process.stdin.write_eof()
    await process.stdin.drain.aio()
    assert await process.stdout.read.aio() == b"1 hidden\n" + data
    assert await process.stderr.read.aio() == b"err\n"
    assert await process.wait.aio() == 3
    late = await sandbox.exec.aio("sleep", "60", timeout=1)
    assert await late.wait.aio() in (-1, 137)
    assert await sandbox.poll.aio() is None
    await sandbox.terminate.aio()
    assert await sandbox.poll.aio() == 137
    with pytest.raises((NotFoundError, InvalidError)):
        await (await modal.Sandbox.from_id.aio(sandbox.object_id)).exec.aio("true")


async def test_sandboxes_are_found_by_their_tags_until_they_end(fake: FakeModal) -> None:
    first, second = [await make(tags={"run": name, "kind": "slots"}) for name in ("one", "two")]
    app = await modal.App.lookup.aio("tests")

    async def found(**tags: str) -> list[str]:
        return [each.object_id async for each in modal.Sandbox.list.aio(app_id=app.app_id, tags=tags)]

    assert await found(run="one") == [first.object_id]
    assert set(await found(kind="slots")) == {first.object_id, second.object_id}
    await first.set_tags.aio({"run": "three"})
    assert await first.get_tags.aio() == {"run": "three"}
    await first.terminate.aio()
    assert await found(kind="slots") == [second.object_id]
    await second.terminate.aio()


async def test_a_sandbox_ends_with_its_command_its_lifetime_or_when_it_is_idle(fake: FakeModal) -> None:
    command = await make("sh", "-c", "exit 5")
    old = await make(timeout=1)
    idle = await make(idle_timeout=1)
    busy = await make(idle_timeout=1)
    await busy.exec.aio("sleep", "60")
    await command.wait.aio()
    assert command.returncode == 5
    deadline = time.monotonic() + 20
    while len(fake.running) > 1 and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    assert [each.sandbox_id for each in fake.running] == [busy.object_id]
    assert await old.poll.aio() == 124
    assert await idle.poll.aio() is not None
    await busy.terminate.aio()


async def test_what_it_lacks_and_refuses_are_the_errors_of_the_client(fake: FakeModal) -> None:
    sandbox = await make()
    with pytest.raises(UnimplementedError):
        await sandbox.snapshot_filesystem.aio()
    fake.quota = 1
    with pytest.raises(ResourceExhaustedError):
        await make()
    app = await modal.App.lookup.aio("tests")
    with pytest.raises(modal.exception.Error, match="nowhere:1"):
        await modal.Sandbox.create.aio(app=app, image=modal.Image.from_registry("nowhere:1"))
    await sandbox.terminate.aio()
