"""`palaestra serve`: run servers. This module defines the server for models; extensions define the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from palaestra.cli.plugin_group import PluginGroup
from palaestra.cli.server_options import address_options, json_option, print_url, read_token, token_file
from palaestra_slots.core.exits import told_to_stop


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
    from palaestra_slots.core.io.http_server import require_token
    from palaestra_tokens.config import APIServerConfig
    from palaestra_tokens.engines.transformers import TransformersEngine
    from palaestra_tokens.serving.model_server import ModelServer
    from palaestra_tokens.tokenizers import model_source, no_folder

    require_token(host, token)
    if "/" not in (source := model_source(model)) and not Path(source).exists():
        raise no_folder(Path(model))
    # Before the model is loaded, which may take long: a signal meanwhile then ends the server in order.
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
