"""`TinkerTrainer` trains an adapter through the Tinker SDK, on Tinker's service or on a server with the same protocol.

The engine samples with a sampling client for the weights of the last step. The loss `importance_sampling` is a sum over
tokens, so advantages are divided by the number of sampled tokens in the step.

Needs the extra `tinker`. Source: the `tinker` package, version 0.38; version 0.25, which SkyRL's server needs, also
works.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import shutil
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from palaestra_slots.core.errors import ConfigError, EngineRefused, EngineUnavailable, TrainerError, TrainerUnavailable
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.io.supervised_command import supervised
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.sampling import Sampling
from palaestra_tokens.engines.token_engine import TokenChat
from palaestra_train.busy import BusyClock
from palaestra_train.config import TrainingConfig
from palaestra_train.trainer import TrainedRow, Weigh

if TYPE_CHECKING:
    import tinker

T = TypeVar("T")

STATE = "tinker.json"
"""The file in a checkpoint that holds the path of the state on the server."""

START_TIMEOUT_S = 180.0
"""Seconds that a local server may take to load its model."""

CHECK_S, GONE_S = 2.0, 10.0
"""Seconds between checks of a server that has not answered yet, and the seconds for which it may be unreachable: the
SDK itself would wait forever for a dead server."""

SAME = 1e-3
"""Importance weights that differ from 1 by less are those of the same probability, up to rounding."""

_LOCAL_KEY = "tml-local"
_MOST_TOKENS = 4096


async def _value(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the final value of an SDK call: 0.38 returns an awaitable, 0.25 the value or a `Future` of it."""
    made = await asyncio.to_thread(call, *args, **kwargs)
    if isinstance(made, Awaitable):  # first, because some awaitables are also futures, and warn whoever uses that
        return await made
    return await asyncio.wrap_future(made) if isinstance(made, Future) else made


def _says_something(record: logging.LogRecord) -> bool:
    """Return whether a line of the SDK's log is news: it warns each time that an answer takes longer than one poll."""
    return "because of try_again" not in record.getMessage()


async def answered(answer: Awaitable[T], url: str | None) -> T:
    """Return a server's answer. Raises `TrainerUnavailable` if no connection to `url` can be made for `GONE_S`. If
    `url` is None, Tinker's service answers, and only the SDK watches the connection."""

    async def wait() -> T:
        return await answer

    waiting, unreachable_s = asyncio.create_task(wait()), 0.0
    try:
        while not (await asyncio.wait([waiting], timeout=CHECK_S))[0]:
            unreachable_s = unreachable_s + CHECK_S if url is not None and not await _listens(url) else 0.0
            if unreachable_s >= GONE_S:
                raise TrainerUnavailable(
                    f"The Tinker server at {url} no longer answers: restart it with the same folder of "
                    "states, and resume"
                )
        return waiting.result()
    finally:
        waiting.cancel()


async def _listens(url: str) -> bool:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(CHECK_S):
            _, writer = await asyncio.open_connection(
                parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
            )
    except OSError:
        return False
    writer.close()
    return True


class TinkerEngine(TokenChat):
    """Samples with the current weights of a training client."""

    def __init__(self, config: APIServerConfig, busy: BusyClock) -> None:
        super().__init__(config)
        self.version = "0"
        self.url: str | None = None
        self._busy = busy
        self._client: tinker.SamplingClient

    def use(self, client: tinker.SamplingClient, version: str) -> None:
        """Sample with the weights of this client from now on."""
        self._client, self.version = client, version

    async def load_weights(self, folder: str, version: str) -> None:
        """Raise `EngineRefused`: the weights come from the trainer alone."""
        raise EngineRefused(
            f"Model '{self.name}' is in training: its weights come from the trainer, not from {folder}."
        )

    async def aclose(self) -> None:
        """Do nothing: the trainer owns the connection."""

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        import tinker

        stops = getattr(self.tokenizer, "stop_ids", ())
        wanted, version = Sampling.read(sampling, stops), self.version
        settings = tinker.SamplingParams(
            max_tokens=wanted.max_tokens or _MOST_TOKENS,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k or -1,
            seed=wanted.seed,
            stop=sorted(wanted.stop_ids),
        )
        try:
            with self._busy.working():
                prompt = tinker.ModelInput.from_ints(list(input_ids))
                asked = _value(self._client.sample, prompt, num_samples=1, sampling_params=settings)
                answer = await answered(asked, self.url)
        except TrainerUnavailable as error:
            raise EngineUnavailable(str(error)) from None
        except (tinker.APIConnectionError, tinker.APITimeoutError, tinker.InternalServerError) as error:
            raise EngineUnavailable(f"The Tinker server of model '{self.name}' does not answer: {error}") from error
        except tinker.TinkerError as error:
            raise EngineRefused(f"The Tinker server of model '{self.name}' refused to sample: {error}") from error
        (sequence,) = answer.sequences
        return Sampled(
            ids=list(sequence.tokens),
            logprobs=list(sequence.logprobs or ()),
            finish_reason=str(sequence.stop_reason),
            policy_version=version,
        )


