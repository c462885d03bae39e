"""Pulling images from the registry of the Debian package docker-registry, through a server that counts, cuts and
lies."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from golden_messages import raises
from image_registry import OCI, PROGRAM, Front, Registry, digest, front, index, layer, manifest, running_registry
from palaestra_slots.core.errors import ImageError, PullError
from palaestra_slots.core.retry import RetryPolicy
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.images.image_store import ImageStore
from palaestra_slots.sandbox.images.pulled import PulledImage, PulledImages
from palaestra_slots.sandbox.images.reference import image_name
from palaestra_slots.sandbox.images.registry.credentials import Credentials, read_credentials
from palaestra_slots.sandbox.images.registry.pull import Pull
from palaestra_slots.sandbox.images.registry.repository import RegistryAccess
from palaestra_slots.sandbox.images.unpack import architecture
from palaestra_slots.sandbox.slot import SlotSpec
from programs import killed_after, until

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs the Debian package docker-registry")
MIB = 1 << 20
QUICK = RetryPolicy(attempts=3, first_s=0.01, longest_s=0.02)
CONFIG = json.dumps({"os": "linux", "architecture": architecture()}).encode()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry") / "real") as running:
        yield running


@asynccontextmanager
async def pulling(
    registry: Registry | None, folder: Path, access: RegistryAccess | None = None
) -> AsyncIterator[tuple[Front, Pull]]:
    async with front(registry) as at:
        yield at, Pull(PulledImages(folder), access or RegistryAccess(), max_bytes=64 * MIB, retry=QUICK)


def stored(folder: Path) -> set[str]:
    """The digests of all blobs, which must have the content that they name."""
    paths = list((folder / "blobs/sha256").iterdir())
    assert all(digest(path.read_bytes()) == f"sha256:{path.name}" for path in paths)
    return {path.name for path in paths}


def left(folder: Path) -> list[str]:
    """What the folder has besides complete blobs: names, layouts, partial downloads."""
    return [path.name for name in ("names", "images", "partial") for path in (folder / name).iterdir()]


def test_twenty_images_are_pulled_and_shared_layers_once(registry: Registry, tmp_path: Path) -> None:
    base = layer({"usr/base": os.urandom(200_000)})
    middle = [layer({f"usr/middle{n}": os.urandom(50_000)}) for n in range(4)]
    own = [layer({f"usr/own{n}": b"%d" % n}) for n in range(20)]
    made: list[bytes] = []
    for n in range(20):
        repository, tag = f"team/image{n}", "v1" if n % 5 else "latest"
        made.append(registry.push(repository, tag, [base, middle[n % 4], own[n]], docker=n % 2 == 0))
        if n == 19:
            other = manifest(CONFIG + b" ", [own[0]])
            registry.put(repository, CONFIG + b" ")
            registry.put(repository, own[0])
            registry.tag(repository, digest(other), other)
            registry.tag(repository, "v1", index({"s390x": other, architecture(): made[-1]}))

    async def main() -> tuple[Front, list[PulledImage]]:
        async with pulling(registry, tmp_path) as (at, pull):
            names = [f"{at.host}/team/image{n}{':v1' if n % 5 else ''}" for n in range(20)]
            first = [await pull.image(name) for name in names[:10]]
            rest = await asyncio.gather(*(pull.image(name) for name in names[10:]))  # at the same time
            assert [image.digest for image in first + rest] == [digest(data) for data in made]
            before = at.blobs.total()
            assert await pull.image(names[0]) == first[0]
            assert at.blobs.total() == before
            return at, first + rest

    at, images = asyncio.run(main())
    blobs = {digest(data) for data in (base, *middle, *own)} | {json.loads(data)["config"]["digest"] for data in made}
    assert at.blobs == dict.fromkeys(blobs, 1)  # each shared layer was requested once
    assert stored(tmp_path) == {each.removeprefix("sha256:") for each in blobs | {digest(data) for data in made}}
    assert list((tmp_path / "partial").iterdir()) == []
    assert [image.name for image in PulledImages(tmp_path).images()] == sorted(image.name for image in images)

    async def unpacked() -> Path:
        store = ImageStore(str(tmp_path / "unpacked"), pulled=tmp_path)
        try:
            return Path(await store.directory(images[7].name))
        finally:
            await store.aclose()

    root = asyncio.run(unpacked())
    assert (root / "usr/own7").read_bytes() == b"7"
    assert sorted(path.name for path in (root / "usr").iterdir()) == ["base", "middle3", "own7"]

    store = PulledImages(tmp_path)
    store.remove([image_name(image.name) for image in images[1:]])
    kept = {json.loads(made[0])["config"]["digest"], *(digest(data) for data in (base, middle[0], own[0], made[0]))}
    assert stored(tmp_path) == {each.removeprefix("sha256:") for each in kept}
    with pytest.raises(ImageError, match="was not pulled"):
        store.remove([image_name(images[1].name)])


async def test_a_cut_download_continues_where_it_was_cut(registry: Registry, tmp_path: Path) -> None:
    big = layer({"usr/big": os.urandom(6 * MIB)})
    registry.push("cut", "latest", [big])
    async with pulling(registry, tmp_path) as (at, pull):
        name = f"{at.host}/cut"
        # The disk keeps up with the network: bytes that arrived and are not written yet are lost with a connection.
        at.pause_s = 0.01
        at.cuts[:] = [2 * MIB, 2 * MIB]
        shown: list[tuple[int, int]] = []
        image = await pull.image(name, lambda done, total: shown.append((done, total)))
        resumed = sorted(int(each[6:-1]) for each in at.ranges if each)
        assert len(resumed) == 2
        assert 0 < resumed[0] <= 2 * MIB < resumed[1] <= 4 * MIB
        assert at.sent < image.bytes + 2 * MIB
        assert shown[-1] == (image.bytes, image.bytes)
        at.pause_s = 0
        assert [done for done, _ in shown] == sorted(done for done, _ in shown)

        PulledImages(tmp_path).remove([image_name(name)])
        at.cuts[:], at.ranges[:] = [MIB, 0, 0, 0, 0, 0], []
        with pytest.raises(PullError, match=r"of \d+ bytes .* pull the image again"):
            await pull.image(name)
        assert PulledImages(tmp_path).images() == []
        (partial,) = (path for path in (tmp_path / "partial").iterdir() if path.stat().st_size)
        kept = partial.stat().st_size
        at.cuts[:], at.ranges[:] = [], []
        assert (await pull.image(name)).digest == image.digest
        assert f"bytes={kept}-" in at.ranges

        PulledImages(tmp_path).remove([image_name(name)])  # a partial file that the disk damaged, and one too long
        (tmp_path / "partial" / digest(big)[7:]).write_bytes(bytes(MIB))
        assert (await pull.image(name)).digest == image.digest
        PulledImages(tmp_path).remove([image_name(name)])
        (tmp_path / "partial" / digest(big)[7:]).write_bytes(bytes(len(big) + 1))
        assert (await pull.image(name)).digest == image.digest
        assert left(tmp_path)[-1] == image.digest[7:]


async def test_a_killed_pull_leaves_a_part_that_the_next_pull_continues(registry: Registry, tmp_path: Path) -> None:
    big = layer({"usr/big": os.urandom(4 * MIB)})
    registry.push("killed", "latest", [big])
    script = (
        "import asyncio, sys; from pathlib import Path; "
        "from palaestra_slots.sandbox.images.pulled import PulledImages; "
        "from palaestra_slots.sandbox.images.registry.repository import RegistryAccess; "
        "from palaestra_slots.sandbox.images.registry.pull import Pull; "
        "asyncio.run(Pull(PulledImages(Path(sys.argv[1])), RegistryAccess()).image(sys.argv[2]))"
    )
    partial = tmp_path / "partial" / digest(big)[7:]
    async with pulling(registry, tmp_path) as (at, pull):
        at.pause_s = 0.05
        with killed_after([sys.executable, "-c", script, str(tmp_path), f"{at.host}/killed"]):
            enough = lambda: partial.exists() and partial.stat().st_size > 100_000  # noqa: E731
            await asyncio.to_thread(until, enough, "the pull has begun")
        assert PulledImages(tmp_path).images() == []
        kept, at.pause_s, at.ranges[:] = partial.stat().st_size, 0, []
        await pull.image(f"{at.host}/killed")
        assert at.ranges == [f"bytes={kept}-"]
    assert digest(big)[7:] in stored(tmp_path)


async def test_content_that_does_not_match_its_digest_is_refused(registry: Registry, tmp_path: Path) -> None:
    data = layer({"usr/x": b"right"})
    made = registry.push("lie", "latest", [data])
    async with pulling(registry, tmp_path) as (at, pull):
        path = f"/v2/lie/blobs/{digest(data)}"
        wrong = {"same size": bytes(len(data)), "short": data[:-1], "long": data + b"x", "endless": data * 9}
        for body in wrong.values():
            at.answers = {path: web.Response(body=body)}
            with pytest.raises(PullError, match=digest(data)):
                await pull.image(f"{at.host}/lie")
            assert digest(data)[7:] not in stored(tmp_path)
            assert not (tmp_path / "partial" / digest(data)[7:]).exists() or body == data[:-1]
            assert PulledImages(tmp_path).images() == []
        at.answers = {f"/v2/lie/manifests/{digest(made)}": web.Response(body=made.replace(b"2", b"3"))}
        with raises(PullError):
            await pull.image(f"{at.host}/lie@{digest(made)}")
        header = {"Docker-Content-Digest": digest(b"other"), "Content-Type": f"{OCI}.manifest.v1+json"}
        at.answers = {"/v2/lie/manifests/latest": web.Response(body=made, headers=header)}
        with raises(PullError):
            await pull.image(f"{at.host}/lie")
        at.answers = {"/v2/lie/manifests/latest": web.Response(body=b" " * (4 * MIB + 1))}
        with pytest.raises(PullError, match="larger than 4 MiB"):
            await pull.image(f"{at.host}/lie")
        at.answers = {}
        image = await pull.image(f"{at.host}/lie:old@{digest(made)}")
        asked = len(at.authorizations)
        assert await pull.image(f"{at.host}/lie@{digest(made)}") == image
        assert len(at.authorizations) == asked  # a digest that is stored needs no registry


def test_a_registry_with_passwords(tmp_path: Path) -> None:
    if (htpasswd := _htpasswd("reader", "secret-pw")) is None:
        pytest.skip("needs htpasswd (the Debian package apache2-utils)")
    config = tmp_path / "config.json"
    with running_registry(tmp_path / "registry", htpasswd) as running:
        allowed = Registry(running.port, {"Authorization": f"Basic {base64.b64encode(b'reader:secret-pw').decode()}"})
        allowed.push("private/image", "latest", [layer({"usr/x": b"x"})])
        host = f"127.0.0.1:{running.port}"

        def pull(auths: dict[str, object], **more: object) -> PulledImage:
            config.write_text(json.dumps({"auths": auths, **more}))
            access = RegistryAccess(read_credentials(config))
            return asyncio.run(
                Pull(PulledImages(tmp_path / "store"), access, retry=QUICK).image(f"{host}/private/image")
            )

        with pytest.raises(PullError, match="docker login"):
            pull({"127.0.0.1": {"auth": base64.b64encode(b"reader:secret-pw").decode()}})  # another port
        with raises(PullError):
            pull({host: {"auth": base64.b64encode(b"reader:wrong").decode()}})
        with raises(PullError, "evil"):
            pull({host: {}}, credHelpers={host: "evil"})
        assert pull({f"http://{host}/v2/": {"auth": base64.b64encode(b"reader:secret-pw").decode()}}).bytes > 0


def _htpasswd(user: str, password: str) -> str | None:
    try:
        return subprocess.run(
            ["htpasswd", "-nbB", "-C4", user, password], capture_output=True, text=True, check=True
        ).stdout
    except FileNotFoundError:
        return None


async def test_tokens_and_redirects(registry: Registry, tmp_path: Path) -> None:
    data = layer({"usr/x": b"x"})
    registry.push("tokens", "latest", [data])
    asked: list[tuple[dict[str, str], str | None]] = []

    async def issue(request: web.Request) -> web.Response:
        asked.append((dict(request.query), request.headers.get("Authorization")))
        return web.json_response({"token": "t0ken"}, status=200 if asked[-1][1] else 401)

    app = web.Application()
    app.router.add_get("/token", issue)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port := _free_port()).start()
    try:
        async with front(registry) as elsewhere, pulling(registry, tmp_path) as (at, pull):
            at.token, at.realm = "t0ken", f"http://127.0.0.1:{port}/token"
            with pytest.raises(PullError, match="access was refused"):
                await pull.image(f"{at.host}/tokens")
            pull.access = RegistryAccess(Credentials({at.host: "Basic cGVyc29uOnB3"}))
            path = f"/v2/tokens/blobs/{digest(data)}"
            refused = (
                "http://192.0.2.1/x",
                "https://u:p@example.com/",
                "file:///etc/shadow",
                "ftp://127.0.0.1/",
                "",
            )
            for place in refused:
                at.answers[path] = web.Response(status=302, headers={"Location": place})
                with pytest.raises(PullError, match="redirects to"):
                    await pull.image(f"{at.host}/tokens")
            at.answers[path] = web.Response(status=302, headers={"Location": path})  # in a circle
            with pytest.raises(PullError, match="HTTP 302"):
                await pull.image(f"{at.host}/tokens")
            at.answers[path] = web.Response(
                status=307, headers={"Location": f"http://{elsewhere.host}{path}?sig=1%2B2"}
            )
            await pull.image(f"{at.host}/tokens")
            query = {"service": "the registry", "scope": "repository:tokens:pull"}
            assert asked[-1] == (query, "Basic cGVyc29uOnB3")
            assert elsewhere.authorizations == [None]
            assert set(at.authorizations) == {None, "Bearer t0ken"}
            at.realm, asked[:] = "http://192.0.2.1/token", []
            with raises(PullError):
                await pull.image(f"{at.host}/tokens")
            assert asked == []
    finally:
        await runner.cleanup()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_only_this_machine_is_asked_over_http(tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    def proxy(scheme: str, host: str) -> str:
        asked.append((scheme, host))
        return f"http://127.0.0.1:{_free_port()}"

    for plain in (False, True):
        pull = Pull(PulledImages(tmp_path), RegistryAccess(plain_http=plain, proxy=proxy), retry=RetryPolicy(1))
        with pytest.raises(PullError, match=r"https?://registry\.example"):
            asyncio.run(pull.image("registry.example:5000/name"))
    assert asked == [("https", "registry.example"), ("http", "registry.example")]


async def test_images_for_other_machines_and_failing_registries_are_named(registry: Registry, tmp_path: Path) -> None:
    data = layer({"usr/x": b"x"})
    arm = json.dumps({"os": "linux", "architecture": "s390x"}).encode()
    for blob in (arm, data):
        registry.put("arm", blob)
    registry.tag("arm", "latest", manifest(arm, [data]))
    async with pulling(registry, tmp_path) as (at, pull):
        with raises(ImageError, "linux/s390x"):
            await pull.image(f"{at.host}/arm")
        with raises(PullError):
            await pull.image(f"{at.host}/missing")
        at.answers["/v2/arm/manifests/latest"] = web.Response(status=429, headers={"Retry-After": "9999"})
        with raises(PullError, "HTTP", "429"):
            await pull.image(f"{at.host}/arm")
        assert PulledImages(tmp_path).images() == []


@pytest.mark.slots
def test_a_slot_runs_in_a_pulled_image(registry: Registry, tmp_path: Path) -> None:
    files = {f"{name}/.keep": b"" for name in ("etc", "proc", "tmp")}
    for program in ("/bin/bash", "/bin/cat"):
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for file in {program, *re.findall(r"(/[^ ]+) \(", listed)}:
            files[file[1:]] = Path(file).read_bytes()
    registry.push("tools/bash", "5", [layer(files), layer({"hello": b"from the registry\n"})])

    async def main() -> None:
        async with pulling(registry, tmp_path / "pulled") as (at, pull):
            name = f"{at.host}/tools/bash:5"
            images = ImageStore(str(tmp_path / "store"), pulled=tmp_path / "pulled")
            async with LocalBackend(images=images) as backend:
                with pytest.raises(ImageError, match=re.escape(f"palaestra images pull {name}")):
                    await backend.create(SlotSpec(image=name), "1")
                await pull.image(name)
                slot = await backend.create(SlotSpec(image=name), "1")
                assert (
                    await slot.execute("cat /hello; echo /bin/*")
                ).output == "from the registry\n/bin/bash /bin/cat\n"

    asyncio.run(main())
