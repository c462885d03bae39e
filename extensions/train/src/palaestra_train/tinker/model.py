"""The models of the training server: one base model, and the modules made from it.

Each trained model is a separate `torch` module. With LoRA, the module shares the base model's tensors and adds those of
its adapter. With full weights, it has its own tensors. A sampler is a module with a copy of the trained tensors, so
later steps do not change it. Invariants: log-probabilities are the model's own, in float32 at temperature 1, in
samplers and trainers alike. A batch that fails leaves the gradients as they were.

Needs the extra `tinker` (torch, transformers, peft).
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.extras import install_command
from palaestra_tokens.engines.torch_decoder import TorchDecoder, load_model, quiet_loading
from palaestra_tokens.tokenizers import model_source
from palaestra_train.pass_memory import PassMemory, most_cache_bytes, peak_gib, release
from palaestra_train.tinker.forward_pass import OutputLayer, Targets, clusters
from palaestra_train.tinker.losses import has_gradient, total

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

LORA_ALPHA = 32
"""The scale of an adapter is this value divided by the adapter's rank, as in Tinker (thinkingmachines.ai/blog/lora)."""

DEFAULT_WINDOW_TOKENS = 4096

_LEAST_TIMES_FREE = 4
"""How many times the size of merged weights must be free before a sampler merges its adapter into them."""


class UserError(Exception):
    """A call that cannot succeed in this form. The client gets the message and does not retry."""


class Turns:
    """A lock that threads get in the order in which they requested it, so that training and sampling share one
    device."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._next = itertools.count()
        self._now = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._lock:
            mine = next(self._next)
            self._lock.wait_for(lambda: self._now == mine)
        try:
            yield
        finally:
            with self._lock:
                self._now += 1
                self._lock.notify_all()


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """An adapter: its rank, the seed of its initial weights, and the layers that have one."""

    rank: int
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class Adam:
    """Settings of one AdamW step, as in the API. If `grad_clip_norm` is 0, gradients are not clipped."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a batch: `ids[N]` and its loss inputs, each [N] or [N, K], `target_tokens` among them."""

    ids: Sequence[int]
    inputs: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Per row, the targets' log-probabilities in the shape of `target_tokens`; the loss is the sum over all rows."""

    logprobs: Sequence[torch.Tensor]
    loss: float


