"""The real trainers on a tiny model: sampler and trainer agree, steps change weights, checkpoints hold."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import importlib.util
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from note_environment import NOTE

import palaestra
from palaestra import ConfigError, Rollout, Slot, Task, environment
from palaestra.rollouts.export.token_rows import ExportedRow
from palaestra.rollouts.observe.training_steps import read_steps
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_slots import DiskError, EngineUnavailable, TrainerError
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.testing.tiny_model import make_tiny
from palaestra_train import TrainingReport
from palaestra_train.advantages import Batch
from palaestra_train.step_groups import verify_steps
from palaestra_train.tinker_client import TinkerTrainer
from palaestra_train.trainer import TrainedRow

pytestmark = [
    pytest.mark.slots,
    pytest.mark.torch,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the extra 'trl': make test-torch"),
]


@environment(toolsets=[])
def note(n: int = 6) -> Iterator[Task]:
    for i in range(n):
        yield Task(id=f"note-{i}", prompt="Write hello to note.txt", solution="echo hello > note.txt")


@note.tool
async def terminal(command: str, sandbox: Slot) -> str:
    """Run a command."""
    return (await sandbox.execute(command)).output


@note.score
async def some(rollout: Rollout, sandbox: Slot) -> float:
    """A command that ran is half of the reward, and chance decides over the rest, so that groups differ."""
    assert rollout.result is not None
    ran = any(message["role"] == "tool" and '"error"' not in message["content"] for message in rollout.result.messages)
    return 0.5 * ran + 0.5 * (rollout.index % 2)


SCORE = """@note.score
async def some(rollout: Rollout) -> float:
    return 0.5 * (rollout.index % 2)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(out, practice=60, hidden=64, layers=2)
    return out


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """What the SDK of Tinker leaves open is collected here, where warnings about it are no errors."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.delenv("TINKER_API_KEY", raising=False)


def train(
    folder: Path,
    trainer: Any,
    steps: int,
    resume: Path | None = None,
    *,
    tinker_url: str | None = None,
    **settings: Any,
) -> TrainingReport:
    training = {"steps": steps, "groups": 2, "eval_every": 0, "learning_rate": 1e-3, "lora_rank": 4, **settings}
    return asyncio.run(
        palaestra.train(
            note(),
            model=str(folder),
            trainer=trainer,
            tinker_url=tinker_url,
            group_size=4,
            resume=resume,
            training=training,
            max_agent_turns=2,
            max_token_length=24,
        )
    )


@pytest.mark.parametrize("trainer", ["trl", "tinker"])
def test_a_trainer_steps_saves_and_resumes(folder: Path, trainer: Any) -> None:
    if trainer == "tinker":
        pytest.importorskip("palaestra_train.tinker.model")
    first = train(folder, trainer, 2)
    assert first.result.difference < 1e-4
    again = train(folder, trainer, 3, first.run.folder)
    assert again.result.difference < 1e-4  # the weights that were saved sampled, and are trained
    lines = list(read_steps(first.run.folder))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["rows"] == 8 and line["loss"] != 0.0 for line in lines)
    rows = palaestra.open_run(first.run.folder).to_rows()
    assert [row["policy_version"] for row in rows] == ["0"] * 8 + ["1"] * 8 + ["2"] * 8


class Server:
    """A Tinker server as a process; its address stays over a restart."""

    def __init__(self, folder: Path, *words: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.command = [sys.executable, "-m", "palaestra", "serve", "tinker", str(folder), "--name", str(folder)]
        self.command += ["--port", str(self.port), "--checkpoints", "states", *words]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.slow
def test_a_server_that_is_killed_ends_the_training_which_can_resume(folder: Path) -> None:
    pytest.importorskip("palaestra_train.tinker.model")
    server, ended = Server(folder), threading.Event()

    def kill_after_a_step() -> None:
        while not ended.wait(0.05):
            if any(line["step"] >= 1 for run in Path("runs").glob("*/*") for line in read_steps(run)):
                server.kill()
                return

    killing = threading.Thread(target=kill_after_a_step)
    killing.start()
    try:
        with pytest.raises((TrainerError, EngineUnavailable), match=str(server.port)):
            train(folder, "tinker", 40, tinker_url=server.url)
    finally:
        ended.set()
        killing.join()
    server.start()
    (run,) = Path("runs").glob("*/*")
    done = max(line["step"] for line in read_steps(run))
    try:
        train(folder, "tinker", done + 1, run, tinker_url=server.url)
    finally:
        server.kill()
    assert [line["step"] for line in read_steps(run)] == list(range(1, done + 2))


def test_a_training_frees_its_model_of_the_server(folder: Path) -> None:
    pytest.importorskip("palaestra_train.tinker.model")
    server = Server(folder, "--max-models=1")
    try:
        for _ in range(2):
            assert train(folder, "tinker", 1, tinker_url=server.url).result.steps == 1
    finally:
        server.kill()


def test_a_training_that_is_killed_resumes_on_a_server_of_one_model(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("palaestra_train.tinker.model")
    server = Server(folder, "--max-models=1")
    (tmp_path / "note_env.py").write_text(NOTE + SCORE)
    train = [sys.executable, "-m", "palaestra", "train", f"--tinker-url={server.url}"]
    words = ["note_env.py", "--trainer=tinker", f"--model={folder}", "--out=run", "--unchecked=note", "--steps=1000"]
    words += ["--eval-every=0", "--group=4", "--groups=1", "--env.max_agent_turns=2", "--env.max_token_length=24"]
    try:
        with subprocess.Popen([*train, *words]) as training:
            while training.poll() is None and not list(Path("run/training").glob("checkpoints/step-*/state.json")):
                time.sleep(0.1)
            training.kill()
        done = max(line["step"] for line in read_steps(Path("run")))
        resumed = subprocess.run(
            [*train, "--resume=run", f"--steps={done + 1}"], capture_output=True, text=True, check=False
        )
        assert resumed.returncode == 0, resumed.stderr
        assert [line["step"] for line in read_steps(Path("run"))] == list(range(1, done + 2))
    finally:
        server.kill()


def test_an_interrupted_training_names_the_command_that_resumes_it(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("palaestra_train.tinker.model")
    server = Server(folder)
    (tmp_path / "note_env.py").write_text(NOTE + SCORE)
    words = ["note_env.py", "--trainer=tinker", f"--tinker-url={server.url}", f"--model={folder}", "--unchecked=note"]
    words += ["--steps=1000", "--eval-every=0", "--group=4", "--groups=1", "--env.max_agent_turns=2"]
    command = [sys.executable, "-m", "palaestra", "train", *words, "--env.max_token_length=24", "--out=run"]
    try:
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as training:
            while training.poll() is None and not list(Path("run/training").glob("checkpoints/step-*/state.json")):
                time.sleep(0.1)
            os.killpg(training.pid, signal.SIGINT)
            assert training.stderr is not None
            said = training.stderr.read()
        assert training.returncode == 130
        (line,) = [line for line in said.splitlines() if "resume" in line]
        again = shlex.split(line.partition("continue with palaestra ")[2])
        assert again == ["train", "--tinker-url", server.url, "--resume", "run"], said
        resumed = [sys.executable, "-m", "palaestra", *again, f"--steps={len(list(read_steps(Path('run')))) + 1}"]
        subprocess.run(resumed, check=True)
    finally:
        server.kill()


@pytest.mark.slow
def test_the_server_of_a_training_that_is_killed_ends_with_it(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("palaestra_train.tinker.model")
    (tmp_path / "note_env.py").write_text(NOTE + SCORE)
    words = ["train", "note_env.py", "--trainer=tinker", f"--model={folder}", "--out=run", "--unchecked=note"]
    words += ["--steps=1000", "--eval-every=0", "--group=4", "--groups=1"]
    words += ["--env.max_agent_turns=2", "--env.max_token_length=24"]
    with subprocess.Popen([sys.executable, "-m", "palaestra", *words], stderr=subprocess.DEVNULL) as training:
        while training.poll() is None and not list(read_steps(Path("run"))):
            time.sleep(0.1)
        servers = [os.pidfd_open(pid) for pid in serving(folder)]
        training.kill()
    assert len(servers) == 2  # the server, and what watches over it
    for each in servers:
        assert select.select([each], [], [], 30)[0], "it outlived the training"
        os.close(each)


def serving(model: Path) -> Iterator[int]:
    """The processes with the words `serve tinker MODEL`."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if "\0".join(("serve", "tinker", str(model))) in path.read_text():
                yield int(path.parent.name)


