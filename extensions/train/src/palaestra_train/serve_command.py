"""`palaestra serve api` and `palaestra serve tinker`: servers for trainers and for programs that train."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from palaestra.cli.server_options import address_options, json_option, print_url, read_token, token_file
from palaestra.envs.config.host_path import HostPath
from palaestra_slots.core.exits import told_to_stop


@click.command("api")
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
    """Accept scored groups from environments and serve them in batches to a trainer (Atropos trajectory API).

    \b
      palaestra serve api --store groups.jsonl
      python my_env.py serve --env.rollout_server_url http://127.0.0.1:8000 …

    With --store, received groups survive a restart; without it, they are kept in memory only. To listen on more than
    the loopback interface, set a token, in --token-file or in the variable TRAJECTORY_SERVER_TOKEN. Callers send it as
    a bearer token (`--env.rollout_server_token`, best in a configuration file).
    """
    token = read_token(token_file, "TRAJECTORY_SERVER_TOKEN")
    asyncio.run(_serve_trajectories(host, port, store, max_groups, max_mib << 20, token))


async def _serve_trajectories(
    host: str, port: int, store: Path | None, most_groups: int, most_bytes: int, token: str | None
) -> None:
    from palaestra_train.atropos.trajectory_server import serving

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


@click.command("tinker")
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
@click.option(
    "--pass-memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Most memory of one forward and backward pass. Default: 0.125 on a CPU, half of the free memory of a GPU.",
)
@click.option("--seed", type=int, help="The seed for requests without one. The same seed gives the same samples.")
@token_file
@json_option
@click.argument("model")
def tinker(host: str, port: int, checkpoints: Path, model: str, token_file: Path | None, **settings: Any) -> None:
    """Train and sample a model on this machine for programs that use the Tinker SDK (0.38), unchanged.

    \b
      palaestra model tiny /tmp/tiny --practice 150
      palaestra serve tinker /tmp/tiny --port 8010
      TINKER_BASE_URL=http://127.0.0.1:8010 TINKER_API_KEY=tml-local python train.py

    MODEL is a folder, or the OWNER/NAME of a model on the hub. In the program, set base_model to the name that the
    server prints. Several clients can train LoRA adapters and full weights (rank=0) concurrently. To listen on more
    than the loopback interface, set a token, in --token-file or in the variable TINKER_SERVER_TOKEN. It must
    start with tml-; clients set it as TINKER_API_KEY. Needs the extra 'tinker'. docs/tinker.md lists the calls and the
    losses.
    """
    token = read_token(token_file, "TINKER_SERVER_TOKEN")
    settings["most_models"], settings["most_samplers"] = settings.pop("max_models"), settings.pop("max_samplers")
    asyncio.run(_serve_tinker(model, checkpoints, host, port, token, settings))


async def _serve_tinker(
    model: str, checkpoints: Path, host: str, port: int, token: str | None, settings: dict[str, Any]
) -> None:
    from palaestra_slots.core.errors import ConfigError
    from palaestra_slots.core.extras import install_command
    from palaestra_tokens.tokenizers import model_source, no_folder

    try:
        from palaestra_train.tinker.server import serving
        from palaestra_train.tinker.service import ServiceSettings
    except ImportError as error:
        raise ConfigError(
            f"The training server needs the extra 'tinker' ({error}): {install_command('tinker')}"
        ) from None
    if "/" not in (source := model_source(model)) and not Path(source).exists():
        raise no_folder(Path(model))
    stop = told_to_stop()
    async with serving(model, checkpoints, host, port, token=token, settings=ServiceSettings(**settings)) as server:
        print_url(server.url)
        click.echo(f"base_model={server.name!r}; checkpoints in {checkpoints}", err=True)
        await stop.wait()
