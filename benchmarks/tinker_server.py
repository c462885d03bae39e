"""What does the Tinker server cost? Requests, sampled tokens and training steps through the SDK, compared with bare
torch.

    python benchmarks/tinker_server.py             # needs the extra 'tinker': see `make test-torch`
    python benchmarks/tinker_server.py --quick

The server runs in a separate process, as for users, and the SDK is the real one. The peer is the same model in this
process: its decoder for sampled tokens, and forward, backward and AdamW on the same batch for the training step. The
benchmark also measures the largest difference between the log-probabilities of sampler and trainer, which must be at
most 1e-4.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _measure import Row, parse_options, report, with_ceiling

from palaestra_tokens.testing.tiny_model import make_tiny

KEY = "tml-local"
RANK, PROMPT_TOKENS, REPLY_TOKENS, REPLIES = 8, 32, 64, 64
AGREEMENT = 1e-4


@contextmanager
def server(model: Path, checkpoints: Path) -> Iterator[str]:
    """Run `palaestra serve tinker` in a separate process, and yield its address."""
    command = [sys.executable, "-m", "palaestra", "serve", "tinker", str(model), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        [*command, "--checkpoints", str(checkpoints)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def seconds(work: Callable[[], Any], times: int) -> float:
    """Return the median of several runs, after one run that is not counted."""
    work()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def data(sequences: list[list[int]], logprobs: list[list[float]]) -> list[Any]:
    """Return one datum per sampled reply, with alternating advantages."""
    from tinker import types

    zeros, found = [0.0] * (PROMPT_TOKENS - 1), []
    for index, (ids, own) in enumerate(zip(sequences, logprobs, strict=True)):
        inputs = {
            "target_tokens": ids[1:],
            "logprobs": zeros + own,
            "advantages": zeros + [1.0 if index % 2 else -1.0] * len(own),
        }
        found.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
    return found


def through_the_sdk(url: str, times: int) -> dict[str, float]:
    import tinker
    from tinker import types

    prompt = list(range(10, 10 + PROMPT_TOKENS))
    settings = types.SamplingParams(max_tokens=REPLY_TOKENS, stop=[], seed=1)
    with tinker.ServiceClient(base_url=url, api_key=KEY) as service:
        rest = tinker.RestClient(base_url=url, api_key=KEY)
        name = rest.get_server_capabilities().result().supported_models[0].model_name
        training = service.create_lora_training_client(name, rank=RANK, seed=0).result()
        sampler = training.save_weights_and_get_sampling_client().result()

        def requests() -> None:
            for waiting in [rest.get_server_capabilities() for _ in range(100)]:
                waiting.result()

        def sample() -> Any:
            return sampler.sample(types.ModelInput.from_ints(prompt), REPLIES, settings).result()

        replies = sample().sequences
        batch = data([prompt + list(each.tokens) for each in replies], [list(each.logprobs) for each in replies])

        def step() -> Any:
            trained = training.forward_backward(batch, "importance_sampling")
            training.optim_step(types.AdamParams(learning_rate=0.0)).result()
            return trained.result()

        outputs = [output["logprobs"].tolist()[PROMPT_TOKENS - 1 :] for output in step().loss_fn_outputs]
        pairs = (zip(own, each.logprobs, strict=True) for own, each in zip(outputs, replies, strict=True))
        return {
            "requests": 100 / seconds(requests, times),
            "sampled": REPLIES * REPLY_TOKENS / seconds(sample, times),
            "step": seconds(step, times),
            "difference": max(abs(a - b) for pair in pairs for a, b in pair),
        }


def bare_torch(model: Path, times: int) -> dict[str, float]:
    import torch

    from palaestra_tokens.engines.sampling import Sampling
    from palaestra_tokens.engines.torch_decoder import TorchDecoder
    from palaestra_train.tinker.model import BaseModel, LoraSettings

    base = BaseModel(str(model), device="cpu")
    module = base.copy(LoraSettings(RANK, seed=0))
    prompt = list(range(10, 10 + PROMPT_TOKENS))

    def sample() -> list[list[int]]:
        decoder = TorchDecoder(module)
        decoder.admit([prompt] * REPLIES, [Sampling(seed=seed) for seed in range(REPLIES)])
        steps = [decoder.step() for _ in range(REPLY_TOKENS)]
        return [prompt + [each[row][0] for each in steps] for row in range(REPLIES)]

    ids = torch.tensor(sample())
    trained = [tensor for tensor in module.parameters() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    advantages = torch.tensor([[1.0 if row % 2 else -1.0] for row in range(REPLIES)])

    def step() -> None:
        logprobs = module(input_ids=ids[:, :-1], use_cache=False).logits.log_softmax(-1)
        own = logprobs.gather(2, ids[:, 1:, None]).squeeze(2)[:, PROMPT_TOKENS - 1 :]
        (-(own - own.detach()).exp() * advantages).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"sampled": REPLIES * REPLY_TOKENS / seconds(sample, times), "step": seconds(step, times)}


def main() -> int:
    options = parse_options(__doc__)
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    times = 3 if options.quick else 10
    with tempfile.TemporaryDirectory() as work:
        model = Path(work) / "tiny"
        make_tiny(model)
        with server(model, Path(work) / "checkpoints") as url:
            ours = through_the_sdk(url, times)
        bare = bare_torch(model, times)
    rows = [
        Row("requests without a model, 100 concurrently", ours["requests"], "1/s"),
        Row(
            f"sampled tokens, {REPLIES} replies of one prompt",
            ours["sampled"],
            "tokens/s",
            ratio=ours["sampled"] / bare["sampled"],
        ),
        Row(
            f"training step, {REPLIES} x {PROMPT_TOKENS + REPLY_TOKENS} tokens",
            ours["step"] * 1e3,
            "ms",
            ratio=ours["step"] / bare["step"],
        ),
        with_ceiling(Row("largest difference of sampler and trainer", ours["difference"], "nats"), AGREEMENT),
    ]
    return report("The Tinker server through the SDK, compared with bare torch", rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