class BaseModel:
    """The base model, from which all trained models start. `name` is its name for clients. Loading blocks. Raises
    `ConfigError` if the model cannot be loaded."""

    def __init__(
        self,
        source: str,
        *,
        name: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        pass_memory: float | None = None,
    ):
        try:
            import peft  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"The training server needs the extra 'tinker' ({error}): {install_command('tinker')}"
            ) from None
        source = model_source(source)
        self.module = load_model(source, device, dtype)
        self.module.requires_grad_(False)
        folder = Path(source)
        self.source = str(folder.resolve()) if folder.exists() else source
        self.name = name or loadable_name(self.source)
        self.turns = Turns()
        config = self.module.config.get_text_config()
        self.vocabulary = int(config.vocab_size)
        self.window = int(getattr(config, "max_position_embeddings", 0) or DEFAULT_WINDOW_TOKENS)
        self.digest = _weights_digest(self.module)
        self.output = OutputLayer(self.module)
        self._memory = PassMemory.of(self.module, pass_memory)
        self._merged: tuple[PreTrainedModel, PreTrainedModel] | None = None

    @property
    def device(self) -> str:
        return str(self.module.device)

    def passes(self, rows: Sequence[Sequence[int]], *, whole: bool = False) -> Iterator[tuple[list[int], int, bool]]:
        """Yield, for each pass, the indices of its rows `ids[B][T]`, the length of their common beginning, and whether
        layers must be computed again in the backward pass. If `whole` is true, beginnings are not shared. Raises
        `UserError` for a row that cannot be computed."""
        memory = self._memory
        alone: list[int] = []
        try:
            for chosen, shared in [] if whole else clusters(rows):
                together = memory.rows_beside(shared, max(len(rows[index]) for index in chosen) - shared)
                if not shared or together < 2:
                    alone += chosen
                    continue
                for start in range(0, len(chosen), together):
                    part = chosen[start : start + together]
                    yield part, shared if len(part) > 1 else 0, False
            alone = list(range(len(rows))) if whole else alone
            for part in memory.passes([len(rows[index]) for index in alone]):
                longest = len(rows[alone[part[0]]])
                yield [alone[place] for place in part], 0, memory.must_recompute(longest)
        except ConfigError as error:
            raise UserError(str(error)) from None

    def check_name(self, name: str) -> None:
        """Raise `UserError` if a client that requests `name` means another model."""
        if name.rstrip("/") not in {self.name.rstrip("/"), self.source, Path(self.source).name}:
            raise UserError(f"This server does not have the model '{name}'; it has '{self.name}'.")

    def stop_ids(self) -> tuple[int, ...]:
        settings = self.module.generation_config
        found = settings.eos_token_id if settings else None
        return (found,) if isinstance(found, int) else tuple(found or ())

    def copy(self, lora: LoraSettings | None) -> PreTrainedModel:
        """Return a new module to train: with a fresh adapter or, if `lora` is None, with weights of its own. Blocks.
        Raises `UserError` for an adapter that this model cannot have."""
        import torch

        if lora is None:
            own = copy.deepcopy(self.module)
            return own.requires_grad_(True)
        module = _sharing(self.module)
        with torch.random.fork_rng(), quiet_loading():
            if lora.seed is not None:
                torch.manual_seed(lora.seed)
            _add_adapter(module, lora)
        return module

    def merged(self, module: PreTrainedModel) -> PreTrainedModel:
        """Return a module that samples like `module` and has its adapter in the weights, which is faster by a third. If
        memory is too short for that, or weights of half precision would round an adapter's changes away, return
        `module`. Only the last one is kept, since each is as large as the base model. Needs the turn."""
        import torch

        if self._merged is not None and self._merged[0] is module:
            return self._merged[1]
        self._merged = None
        weights = [layer.get_base_layer().weight for layer in _adapted(module).values()]
        size = sum(each.nbytes for each in weights)
        exact = weights and all(each.dtype is torch.float32 for each in weights)
        if not exact or size * _LEAST_TIMES_FREE > self._memory.free_bytes:
            return module
        self._merged = (module, _with_adapter_in_weights(module))
        return self._merged[1]

    def drop_merged(self) -> None:
        """Free the memory of merged weights, unless a sampler uses them now."""
        with self.turns.turn():
            if self._merged is not None:
                self._merged = None
                release(self.module.device)

    def check_ids(self, ids: Iterable[int], what: str) -> None:
        """Raise `UserError` for an id outside the vocabulary, because it would make the whole batch fail."""
        for number in ids:
            if not 0 <= number < self.vocabulary:
                raise UserError(
                    f"{what} contains the token id {number}; the ids of model '{self.name}' are 0 to "
                    f"{self.vocabulary - 1}. Does the tokenizer belong to this model?"
                )