def saved_weights(checkpoint: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    if (state := checkpoint / "tinker.json").exists():
        (file,) = Path(json.loads(state.read_text())["folder"]).glob("adapter*.safetensors")
        return load_file(file)
    return load_file(checkpoint / "model/model.safetensors")


@pytest.mark.parametrize("trainer", ["trl", "tinker"])
def test_the_same_steps_again_give_the_same_weights(folder: Path, trainer: Any) -> None:
    if trainer == "tinker":
        pytest.importorskip("palaestra_train.tinker.model")
    settings = {"save_every": 1, "warm_start": "oracle", "warm_steps": 2}
    first = train(folder, trainer, 2, **settings)
    weights = saved_weights(first.result.last)
    kept = sorted((first.run.folder / "training/checkpoints").iterdir())
    before = saved_weights(kept[0])
    assert any(not (weights[name] == before[name]).all() for name in before)
    for each in kept[1:]:  # as if the training had been killed in the first step after the first checkpoint
        shutil.rmtree(each)
    again = train(folder, trainer, 2, first.run.folder, **settings)
    assert [line["step"] for line in read_steps(first.run.folder)] == [1, 2, 3, 4]
    replayed = saved_weights(again.result.last)
    assert max(float((weights[name] - replayed[name]).abs().max()) for name in weights) < 1e-5


def test_a_checkpoint_of_a_model_of_another_size_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "same-name")
    first = train(tmp_path / "same-name", "trl", 1)
    make_tiny(tmp_path / "same-name", hidden=32, layers=1, force=True)
    with pytest.raises(ConfigError, match="step-000001"):
        train(tmp_path / "same-name", "trl", 2, first.run.folder)


