"""The routes of the Tinker API that list and change checkpoints, and the training runs that they belong to."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from palaestra_slots.core.types import JSON
from palaestra_train.tinker.checkpoints import Checkpoint, runs
from palaestra_train.tinker.client_sessions import NotFound
from palaestra_train.tinker.http_bodies import page, read_json, texts
from palaestra_train.tinker.model import UserError
from palaestra_train.tinker.service import TinkerService


class CheckpointRoutes:
    """The routes of one service's checkpoints."""

    def __init__(self, service: TinkerService) -> None:
        self.service = service

    def under(self, root: str) -> list[web.RouteDef]:
        """Return the routes, whose paths begin with `root`."""
        checkpoint = f"{root}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}"
        return [
            web.post(f"{root}/weights_info", self._weights_info),
            web.get(f"{root}/training_runs", self._list_runs),
            web.get(f"{root}/training_runs/{{run}}", self._get_run),
            web.get(f"{root}/training_runs/{{run}}/checkpoints", self._run_checkpoints),
            web.get(f"{root}/checkpoints", self._list_checkpoints),
            web.delete(checkpoint, self._delete_checkpoint),
            web.put(f"{checkpoint}/ttl", self._set_ttl),
        ]

    async def _weights_info(self, request: web.Request) -> web.Response:
        found = self.service.checkpoints.find(str((await read_json(request)).get("tinker_path")))
        body: dict[str, JSON] = {"base_model": found.base_model, "is_lora": found.lora is not None}
        if found.lora is not None:
            body["lora_rank"] = found.lora.rank
            for name in ("train_unembed", "train_mlp", "train_attn"):
                body[name] = getattr(found.lora, name)
        return web.json_response(body)

    async def _list_runs(self, request: web.Request) -> web.Response:
        start, count = page(request)
        found = self._runs()
        body = {"training_runs": found[start : start + count], "cursor": _cursor(start, count, len(found))}
        return web.json_response(body)

    async def _get_run(self, request: web.Request) -> web.Response:
        for run in self._runs():
            if run["training_run_id"] == request.match_info["run"]:
                return web.json_response(run)
        raise NotFound(f"There is no training run {request.match_info['run']}.")

    def _runs(self) -> list[dict[str, Any]]:
        """Return the models in training, and the models with checkpoints."""
        saved = dict(runs(self.service.checkpoints.all()))
        found = []
        for run in dict.fromkeys([*saved, *self.service.trainings]):
            training, checkpoints = self.service.trainings.get(run), saved.get(run, [])
            lora = training.model.lora if training else checkpoints[-1].lora
            times_s = [*(each.created_s for each in checkpoints), *([training.started_s] if training else [])]
            body: dict[str, Any] = {
                "training_run_id": run,
                "base_model": self.service.base.name if training else checkpoints[-1].base_model,
                "model_owner": "local",
                "is_lora": lora is not None,
                "lora_rank": lora.rank if lora else None,
                "last_request_time": _time(max(times_s)),
                "user_metadata": texts(training.user_metadata) if training else None,
            }
            for each in checkpoints:
                body["last_checkpoint" if each.kind == "weights" else "last_sampler_checkpoint"] = _checkpoint_fields(
                    each
                )
            found.append(body)
        return found

    async def _run_checkpoints(self, request: web.Request) -> web.Response:
        run = request.match_info["run"]
        found = [_checkpoint_fields(each) for each in self.service.checkpoints.all() if each.run == run]
        return web.json_response({"checkpoints": found})

    async def _list_checkpoints(self, request: web.Request) -> web.Response:
        start, count = page(request)
        found = [_checkpoint_fields(each) for each in self.service.checkpoints.all()]
        body = {"checkpoints": found[start : start + count], "cursor": _cursor(start, count, len(found))}
        return web.json_response(body)

    async def _delete_checkpoint(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(self.service.checkpoints.delete, _checkpoint_path(request))
        return web.json_response({})

    async def _set_ttl(self, request: web.Request) -> web.Response:
        ttl_s = (await read_json(request)).get("ttl_seconds")
        if ttl_s is not None and (type(ttl_s) not in (int, float) or ttl_s <= 0):
            raise UserError(f"ttl_seconds is {ttl_s!r}; it must be a number above 0, or null.")
        await asyncio.to_thread(self.service.checkpoints.set_expiry, _checkpoint_path(request), ttl_s)
        return web.json_response({})


def _checkpoint_path(request: web.Request) -> str:
    return "tinker://{run}/{kind}/{name}".format_map(request.match_info)


def _checkpoint_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": "training" if checkpoint.kind == "weights" else "sampler",
        "time": _time(checkpoint.created_s),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires_s is None else _time(checkpoint.expires_s),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _cursor(start: int, count: int, total: int) -> dict[str, JSON]:
    return {"offset": start, "limit": count, "total_count": total}
