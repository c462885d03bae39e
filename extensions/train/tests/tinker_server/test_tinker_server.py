"""The Tinker SDK, unchanged, against `palaestra serve tinker` with the tiny model; and bad input on the wire."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.threads import LoopThread
from palaestra_tokens.testing.tiny_model import make_tiny
from programs import killed_after

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
tinker = pytest.importorskip("tinker")

KEY = "tml-local"
AGREEMENT = 1e-4
"""What the log-probabilities of sampler and trainer may differ by."""


class Server:
    """A server in a thread of this process."""

    def __init__(self, model: Path, checkpoints: Path, token: str | None = None, **settings: Any) -> None:
        from palaestra_train.tinker.server import serving
        from palaestra_train.tinker.service import ServiceSettings

        self.checkpoints = checkpoints
        self._loop = LoopThread("tinker-server")
        chosen = ServiceSettings(device="cpu", seed=0, **settings)
        self._serving = serving(str(model), checkpoints, token=token, settings=chosen)
        started = self._loop.wait(self._serving.__aenter__())
        self.url, self.name = started.url, started.name

    def client(self, key: str = KEY) -> Any:
        return tinker.ServiceClient(base_url=self.url, api_key=key)

    def close(self) -> None:
        self._loop.wait(self._serving.__aexit__(None, None, None))
        self._loop.close()

    def post(self, path: str, body: bytes = b"{}", **headers: str) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", body, {"X-API-Key": KEY, **headers})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, json.loads(reply.read() or b"{}")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(folder, hidden=64, layers=2)
    return folder


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tiny, tmp_path_factory.mktemp("checkpoints"))
    yield server
    server.close()


@pytest.fixture
def service(server: Server) -> Iterator[Any]:
    with server.client() as client:
        yield client


def lora(service: Any, server: Server, rank: int = 8, seed: int = 1) -> Any:
    return service.create_lora_training_client(server.name, rank=rank, seed=seed).result()


def text(ids: Sequence[int]) -> Any:
    return tinker.types.ModelInput.from_ints(list(ids))


def params(**settings: Any) -> Any:
    return tinker.types.SamplingParams(**{"max_tokens": 6, "temperature": 1.0, **settings})


def supervised(ids: Sequence[int], prompt: int = 1) -> Any:
    weights = [0.0] * (prompt - 1) + [1.0] * (len(ids) - prompt)
    inputs = {"target_tokens": list(ids[1:]), "weights": weights}
    return tinker.types.Datum(model_input=text(ids[:-1]), loss_fn_inputs=inputs)


def sampled(prompt: Sequence[int], sequence: Any, advantage: float, **inputs: Any) -> Any:
    """A datum of a sampled sequence, as recipes make it: zeros on the prompt."""
    before = [0.0] * (len(prompt) - 1)
    ids = [*prompt, *sequence.tokens]
    datum_inputs = {
        "target_tokens": ids[1:],
        "logprobs": before + list(sequence.logprobs),
        "advantages": before + [advantage] * len(sequence.tokens),
        **inputs,
    }
    return tinker.types.Datum(model_input=text(ids[:-1]), loss_fn_inputs=datum_inputs)


def adam(rate: float, **settings: Any) -> Any:
    return tinker.types.AdamParams(learning_rate=rate, **settings)


def weights_of(training: Any) -> list[float]:
    """Log-probabilities of fixed tokens: equal for equal weights."""
    output = training.forward([supervised([5, 6, 7, 8, 9, 10])], "cross_entropy").result()
    return [float(each) for each in output.loss_fn_outputs[0]["logprobs"].tolist()]


def raises_soon(call: Callable[[], Any], *words: str) -> str:
    """The call raises an error that has these words, and does not retry."""
    start = time.monotonic()
    with pytest.raises(Exception) as caught:  # the SDK's classes differ by call
        call()
    assert time.monotonic() - start < 20
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


PROMPT = [40, 41, 42, 43]


def test_the_sdk_learns_what_is_rewarded_and_log_probabilities_agree(service: Any, server: Server) -> None:
    training = lora(service, server, rank=8)
    rewards, difference = [], 0.0
    for step in range(12):
        sampler = training.save_weights_and_get_sampling_client().result()
        reply = sampler.sample(text(PROMPT), num_samples=64, sampling_params=params(seed=step)).result()
        reward = [sum(token % 2 for token in each.tokens) / len(each.tokens) for each in reply.sequences]
        mean = sum(reward) / len(reward)
        data = [sampled(PROMPT, each, r - mean) for each, r in zip(reply.sequences, reward, strict=True)]
        trained = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(adam(4e-3))
        for each, output in zip(reply.sequences, trained.result().loss_fn_outputs, strict=True):
            own = output["logprobs"].tolist()[len(PROMPT) - 1 :]
            difference = max(difference, *(abs(a - b) for a, b in zip(own, each.logprobs, strict=True)))
        assert stepped.result().metrics["grad_norm"] > 0
        rewards.append(mean)
    assert difference <= AGREEMENT
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards


@pytest.mark.parametrize("rank", [8, 0], ids=["lora", "full weights"])
def test_supervised_training_lowers_the_loss(service: Any, server: Server, rank: int) -> None:
    training = lora(service, server, rank=rank)
    info = training.get_info()
    assert (info.is_lora, info.lora_rank) == ((True, 8) if rank else (False, None))
    tokenizer = training.get_tokenizer()
    data = [supervised(tokenizer.encode(line)) for line in ("the file is new", "count the lines of a file")]
    losses = []
    for _ in range(10):
        trained = training.forward_backward(data, "cross_entropy")
        training.optim_step(adam(2e-2 if rank else 2e-3, grad_clip_norm=1.0)).result()
        losses.append(trained.result().metrics["loss:sum"])
    assert losses[-1] < 0.7 * losses[0], losses


def test_each_loss_runs_on_sampled_data(service: Any, server: Server) -> None:
    from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan

    training = lora(service, server)
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True).result()
    sequence = sampler.sample(text(PROMPT), num_samples=1, sampling_params=params()).result().sequences[0]
    count, before = len(sequence.tokens), len(PROMPT) - 1
    total = -float(count)  # the ratio is 1 where the weights are those that sampled
    for loss in ("importance_sampling", "ppo"):
        out = training.forward([sampled(PROMPT, sequence, 1.0)], loss).result()
        assert out.metrics["loss:sum"] == pytest.approx(total, abs=1e-3)
    mask = {"sequence_ratio_mask": [0.0] * before + [1.0] * count}
    out = training.forward([sampled(PROMPT, sequence, 1.0, **mask)], "gspo", {"clip_high_threshold": 1.1}).result()
    assert out.metrics["loss:sum"] == pytest.approx(total, abs=1e-3)
    log_p = sum(sequence.logprobs)
    weighted = sampled(PROMPT, sequence, 1.0, weights=[0.0] * before + [1.0] * count)
    for loss, data in (("cispo", sampled(PROMPT, sequence, 1.0)), ("dro", weighted)):
        assert training.forward([data], loss).result().metrics["loss:sum"] == pytest.approx(-log_p, abs=1e-3)
    spans = sampled(PROMPT, sequence, 1.0).with_provenance(
        model_input=[
            PromptProvenanceSpan(sequence_id=sequence.sequence_id, length=len(PROMPT)),
            SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=count - 1),
        ],
        loss_fn_inputs=[
            PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=1, length=before),
            SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=count),
        ],
    )
    out = training.forward_backward([spans], "stable_reinforce").result()
    assert out.metrics["loss:sum"] == pytest.approx(-log_p, abs=1e-3)
    raises_soon(
        lambda: training.forward([sampled(PROMPT, sequence, 1.0)], "stable_reinforce").result(), "with_provenance"
    )


def test_a_custom_loss_trains_like_the_built_in_one(service: Any, server: Server) -> None:
    import torch

    def nll(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.stack([each.sum() for each in logprobs]).sum(), {"own": 1.0}

    data = [supervised([5, 6, 7, 8]), supervised([9, 10, 11])]
    built_in, custom = lora(service, server, seed=3), lora(service, server, seed=3)
    built_in.forward_backward(data, "cross_entropy").result()
    out = custom.forward_backward_custom(data, nll).result()
    assert out.metrics["own"] == 1.0
    for training in (built_in, custom):
        training.optim_step(adam(1e-2)).result()
    assert weights_of(built_in) == pytest.approx(weights_of(custom), abs=1e-5)


def test_large_batches_are_split_and_make_one_step(service: Any, server: Server) -> None:
    data = [supervised([i % 900 + 3, 6, 7, i % 50 + 100]) for i in range(1500)]  # the SDK sends 1,024 at most
    whole = lora(service, server, seed=4)
    out = whole.forward_backward(data, "cross_entropy").result()
    assert len(out.loss_fn_outputs) == 1500
    assert whole.optim_step(adam(1e-3)).result().metrics["grad_norm"] > 0


def test_two_clients_train_their_own_adapters(server: Server) -> None:
    with server.client() as one, server.client() as two:
        first, second = lora(one, server, seed=5), lora(two, server, seed=5)
        before = weights_of(second)
        assert weights_of(first) == pytest.approx(before, abs=1e-6)
        first.forward_backward([supervised([5, 6, 7, 8])], "cross_entropy").result()
        first.optim_step(adam(1e-2)).result()
        assert weights_of(first) != pytest.approx(before, abs=1e-3)
        assert weights_of(second) == pytest.approx(before, abs=1e-6)


def test_training_resumes_from_a_checkpoint_as_if_uninterrupted(service: Any, server: Server) -> None:
    def step(training: Any) -> None:
        training.forward_backward([supervised([5, 6, 7, 8])], "cross_entropy").result()
        training.optim_step(adam(1e-2)).result()

    for rank in (8, 0):
        training = lora(service, server, rank=rank)
        step(training)
        path = training.save_state("first", overwrite=True).result().path
        step(training)
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        step(resumed)
        assert weights_of(resumed) == pytest.approx(weights_of(training), abs=1e-5)
        fresh = service.create_training_client_from_state(path).result()
        step(fresh)  # AdamW starts anew, so the second step differs
        assert weights_of(fresh) != pytest.approx(weights_of(training), abs=1e-4)


def test_checkpoints_survive_the_server_and_are_listed(tiny: Path, tmp_path: Path) -> None:
    first = Server(tiny, tmp_path / "ck")
    with first.client() as service:
        training = lora(service, first)
        training.forward_backward([supervised([5, 6, 7, 8])], "cross_entropy").result()
        training.optim_step(adam(1e-2)).result()
        expected = weights_of(training)
        path = training.save_state("state").result().path
        sampler = training.save_weights_for_sampler("sampler").result().path
    first.close()
    (tmp_path / "ck" / "run" / "weights" / "torn.0123abcd").mkdir(parents=True)
    second = Server(tiny, tmp_path / "ck")
    with second.client() as service:
        assert not (tmp_path / "ck" / "run" / "weights" / "torn.0123abcd").exists()
        rest = service.create_rest_client()
        assert {each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints} == {path, sampler}
        assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 8
        assert weights_of(service.create_training_client_from_state(path).result()) == pytest.approx(expected, abs=1e-5)
        from_disk = service.create_sampling_client(model_path=sampler).result()
        scores = from_disk.compute_logprobs(text([5, 6, 7, 8, 9, 10])).result()
        assert scores[1:] == pytest.approx(expected, abs=AGREEMENT)
        rest.delete_checkpoint_from_tinker_path(sampler).result()
        raises_soon(lambda: service.create_sampling_client(model_path=sampler).result(), sampler)
    second.close()


def test_adapters_load_with_peft(service: Any, server: Server, tiny: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    training = lora(service, server)
    training.forward_backward([supervised([5, 6, 7, 8])], "cross_entropy").result()
    training.optim_step(adam(1e-2)).result()
    path = training.save_state("export").result().path
    (folder,) = (server.checkpoints / path.split("/")[2] / "weights").glob("export.*/")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), folder)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    assert logprobs.tolist() == pytest.approx(weights_of(training), abs=1e-5)


def test_a_sampler_keeps_its_weights_while_training_goes_on(service: Any, server: Server) -> None:
    training = lora(service, server)
    sampler = training.save_weights_and_get_sampling_client().result()
    inflight = training.save_weights_and_get_sampling_client(kind="inflight").result()
    before = sampler.compute_logprobs(text(PROMPT)).result()
    training.forward_backward([supervised(PROMPT)], "cross_entropy").result()
    training.optim_step(adam(1e-2)).result()
    training.save_weights_and_get_sampling_client(kind="inflight").result()
    assert sampler.compute_logprobs(text(PROMPT)).result() == before
    assert inflight.compute_logprobs(text(PROMPT)).result() != before


def test_scores_of_prompts_and_replies(service: Any, server: Server) -> None:
    import torch

    sampler = service.create_sampling_client(base_model=server.name).result()
    targets = tinker.types.TensorData.from_torch(torch.tensor([[7, -1], [8, 9], [41, 42]]))
    reply = sampler.sample(
        text(PROMPT),
        num_samples=2,
        sampling_params=params(max_tokens=3),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=1,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=4,
    ).result()
    assert reply.prompt_logprobs[0] is None
    assert all(value < 0 for value in reply.prompt_logprobs[1:])
    assert len(reply.topk_prompt_logprobs) == len(PROMPT)
    best = [pairs[0] for pairs in reply.topk_prompt_logprobs[1:]]
    assert all(own <= top + 1e-6 for own, (_, top) in zip(reply.prompt_logprobs[1:], best, strict=True))
    picked = reply.target_prompt_logprobs.to_torch()
    assert picked[0, 1] == 0.0
    assert float(picked[1, 0]) < 0
    for sequence in reply.sequences:
        assert len(sequence.topk_logprobs) == len(sequence.tokens)
        for own, pairs in zip(sequence.logprobs, sequence.topk_logprobs, strict=True):
            assert own <= pairs[0][1] + 1e-5
    assert list(reply.prompt_alt_tokens.tokens.shape) == [len(PROMPT) - 1, 4]
    last = sampler.compute_logprobs(text(PROMPT), prompt_logprobs_last_n=1).result()
    assert last[:-1] == [None] * (len(PROMPT) - 1)
    assert last[-1] == pytest.approx(reply.prompt_logprobs[-1], abs=1e-5)


def test_stops_seeds_and_lengths(service: Any, server: Server) -> None:
    sampler = service.create_sampling_client(base_model=server.name).result()
    tokenizer = sampler.get_tokenizer()

    def sample(**settings: Any) -> Any:
        return sampler.sample(text(PROMPT), 8, params(**settings)).result().sequences

    one, two, three = (sample(seed=seed, stop=[], max_tokens=20) for seed in (7, 7, 8))
    assert [each.tokens for each in one] == [each.tokens for each in two]
    assert [each.tokens for each in one] != [each.tokens for each in three]
    assert len({tuple(each.tokens) for each in one}) > 1
    assert all(each.stop_reason == "length" and len(each.tokens) == 20 for each in one)
    stop = one[0].tokens[5]
    stopped = sample(seed=7, stop=[stop], max_tokens=20)[0]
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == one[0].tokens[: one[0].tokens.index(stop) + 1]
    mark = tokenizer.decode(one[0].tokens[3:6])
    by_text = sample(seed=7, stop=[mark], max_tokens=20)[0]
    assert by_text.stop_reason == "stop"
    assert mark in tokenizer.decode(by_text.tokens)
    assert len(by_text.tokens) <= 6


def test_samplers_are_pickled_and_joined(service: Any, server: Server) -> None:
    import pickle

    sampler = service.create_sampling_client(base_model=server.name).result()
    copy = pickle.loads(pickle.dumps(sampler))
    for each in (sampler, copy):
        assert each.sample(text(PROMPT), 1, params()).result().sequences[0].tokens


def test_wrong_calls_fail_at_once_with_their_reason(service: Any, server: Server) -> None:
    types = tinker.types
    training = lora(service, server)
    raises_soon(lambda: service.create_lora_training_client("other/model").result(), "other/model", server.name)
    raises_soon(lambda: service.create_sampling_client(base_model="other/model").result(), "other/model")
    raises_soon(
        lambda: service.create_training_client_from_state("tinker://a/weights/b").result(), "tinker://a/weights/b"
    )
    raises_soon(lambda: service.create_training_client_from_state("tinker://../weights/b").result(), "checkpoint")
    good = supervised([5, 6, 7])
    for datum, word in (
        (supervised([5, 99_999, 7]), "99999"),
        (types.Datum(model_input=text([5, 6]), loss_fn_inputs={"target_tokens": [6]}), "target_tokens"),
        (types.Datum(model_input=text([5, 6]), loss_fn_inputs={"weights": [1.0, 1.0]}), "target_tokens"),
        (types.Datum(model_input=text([5]), loss_fn_inputs={"target_tokens": [6], "advantages": [1.0]}), "advantages"),
        (
            types.Datum(model_input=text([5]), loss_fn_inputs={"target_tokens": [6], "weights": [float("nan")]}),
            "finite",
        ),
        (supervised([5] * 20_000), "window"),
    ):
        assert "Datum 1" in raises_soon(
            lambda d=datum: training.forward_backward([good, d], "cross_entropy").result(), word
        )
    raises_soon(lambda: training.forward_backward([good], "nonsense").result(), "nonsense")
    raises_soon(lambda: training.forward_backward([good], "cross_entropy", {"beta": 1.0}).result(), "beta")
    raises_soon(lambda: training.forward_backward([good], "importance_sampling").result(), "advantages")
    raises_soon(lambda: training.optim_step(adam(1e-3)).result(), "forward_backward")
    training.forward_backward([good], "cross_entropy").result()
    raises_soon(lambda: training.optim_step(adam(float("nan"))).result(), "learning_rate")
    raises_soon(lambda: training.optim_step(types.DimuonParams(learning_rate=1e-3)).result(), "dimuon")
    raises_soon(lambda: training.save_state("../x").result(), "../x")
    training.save_state("once").result()
    raises_soon(lambda: training.save_state("once").result(), "exists")
    assert training.optim_step(adam(1e-3)).result().metrics["step"] == 1.0
    sampler = service.create_sampling_client(base_model=server.name).result()
    for call, word in (
        (lambda: sampler.sample(text([]), 1, params()), "no tokens"),
        (lambda: sampler.sample(text([99_999]), 1, params()), "99999"),
        (lambda: sampler.sample(text(PROMPT), 0, params()), "num_samples"),
        (lambda: sampler.sample(text(PROMPT), 1, params(temperature=-1.0)), "temperature"),
        (lambda: sampler.sample(text(PROMPT), 1, params(max_tokens=0)), "max_tokens"),
        (lambda: sampler.sample(text([5] * 20_000), 1, params()), "window"),
    ):
        raises_soon(lambda c=call: c().result(), word)


def test_a_step_is_not_taken_after_a_batch_that_failed_in_part(service: Any, server: Server) -> None:
    training = lora(service, server)
    before = weights_of(training)
    good = training.forward_backward([supervised([5, 6, 7])], "cross_entropy")
    bad = training.forward_backward([supervised([5, 99_999])], "cross_entropy")
    step = training.optim_step(adam(1e-1))
    good.result()
    for future in (bad, step):
        with pytest.raises(tinker.RequestFailedError):
            future.result()
    assert weights_of(training) == before


def test_a_cancelled_request_stops_sampling(service: Any, server: Server) -> None:
    sampler = service.create_sampling_client(base_model=server.name).result()
    body = {
        "sampling_session_id": sampler._sampling_session_id,
        "seq_id": 77,
        "prompt": {"chunks": [{"tokens": PROMPT, "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 15_000, "stop": []},
        "num_samples": 4,
    }
    accepted = server.post("asample", json.dumps(body).encode())[1]
    assert len(accepted["sample_sequence_ids"]) == 4
    asked = json.dumps({"request_id": accepted["request_id"]}).encode()
    assert server.post("cancel_future", asked)[0] == 200
    start = time.monotonic()
    assert "cancelled" in server.post("retrieve_future", asked)[1]["error"]
    assert time.monotonic() - start < 10


def test_the_wire_refuses_bad_input(server: Server) -> None:
    assert server.post("forward_backward", b"\xff\xff garbage")[0] == 400
    assert server.post("forward_backward", b"")[0] == 404  # a message without a model
    assert server.post("optim_step", b"not json")[0] == 400
    assert server.post("optim_step", b'{"model_id": "x", "adam_params": {}}')[0] == 404
    assert server.post("create_model", b'{"session_id": "x", "model_seq_id": 0, "base_model": "y"}')[0] == 404
    assert server.post("asample", b'{"sampling_session_id": "x", "odd": 1}')[0] == 422
    assert server.post("retrieve_future", b'{"request_id": "nobody"}')[0] == 404
    assert server.post("session_heartbeat", b'{"session_id": "nobody"}')[0] == 410
    assert server.post("join_sampling_session", b"[]")[0] == 400
    assert server.post("join_sampling_session", b"{}")[0] in (400, 404, 422)
    assert server.post("no_such_call")[0] == 404
    assert server.post("create_session", Origin="http://example.com", **{"X-API-Key": ""})[0] in (403, 422)


def test_a_repeated_request_runs_once_and_a_gap_ends(server: Server, service: Any, monkeypatch: Any) -> None:
    from palaestra_train.tinker import service as module

    monkeypatch.setattr(module, "GAP_S", 0.5)
    training = lora(service, server)
    training.forward_backward([supervised([5, 6, 7])], "cross_entropy").result()  # number 1
    body = json.dumps({"model_id": training.model_id, "seq_id": 2, "adam_params": {}}).encode()
    first, again = server.post("optim_step", body), server.post("optim_step", body)
    assert first == again
    assert server.post("retrieve_future", json.dumps({"request_id": first[1]["request_id"]}).encode())[1]["metrics"]
    late = server.post("optim_step", body.replace(b'"seq_id": 2', b'"seq_id": 9'))[1]["request_id"]
    reply = server.post("retrieve_future", json.dumps({"request_id": late}).encode())[1]
    assert reply["category"] == "user"
    assert "Request 3" in reply["error"]


def test_a_token_is_the_api_key(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tml-"):
        Server(tiny, tmp_path / "a", token="secret")
    server = Server(tiny, tmp_path / "b", token=KEY)
    try:
        with server.client() as service:
            assert service.create_rest_client().get_server_capabilities().result().supported_models
        assert server.post("create_session", **{"X-API-Key": "tml-wrong"})[0] == 401
        raises_soon(lambda: server.client("tml-wrong").create_lora_training_client(server.name).result(), "401")
    finally:
        server.close()


def test_limits_of_models_and_samplers(tiny: Path, tmp_path: Path) -> None:
    server = Server(tiny, tmp_path / "ck", most_models=1, most_samplers=2)
    try:
        with server.client() as service:
            training = lora(service, server)
            raises_soon(lambda: lora(service, server), "--max-models")
            named = training.save_weights_for_sampler("named").result().path
            kept = service.create_sampling_client(model_path=named).result()
            kept.compute_logprobs(text(PROMPT)).result()
            first, *_ = [training.save_weights_and_get_sampling_client().result() for _ in range(3)]
            raises_soon(lambda: first.sample(text(PROMPT), 1, params()).result(), "--max-samplers")
            assert kept.sample(text(PROMPT), 1, params()).result().sequences
        with server.client() as service:  # the first one's session has ended
            lora(service, server)
    finally:
        server.close()


def test_weights_that_are_kept_while_others_close_are_not_swept_away(
    tiny: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    from palaestra_train.tinker import sampler
    from palaestra_train.tinker import server as module

    close = sampler.Sampler.aclose

    async def slowly(self: Any) -> None:
        await asyncio.sleep(0.3)  # as on a busy machine
        await close(self)

    monkeypatch.setattr(sampler.Sampler, "aclose", slowly)
    monkeypatch.setattr(module, "SWEEP_S", 0.02)
    server = Server(tiny, tmp_path / "ck", most_samplers=1)
    try:
        with server.client() as service:
            training = lora(service, server)
            for _ in range(3):
                client = training.save_weights_and_get_sampling_client().result()
                assert client.sample(text(PROMPT), 1, params()).result().sequences
    finally:
        server.close()


def test_the_model_of_a_client_that_was_killed_makes_way(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from palaestra_train.tinker import service as module

    monkeypatch.setattr(module, "SILENT_S", 15.0)  # the SDK sends a heartbeat each 10 s
    server = Server(tiny, tmp_path / "ck", most_models=1)
    try:
        program = [sys.executable, "-c", CLIENT, server.url, server.name]
        with killed_after(program, stdout=subprocess.PIPE, text=True) as owner, server.client() as service:
            model = owner.stdout.readline().strip()
            raises_soon(lambda: lora(service, server), "--max-models")
            owner.kill()
            lora(service, server).forward_backward([supervised([5, 6, 7])], "cross_entropy").result()
            info = server.post("get_info", json.dumps({"model_id": model}).encode())
            assert (info[0], "its session has ended" in info[1]["detail"]) == (404, True)
    finally:
        server.close()


CLIENT = """
import sys, time, tinker
service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-local")
print(service.create_lora_training_client(sys.argv[2], rank=4).result().model_id, flush=True)
time.sleep(600)
"""


def test_a_checkpoint_of_another_model_is_refused(service: Any, server: Server, tmp_path: Path) -> None:
    path = lora(service, server).save_state("here").result().path
    make_tiny(tmp_path / "other", hidden=64, layers=2, seed=9)
    other = Server(tmp_path / "other", server.checkpoints)
    try:
        with other.client() as client:
            raises_soon(lambda: client.create_training_client_from_state(path).result(), path)
    finally:
        other.close()


def test_the_other_calls_of_the_list(service: Any, server: Server) -> None:
    training = lora(service, server)
    raises_soon(lambda: training.save_weights_external("out").result(), "save_state")
    path = training.save_state("listed", user_metadata={"a": "b"}).result().path
    before = weights_of(training)
    training.forward_backward([supervised([5, 6, 7])], "cross_entropy").result()
    training.optim_step(adam(1e-2)).result()
    raises_soon(lambda: lora(service, server, rank=4).load_state(path).result(), "LoRA settings")
    other = lora(service, server, seed=2)
    other.load_state(path).result()
    assert weights_of(other) == pytest.approx(before, abs=1e-6)
    training.load_state(path).result()
    assert weights_of(training) == pytest.approx(before, abs=1e-6)
    rest, run = service.create_rest_client(), training.model_id
    assert rest.get_training_run(run).result().last_checkpoint.tinker_path == path
    assert run in [each.training_run_id for each in rest.list_training_runs().result().training_runs]
    (listed,) = rest.list_checkpoints(run).result().checkpoints
    assert (listed.tinker_path, listed.user_metadata) == (path, {"a": "b"})
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    assert rest.list_checkpoints(run).result().checkpoints[0].expires_at is not None
    session = service.holder.get_session_id()
    assert session in rest.list_sessions().result().sessions
    assert run in rest.get_session(session).result().training_run_ids
    sampler = service.create_sampling_client(base_model=server.name).result()
    again = type(sampler).from_sampler_handle(sampler.get_sampler_handle(), api_key=KEY)
    assert again.get_base_model() == server.name
    assert rest.get_sampler(sampler._sampling_session_id).result().base_model == server.name
    raises_soon(lambda: rest.publish_checkpoint_from_tinker_path(path).result(), "404")
    raises_soon(lambda: rest.get_training_run("nobody").result(), "nobody")


def weighted_nll(logprobs: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
    return -(logprobs * weights).sum(), {}


def test_a_traced_custom_loss_runs_in_the_sdk(service: Any, server: Server) -> None:
    training = lora(service, server)
    handle = service.create_custom_loss(weighted_nll, {"logprobs": 1, "weights": 1}).result()
    data = [supervised([5, 6, 7])]
    expected = training.forward(data, "cross_entropy").result().metrics["loss:sum"]
    assert training.forward_backward_custom(data, handle).result().metrics["loss:sum"] == pytest.approx(expected)


@pytest.mark.slow
def test_a_killed_server_leaves_whole_checkpoints(tiny: Path, tmp_path: Path) -> None:
    """A process that saves is killed four times; each checkpoint on disk loads."""
    program = [sys.executable, "-c", KILLED, str(tiny), str(tmp_path / "ck")]
    from palaestra_train.tinker.checkpoints import CheckpointFolder
    from palaestra_train.tinker.model import BaseModel

    rng = random.Random(0)
    for _ in range(4):
        with killed_after(program, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"saving\n"
            time.sleep(rng.uniform(0.05, 0.6))
        folder = CheckpointFolder(tmp_path / "ck")
        folder.sweep()
        base = BaseModel(str(tiny), device="cpu")
        for found in folder.all():
            assert folder.load(found, base, optimizer=True).steps == found.steps
    assert folder.all()


KILLED = """
import sys
from pathlib import Path
from palaestra_train.tinker.checkpoints import CheckpointFolder, CheckpointPath
from palaestra_train.tinker.model import Adam, BaseModel, LoraSettings, Row, TrainedModel
import torch
model = TrainedModel(BaseModel(sys.argv[1], device="cpu"), LoraSettings(32, seed=0))
row = Row([5, 6, 7], {"target_tokens": torch.tensor([6, 7, 8])})
model.batch([row], "cross_entropy", {}, backward=True)
model.step(Adam())
print("saving", flush=True)
while True:
    place = CheckpointPath("run", "weights", "state")
    CheckpointFolder(Path(sys.argv[2])).save(model, place, optimizer=True, overwrite=True)
"""


@pytest.mark.parametrize("rank", [-1, 4097])
def test_an_impossible_rank_is_refused(service: Any, server: Server, rank: int) -> None:
    with pytest.raises(Exception, match=f"LoRA rank of {rank} is not possible"):
        lora(service, server, rank=rank)
