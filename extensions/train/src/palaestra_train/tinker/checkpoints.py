"""Stores the training server's checkpoints on disk: `FOLDER/RUN/KIND/NAME.json`, and the folder with tensors that this
file names.

The folder can be loaded by peft (LoRA) or transformers (full weights); AdamW's state is a file next to the weights.
Invariants: a checkpoint exists once its JSON file has its final name, which happens after all its content is on the
disk, so a crash leaves either the former checkpoint or the new one. No file is pickled. The content of a JSON file and
links never lead out of the checkpoint's own folder, because checkpoints may come from others.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from palaestra_slots.core.io.durable_files import read_regular, replaced, writing
from palaestra_train.tinker.model import BaseModel, LoraSettings, TrainedModel, UserError

if TYPE_CHECKING:
    import torch

SCHEMA = "palaestra.tinker_checkpoint/1"

MOST_TTL_S = 100 * 365 * 86_400.0
_MOST_BYTES = 1 << 20

Kind: TypeAlias = Literal["weights", "sampler_weights"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,199}")


class Checkpoint(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON file of a checkpoint. Times are seconds since the epoch."""

    schema: str = SCHEMA
    run: str
    kind: Kind
    name: str
    base_model: str
    digest: str
    lora: LoraSettings | None
    steps: int
    folder: str
    size_bytes: int
    created_s: float
    expires_s: float | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """The parts of a checkpoint's address `tinker://RUN/KIND/NAME`."""

    run: str
    kind: Kind
    name: str

    @classmethod
    def read(cls, path: str) -> CheckpointPath:
        """Parse a path. Raises `UserError` if it is not the path of a checkpoint."""
        parts = path.removeprefix("tinker://").split("/")
        well_formed = path.startswith("tinker://") and len(parts) == 3 and parts[1] in ("weights", "sampler_weights")
        if not well_formed or not _RUN.fullmatch(parts[0]):
            raise UserError(f"{path!r} is not a checkpoint: use tinker://RUN/weights/NAME or …/sampler_weights/NAME.")
        return cls(parts[0], parts[1], checked_name(parts[2]))  # type: ignore[arg-type]


def checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot name a checkpoint: use up to 200 letters, digits, dots, '_' and '-'.")
    return name