class TinkerTrainer:
    """Trains an adapter for `server.model_name`. `url` is the server's address. If `url` is None and `local` is set, a
    server is started on this machine and keeps its states in the folder `local`. If both are None, Tinker's service is
    used."""

    name = "tinker"
    overlaps = True

    def __init__(
        self,
        server: APIServerConfig,
        config: TrainingConfig,
        *,
        url: str | None = None,
        local: Path | None = None,
        seed: int = 0,
    ) -> None:
        self.model = server.model_name
        self.busy = BusyClock()
        self._config = config
        self._url = url
        self._local = local
        self._seed = seed
        self._opened = AsyncExitStack()
        self._engine = TinkerEngine(server.model_copy(update={"history": "append"}), self.busy)
        self._base: tinker.SamplingClient | None = None
        self._saved = dict[str, str]()  # by checkpoint, the path of its state
        self._service: tinker.ServiceClient
        self._client: tinker.TrainingClient

    @property
    def engine(self) -> TinkerEngine:
        return self._engine

    async def open(self) -> None:
        try:
            import tinker
        except ImportError as error:
            raise ConfigError(
                f"The trainer tinker needs the extra 'tinker' ({error}): {install_command('tinker')}"
            ) from None
        logging.getLogger("tinker.lib.api_future_impl").addFilter(_says_something)
        if self._url is None and self._local is not None:
            self._url = await self._opened.enter_async_context(
                _local_server(self.model, self._local, self._config.pass_memory)
            )
        try:
            self._service = await asyncio.to_thread(self._connected)
            self._opened.push_async_callback(self._end_session)
            made = self._service.create_lora_training_client
            self._client = await _value(made, self.model, rank=self._config.lora_rank, seed=self._seed)
        except tinker.TinkerError as error:
            raise ConfigError(
                f"The model '{self.model}' cannot be trained at {self._url or 'the Tinker service'}: {error}. Check "
                "the address, the key in TINKER_API_KEY, and the name of the model"
            ) from error
        self._engine.url = self._url
        await self._sample_with("0")

    async def step(self, rows: Sequence[TrainedRow], version: str, weigh: Weigh) -> Mapping[str, float]:
        import tinker

        config = self._config
        # A local server samples with the trainer's numbers, so nearly all importance weights are 1: the gradient with
        # these weights comes from the pass that compares the numbers, and a second pass corrects the other tokens.
        at_once = self._local is not None and config.loss_name == "importance_sampling" and not config.kl_weight
        given = [_coefficients(row, sum(each.sampled for each in rows)) for row in rows]
        own = await self._completion_logprobs(rows, given if at_once else None)
        weighed = weigh(rows, own)
        count, numbers = sum(row.sampled for row in weighed), dict[str, float]()
        if at_once:
            data = _corrections(rows, own, given, weighed, count)
        else:
            none = [[0.0] * len(row.importance) for row in weighed]
            penalties, numbers = await self._reference(weighed) if config.kl_weight else (none, numbers)
            data = [
                _datum(row, **_loss_inputs(row, config, count, penalty))
                for row, penalty in zip(weighed, penalties, strict=True)
            ]
        name, settings = _loss_call(config)
        options = {"loss_fn_config": settings} if settings else {}
        rate = config.rate(int(version) - 1)
        adam = tinker.AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8)
        computing = self._client.forward_backward(data, name, **options) if data else None
        stepping = self._client.optim_step(adam)
        if computing is not None:
            await self._asked(computing)
        stepped = await self._asked(stepping)
        await self._sample_with(version)
        loss = -sum(sum(_coefficients(row, count)) for row in weighed)
        used = {name: found for name, found in (stepped.metrics or {}).items() if name == "memory_gib"}
        return {"loss": loss, "learning_rate": rate, **numbers, **used}

    async def _completion_logprobs(
        self, rows: Sequence[TrainedRow], coefficients: Sequence[Sequence[float]] | None
    ) -> list[list[float]]:
        """Return the trainer's log-probabilities of the completions. If there are `coefficients`, the gradient of the
        cross entropy, whose tokens they multiply, is added to the accumulated gradient."""
        ask = self._client.forward if coefficients is None else self._client.forward_backward
        weights = coefficients or [[0.0] * len(row.row.completion_ids) for row in rows]
        data = [_datum(row, weights=_shifted(row, line)) for row, line in zip(rows, weights, strict=True)]
        answer = await self._asked(ask(data, "cross_entropy"))
        return [_completion(row, each["logprobs"]) for row, each in zip(rows, answer.loss_fn_outputs, strict=True)]

    async def _reference(self, rows: Sequence[TrainedRow]) -> tuple[list[list[float]], dict[str, float]]:
        """Return what the KL divergence from the base model subtracts from the advantage of each token, relative to the
        mean over the step, and the metric `reference_kl`. Source: `incorporate_kl_penalty` of tinker-cookbook 0.6.1."""
        import tinker

        if self._base is None:
            self._base = await _value(self._service.create_sampling_client, base_model=self.model)
        asked = (_value(self._base.compute_logprobs, tinker.ModelInput.from_ints(row.tokens)) for row in rows)
        answers = await self._asked(asyncio.gather(*asked))
        apart = [
            [
                (now - (base or 0.0)) * on
                for now, base, on in zip(row.own or row.logprobs, tail, row.row.mask, strict=True)
            ]
            for row, tail in ((row, each[len(row.row.prompt_ids) :]) for row, each in zip(rows, answers, strict=True))
        ]
        mean = sum(map(sum, apart)) / sum(row.sampled for row in rows)
        return [[self._config.kl_weight * (each - mean) for each in line] for line in apart], {"reference_kl": mean}

    async def save(self, folder: Path) -> None:
        name = f"{folder.parent.parent.parent.name}-{folder.stem}".lower()
        saved = await self._asked(self._client.save_state(name, overwrite=True))
        kept = None if self._local is None else _kept_in(self._local, saved.path)
        (folder / STATE).write_text(json.dumps({"path": saved.path, "url": self._url, "folder": kept}))
        if self._local is not None:
            self._saved.pop(folder.stem, None)  # the new state has taken the place of one of the same step
            await asyncio.to_thread(self._drop_states, self._local, folder.parent)
            self._saved[folder.stem] = saved.path

    def _drop_states(self, states: Path, checkpoints: Path) -> None:
        """Delete the states of this process whose checkpoints have been removed. The server does not know of that, and
        reads a state only when it loads it."""
        for name in [each for each in self._saved if not (checkpoints / each).is_dir()]:
            path = self._saved.pop(name)
            kept = _kept_in(states, path)
            _state_file(states, path).unlink(missing_ok=True)
            if kept is not None:
                shutil.rmtree(kept, ignore_errors=True)

    async def load(self, folder: Path, version: str) -> None:
        try:
            path = str(json.loads((folder / STATE).read_text())["path"])
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"The checkpoint {folder} contains no state of a Tinker server: {error!r}") from None
        try:
            # The model that `open` created gives up its place, because a state is loaded only into a new model.
            await self._end_session()
            self._service = await self._asked(asyncio.to_thread(self._connected))
            made = self._service.create_training_client_from_state_with_optimizer
            self._client = await self._asked(_value(made, path))
        except TrainerError as error:
            raise ConfigError(
                f"The state {path} cannot be loaded: {error}. Resume with the same server and its folder of states"
            ) from error
        await self._sample_with(version)

    async def aclose(self) -> None:
        await self._opened.aclose()

    def _connected(self) -> tinker.ServiceClient:
        """Return a client with its own session."""
        import tinker

        key = {"api_key": _LOCAL_KEY} if self._url is not None else {}
        return tinker.ServiceClient(base_url=self._url, **key)

    async def _end_session(self) -> None:
        """Let the server free the model. SDK 0.25 has no call for that: its sessions end some minutes later."""
        if (close := getattr(self._service, "close", None)) is not None:
            with contextlib.suppress(TrainerError):
                await self._asked(close("success"))

    async def _sample_with(self, version: str) -> None:
        self._engine.use(await self._asked(_value(self._client.save_weights_and_get_sampling_client)), version)

    async def _asked(self, answer: Awaitable[T]) -> T:
        import tinker

        try:
            return await answered(answer, self._url)
        except tinker.TinkerError as error:
            raise TrainerError(
                f"A request to {self._url or 'the Tinker service'} failed: {error}. The training run can be resumed"
            ) from error


