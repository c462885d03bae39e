"""`palaestra images`: root file systems of Debian and Ubuntu, and images of registries, without a container tool."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click

from palaestra_slots.core.config import local_path
from palaestra_slots.core.types import JSON
from palaestra_slots.images.debian_root import ROOTS, make_root, roots
from palaestra_slots.images.task_images import user_access
from palaestra_slots.sandbox.images.pulled import PulledImage, PulledImages
from palaestra_slots.sandbox.images.reference import image_name
from palaestra_slots.sandbox.images.registry.pull import Progress, Pull


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


_folder = click.option("--dir", "folder", default=ROOTS, show_default=True, help="The folder of root file systems.")


@click.command("make")
@_folder
@click.option("--include", multiple=True, metavar="PACKAGE", help="A further package; repeatable.")
@click.option("--mirror", default="", metavar="URL", help="The mirror of the packages. Default: the release's own.")
@click.option(
    "--keyring", default="", metavar="FILE", help="The keyring for the signatures. Default: the distribution's."
)
@click.option("--insecure", is_flag=True, help="Do not verify signatures.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("release", metavar="RELEASE")
def make_command(
    folder: str, include: tuple[str, ...], mirror: str, keyring: str, insecure: bool, as_json: bool, release: str
) -> None:
    """Make a root file system of Debian or Ubuntu without docker, and print its path.

    \b
      palaestra images make debian:12
      palaestra images make ubuntu:24.04 --include python3 --include git
      palaestra run terminalbench_2 --env.base_image "$(palaestra images make debian:12)"

    RELEASE is debian:11, debian:12, debian:13, ubuntu:22.04 or ubuntu:24.04. mmdebstrap or debootstrap must be
    installed; mmdebstrap needs no root. The packages come from the network, and their signatures are verified with
    the distribution's keyring (debian-archive-keyring or ubuntu-archive-keyring). Debian 12 has no package of Ubuntu's
    keyring: copy the file from a machine with Ubuntu and name it with --keyring.
    """
    key = str(local_path(keyring)) if keyring else ""
    made = make_root(release, local_path(folder), include=include, mirror=mirror, verify=not insecure, keyring=key)
    path = asyncio.run(made)
    click.echo(json.dumps({"release": release, "path": str(path)}) if as_json else path)


@click.command("list")
@_folder
@click.option("--store", default="", metavar="DIR", help="The folder of pulled images.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(folder: str, store: str, as_json: bool) -> None:
    """List the root file systems on this machine (name, size, source and path) and the pulled images.

    \b
      palaestra images list
      palaestra images list --json | jq -r '.roots[].path, .pulled[].path'
    """
    found, images = roots(local_path(folder)), PulledImages(local_path(store) if store else None).images()
    if as_json:
        report: dict[str, JSON] = {
            "roots": [asdict(root) for root in found],
            "pulled": [asdict(image) for image in images],
        }
        click.echo(json.dumps(report, indent=2))
        return
    for root in found:
        click.echo(f"{root.name:<32} {root.bytes / (1 << 20):7.0f} MiB  {root.source}  {root.path}")
    for image in images:
        click.echo(f"{image.name:<32} {image.bytes / (1 << 20):7.0f} MiB  pulled  {image.path}")
    if not found and not images:
        click.echo(
            f"there are no root file systems in {folder}; to get one: palaestra images make debian:12, or palaestra "
            "images pull debian:12",
            err=True,
        )