@pytest.mark.parametrize(("trainer", "rate"), [("trl", 1e38), ("tinker", 1e37)])
def test_a_step_that_ruins_the_weights_is_not_saved(folder: Path, trainer: Any, rate: float) -> None:
    if trainer == "tinker":
        pytest.importorskip("palaestra_train.tinker.model")
    with pytest.raises(TrainerError, match=r"weight_norm is (inf|nan)|ruined the weights"):
        train(folder, trainer, 3, learning_rate=rate)
    (run,) = Path("runs").glob("note-*/*")
    assert not list(run.glob("training/checkpoints/*"))
    assert train(folder, trainer, 2, run).result.steps == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
@pytest.mark.parametrize("trainer", ["trl", "tinker"])
def test_a_full_disk_ends_a_training_which_can_resume(folder: Path, trainer: Any) -> None:
    if trainer == "tinker":
        pytest.importorskip("palaestra_train.tinker.model")
    small = Path("runs" if trainer == "trl" else "runs/tinker-states")
    small.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", small], check=True)
    try:
        with pytest.raises((DiskError, TrainerError), match=r"No space left|cannot write"):
            train(folder, trainer, 2)
        (run,) = Path("runs").glob("note-*/*")
        subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
        assert train(folder, trainer, 2, run).result.steps == 2
        assert [line["step"] for line in read_steps(run)] == [1, 2]
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        train(Path("/nowhere"), "trl", 1)


