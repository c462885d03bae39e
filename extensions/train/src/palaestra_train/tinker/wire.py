"""Decodes and encodes the messages of the Tinker SDK 0.38: protobuf batches in, protobuf results out.

The message classes are the SDK's own (`tinker.proto`, `tinker.types`), so that client and server read messages in the
same way. Tensors are little-endian bytes. Position i of a datum holds the target for the token after `model_input[i]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.sampling import Sampling
from palaestra_train.tinker.losses import LOSSES
from palaestra_train.tinker.model import BaseModel, BatchResult, Row, UserError
from palaestra_train.tinker.sampler import SampleRequest, ScoredTokens, Scoring

_DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}

MOST_SAMPLES = 4096
"""The maximum number of samples of one sampling request."""

MOST_TOP = 128
"""The maximum number of top tokens, targets or alternatives per position."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A sequence that was sampled with `record_stability_info`."""

    prompt: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class DatumBatch:
    """A `forward` or `forward_backward` request, not yet checked against a model."""

    model_id: str
    sequence: int
    loss: str
    config: Mapping[str, float]
    forward_only: bool
    data: Sequence[Any] = field(repr=False)


def read_batch(body: bytes) -> DatumBatch:
    """Decode a batch. Raises `UserError` for bytes that are not such a message."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise UserError(f"The body is not a protobuf ForwardBackwardRequest: {error}") from None
    config: dict[str, float] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "number":
            config[name] = value.number
        elif name not in config:
            config[name] = math.nan  # the value is text, which no loss accepts, so `checked_rows` refuses it
    return DatumBatch(message.model_id, message.seq_id, message.loss_fn, config, message.forward_only, message.data)


def checked_rows(batch: DatumBatch, base: BaseModel, recorded: Callable[[str], Recorded]) -> list[Row]:
    """Return the checked rows of a batch. `recorded` returns the recorded sequence with the given id, or raises
    `UserError`. Raises `UserError` for an invalid batch; the message names the invalid datum and input."""
    kind = LOSSES.get(batch.loss)
    if batch.loss == "custom":
        raise UserError("This server does not store custom losses: let the SDK compute them (forward_backward_custom).")
    if kind is None:
        raise UserError(f"There is no loss {batch.loss!r}; this server supports {', '.join(LOSSES)}.")
    for name, value in batch.config.items():
        if name not in kind.settings:
            known = ", ".join(kind.settings) or "no settings"
            raise UserError(f"The loss '{batch.loss}' has no setting '{name}'; it has {known}.")
        if not math.isfinite(value):
            raise UserError(f"The setting '{name}' of the loss '{batch.loss}' is not a finite number.")
    if not batch.data:
        raise UserError("The batch has no data.")
    found = []
    for index, datum in enumerate(batch.data):
        try:
            found.append(_row_of_datum(datum, batch.loss, base, recorded))
        except UserError as error:
            raise UserError(f"Datum {index}: {error}") from None
    return found


def _row_of_datum(datum: Any, loss: str, base: BaseModel, recorded: Callable[[str], Recorded]) -> Row:
    kind = LOSSES[loss]
    ids = [number for chunk in datum.model_input for number in _chunk(chunk)]
    if not ids:
        raise UserError("model_input has no tokens.")
    if len(ids) > base.window:
        raise UserError(f"model_input has {len(ids)} tokens; model '{base.name}' has a window of {base.window}.")
    base.check_ids(ids, "model_input")
    inputs = {name: _tensor(tensor, name) for name, tensor in datum.loss_fn_inputs.items()}
    needed = {"target_tokens", *kind.needs}
    if missing := needed - inputs.keys():
        raise UserError(f"the loss '{loss}' needs the input '{min(missing)}'.")
    if odd := inputs.keys() - needed - kind.may_have:
        raise UserError(f"the loss '{loss}' has no input '{min(odd)}'; remove it from loss_fn_inputs.")
    targets = inputs["target_tokens"]
    if targets.is_floating_point():
        raise UserError("target_tokens are not whole numbers.")
    if not targets.dim() or targets.shape[0] != len(ids) or targets.dim() > (2 if loss == "cross_entropy" else 1):
        raise UserError(f"target_tokens have the shape {list(targets.shape)}; model_input has {len(ids)} tokens.")
    base.check_ids((int(targets.min()), int(targets.max())), "target_tokens")
    for name, tensor in inputs.items():
        if tensor.shape != targets.shape:
            raise UserError(f"'{name}' has the shape {list(tensor.shape)}, but target_tokens {list(targets.shape)}.")
        if name != "target_tokens":
            inputs[name] = tensor.float()
            if not bool(torch.isfinite(inputs[name]).all()):
                raise UserError(f"'{name}' contains a number that is not finite.")
    if loss == "stable_reinforce":
        inputs["recorded_logprobs"] = _recorded_logprobs(datum, targets.tolist(), inputs["advantages"], recorded)
    return Row(ids, inputs)


def _chunk(chunk: Any) -> list[int]:
    if chunk.WhichOneof("chunk") != "encoded_text":
        raise UserError("model_input contains an image or audio; this server accepts only text tokens.")
    if len(chunk.encoded_text.tokens) % 4:
        raise UserError("model_input has a chunk whose bytes are not int32 tokens.")
    tokens: list[int] = np.frombuffer(chunk.encoded_text.tokens, "<i4").tolist()
    return tokens


def _tensor(message: Any, name: str) -> torch.Tensor:
    """Return a tensor's dense values; a CSR tensor has zeros elsewhere."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise UserError(f"'{name}' has an unknown number type ({message.dtype}).")
    shape = list(message.shape)
    try:
        if message.WhichOneof("encoding") == "sparse_csr":
            return _dense(message.sparse_csr, dtype, shape)
        values = torch.from_numpy(np.frombuffer(message.dense, dtype).copy())
        return values.reshape(shape) if shape else values
    except (ValueError, RuntimeError, IndexError) as error:
        raise UserError(f"'{name}' is not a tensor of shape {shape}: {error}") from None


