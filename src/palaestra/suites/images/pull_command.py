"""`palaestra images pull` and `remove`: images of registries, stored on this machine without a container tool."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click

from palaestra.core.config import local_path
from palaestra.sandbox.images.pulled import PulledImage, PulledImages
from palaestra.sandbox.images.reference import image_name
from palaestra.sandbox.images.registry.pull import Progress, Pull
from palaestra.suites.images.task_images import user_access


@contextmanager
def _progress_bar(name: str) -> Iterator[Progress]:
    """Yield a function that shows the bytes which have arrived, on a terminal as a bar."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name[:60], total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


_store = click.option(
    "--store", default="", metavar="DIR", help="The folder of pulled images. Tasks can name images of the default only."
)


def _images(store: str) -> PulledImages:
    return PulledImages(local_path(store) if store else None)


@click.command("pull")
@click.option("--auth", default="", metavar="FILE", help="A file with credentials. Default: docker's config.json.")
@_store
@click.option("--plain-http", is_flag=True, help="Use http also for registries on other machines.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("names", metavar="NAME[:TAG][@DIGEST]...", nargs=-1, required=True)
def pull_command(auth: str, store: str, plain_http: bool, as_json: bool, names: tuple[str, ...]) -> None:
    """Pull images from registries without docker, and print their paths.

    \b
      palaestra images pull python:3.13
      palaestra images pull ghcr.io/owner/name:tag localhost:5000/name@sha256:DIGEST
      palaestra run terminalbench_2 --env.base_image "$(palaestra images pull ubuntu:24.04)"

    A name without a registry is one of docker.io. Tasks can name a pulled image, and the path is an OCI layout. Every
    blob is verified against its digest and stored once for all images. After a cut, the same command continues.
    Credentials come from `auths` in docker's config.json ($DOCKER_CONFIG or ~/.docker); credential helpers are not run.
    Connections use https, and http only to this machine or with --plain-http. Pulled images stay until `palaestra
    images remove`.
    """
    if auth and not local_path(auth).is_file():
        raise click.BadParameter(f"{local_path(auth)} is not a file", param_hint="--auth")
    pull = Pull(_images(store), user_access(auth, plain_http=plain_http))
    for name in names:  # before the first of them is pulled
        image_name(name)
    done: list[PulledImage] = []
    for name in names:
        with _progress_bar(name) as progress:
            done.append(asyncio.run(pull.image(name, progress)))
        if not as_json:
            click.echo(done[-1].path)
    if as_json:
        click.echo(json.dumps({"images": [asdict(image) for image in done]}, indent=2))


@click.command("remove")
@_store
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("names", metavar="NAME...", nargs=-1)
def remove_command(store: str, as_json: bool, names: tuple[str, ...]) -> None:
    """Remove pulled images, and all blobs that no other pulled image needs.

    \b
      palaestra images remove python:3.13
      palaestra images remove

    Without a NAME, this removes only what no name refers to: earlier images of a tag, and unfinished downloads.
    """
    images = _images(store).open()
    freed = images.remove([image_name(name) for name in names])
    if as_json:
        click.echo(json.dumps({"freed_bytes": freed, "folder": str(images.folder)}))
    else:
        click.echo(f"{freed / (1 << 20):.1f} MiB freed in {images.folder}", err=True)
