"""`palaestra serve`: run servers. This module defines the servers for trainers and models. `serve_tools.py` defines the
servers for tools and slots."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from palaestra.cli.plugin_group import PluginGroup
from palaestra.cli.serve_tools import executor, tools
from palaestra.cli.server_options import address_options, json_option, print_url, read_token, token_file
from palaestra.core.exits import told_to_stop
from palaestra.core.host_path import HostPath


class _ServeGroup(PluginGroup):
    prefix = "serve"


@click.group(
    "serve",
    cls=_ServeGroup,
    help="""Run servers.

    \b
      palaestra serve api --store groups.jsonl      # between environments and a trainer
      palaestra serve model /tmp/tiny               # a small model, for development
      palaestra serve tinker /tmp/tiny              # training and sampling for the Tinker SDK
      palaestra serve executor --slots 32           # slots and tools, for other programs
      palaestra serve tools my_tools.py             # tools that need no slot, for other machines' executors
      palaestra serve e2b                           # sandboxes, for programs that use the E2B SDK
    """,
)
def command() -> None:
    pass


@command.command(
    "api",
    help="""Accept scored groups from environments and serve them in batches to a trainer (Atropos trajectory API).

    \b
      palaestra serve api --store groups.jsonl
      python my_env.py serve --env.rollout_server_url http://127.0.0.1:8000 …

    With --store, received groups survive a restart; without it, they are kept in memory only. To listen on more than
    the loopback interface, set a token, in --token-file or in the variable TRAJECTORY_SERVER_TOKEN. Callers send it as
    a bearer token (`--env.rollout_server_token`, best in a configuration file).
    """,
)
@address_options(8000)
@click.option("--store", type=HostPath(dir_okay=False), help="The file that stores received groups.")
@click.option(
    "--max-groups",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="Maximum number of groups queued for the trainer.",
)
@click.option(
    "--max-mib",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    help="Maximum size of the queued groups in MiB.",
)
@token_file
@json_option
def api(host: str, port: int, store: Path | None, max_groups: int, max_mib: int, token_file: Path | None) -> None:
    token = read_token(token_file, "TRAJECTORY_SERVER_TOKEN")
    asyncio.run(_serve(host, port, store, max_groups, max_mib << 20, token))


async def _serve(
    host: str, port: int, store: Path | None, most_groups: int, most_bytes: int, token: str | None
) -> None:
    from palaestra.trainers.atropos.trajectory_server import serving

    stop = told_to_stop()
    async with serving(host, port, store=store, most_groups=most_groups, most_bytes=most_bytes, token=token) as url:
        print_url(url)
        click.echo(
            f"groups are stored in {store}"
            if store
            else "groups are kept in memory only; with --store FILE, they survive a restart",
            err=True,
        )
        await stop.wait()


@command.command(
    "model",
    help="""Serve a `transformers` model in this process, for development and tests, not for heavy load.

    \b
      palaestra model tiny /tmp/tiny
      palaestra serve model /tmp/tiny --port 8000
      palaestra run my_env.py --base-url http://127.0.0.1:8000/v1 --model /tmp/tiny
      palaestra run my_env.py --base-url http://127.0.0.1:8000 --openai.server_type vllm --model /tmp/tiny

    The server supports chat completions with tools, and the token APIs of vLLM and SGLang; `palaestra doctor URL`
    checks it. A POST of {"model_path": FOLDER} to /update_weights_from_disk reloads the weights, as SGLang does.
    MODEL is a folder, or the OWNER/NAME of a model on the hub. To listen on more than the loopback interface, set a
    token, in --token-file or in the variable MODEL_SERVER_TOKEN; callers send it as their API key. Needs the
    extra 'train'.
    """,
)
@address_options(8000)
@click.option(
    "--tool-parser", default="hermes", show_default=True, help="The format in which the model writes tool calls."
)
@click.option("--device", help="The device: cpu, cuda, … Default: the best available.")
@click.option("--seed", type=int, help="The seed for requests without one. The same seed gives the same samples.")
@token_file
@json_option
@click.argument("model")
def model(
    host: str, port: int, tool_parser: str, device: str | None, seed: int | None, token_file: Path | None, model: str
) -> None:
    token = read_token(token_file, "MODEL_SERVER_TOKEN")
    asyncio.run(_serve_model(host, port, tool_parser, device, seed, model, token))


async def _serve_model(
    host: str, port: int, tool_parser: str, device: str | None, seed: int | None, model: str, token: str | None
) -> None:
    from palaestra.core.io.http_server import require_token
    from palaestra.inference.config import APIServerConfig
    from palaestra.inference.engines.transformers import TransformersEngine
    from palaestra.inference.serving.model_server import ModelServer
    from palaestra.inference.tokenizers import no_folder

    require_token(host, token)
    if "/" not in model and not Path(model).exists():
        raise no_folder(Path(model))
    stop = told_to_stop()
    config = APIServerConfig(server_type="transformers", model_name=model, tool_parser=tool_parser)
    engine = TransformersEngine(config, device=device, seed=seed)
    await engine.start()
    try:
        async with ModelServer(engine, host=host, port=port, token=token, load=engine.load_weights) as server:
            print_url(server.url)
            click.echo(f"use it with palaestra run or chat: --base-url {server.url}/v1 --model {model}", err=True)
            await stop.wait()
    finally:
        await engine.aclose()


@command.command(
    "tinker",
    help="""Train and sample a model on this machine for programs that use the Tinker SDK (0.38), unchanged.

    \b
      palaestra model tiny /tmp/tiny --practice 150
      palaestra serve tinker /tmp/tiny --port 8010
      TINKER_BASE_URL=http://127.0.0.1:8010 TINKER_API_KEY=tml-local python train.py

    MODEL is a folder, or the OWNER/NAME of a model on the hub. In the program, set base_model to the name that the
    server prints. Several clients can train LoRA adapters and full weights (rank=0) concurrently. To listen on more
    than the loopback interface, set a token, in --token-file or in the variable TINKER_SERVER_TOKEN. It must
    start with tml-; clients set it as TINKER_API_KEY. Needs the extra 'tinker'. docs/tinker.md lists the calls and the
    losses.
    """,
)
@address_options(8000)
@click.option(
    "--checkpoints",
    type=HostPath(file_okay=False),
    default=Path("tinker-checkpoints"),
    show_default=True,
    help="The folder for saved states and sampler weights.",
)
@click.option("--name", help="The model's name for clients. Default: its folder, where clients find the tokenizer.")
@click.option("--device", help="The device: cpu, cuda, … Default: the best available.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="The data type of the weights. In float32, sampler and trainer agree on log-probabilities to 1e-4.",
)
@click.option(
    "--max-models",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Maximum number of models in training.",
)
@click.option(
    "--max-samplers",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Maximum number of sampler weights in memory. Weights that were saved by name are loaded again when needed.",
)
@click.option("--seed", type=int, help="The seed for requests without one. The same seed gives the same samples.")
@token_file
@json_option
@click.argument("model")
def tinker(host: str, port: int, checkpoints: Path, model: str, token_file: Path | None, **settings: Any) -> None:
    token = read_token(token_file, "TINKER_SERVER_TOKEN")
    settings["most_models"], settings["most_samplers"] = settings.pop("max_models"), settings.pop("max_samplers")
    asyncio.run(_serve_tinker(model, checkpoints, host, port, token, settings))


async def _serve_tinker(
    model: str, checkpoints: Path, host: str, port: int, token: str | None, settings: dict[str, Any]
) -> None:
    from palaestra.core.errors import ConfigError
    from palaestra.core.extras import install_command
    from palaestra.inference.tokenizers import no_folder

    try:
        from palaestra.trainers.tinker.server import serving
        from palaestra.trainers.tinker.service import ServiceSettings
    except ImportError as error:
        raise ConfigError(
            f"The training server needs the extra 'tinker' ({error}): {install_command('tinker')}"
        ) from None
    if "/" not in model and not Path(model).exists():
        raise no_folder(Path(model))
    stop = told_to_stop()
    async with serving(model, checkpoints, host, port, token=token, settings=ServiceSettings(**settings)) as server:
        print_url(server.url)
        click.echo(f"base_model={server.name!r}; checkpoints in {checkpoints}", err=True)
        await stop.wait()


command.add_command(tools)
command.add_command(executor)