def _kept_in(states: Path, path: str) -> str | None:
    """Return the folder in which a local server keeps a state, or None if it is elsewhere."""
    file = _state_file(states, path)
    try:
        kept = json.loads(file.read_text())["folder"]
    except (OSError, ValueError, KeyError):
        return None
    return str((file.parent / kept).resolve())


def _state_file(states: Path, path: str) -> Path:
    """Return the file in which a local server describes the state with this path."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    return states / run / kind / f"{name}.json"


def _shifted(row: TrainedRow, completion: Sequence[float]) -> list[float]:
    """Return values of the completion at the positions that predict it; 0.0 at earlier positions."""
    return [*[0.0] * (len(row.row.prompt_ids) - 1), *completion]


def _loss_call(config: TrainingConfig) -> tuple[str, dict[str, float]]:
    """Return the loss's name in the API, and its settings."""
    if config.loss_name == "importance_sampling":
        return config.loss_name, {}
    low, high = config.clips
    name = "ppo" if config.loss_name == "dapo" else config.loss_name  # they differ only in the upper bound
    return name, {"clip_low_threshold": max(0.0, 1 - low), "clip_high_threshold": 1 + high}


def _loss_inputs(
    row: TrainedRow, config: TrainingConfig, count: int, penalty: Sequence[float]
) -> dict[str, Sequence[float]]:
    """Return the inputs of the loss. Losses that clip compare with the sampler's probabilities; `importance_sampling`
    compares with the trainer's own before the step, because the truncated weights are part of the advantages."""
    clips = config.loss_name != "importance_sampling"
    weights = [float(each > 0) if clips else each for each in row.importance]
    gains = [(row.advantage - less) / count * weight for weight, less in zip(weights, penalty, strict=True)]
    found: dict[str, Sequence[float]] = {
        "logprobs": _shifted(row, row.logprobs if clips else row.own or row.logprobs),
        "advantages": _shifted(row, gains),
    }
    if config.loss_name == "gspo":
        found["sequence_ratio_mask"] = _shifted(row, [float(on) for on in row.row.mask])
    return found