class CheckpointFolder:
    """All checkpoints of one server. Methods block; those that write raise `DiskError`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self,
        model: TrainedModel,
        place: CheckpointPath,
        *,
        optimizer: bool,
        overwrite: bool = False,
        ttl_s: float | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> Checkpoint:
        """Write the weights and, if `optimizer` is true, AdamW's state. Raises `UserError` if the name is taken and
        `overwrite` is false."""
        file = self._checkpoint_file(place)
        former = self._read_checkpoint(file)
        if former is not None and not overwrite:
            raise UserError(f"The checkpoint {former.path} exists: choose a different name, or pass overwrite=True.")
        now_s, expires_s = time.time(), _expiry(ttl_s)
        data = file.with_name(f"{place.name}.{secrets.token_hex(4)}")
        with writing(file):
            data.mkdir(parents=True)
            try:
                size = _write_tensors(data, model, optimizer)
                checkpoint = Checkpoint(
                    run=place.run,
                    kind=place.kind,
                    name=place.name,
                    base_model=model.base.name,
                    digest=model.base.digest,
                    lora=model.lora,
                    steps=model.steps,
                    folder=data.name,
                    size_bytes=size,
                    created_s=now_s,
                    expires_s=expires_s,
                    user_metadata=user_metadata,
                )
                with replaced(file) as out:
                    out.write(msgspec.json.format(msgspec.json.encode(checkpoint)) + b"\n")
                _fsync_path(file.parent)
            except BaseException:
                shutil.rmtree(data, ignore_errors=True)
                raise
        if former is not None:
            shutil.rmtree(file.parent / former.folder, ignore_errors=True)
        return checkpoint

    def find(self, path: str) -> Checkpoint:
        """Return the checkpoint at a `tinker://` path. Raises `UserError` if there is none."""
        found = self._read_checkpoint(self._checkpoint_file(CheckpointPath.read(path)))
        if found is None:
            raise UserError(f"There is no checkpoint {path}: it was never saved here, or it expired or was deleted.")
        return found

    def load(self, checkpoint: Checkpoint, base: BaseModel, *, optimizer: bool) -> TrainedModel:
        """Return a saved model, ready to train. If `optimizer` is true, AdamW's state is loaded too. Raises `UserError`
        if the checkpoint belongs to a different base model, lacks the optimizer's state although `optimizer` is true,
        or cannot be read."""
        if checkpoint.digest != base.digest:
            raise UserError(
                f"The checkpoint {checkpoint.path} was trained from '{checkpoint.base_model}', whose weights differ "
                f"from those of this server's model '{base.name}'."
            )
        folder = (
            self._checkpoint_file(CheckpointPath(checkpoint.run, checkpoint.kind, checkpoint.name)).parent
            / checkpoint.folder
        )
        if optimizer and checkpoint.kind != "weights":
            raise UserError(f"{checkpoint.path} has only sampler weights, without the optimizer's state.")
        model = TrainedModel(base, checkpoint.lora)
        self.restore(model, folder, optimizer=optimizer, steps=checkpoint.steps)
        return model

    def restore(self, model: TrainedModel, folder: Path, *, optimizer: bool, steps: int) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            weights = _own_names(load_file(folder / _weights_file(model.lora)), model.lora)
            state = load_file(folder / "optimizer.safetensors") if optimizer else None
        except (OSError, SafetensorError) as error:
            raise UserError(f"The checkpoint in {folder.name} cannot be read: {error}") from None
        model.restore(weights, state, steps if optimizer else 0)

    def folder_of(self, checkpoint: Checkpoint) -> Path:
        """Return the folder that holds a checkpoint's tensors."""
        return (
            self._checkpoint_file(CheckpointPath(checkpoint.run, checkpoint.kind, checkpoint.name)).parent
            / checkpoint.folder
        )

    def delete(self, path: str) -> None:
        """Delete a checkpoint. Raises `UserError` if there is no such checkpoint."""
        found = self.find(path)
        file = self._checkpoint_file(CheckpointPath.read(path))
        with writing(file):
            file.unlink()
            _fsync_path(file.parent)
        shutil.rmtree(file.parent / found.folder, ignore_errors=True)

    def set_expiry(self, path: str, ttl_s: float | None) -> None:
        found = self.find(path)
        found.expires_s = _expiry(ttl_s)
        with writing(self.folder), replaced(self._checkpoint_file(CheckpointPath.read(path))) as out:
            out.write(msgspec.json.format(msgspec.json.encode(found)) + b"\n")

    def all(self) -> list[Checkpoint]:
        """Return the checkpoints, oldest first."""
        found = (self._read_checkpoint(file) for file in self.folder.glob("*/*/*.json"))
        return sorted((each for each in found if each is not None), key=lambda each: each.created_s)

    def sweep(self) -> None:
        """Delete expired checkpoints and folders that a crash left behind. Call it before the first `save`."""
        kept = set()
        for file in self.folder.glob("*/*/*.json"):
            found = self._read_checkpoint(file, expired=True)
            if found is None:
                continue
            if found.expires_s is not None and found.expires_s < time.time():
                file.unlink(missing_ok=True)
            else:
                kept.add(file.parent / found.folder)
        for folder in self.folder.glob("*/*/*/"):
            if folder not in kept and re.fullmatch(r".+\.[0-9a-f]{8}", folder.name) and not self._leaves(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def _leaves(self, path: Path) -> bool:
        """Return whether a link leads a path of this folder to another place."""
        return path.resolve() != self.folder.resolve() / path.relative_to(self.folder)

    def _checkpoint_file(self, place: CheckpointPath) -> Path:
        return self.folder / place.run / place.kind / f"{checked_name(place.name)}.json"

    def _read_checkpoint(self, file: Path, *, expired: bool = False) -> Checkpoint | None:
        try:
            found = msgspec.json.decode(read_regular(file, _MOST_BYTES), type=Checkpoint)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise UserError(f"The checkpoint file {file.name} cannot be read: {error}") from None
        if found.schema != SCHEMA:
            raise UserError(f"The checkpoint file {file.name} has schema {found.schema}; this version reads {SCHEMA}.")
        named = (found.run, found.kind, f"{found.name}.json")
        place = (file.parent.parent.name, file.parent.name, file.name)
        tensors = file.parent / found.folder
        if named != place or not re.fullmatch(rf"{re.escape(found.name)}\.[0-9a-f]{{8}}", found.folder):
            raise UserError(f"The checkpoint file {file.name} names the folder {found.folder!r}, which is not its own.")
        if self._leaves(file) or self._leaves(tensors) or any(map(self._leaves, tensors.glob("*"))):
            raise UserError(f"The checkpoint {found.path} has links to other folders; copy the files themselves.")
        past = found.expires_s is not None and found.expires_s < time.time()
        return found if expired or not past else None


def _write_tensors(folder: Path, model: TrainedModel, optimizer: bool) -> int:
    """Write tensors; return their size in bytes once everything is on the disk."""
    from safetensors.torch import save_file

    save_file(_public_names(model.state(), model.lora), folder / _weights_file(model.lora), {"format": "pt"})
    if optimizer:
        save_file(model.optimizer_state(), folder / "optimizer.safetensors")
    if model.lora is None:
        model.module.config.save_pretrained(folder)
        if model.module.generation_config is not None:
            model.module.generation_config.save_pretrained(folder)
    else:
        _write_adapter_config(folder, model)
    size = 0
    for file in folder.iterdir():
        size += file.stat().st_size
        _fsync_path(file)
    _fsync_path(folder)
    return size


def _write_adapter_config(folder: Path, model: TrainedModel) -> None:
    config = model.module.peft_config["default"]
    config.base_model_name_or_path = model.base.source
    config.task_type = "CAUSAL_LM"
    config.inference_mode = True
    config.save_pretrained(folder)


def _weights_file(lora: LoraSettings | None) -> str:
    return "model.safetensors" if lora is None else "adapter_model.safetensors"


def _public_names(state: Mapping[str, torch.Tensor], lora: LoraSettings | None) -> dict[str, torch.Tensor]:
    """Return the tensors under the names that peft uses in adapter files. Full weights keep their names."""
    if lora is None:
        return {name: tensor.contiguous() for name, tensor in state.items()}
    return {f"base_model.model.{name.replace('.default.', '.')}": value.contiguous() for name, value in state.items()}


def _own_names(saved: Mapping[str, torch.Tensor], lora: LoraSettings | None) -> dict[str, torch.Tensor]:
    if lora is None:
        return dict(saved)
    ending = re.compile(r"\.(lora_[A-Za-z_]+)\.")
    return {ending.sub(r".\1.default.", name.removeprefix("base_model.model.")): saved[name] for name in saved}


def _expiry(ttl_s: float | None) -> float | None:
    """Return when a checkpoint expires, or None if it never does. Raises `UserError` if `ttl_s` is more than
    `MOST_TTL_S`."""
    if ttl_s is not None and ttl_s > MOST_TTL_S:
        raise UserError(f"ttl_seconds is {ttl_s:g}; it must be at most {MOST_TTL_S:g}, or null.")
    return None if ttl_s is None else time.time() + ttl_s


def _fsync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def runs(checkpoints: list[Checkpoint]) -> Iterator[tuple[str, list[Checkpoint]]]:
    """Yield each run with its checkpoints, in the order of the runs' first checkpoints."""
    found: dict[str, list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        found.setdefault(checkpoint.run, []).append(checkpoint)
    yield from found.items()
