"""New weights for SGLang and vLLM, through a stand-in that refuses what their own routes would refuse.

Sources of the shapes: `sglang.srt.managers.io_struct` (PauseGenerationReqInput, UpdateWeightFromDiskReqInput,
ContinueGenerationReqInput) and `vllm/entrypoints/serve/rlhf/api_router.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import msgspec
import pytest
from aiohttp import web

from golden_messages import raises
from palaestra_slots.core.errors import EngineRefused
from palaestra_slots.core.io.http_server import listening
from palaestra_slots.core.retry import RetryPolicy
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.token_engine import SGLangEngine, VLLMEngine
from palaestra_tokens.testing.fake_engine import toy_tokenizer


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Continue(msgspec.Struct, forbid_unknown_fields=True):
    torch_empty_cache: bool = True


class Update(msgspec.Struct, forbid_unknown_fields=True):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    is_async: bool = False
    keep_pause: bool = False
    flush_cache: bool = True


class Rpc(msgspec.Struct, forbid_unknown_fields=True):
    method: str
    args: list[str] = []
    kwargs: dict[str, str] = {}
    timeout: float | None = None


class StandIn:
    """The control routes of both servers. `seen` lists the paths; `broken` makes the update fail, with the `status`. If
    it `refuses`, a request during a pause gets status 503, as from vLLM 0.33. If it `labels`, it reports the version of
    its weights with the tokens."""

    def __init__(self, *, broken: bool = False, status: int = 400, refuses: bool = False, labels: bool = False) -> None:
        self.status, self.refuses, self.labels, self.label = status, refuses, labels, "default"
        self.seen: list[str] = []
        self.broken = broken
        self.paused = False
        self.loaded: list[tuple[str, str | None]] = []
        self.asked, self.updating = asyncio.Event(), asyncio.Event()
        self.held: asyncio.Event | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        for path, answer in (
            ("pause_generation", self.pause),
            ("continue_generation", self.resume),
            ("update_weights_from_disk", self.update),
            ("pause", self.pause),
            ("resume", self.resume),
            ("collective_rpc", self.rpc),
            ("reset_prefix_cache", self.reset),
            ("v1/completions", self.complete),
            *([("update_weight_version", self.relabel)] if self.labels else []),
        ):
            app.router.add_post(f"/{path}", answer)
        async with listening(app, "127.0.0.1", 0, token=None) as url:
            yield url

    async def complete(self, request: web.Request) -> web.Response:
        """Answer with one token, but not while the engine is paused, as vLLM's `AsyncLLM` does."""
        self.asked.set()
        if self.refuses and self.paused:
            return web.json_response({"error": {"message": "The server is paused", "code": 503}}, status=503)
        while self.paused:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        logprobs = {"tokens": ["token_id:5"], "token_logprobs": [-0.5]}
        choice = {"index": 0, "text": "", "finish_reason": "stop", "token_ids": [5], "logprobs": logprobs}
        if self.labels and (await request.json()).get("return_weight_versions"):
            choice["weight_versions"] = [{"version": self.label, "start": 0, "end": 1}]
        return web.json_response({"choices": [choice]})

    async def body(self, request: web.Request, shape: type) -> object:
        self.seen.append(request.path_qs)
        return msgspec.json.decode(await request.read() or b"{}", type=shape)

    async def pause(self, request: web.Request) -> web.Response:
        await self.body(request, Pause)
        if request.path == "/pause":  # FastAPI checks the mode in the query
            msgspec.convert(request.query["mode"], Literal["abort", "wait", "keep"])
        self.paused = True
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        await self.body(request, Continue)
        self.paused = False
        return web.json_response({"status": "resumed"})

    async def update(self, request: web.Request) -> web.Response:
        asked = await self.body(request, Update)
        assert isinstance(asked, Update)
        assert self.paused
        self.loaded.append((asked.model_path, asked.weight_version))
        if self.broken:
            reply = {"success": False, "message": "no such folder", "num_paused_requests": 0}
            return web.json_response(reply, status=self.status)
        return web.json_response({"success": True, "message": "Succeeded", "num_paused_requests": 0})

    async def rpc(self, request: web.Request) -> web.Response:
        asked = await self.body(request, Rpc)
        self.updating.set()
        if self.held is not None:
            await self.held.wait()
        assert isinstance(asked, Rpc)
        assert self.paused
        assert asked.method == "reload_weights"
        if self.broken:
            return web.json_response({"error": "no such folder"}, status=self.status)
        self.loaded.append((asked.kwargs["weights_path"], None))
        return web.json_response({"results": [None]})

    async def relabel(self, request: web.Request) -> web.Response:
        assert self.paused
        self.label = f"{(await request.json())['new_version']} of the server"
        return web.json_response({"success": True})

    async def reset(self, request: web.Request) -> web.Response:
        await self.body(request, dict)
        return web.Response()