def _coefficients(row: TrainedRow, count: int) -> list[float]:
    """Return by how much each token of the completion counts in a step of `count` sampled tokens. Their sum over all
    rows is minus the loss before the step, without clips; not every server reports it."""
    return [row.advantage * weight / count for weight in row.importance]


def _corrections(
    rows: Sequence[TrainedRow],
    own: Sequence[Sequence[float]],
    given: Sequence[Sequence[float]],
    weighed: Sequence[TrainedRow],
    count: int,
) -> list[tinker.Datum]:
    """Return data whose gradient turns that of the coefficients `given` into that of the rows `weighed`, of which some
    of `rows` may be missing."""
    data, left = [], deque(weighed)
    for row, theirs, line in zip(rows, own, given, strict=True):
        kept = bool(left) and left[0].row.completion_ids is row.row.completion_ids
        wanted = _coefficients(left.popleft(), count) if kept else [0.0] * len(line)
        apart = [new - old for new, old in zip(wanted, line, strict=True)]
        if any(abs(each) > SAME * abs(old) for each, old in zip(apart, line, strict=True)):
            now = [each if math.isfinite(each) else 0.0 for each in theirs]
            data.append(_datum(row, logprobs=_shifted(row, now), advantages=_shifted(row, apart)))
    if left:
        raise TrainerError("weighed rows must be made of the given ones, in their order")
    return data


def _completion(row: TrainedRow, found: Any) -> list[float]:
    return [float(each) for each in found.tolist()][len(row.row.prompt_ids) - 1 :]


def _datum(row: TrainedRow, **values: Sequence[float]) -> tinker.Datum:
    """Return a row with the inputs of a loss: targets and `values`, each with one entry per predicted token."""
    import numpy as np
    import tinker

    arrays = {"target_tokens": np.array(row.tokens[1:], dtype=np.int64)}
    arrays |= {name: np.array(each, dtype=np.float32) for name, each in values.items()}
    inputs = {name: tinker.TensorData.from_numpy(array) for name, array in arrays.items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(row.tokens[:-1]), loss_fn_inputs=inputs)


@asynccontextmanager
async def _local_server(model: str, states: Path, pass_memory: float | None) -> AsyncIterator[str]:
    """Start `palaestra serve tinker` for the model and yield its address. The server ends with the block or with this
    process."""
    words = ["--port", "0", "--checkpoints", str(states)]
    words += [] if pass_memory is None else ["--pass-memory", str(pass_memory)]
    child = await asyncio.create_subprocess_exec(
        *supervised(sys.executable, "-P", "-m", "palaestra", "serve", "tinker", model, "--name", model, *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = (await child.stdout.readline()).decode().strip()
        if not line:
            raise ConfigError(
                f"`palaestra serve tinker {model}` ended with code {await child.wait()}; see its error above"
            )
        yield line
    except TimeoutError:
        raise ConfigError(f"`palaestra serve tinker {model}` did not start within {START_TIMEOUT_S:g} s") from None
    finally:
        if child.returncode is None:
            child.terminate()
            try:
                async with asyncio.timeout(20):
                    await child.wait()
            except TimeoutError:
                child.kill()
                await child.wait()