def _dense(csr: Any, dtype: np.dtype[Any], shape: Sequence[int]) -> torch.Tensor:
    values = np.frombuffer(csr.values, dtype)
    starts, columns = np.frombuffer(csr.crow_indices, "<i8"), np.frombuffer(csr.col_indices, "<i8")
    if len(shape) != 2 or len(starts) != shape[0] + 1 or shape[1] > MOST_TOP:
        raise ValueError(f"CSR needs a shape [N, K] with K up to {MOST_TOP} and N + 1 row starts")
    counts = np.diff(starts)
    if len(columns) != len(values) or starts[0] != 0 or starts[-1] != len(values) or (counts < 0).any():
        raise ValueError("the row starts do not match the values")
    dense = np.zeros(tuple(shape), dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return torch.from_numpy(dense)


def _recorded_logprobs(
    datum: Any, targets: Sequence[int], advantages: torch.Tensor, recorded: Callable[[str], Recorded]
) -> torch.Tensor:
    """Return q at each position, from the sequences that the datum's spans name; 0 on prompts."""
    spans = datum.loss_fn_input_spans
    if not spans:
        raise UserError("the loss 'stable_reinforce' needs provenance: call Datum.with_provenance.")
    logprobs = torch.zeros(len(targets))
    place = 0
    for span in spans:
        kind = span.WhichOneof("span")
        part = span.sampled_tokens if kind == "sampled_tokens" else span.prompt_tokens
        sequence = recorded(part.sequence_id)
        source = sequence.ids if kind == "sampled_tokens" else sequence.prompt
        end = part.offset + part.length
        if list(source[part.offset : end]) != list(targets[place : place + part.length]):
            raise UserError(f"the tokens at {place} are not those of sequence {part.sequence_id} at {part.offset}.")
        here = slice(place, place + part.length)
        if kind == "sampled_tokens":
            logprobs[here] = torch.tensor(sequence.logprobs[part.offset : end])
        elif bool(advantages[here].any()):
            raise UserError("a prompt token has an advantage; only sampled tokens may have one.")
        place += part.length
    if place != len(targets):
        raise UserError(f"the spans of loss_fn_inputs cover {place} of {len(targets)} positions.")
    return logprobs


def batch_output(result: BatchResult) -> bytes:
    """Return the result with the targets' log-probabilities of each datum. Data of different width become several
    records."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": result.loss})
    start = 0
    while start < len(result.logprobs):
        width = result.logprobs[start].shape[1:]
        end = start
        while end < len(result.logprobs) and result.logprobs[end].shape[1:] == width:
            end += 1
        arrays = [logprobs.float().numpy() for logprobs in result.logprobs[start:end]]
        record = message.loss_fn_outputs.add(num_datums=len(arrays))
        tensor = record.fields["logprobs"]
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.data = b"".join(array.tobytes() for array in arrays)
        tensor.offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8").tobytes()
        tensor.trailing_shape.extend(width)
        start = end
    encoded: bytes = message.SerializeToString()
    return encoded


@dataclass(frozen=True, slots=True)
class SamplingCall:
    """A checked sampling request. `scores_prompt` is true if the prompt needs a forward pass for its scores."""

    request: SampleRequest
    wants_logprobs: bool
    first: int
    top_prompt: int
    top_sampled: int
    targets: torch.Tensor | None
    targets_sparse: Any
    alternatives: int
    seed: int

    @property
    def scores_prompt(self) -> bool:
        return bool(self.wants_logprobs or self.top_prompt or self.targets is not None or self.alternatives)

    def scoring(self, ids: Sequence[int]) -> Scoring:
        return Scoring(
            ids=ids,
            prompt=len(self.request.prompt),
            first=self.first,
            top_prompt=self.top_prompt,
            top_sampled=self.top_sampled if len(ids) > len(self.request.prompt) else 0,
            targets=self.targets,
            alternatives=self.alternatives,
            temperature=self.request.sampling.temperature,
            seed=self.seed,
        )


def read_sampling(sent: types.SampleRequest, base: BaseModel, stop_ids: Sequence[int], seed: int) -> SamplingCall:
    """Check a sampling request. `stop_ids` end a reply unless the request has stops of its own; `seed` is used if the
    request has none. Raises `UserError`."""
    prompt: list[int] = []
    for chunk in sent.prompt.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise UserError("The prompt contains an image or audio; this server accepts only text tokens.")
        prompt += chunk.tokens
    if not prompt:
        raise UserError("The prompt has no tokens.")
    base.check_ids(prompt, "The prompt")
    if not 1 <= sent.num_samples <= MOST_SAMPLES:
        raise UserError(f"num_samples is {sent.num_samples}; it must be 1 to {MOST_SAMPLES}.")
    params = sent.sampling_params
    for name, value, least, most in (
        ("temperature", params.temperature, 0.0, 100.0),
        ("top_p", params.top_p, 1e-6, 1.0),
        ("max_tokens", 1 if params.max_tokens is None else params.max_tokens, 1, 1 << 31),
        ("top_k", params.top_k, -1, 1 << 31),
        ("topk_prompt_logprobs", sent.topk_prompt_logprobs, 0, MOST_TOP),
        ("topk_sample_logprobs", sent.topk_sample_logprobs, 0, MOST_TOP),
        ("prompt_alt_tokens_k", sent.prompt_alt_tokens_k, 0, MOST_TOP),
    ):
        if not least <= value <= most:  # also false for NaN
            raise UserError(f"{name} is {value}; it must be {least:g} to {most:g}.")
    last = sent.prompt_logprobs_last_n
    if last is not None and not 1 <= last < max(2, len(prompt)):
        raise UserError(f"prompt_logprobs_last_n is {last}; this prompt allows 1 to {len(prompt) - 1}.")
    stop_ids, stops = _stops(params.stop, stop_ids)
    own_seed = seed if params.seed is None else params.seed
    sampling = Sampling(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        seed=own_seed,
        stop_ids=frozenset(stop_ids),
    )
    targets, sparse = _prompt_targets(sent, len(prompt), base)
    return SamplingCall(
        request=SampleRequest(prompt, sent.num_samples, sampling, stops),
        wants_logprobs=bool(sent.prompt_logprobs),
        first=1 if last is None else len(prompt) - last,
        top_prompt=sent.topk_prompt_logprobs,
        top_sampled=sent.topk_sample_logprobs,
        targets=targets,
        targets_sparse=sparse,
        alternatives=sent.prompt_alt_tokens_k,
        seed=own_seed & ((1 << 63) - 1),
    )


def _stops(stop: Any, stop_ids: Sequence[int]) -> tuple[Sequence[int], Sequence[str]]:
    """Return the stops of a request: ids and texts. None selects the model's own stops, an empty list means no stops,
    and other values replace the model's own stops."""
    if stop is None:
        return stop_ids, ()
    listed = [stop] if isinstance(stop, str) else list(stop)
    if any(each == "" for each in listed):
        raise UserError("A stop text is empty.")
    return [each for each in listed if isinstance(each, int)], [each for each in listed if isinstance(each, str)]


def _prompt_targets(sent: types.SampleRequest, length: int, base: BaseModel) -> tuple[torch.Tensor | None, Any]:
    """Return `targets[length - 1, K]`, -1 where there is no target, and the request's tensor if it is sparse."""
    given = sent.target_prompt_logprobs
    if given is None:
        return None, None
    shape = list(given.shape or [])
    if len(shape) != 2 or shape[0] != length - 1 or not 1 <= shape[1] <= MOST_TOP:
        raise UserError(f"target_prompt_logprobs has the shape {shape}; it must be [{length - 1}, 1 to {MOST_TOP}].")
    try:
        values = np.asarray(given.data, "<i8")
        if given.sparse_crow_indices is None:
            targets, sparse = torch.from_numpy(values.reshape(shape).copy()), None
        else:
            csr = pb.SparseCsr(
                values=(values + 1).tobytes(),
                crow_indices=np.asarray(given.sparse_crow_indices, "<i8").tobytes(),
                col_indices=np.asarray(given.sparse_col_indices, "<i8").tobytes(),
            )
            targets, sparse = _dense(csr, np.dtype("<i8"), shape) - 1, given
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise UserError(f"target_prompt_logprobs is not a tensor of shape {shape}: {error}") from None
    base.check_ids((int(number) for number in targets[targets != -1].unique()), "target_prompt_logprobs")
    return targets, sparse


def sample_output(
    call: SamplingCall, sampled: Sequence[Sampled], prompt: ScoredTokens | None, scored: Sequence[ScoredTokens]
) -> bytes:
    """Return the result of a sampling request. `prompt` has the scores of the prompt, `scored` those of each reply."""
    message = pb.SampleResponse()
    for index, sequence in enumerate(sampled):
        stopped = sequence.finish_reason == "stop"
        part = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(sequence.ids, "<i4").tobytes(),
            logprobs=np.asarray(sequence.logprobs, "<f4").tobytes(),
        )
        if scored and scored[index].top_sampled is not None:
            _write_top(part.topk_sampled_logprobs, scored[index].top_sampled)
    if prompt is not None:
        if call.wants_logprobs:
            message.prompt_logprobs = prompt.logprobs.numpy().astype("<f4").tobytes()
        if prompt.top_prompt is not None:
            _write_top(message.topk_prompt_logprobs, prompt.top_prompt)
        if prompt.targets is not None:
            _write_targets(message.target_prompt_logprobs, call, prompt.targets)
        if prompt.alternatives is not None:
            _write_dense(message.prompt_alt_tokens.tokens, prompt.alternatives[0].long(), pb.DTYPE_INT64)
            _write_dense(message.prompt_alt_tokens.logprobs, prompt.alternatives[1].float(), pb.DTYPE_FLOAT32)
    encoded: bytes = message.SerializeToString()
    return encoded


def _write_top(message: Any, top: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    assert top is not None
    ids, logprobs = top
    message.length, message.k = ids.shape
    message.token_ids, message.logprobs = ids.int().numpy().tobytes(), logprobs.float().numpy().tobytes()


def _write_targets(message: Any, call: SamplingCall, values: torch.Tensor) -> None:
    if call.targets_sparse is None:
        _write_dense(message, values.float(), pb.DTYPE_FLOAT32)
        return
    starts = np.asarray(call.targets_sparse.sparse_crow_indices, "<i8")
    columns = np.asarray(call.targets_sparse.sparse_col_indices, "<i8")
    lines = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    message.dtype = pb.DTYPE_FLOAT32
    message.shape.extend(values.shape)
    message.sparse_csr.values = values.float().numpy()[lines, columns].astype("<f4").tobytes()
    message.sparse_csr.crow_indices, message.sparse_csr.col_indices = starts.tobytes(), columns.tobytes()


def _write_dense(message: Any, values: torch.Tensor, dtype: int) -> None:
    message.dtype = dtype
    message.shape.extend(values.shape)
    message.dense = values.contiguous().numpy().tobytes()