class TrainedModel:
    """One model in training: a module, its accumulated gradients and AdamW's state. Used by one thread at a time."""

    def __init__(self, base: BaseModel, lora: LoraSettings | None) -> None:
        self.base = base
        self.lora = lora
        self.module = base.copy(lora)
        self.steps = 0
        self._optimizer: torch.optim.AdamW | None = None

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the tensors that training changes, by name."""
        return {name: tensor for name, tensor in self.module.named_parameters() if tensor.requires_grad}

    def batch(self, rows: Sequence[Row], loss: str, config: Mapping[str, float], *, backward: bool) -> BatchResult:
        """Return the loss and the log-probabilities of `rows`. If `backward` is true, the gradient is added to the
        accumulated gradient.

        Raises `UserError` if the loss is not finite; the gradients are then unchanged.
        """
        import torch

        self.base.drop_merged()
        tensors = list(self.trained().values())
        before = [tensor.grad for tensor in tensors]
        for tensor in tensors:
            tensor.grad = None
        logprobs: dict[int, torch.Tensor] = {}
        summed = 0.0
        try:
            for chosen, shared, recompute in self.base.passes([row.ids for row in rows]):
                with self.base.turns.turn(), torch.set_grad_enabled(backward):
                    found, part = self._pass([rows[index] for index in chosen], loss, config, shared, recompute)
                logprobs.update(zip(chosen, found, strict=True))
                summed += part
            if not math.isfinite(summed):
                raise UserError(f"The loss '{loss}' of this batch is {summed}; its gradient was dropped.")
        except BaseException:
            for tensor, gradient in zip(tensors, before, strict=True):
                tensor.grad = gradient
            raise
        for tensor, gradient in zip(tensors, before, strict=True):
            if backward and tensor.grad is None:  # no position of this batch has a gradient
                tensor.grad = torch.zeros_like(tensor)
            if gradient is not None:
                tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)
        release(self.module.device)
        return BatchResult([logprobs[index] for index in range(len(rows))], summed)

    def _pass(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, float], shared: int, recompute: bool
    ) -> tuple[list[torch.Tensor], float]:
        """Run one forward pass over all `rows`, which have the first `shared` tokens in common, and backward if
        gradients are enabled. Returns their log-probabilities and the sum of the losses."""
        import torch

        from palaestra_tokens.engines.onednn import by_onednn

        device = self.module.device
        inputs = [{name: tensor.to(device) for name, tensor in row.inputs.items()} for row in rows]
        targets = [Targets(each["target_tokens"], has_gradient(loss, each)) for each in inputs]
        ids = [row.ids for row in rows]
        found = self.base.output.logprobs(self.module, ids, targets, shared, recompute=recompute)
        losses = [total(loss, each, given, config) for each, given in zip(found, inputs, strict=True)]
        summed = torch.stack(losses).sum()
        if summed.requires_grad and torch.isfinite(summed):
            with by_onednn():
                summed.backward()
        return [logprobs.detach().cpu() for logprobs in found], float(summed.detach())

    def step(self, adam: Adam) -> dict[str, float]:
        """Take one AdamW step with the accumulated gradient, which is then dropped. Returns the gradient's norm before
        clipping. Raises `UserError` if there is no gradient or if the gradient is not finite; the weights are then
        unchanged. Also raises `UserError` if the step has ruined the weights; only loading another state repairs
        them."""
        import torch

        tensors = [tensor for tensor in self.trained().values() if tensor.grad is not None]
        if not tensors:
            raise UserError("optim_step has no gradient: call forward_backward before each optim_step.")
        with self.base.turns.turn():
            limit = adam.grad_clip_norm if adam.grad_clip_norm > 0 else math.inf
            norm = float(torch.nn.utils.clip_grad_norm_(tensors, limit))
            if not math.isfinite(norm):
                self.drop_gradients()
                raise UserError(f"The gradient's norm is {norm}: the step was not taken, and the gradient was dropped.")
            self._adamw(adam).step()
            size = float(torch.nn.utils.get_total_norm([tensor.detach() for tensor in tensors]))
        self.drop_gradients()
        if not math.isfinite(size):
            raise UserError(
                f"The step with the learning rate {adam.learning_rate:g} ruined the weights, whose norm is {size}: "
                "load an earlier state, and use a lower learning rate."
            )
        self.steps += 1
        numbers = {"grad_norm": norm, "learning_rate": adam.learning_rate, "step": float(self.steps)}
        return {**numbers, "memory_gib": peak_gib(self.module.device)}

    def drop_gradients(self) -> None:
        for tensor in self.trained().values():
            tensor.grad = None

    def _adamw(self, adam: Adam) -> torch.optim.AdamW:
        import torch

        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(self.trained().values())
        self._optimizer.param_groups[0].update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )
        return self._optimizer

    def snapshot(self) -> PreTrainedModel:
        """Return a module with a copy of the current weights, for sampling."""
        with self.base.turns.turn():
            return _sharing(self.module).requires_grad_(False)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the trained tensors, by name."""
        return {name: tensor.detach() for name, tensor in self.trained().items()}

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return AdamW's tensors, by names of the form `KIND.NAME`. There are none before the first step."""
        if self._optimizer is None:
            return {}
        return {
            f"{kind}.{name}": value
            for name, tensor in self.trained().items()
            for kind, value in self._optimizer.state[tensor].items()
        }

    def restore(
        self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor] | None, steps: int
    ) -> None:
        """Load saved tensors. Raises `UserError` if they do not fit this model."""
        import torch

        own = self.trained()
        odd = own.keys() ^ state.keys() or {name for name in own if own[name].shape != state[name].shape}
        if odd:
            raise UserError(f"The checkpoint does not fit this model: '{min(odd)}' is missing, unknown or misshapen.")
        with self.base.turns.turn(), torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])
        self.drop_gradients()
        self._optimizer, self.steps = None, steps
        if optimizer:
            adamw = self._adamw(Adam())
            for key, value in optimizer.items():
                kind, _, name = key.partition(".")
                tensor = own[name]
                place = "cpu" if kind == "step" else tensor.device
                adamw.state[tensor][kind] = value.to(place)


