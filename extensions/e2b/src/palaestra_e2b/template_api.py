"""The part of the control API about templates: lists, names, builds and their files."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web
from pydantic import Field

from palaestra_e2b.call_limits import Lanes
from palaestra_e2b.envd import ENVD_VERSION
from palaestra_e2b.requests import ControlCall, Handle, _Body, cpu_count, moment, read_body
from palaestra_e2b.template_builds import MOST_ARCHIVE_BYTES, MOST_STEPS, Build, TemplateBuilds
from palaestra_e2b.templates import Template, Templates
from palaestra_e2b.wire_errors import ApiError
from palaestra_slots.core.io.http_server import invite_body
from palaestra_slots.core.types import JSON, Limits

UPLOADS = "/template-files/"
"""The start of the paths to which the files of templates are sent, with a token in place of a key."""

_HASH = re.compile(r"[0-9a-f]{16,128}")
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._/-]{0,127}(?::[a-zA-Z0-9._-]{1,64})?")
_ARRIVE_S, _UPLOADS_OF_KEY, _UPLOADS_AT_ONCE = 60.0, 8, 64
_MOST_NAMES = 100


class NewTemplate(_Body):
    """POST /v3/templates."""

    name: str = ""
    alias: str = ""
    tags: tuple[str, ...] = Field(default=(), max_length=20)


class TemplateTags(_Body):
    """POST and DELETE /templates/tags."""

    target: str = Field(default="", max_length=200)
    name: str = Field(default="", max_length=200)
    tags: tuple[str, ...] = Field(max_length=20)


class StartBuild(_Body):
    """POST /v2/templates/{id}/builds/{id}."""

    from_image: str = Field(default="", alias="fromImage", max_length=500)
    from_template: str = Field(default="", alias="fromTemplate", max_length=500)
    registry: JSON = Field(default=None, alias="fromImageRegistry")
    steps: list[JSON] = Field(default=[], max_length=MOST_STEPS)
    start: str = Field(default="", alias="startCmd")
    ready: str = Field(default="", alias="readyCmd")


class TemplateApi:
    """Answers the requests about templates."""

    def __init__(self, templates: Templates, builds: TemplateBuilds, limits: Limits) -> None:
        self._templates, self._builds, self._limits = templates, builds, limits
        self._uploads = Lanes(_UPLOADS_OF_KEY, _UPLOADS_AT_ONCE)
        one, build = r"/templates/([^/]+)", r"/templates/([^/]+)/builds/([^/]+)"
        self.routes: Sequence[tuple[str, str, Handle]] = (
            ("GET", r"(?:/v2)?/templates", self.list),
            ("GET", r"/default-templates", self.list),
            ("GET", r"/templates/aliases/([^/]+)", self.alias),
            ("POST", r"/v3/templates", self.request),
            ("POST", "/v2" + build, self.start),
            ("GET", build + "/status", self.status),
            ("GET", build + "/logs", self.status),
            ("GET", one + r"/files/([^/]+)", self.files),
            ("POST", r"/templates/tags", self.assign_tags),
            ("DELETE", r"/templates/tags", self.remove_tags),
            ("GET", one + r"/tags", self.tags),
            ("GET", one, self.detail),
            ("DELETE", one, self.delete),
            ("PATCH", "(?:/v2)?" + one, self.update),
        )

    async def list(self, call: ControlCall) -> web.Response:
        own = [each for each in self._templates.of_key(call.key) if not each.source]
        return web.json_response([self._described(each) for each in own])

    async def detail(self, call: ControlCall) -> web.Response:
        template = self._templates.find(call.key, call.parts[0])
        return web.json_response({**self._described(template), "builds": []})

    async def alias(self, call: ControlCall) -> web.Response:
        template = self._templates.find(call.key, call.parts[0])
        return web.json_response({"templateID": template.template_id, "public": template.owner is None})

    async def delete(self, call: ControlCall) -> web.Response:
        await self._builds.delete(call.key, call.parts[0])
        return web.Response(status=204)

    async def update(self, call: ControlCall) -> web.Response:
        raise ApiError(
            400, "templates of this server cannot be made public; add an image for everybody with --template"
        )

    async def tags(self, call: ControlCall) -> web.Response:
        template = self._templates.find(call.key, call.parts[0])
        described, tags = self._described(template), [name.partition(":")[2] or "default" for name in template.names]
        found = [{"tag": tag, "buildID": described["buildID"], "createdAt": described["createdAt"]} for tag in tags]
        return web.json_response(found)

    async def assign_tags(self, call: ControlCall) -> web.Response:
        body = read_body(call.body, TemplateTags)
        template = self._templates.find(call.key, body.target)
        if template.owner is None:
            raise ApiError(403, f"the template {template.name} belongs to this server, so it gets no tags")
        names = [f"{body.target.partition(':')[0]}:{tag}" for tag in body.tags]
        for name in names:
            if not _NAME.fullmatch(name):
                raise ApiError(400, f"{name[:200]!r} is not a name with a tag")
        if len({*template.names, *names}) > _MOST_NAMES:
            raise ApiError(429, f"a template has at most {_MOST_NAMES} names with tags: remove some", retry=False)
        self._templates.rename(template, [*template.names, *names])
        build_id = self._described(template)["buildID"]
        return web.json_response({"tags": list(body.tags), "buildID": build_id}, status=201)

    async def remove_tags(self, call: ControlCall) -> web.Response:
        body = read_body(call.body, TemplateTags)
        for tag in body.tags:
            name = f"{body.name.partition(':')[0]}:{tag}"
            template = self._templates.find(call.key, name)
            if template.owner is None or name not in template.names:
                raise ApiError(404, f"tag '{tag[:100]}' not found")
            self._templates.rename(template, [each for each in template.names if each != name])
        return web.Response(status=204)

    async def request(self, call: ControlCall) -> web.Response:
        body = read_body(call.body, NewTemplate)
        name = body.name or body.alias
        for each in (name, *(f"{name.partition(':')[0]}:{tag}" for tag in body.tags)):
            if not _NAME.fullmatch(each):
                raise ApiError(400, f"{each[:200]!r} is not a name for a template: use letters, digits, '.', '-', '_'")
        if self._templates.kept_by(call.key) >= call.key.kept:
            raise ApiError(429, f"the key {call.key.name} keeps its limit of {call.key.kept} templates", retry=False)
        names = dict.fromkeys([name, *(f"{name.partition(':')[0]}:{tag}" for tag in body.tags)])
        build = self._builds.new(call.key, list(names))
        answer = {
            "templateID": build.template.template_id, "buildID": build.build_id, "public": False,
            "names": list(names), "aliases": [name], "tags": list(body.tags),
        }  # fmt: skip
        return web.json_response(answer, status=202)

    async def start(self, call: ControlCall) -> web.Response:
        build, body = self._builds.find(call.key, *call.parts), read_body(call.body, StartBuild)
        if body.registry:
            raise ApiError(400, "this server pulls no images, so it needs no registry; leave the credentials out")
        base = self._builds.base_of(call.key, body.from_image, body.from_template)
        self._builds.start(build, base, body.steps, body.start, body.ready)
        return web.Response(status=202)

    async def status(self, call: ControlCall) -> web.Response:
        build = self._builds.find(call.key, *call.parts)
        offset = call.request.query.get("logsOffset", "0")
        entries = build.log[int(offset) if offset.isdigit() else 0 :][:100]
        return web.json_response(_build_status(build, entries))

    async def files(self, call: ControlCall) -> web.Response:
        if not _HASH.fullmatch(call.parts[1]):
            raise ApiError(400, "the hash of the files is not hexadecimal")
        present, token = self._builds.link(call.key, call.parts[1])
        url = f"{call.request.scheme}://{call.request.host}{UPLOADS}{token}"
        return web.json_response({"present": present, "url": url}, status=201)

    async def upload(self, request: web.Request) -> web.Response:
        """Take the files of a COPY. Raises `ApiError`."""
        token = request.path.removeprefix(UPLOADS)
        if request.method != "PUT":
            raise ApiError(405, "files are sent with PUT")
        key, place = self._builds.place(token)
        await invite_body(request)
        async with self._uploads.one(key):
            try:
                await _store(request, place)
            except BaseException:
                place.unlink(missing_ok=True)
                raise
            self._builds.arrived(token, place)
        return web.Response(status=200)

    def _described(self, template: Template) -> dict[str, JSON]:
        build = self._builds.latest(template)
        created = moment(template.created_at)
        return {
            "templateID": template.template_id, "buildID": build.build_id if build is not None else _NO_BUILD,
            "cpuCount": cpu_count(self._limits.cpus), "memoryMB": (self._limits.memory_bytes or 0) >> 20,
            "diskSizeMB": (self._limits.disk_bytes or 0) >> 20, "public": template.owner is None,
            "aliases": list(template.names), "names": list(template.names), "createdAt": created, "updatedAt": created,
            "createdBy": None, "lastSpawnedAt": None, "spawnCount": template.spawned,
            "buildCount": int(build is not None), "envdVersion": ENVD_VERSION,
            "buildStatus": build.status if build is not None else "ready",
        }  # fmt: skip


async def _store(request: web.Request, place: Path) -> None:
    """Write a request's body to a new file. Raises `ApiError` if it is too large."""
    size = 0
    with await asyncio.to_thread(place.open, "xb") as file:
        while True:
            async with asyncio.timeout(_ARRIVE_S):
                data = await request.content.readany()
            if not data:
                return
            size += len(data)
            if size > MOST_ARCHIVE_BYTES:
                raise ApiError(413, f"the files of one COPY may have at most {MOST_ARCHIVE_BYTES} bytes")
            await asyncio.to_thread(file.write, data)


_NO_BUILD = "00000000-0000-0000-0000-000000000000"


def _build_status(build: Build, entries: Sequence[tuple[float, str, str]]) -> dict[str, JSON]:
    found: dict[str, JSON] = {
        "templateID": build.template.template_id, "buildID": build.build_id, "status": build.status,
        "logs": [text for _, _, text in entries],
        "logEntries": [{"timestamp": moment(at), "level": level, "message": text} for at, level, text in entries],
    }  # fmt: skip
    if build.status == "error":
        found["reason"] = {"message": build.reason} | ({"step": build.failed_step} if build.failed_step else {})
    return found
