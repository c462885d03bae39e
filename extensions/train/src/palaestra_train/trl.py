"""`TrlTrainer` trains step by step with the loss and the optimizer of TRL's `GRPOTrainer`; the engine samples with the
trained model itself.

TRL trains in a thread. Its `rollout_func` waits for the rows of the next step, so that `Training` decides when TRL
takes a step. The model's weights change only while nothing samples; if rollouts are ahead of the steps, a copy of the
model samples. TRL subtracts the mean of a batch from its rewards. One added row without trained tokens makes the mean
0, so that the advantages stay as they are. TRL accepts one advantage per token from subclasses, so each token's
advantage is multiplied by its importance weight. The loss types `dapo` and `cispo` give all sampled tokens of a step
the same weight. Losses that clip compare the new probabilities with the sampler's.

Needs the extra `trl`. Source: `GRPOTrainer` of TRL 1.16.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import queue
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from palaestra_slots.core.errors import ConfigError, DiskError, TrainerError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.types import JSON
from palaestra_tokens.chat_server import ServerEngine
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.token_engine import PROBE, SGLangEngine, TokenChat, VLLMEngine
from palaestra_tokens.engines.torch_decoder import quiet_loading
from palaestra_tokens.engines.transformers import TransformersEngine
from palaestra_tokens.ledger import UNTRAINED
from palaestra_tokens.tokenizers import model_source
from palaestra_train.busy import BusyClock
from palaestra_train.config import TrainingConfig
from palaestra_train.pass_memory import PassMemory, peak_gib, recomputed
from palaestra_train.trainer import TrainedRow, Weigh, sequence_row

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl import GRPOTrainer

logger = logging.getLogger(__name__)

T = TypeVar("T")

JUMP, LEAST_NATS = 10, 1e-5
"""The difference after an update that ends the training run, as a multiple of the difference after the first update,
which counts as at least `LEAST_NATS`."""

_SPARE = 1.1
"""The maximum number of rows in a step, as a multiple of its rollouts, because a rollout has several rows if its
history changed."""


class _TrainedEngine(TokenChat):
    """An engine that samples with the trained weights. The time in which it samples counts as busy."""

    busy: BusyClock
    settings: ClassVar[Mapping[str, JSON]] = {}
    """Settings of every call."""

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        with self.busy.working():
            return await super().generate(input_ids, {**sampling, **self.settings})


class _SamplingEngine(_TrainedEngine, TransformersEngine):
    """The trained model itself, or its copy."""

    settings: ClassVar[Mapping[str, JSON]] = {
        "logprobs_mode": "processed_logprobs"
    }  # the trainer also applies the temperature


class _ServedSGLang(_TrainedEngine, SGLangEngine):
    """An SGLang server."""


class _ServedVLLM(_TrainedEngine, VLLMEngine):
    """A vLLM server."""


_SERVED: Mapping[str, type[_ServedSGLang | _ServedVLLM]] = {"sglang": _ServedSGLang, "vllm": _ServedVLLM}


class TrlTrainer:
    """Trains all weights of a model from a folder or the hub, on this machine. If the server's type is `sglang` or
    `vllm`, this server samples: after each step, the weights are written to a folder that the server must be able to
    read, and the server loads them."""

    name = "trl"
    overlaps = True

    def __init__(self, server: APIServerConfig, config: TrainingConfig, *, rollouts: int, temperature: float) -> None:
        """Set up the trainer. `rollouts` is the maximum number of rollouts that one step trains on, and `temperature`
        is the temperature at which they are sampled."""
        self.model = server.model_name
        self.busy = BusyClock()
        served = server.server_type in _SERVED
        if served and temperature != 1:
            raise ConfigError(
                f"{server.server_type} reports log-probabilities at temperature 1, but the agent samples at "
                f"{temperature:g}: set agent_temperature to 1"
            )
        kind = server.server_type if served else "transformers"
        self._server = server.model_copy(update={"server_type": kind, "history": "append"})
        self._config = config
        self._temperature = temperature
        self._rows = math.ceil(rollouts * _SPARE) + 1
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._ready: Future[None] = Future()
        self._pending: _Batch | None = None
        self._failed: BaseException | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="palaestra-trl-")
        self._thread = threading.Thread(target=self._train, name="trl-trainer", daemon=True)
        self._usual_nats: float | None = None
        self._trl: GRPOTrainer
        self._memory: PassMemory
        self._engine: _SamplingEngine | _ServedSGLang | _ServedVLLM

    @property
    def engine(self) -> ServerEngine:
        return self._engine

    async def open(self) -> None:
        try:
            self._trl = await asyncio.to_thread(self._make_trainer)
        except ImportError as error:
            raise ConfigError(f"The trainer trl needs the extra 'trl' ({error}): {install_command('trl')}") from None
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(f"The model '{self.model}' cannot be trained: {first}") from None
        if served := _SERVED.get(self._server.server_type):
            self._engine = served(self._server)
        else:
            self._engine = _SamplingEngine(
                self._server, tokenizer=self._trl.processing_class, make=self._sampled_model, seed=0
            )
        self._engine.busy = self.busy
        self._thread.start()
        await asyncio.wrap_future(self._ready)
        if self._server.server_type in _SERVED:
            await self._sample_as("0")

    async def step(self, rows: Sequence[TrainedRow], version: str, weigh: Weigh) -> Mapping[str, float]:
        rows = weigh(rows, await self._computed(lambda: self._own_logprobs(rows)))
        if len(rows) >= self._rows:
            raise ConfigError(
                f"a step has {len(rows)} rows, but TRL was set up for {self._rows - 1}: sub-agents and changed "
                "histories (compaction) give a rollout several rows. Avoid both, or train with tinker"
            )
        rate = self._config.rate(int(version) - 1)
        for group in self._trl.optimizer.param_groups:
            group["lr"] = rate
        batch = _Batch(rows)
        self._batches.put(batch)
        numbers = await asyncio.wrap_future(batch.done)
        await self._sample_as(version)
        return {**numbers, "learning_rate": rate, "memory_gib": peak_gib(self._trl.accelerator.device)}

    async def save(self, folder: Path) -> None:
        from safetensors import SafetensorError

        def write() -> None:
            import torch

            self._save_model(folder / "model")
            torch.save(self._trl.optimizer.state_dict(), folder / "optimizer.pt")

        try:
            await self._computed(write)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a full disk as a RuntimeError
            raise DiskError(f"cannot write the checkpoint {folder}: {error}. Earlier checkpoints are kept") from error

    async def load(self, folder: Path, version: str) -> None:
        def read() -> None:
            import torch
            from safetensors.torch import load_model

            device = self._trl.accelerator.device
            missing, unknown = load_model(
                self._trl.model, str(folder / "model" / "model.safetensors"), strict=False, device=str(device)
            )
            if unknown or set(missing) - set(self._trl.model.all_tied_weights_keys):
                raise ValueError(f"its weights have different names ({[*missing, *unknown][:3]})")
            self._trl.optimizer.load_state_dict(
                torch.load(folder / "optimizer.pt", map_location=device, weights_only=True)
            )

        try:
            await self._computed(read)
        except Exception as error:  # a checkpoint's data may be anything
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(
                f"The checkpoint {folder} does not fit the model '{self.model}': {first}. Resume with the model that "
                "was trained, or remove the folder to continue from the previous checkpoint"
            ) from None
        await self._sample_as(version)

    async def aclose(self) -> None:
        self._batches.put(None)
        if self._thread.ident is not None:
            await asyncio.shield(asyncio.to_thread(self._thread.join))
        self._folder.cleanup()

    def _save_model(self, folder: Path) -> None:
        with quiet_loading():
            self._trl.model.save_pretrained(folder)
        self._trl.processing_class.save_pretrained(folder)

    def _sampled_model(self) -> PreTrainedModel:
        """Return the model that samples: the trained one, or a copy if it samples during steps."""
        return copy.deepcopy(self._trl.model).eval() if self._config.async_steps else self._trl.model

    async def _sample_as(self, version: str) -> None:
        if not isinstance(self._engine, _SamplingEngine):
            folder = Path(self._folder.name) / "served" / version
            await self._computed(lambda: self._save_model(folder))
            try:
                await self._engine.load_weights(str(folder), version)
            finally:
                await asyncio.to_thread(shutil.rmtree, folder)
            await self._check_server(version)
        elif self._config.async_steps:
            await self._engine.copy_weights(self._trl.model, version)
        else:
            self._engine.policy_version = version

    async def _check_server(self, version: str) -> None:
        """Compare the server's log-probabilities of a few tokens with the trainer's. Raises `TrainerError` if they
        differ by much more than after the first update, because a server may answer that it has loaded weights and
        still use old ones."""
        mean = await self._probed(range(4))
        self._usual_nats = max(mean, LEAST_NATS) if self._usual_nats is None else self._usual_nats
        most = min(JUMP * self._usual_nats, self._config.most_nats)
        # Other tokens too, because the first ones may have been nearly certain. `not <=` includes nan.
        if not mean <= most and not (mean := await self._probed(range(4, 12))) <= most:
            raise TrainerError(
                f"After the update to version {version}, the log-probabilities of the model server at "
                f"{self._server.base_url} differ from the trainer's by {mean:.1e} nats per token, and by "
                f"{self._usual_nats:.1e} after the first update: the server still uses weights of an earlier step. "
                "vLLM on a CPU keeps the output layer of a model that shares it with the embeddings. Leave out "
                "--openai.server_type, so that this process samples, or use another server, and resume"
            )

    async def _probed(self, seeds: Iterable[int]) -> float:
        """Return the mean difference, in nats per token, over 16 tokens of each seed."""
        prompt = list(self._engine.tokenizer.encode(PROBE))
        settings = ({"max_tokens": 16, "temperature": 1.0, "seed": seed} for seed in seeds)
        sampled = await asyncio.gather(*(self._engine.generate(prompt, each) for each in settings))
        rows: list[TrainedRow] = []
        for place, each in enumerate(sampled):
            masks, logprobs = [*[UNTRAINED] * len(prompt), *each.ids], [*[0.0] * len(prompt), *each.logprobs]
            row = sequence_row([*prompt, *each.ids], masks, logprobs, None, f"probe/{place}", ())
            rows += [] if row is None else [TrainedRow(row, 0.0)]
        own = await self._computed(lambda: self._own_logprobs(rows))
        pairs = [pair for row, line in zip(rows, own, strict=True) for pair in zip(row.logprobs, line, strict=True)]
        return sum(abs(theirs - ours) for theirs, ours in pairs) / max(1, len(pairs))

    async def _computed(self, compute: Callable[[], T]) -> T:
        """Run a function while TRL waits for rows."""
        if self._failed is not None:
            raise TrainerError(f"TRL has failed: {self._failed}")
        return await asyncio.to_thread(compute)

    def _make_trainer(self) -> GRPOTrainer:
        import torch
        from datasets import Dataset
        from transformers import AutoTokenizer, PrinterCallback
        from trl import GRPOConfig, GRPOTrainer

        owner, config = self, self._config
        low, high = config.clips if config.loss_name != "importance_sampling" else (0.2, 0.28)  # its ratio is exactly 1

        class WeighedTrainer(GRPOTrainer):  # type: ignore[misc]  # trl has no types
            def _generate_and_score_completions(self, inputs: list[JSON]) -> dict[str, Any]:
                return owner._weighed(super()._generate_and_score_completions(inputs))

            def compute_loss(self, model: Any, inputs: JSON, *args: Any, **options: Any) -> Any:
                *parts, last = owner._input_passes(inputs)
                done = 0.0
                for part in parts:
                    loss = super().compute_loss(model, part, *args, **options)
                    self.accelerator.backward(loss)  # so that a pass's memory is free before the next one
                    done = done + loss.detach()
                return super().compute_loss(model, last, *args, **options) + done

            def _get_per_token_logps_and_entropies(
                self, model: Any, ids: Any, attention: Any, kept: int, batch_size: int | None = None, **options: Any
            ) -> Any:
                with_gradient = torch.is_grad_enabled()
                if not with_gradient:
                    batch_size = owner._memory.rows(ids.size(1))
                with recomputed(model, on=with_gradient and owner._memory.must_recompute(ids.size(1))):
                    return super()._get_per_token_logps_and_entropies(
                        model, ids, attention, kept, batch_size=batch_size, **options
                    )

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the library's plans, not about this training
            args = GRPOConfig(
                self._folder.name,
                max_steps=2**40,
                per_device_train_batch_size=self._rows,  # `compute_loss` splits them into passes
                num_generations=self._rows,
                learning_rate=config.learning_rate,
                lr_scheduler_type="constant",  # `step` sets the rate of each step
                adam_beta2=0.95,
                weight_decay=0.0,
                beta=config.kl_weight,
                loss_type="cispo" if config.loss_name == "cispo" else "dapo",
                importance_sampling_level="sequence" if config.loss_name == "gspo" else "token",
                epsilon=low,
                epsilon_high=1 + high if config.loss_name == "cispo" else high,
                scale_rewards="none",
                temperature=self._temperature,
                bf16=False,
                use_cpu=not _has_gpu(),
                gradient_checkpointing=False,
                logging_steps=1,
                logging_nan_inf_filter=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                model_init_kwargs={"dtype": "float32"},
            )
        with quiet_loading(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = WeighedTrainer(
                model=model_source(self.model),
                args=args,
                train_dataset=Dataset.from_list([{"prompt": "rows come from the training"}]),
                processing_class=AutoTokenizer.from_pretrained(model_source(self._server_tokenizer)),
                rollout_func=self._rollout_func,
                reward_funcs=_advantage,
            )
        trainer.remove_callback(PrinterCallback)
        self._memory = PassMemory.of(trainer.model, config.pass_memory)
        return trainer

    @property
    def _server_tokenizer(self) -> str:
        named = self._server.tokenizer_name
        return self.model if named in ("", "none") else named

    # In TRL's thread

    def _train(self) -> None:
        try:
            self._trl.train()
        except _End:
            failed: BaseException = TrainerError("the trainer is closed")
        except BaseException as error:  # every kind of error is passed to the waiting code
            logger.debug("TRL ended", exc_info=True)
            failed = self._failed = error
        else:
            failed = self._failed = TrainerError("TRL ended by itself")
        for waiting in (self._ready, *(() if self._pending is None else (self._pending.done,))):
            if not waiting.done():
                waiting.set_exception(TrainerError(f"TRL has failed: {failed}"))
        with suppress(queue.Empty):
            while True:
                if (batch := self._batches.get_nowait()) is not None:
                    batch.done.set_exception(TrainerError(f"TRL has failed: {failed}"))

    def _rollout_func(self, prompts: Sequence[JSON], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Return the rows of the next step, as many as `prompts`. TRL calls this function when the previous step is
        complete."""
        trainer.model.eval()  # the model samples until the next rows arrive
        if self._pending is not None:
            self._pending.done.set_result(_step_metrics(trainer))
        if not self._ready.done():
            self._ready.set_result(None)
        self._pending = self._batches.get()
        if self._pending is None:
            raise _End
        trainer.model.train()
        rows = self._pending.rows
        blank = trainer.processing_class.eos_token_id
        fillers = len(prompts) - len(rows)
        balance = -sum(row.advantage for row in rows)
        return {
            "prompt_ids": [row.row.prompt_ids for row in rows] + [[blank]] * fillers,
            "completion_ids": [row.row.completion_ids for row in rows] + [[blank]] * fillers,
            "logprobs": [row.logprobs for row in rows] + [[0.0]] * fillers,
            "env_mask": [row.row.mask for row in rows] + [[0]] * fillers,
            "advantage": [row.advantage for row in rows] + [balance] + [0.0] * (fillers - 1),
        }

    def _weighed(self, output: dict[str, Any]) -> dict[str, Any]:
        """Return TRL's inputs of a step with one advantage per token, and with the probabilities to which the loss
        compares the new ones: the trainer's own before the step, which TRL takes if there are none, or the
        sampler's."""
        import torch

        assert self._pending is not None
        weights = torch.zeros(output["completion_ids"].shape, device=output["advantages"].device)
        for line, row in zip(weights, self._pending.rows, strict=False):
            given = torch.tensor(row.importance, device=weights.device)
            line[: len(given)] = given if self._config.loss_name == "importance_sampling" else (given > 0).float()
        output["advantages"] = output["advantages"].unsqueeze(1) * weights
        if self._config.loss_name != "importance_sampling":
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output

    def _input_passes(self, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return TRL's inputs of a step split into passes, without rows of which no token is trained and without the
        padding that only other passes need."""
        prompts, completions = inputs["prompt_mask"], inputs["completion_mask"]
        trained = (completions * inputs.get("tool_mask", 1)).any(dim=1).nonzero().flatten()
        sizes = list(zip(prompts.sum(dim=1).tolist(), completions.sum(dim=1).tolist(), strict=True))
        parts = []
        for chosen in self._memory.passes([sum(sizes[row]) for row in trained.tolist()]):
            rows = trained[chosen]
            before, after = (max(sizes[row][side] for row in rows.tolist()) for side in (0, 1))
            part = dict(inputs)
            for name, value in inputs.items():
                if getattr(value, "ndim", 0) and value.size(0) == len(sizes):
                    value = value[rows]
                    if name.startswith("prompt_"):
                        value = value[:, -before:]
                    elif value.ndim == 2 and value.size(1) == completions.size(1):
                        value = value[:, :after]
                    part[name] = value
            parts.append(part)
        return parts

    def _own_logprobs(self, rows: Sequence[TrainedRow]) -> list[list[float]]:
        import torch
        from trl.trainer.utils import pad

        trl = self._trl
        device = trl.accelerator.device
        found: list[list[float]] = [[]] * len(rows)
        for chosen in self._memory.passes([len(each.tokens) for each in rows]):
            part = [rows[index].row for index in chosen]
            prompts = [torch.tensor(each.prompt_ids) for each in part]
            completions = [torch.tensor(each.completion_ids) for each in part]
            ids = torch.cat([pad(prompts, 0, padding_side="left"), pad(completions, 0, padding_side="right")], dim=1)
            attention = torch.cat(
                [
                    pad([torch.ones_like(each) for each in prompts], 0, padding_side="left"),
                    pad([torch.ones_like(each) for each in completions], 0, padding_side="right"),
                ],
                dim=1,
            )
            longest = max(len(each) for each in completions)
            with torch.no_grad():
                own, _, _ = trl._get_per_token_logps_and_entropies(
                    trl.model, ids.to(device), attention.to(device), longest
                )
            for index, line, each in zip(chosen, own.tolist(), part, strict=True):
                found[index] = line[: len(each.completion_ids)]
        return found


class _Batch:
    """The rows of one step, and the future of its metrics."""

    def __init__(self, rows: Sequence[TrainedRow]) -> None:
        self.rows = rows
        self.done: Future[Mapping[str, float]] = Future()


class _End(Exception):
    """Raised to end TRL's loop."""


def _advantage(*, advantage: Sequence[float], **_: object) -> list[float]:
    """Return the advantages from `_rollout_func`, as TRL's reward function."""
    return list(advantage)


def _step_metrics(trainer: GRPOTrainer) -> dict[str, float]:
    """Return the numbers that TRL logged for its last step, and the norm of the weights, which overflows if a step has
    ruined them."""
    import torch

    last = next((each for each in reversed(trainer.state.log_history) if "loss" in each), {"loss": math.nan})
    names = {
        "loss": "loss",
        "grad_norm": "grad_norm",
        "entropy": "entropy",
        "clip_ratio/region_mean": "clip_ratio",
        "kl": "reference_kl",
    }
    numbers = {name: float(last[key]) for key, name in names.items() if key in last}
    norms = [weight.detach().norm() for weight in trainer.model.parameters()]
    return numbers | {"weight_norm": float(torch.stack(norms).norm())}


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())