class SamplingDecoder(TorchDecoder):
    """A decoder that takes turns with the trainer and with other samplers."""

    def __init__(self, module: PreTrainedModel, base: BaseModel) -> None:
        super().__init__(module, most_cache_bytes(module.device))
        self._module, self._base = module, base

    def admit(self, *arguments: Any) -> None:
        with self._base.turns.turn():
            if not self._ids:
                self.model = self._base.merged(self._module)
            super().admit(*arguments)

    def step(self) -> list[tuple[int, float]]:
        with self._base.turns.turn():
            return super().step()

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        if not self._ids:
            self.model = self._module  # or each idle sampler would hold weights of its own
            release(self._module.device)


def _sharing(module: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `module` that shares the module's untrained tensors."""
    frozen = [tensor for tensor in module.parameters() if not tensor.requires_grad]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in [*frozen, *module.buffers()]})


def _with_adapter_in_weights(module: PreTrainedModel) -> PreTrainedModel:
    import torch

    own = _sharing(module)
    for path, layer in _adapted(own).items():
        inner, (name,) = layer.get_base_layer(), layer.active_adapters
        # A new tensor: the old one is the base model's.
        inner.weight = torch.nn.Parameter(inner.weight + layer.get_delta_weight(name), requires_grad=False)
        own.set_submodule(path, inner)
    return own


def _adapted(module: PreTrainedModel) -> dict[str, Any]:
    """Return the layers that have an adapter, by their paths."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {path: layer for path, layer in module.named_modules() if isinstance(layer, BaseTunerLayer)}


def _add_adapter(module: PreTrainedModel, lora: LoraSettings) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    targets = adapter_targets(module, lora)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings")  # a merged output layer is apart
        inject_adapter_in_model(LoraConfig(r=lora.rank, lora_alpha=LORA_ALPHA, target_modules=targets), module)


def adapter_targets(module: PreTrainedModel, lora: LoraSettings) -> list[str]:
    """Return the names of the layers that get an adapter: linear layers of attention, of the MLPs, and the output
    layer."""
    import torch
    from transformers.pytorch_utils import Conv1D

    found = set()
    for path, layer in module.named_modules():
        if not isinstance(layer, torch.nn.Linear | Conv1D):
            continue
        if layer is module.get_output_embeddings():
            wanted = lora.train_unembed
        else:
            wanted = lora.train_attn if re.search(r"att", path, re.IGNORECASE) else lora.train_mlp
        if wanted:
            found.add(path.rpartition(".")[2])
    if not found:
        raise UserError("No layer of this model would get an adapter: set train_attn, train_mlp or train_unembed.")
    return sorted(found)


def loadable_name(source: str) -> str:
    """Return a folder's name for clients. The SDK interprets `A/B/C` as a variant of the model `A/B` on the hub and
    would load that model's tokenizer, so a path with two slashes gets a third one."""
    return f"{source}/" if source.startswith("/") and source.count("/") == 2 else source


def _weights_digest(module: PreTrainedModel) -> str:
    """Return a digest of the first numbers of each tensor, which distinguishes checkpoints of this model from
    checkpoints of other models."""
    seen = hashlib.sha256()
    for name, tensor in module.named_parameters():
        seen.update(f"{name}{tuple(tensor.shape)}".encode())
        seen.update(tensor.detach().flatten()[:64].float().cpu().numpy().tobytes())
    return seen.hexdigest()[:32]