async def test_an_agent_trains_a_model(folder: Path, tmp_path: Path) -> None:
    """The rl_* tools: the training is `palaestra train` with TRL, and its checkpoint a model."""
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "note_env.py").write_text(NOTE + SCORE)
    settings = palaestra.ToolSettings(
        rl_dir=str(tmp_path / "rl"),
        rl_model=str(folder),
        rl_unchecked=["note"],
        rl_locked={"learning_rate": 1e-3, "max_token_length": 24},
        rl_status_interval_s=0,
    )
    edits = {"steps": 1, "groups": 1, "group_size": 4, "eval_every": 0, "max_agent_turns": 2}
    async with ToolRuntime(build_tool_registry(["rl"], settings=settings), None, "t") as tools:

        async def call(name: str, /, **arguments: Any) -> dict[str, Any]:
            return json.loads(await tools.handle(f"rl_{name}", arguments))

        assert (await call("select_environment", name="note"))["environment"] == "note"
        tried = await call("test_inference", num_steps=1, group_size=2)
        assert tried["models_tested"][0]["total_completions"] == 2, tried
        for field, value in edits.items():
            assert "error" not in await call("edit_config", field=field, value=value)
        started = await call("start_training")
        assert started["status"] == "started", started
        while (  # noqa: ASYNC110
            status := await call("check_status", run_id=started["run_id"])
        )["status"] in ("starting", "running"):
            await asyncio.sleep(0.5)
        assert status["status"] == "completed", status
        results = await call("get_results", run_id=started["run_id"])
    assert results["final_metrics"]["step"] == 1
    assert results["final_metrics"]["logprob_difference"] < 1e-4
    assert list(Path(results["result"]["last"]).rglob("*.safetensors"))