@pytest.mark.parametrize("refuses", [False, True])
async def test_what_waits_for_new_weights_is_sampled_by_them(refuses: bool) -> None:
    server = StandIn(refuses=refuses)

    async def main() -> tuple[str, str]:
        async with server.serving() as url:
            config = APIServerConfig(model_name="m", base_url=f"{url}/v1")
            # One attempt, because an update may take longer than all retries.
            engine = VLLMEngine(config, tokenizer=toy_tokenizer(), retry=RetryPolicy(attempts=1))
            try:
                before = await engine.generate([1, 2], {"max_tokens": 4})
                server.held = asyncio.Event()
                update = asyncio.create_task(engine.load_weights("/weights/7", "7"))
                await server.updating.wait()
                server.asked.clear()
                held = asyncio.create_task(engine.generate([1, 2], {"max_tokens": 4}))
                await server.asked.wait()
                server.held.set()
                await update
                return before.policy_version, (await held).policy_version
            finally:
                await engine.aclose()

    assert await main() == ("", "7")


async def test_the_server_decides_which_version_is_recorded_if_it_reports_it() -> None:
    server = StandIn(labels=True)

    async def main() -> list[str]:
        async with server.serving() as url:
            engine = VLLMEngine(APIServerConfig(model_name="m", base_url=f"{url}/v1"), tokenizer=toy_tokenizer())
            try:
                found = [(await engine.generate([1, 2], {"max_tokens": 4})).policy_version]
                for version in ("7", "8"):
                    await engine.load_weights(f"/weights/{version}", version)
                    found.append((await engine.generate([1, 2], {"max_tokens": 4})).policy_version)
                return found
            finally:
                await engine.aclose()

    assert await main() == ["", "7 of the server", "8 of the server"]


@pytest.mark.parametrize("kind", [SGLangEngine, VLLMEngine])
@pytest.mark.parametrize("status", [400, 404, 500, 503])
async def test_a_folder_that_the_server_cannot_read_is_one_error(
    kind: type[SGLangEngine] | type[VLLMEngine], status: int
) -> None:
    server = StandIn(broken=True, status=status)

    async def main() -> None:
        async with server.serving() as url:
            engine = kind(APIServerConfig(model_name="m", base_url=url), tokenizer=toy_tokenizer())
            try:
                await engine.load_weights("/weights/7", "7")
            finally:
                await engine.aclose()

    with raises(EngineRefused, "/weights/7", status):
        await main()
    assert len(server.seen) == 3
    assert not server.paused


SGLANG = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
VLLM = ["/pause?mode=abort", "/collective_rpc", "/reset_prefix_cache", "/resume"]


@pytest.mark.parametrize(
    ("kind", "paths", "version"), [(SGLangEngine, SGLANG, "7"), (VLLMEngine, VLLM, None)], ids=["sglang", "vllm"]
)
@pytest.mark.parametrize("broken", [False, True])
def test_new_weights_reach_the_server(
    kind: type[SGLangEngine] | type[VLLMEngine], paths: list[str], version: str | None, broken: bool
) -> None:
    server = StandIn(broken=broken)

    async def update() -> str:
        async with server.serving() as url:
            engine = kind(APIServerConfig(model_name="m", base_url=url), tokenizer=toy_tokenizer())
            try:
                await engine.load_weights("/weights/7", "7")
            finally:
                await engine.aclose()
            return getattr(engine, "policy_version", "7")

    if broken:
        with pytest.raises(EngineRefused):
            asyncio.run(update())
    else:
        assert asyncio.run(update()) == "7"
        assert server.seen == paths
        assert server.loaded == [("/weights/7", version)]
    assert not server.paused  # also after a failure, so that other requests continue