def mixed(tokens: int, rows: int = 8) -> tuple[list[Any], Any, Any]:
    """Rows that a random model in bfloat16 has sampled, and the same model in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=tokens + 16, tie_word_embeddings=True,
        )
    )  # fmt: skip
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(16.0 if weight.ndim > 1 else 1.0)  # as sure of its tokens as a trained model
    sampler = copy.deepcopy(model).to(torch.bfloat16)
    ids = torch.randint(0, 512, (rows, 4))
    with torch.no_grad():
        ids = sampler.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0)

        def logprobs(of: Any) -> Any:
            found = of(ids).logits[:, :-1].float().log_softmax(-1)
            return found.gather(2, ids[:, 1:, None])[..., 0][:, 3:]

        return ids.tolist(), logprobs(sampler).tolist(), logprobs(model).tolist()


@pytest.mark.parametrize("tokens", [400, 2000])
def test_long_rows_of_a_sampler_in_bfloat16_are_trained(tokens: int) -> None:
    ids, sampled, own = mixed(tokens)
    batch = Batch()
    for number, (row, logprobs) in enumerate(zip(ids, sampled, strict=True)):
        completion = row[4:]
        made = ExportedRow(
            prompt_ids=row[:4], completion_ids=completion, mask=[1] * tokens, logprobs=logprobs, reward=0.0,
            group_id="g", segment=0, policy_version="0", versions=[(0, tokens, "0")], spans=[], segments=1,
            rollout_id=f"g/{number}", task_id="g", index=number, outcome="natural", reason="start",
            finish_reason="length", source="engine",
        )  # fmt: skip
        batch.rows.append(TrainedRow(made, 1.0))
    far = [any(abs(a - b) > 0.1 for a, b in zip(*each, strict=True)) for each in zip(sampled, own, strict=True)]
    assert all(far)  # the earlier limit, on the maximum over a row, refused every row
    batch.weighing(palaestra.TrainingConfig(), step=1)(batch.rows, own)
    found = batch.mismatch
    assert len(batch.rows) == len(ids)
    assert found.masked <= 0.001 * found.tokens
    assert 0.001 < found.mean < 0.1
    assert 0 < found.k3 < 0.01
    assert abs(found.k1) < 0.01


async def test_states_end_with_their_checkpoints(folder: Path, tmp_path: Path) -> None:
    served, checkpoints = APIServerConfig(model_name=str(folder)), tmp_path / "run" / "training" / "checkpoints"
    trainer = TinkerTrainer(served, palaestra.TrainingConfig(lora_rank=4), local=tmp_path / "states")
    checkpoints.mkdir(parents=True)
    await trainer.open()
    try:
        for step in (1, 2, 2, 3, 4, 5):  # step 2 is taken again
            part, done = (checkpoints / f"step-{step:06d}{ending}" for ending in (".part", ""))
            part.mkdir()
            await trainer.save(part)
            shutil.rmtree(done, ignore_errors=True)
            part.rename(done)
            for old in sorted(checkpoints.iterdir())[:-2]:
                shutil.rmtree(old)
        left = {path.name for path in (tmp_path / "states").glob("*/weights/*")}
        # That of the checkpoint which went after the last state was saved goes with the next one.
        assert {name[len("run-step-") :].partition(".")[0] for name in left} == {"000003", "000004", "000005"}
        assert len(left) == 6  # a description and a folder each
        for each in checkpoints.iterdir():
            await trainer.load(each, "4")
    finally:
        await trainer.aclose()


@pytest.mark.parametrize("trainer", ["trl", "tinker"])
def test_rollouts_overlap_with_steps(folder: Path, trainer: Any) -> None:
    if trainer == "tinker":
        pytest.importorskip("palaestra_train.tinker.model")
    report = train(folder, trainer, 4, async_steps=2, learning_rate=1e-3)
    lines = list(read_steps(report.run.folder))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert max(line["most_staleness"] for line in lines) in (1, 2)
    assert verify_steps(report.run.folder).steps == 4
    assert lines[0]["logprob_difference"] < 1e-4


@pytest.mark.parametrize("trainer", ["trl", "tinker"])
@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_losses_take_a_step_with_a_schedule_and_a_reference(folder: Path, trainer: Any, loss: str) -> None:
    if trainer == "tinker":
        pytest.importorskip("palaestra_train.tinker.model")
    report = train(folder, trainer, 2, loss=loss, kl_weight=0.1, schedule="linear", advantage="rloo")
    lines = list(read_steps(report.run.folder))
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-3, 5e-4])
    assert abs(lines[0]["reference_kl"]) < 1e-3 < 1
    assert lines[0]["loss"] != lines[1]["loss"]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rates_are_those_of_transformers(schedule: Any) -> None:
    import torch
    from transformers import get_scheduler

    config = palaestra.TrainingConfig(steps=20, warmup=5, learning_rate=0.3, schedule=schedule)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    theirs = get_scheduler(name, optimizer, num_warmup_steps=5, num_training_steps=20)
    for step in range(20):
        assert config.rate(step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_server_samples_with_the_weights_of_each_step(folder: Path, ahead: int) -> None:
    """With `palaestra serve model`, which has SGLang's routes for new weights."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", "model", str(folder), "--port", str(port)]
    with subprocess.Popen([sys.executable, "-m", "palaestra", *words], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            training = {"steps": 3, "groups": 2, "eval_every": 0, "learning_rate": 1e-3, "async_steps": ahead}
            report = asyncio.run(
                palaestra.train(
                    note(), model=str(folder), group_size=4, training=training, max_agent_turns=2,
                    max_token_length=24, base_url=url, server_type="sglang",
                )
            )  # fmt: skip
        finally:
            server.terminate()
    lines = list(read_steps(report.run.folder))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert ahead or report.result.difference < 1e-4  # the server has the weights of the step
    assert verify_steps(report.run.folder).violation == ""
    versions = {version for row in palaestra.open_run(report.run.folder).to_rows() for _, _, version in row["versions"]}
    assert versions >= {"0", "1"}
