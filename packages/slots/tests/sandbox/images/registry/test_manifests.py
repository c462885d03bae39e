"""What a registry sends is an image with bounded blobs, or an error that names what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden_messages import raises
from image_registry import DOCKER, OCI, descriptor, index, manifest
from palaestra_slots.core.errors import ImageError
from palaestra_slots.sandbox.images.registry import manifests
from palaestra_slots.sandbox.images.registry.manifests import Blob

CONFIG = b'{"os": "linux", "architecture": "amd64"}'
GOOD = json.loads(manifest(CONFIG, [b"one", b"two", b"one"]))
LAYER = GOOD["layers"][0]
CHILD = manifest(CONFIG, [b"one"])
OURS = {"os": "linux", "architecture": "amd64"}


def read(found: object, stated: str = "") -> dict[str, Any]:
    return manifests.read(found if isinstance(found, bytes) else json.dumps(found).encode(), stated, "name")


def checked(found: object) -> manifests.ImageManifest:
    return manifests.image_manifest(read(found), Blob(f"sha256:{'0' * 64}", 1), "name", 1 << 20)


def test_an_image_has_its_layers_in_order_and_each_blob_once() -> None:
    made = checked(GOOD)
    assert [layer.size for layer in made.layers] == [3, 3, 3]
    assert len(made.blobs) == 3
    assert made.bytes == len(CONFIG) + 6
    bare = {key: value for key, value in GOOD.items() if key != "mediaType"}
    assert read(bare, f"{OCI}.manifest.v1+json; charset=utf-8")["mediaType"] == f"{OCI}.manifest.v1+json"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"schemaVersion": 1, "fsLayers": []}, "schema 1"),
        ({"mediaType": f"{DOCKER}.distribution.manifest.v1+prettyjws"}, "schema 1"),
        ({**GOOD, "mediaType": "application/vnd.cncf.helm.chart"}, "not an image"),
        ({**GOOD, "mediaType": {"a": 1}}, "not an image"),
        ({**GOOD, "manifests": []}, "fields of its type"),
        ({**GOOD, "mediaType": f"{OCI}.index.v1+json"}, "fields of its type"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "cannot be read"),
        (b"\xff", "cannot be read"),
        ({**GOOD, "layers": []}, "1 to 1000 layers"),
        ({**GOOD, "layers": [LAYER] * 1001}, "1 to 1000 layers"),
        ({**GOOD, "layers": {"a": 1}}, "1 to 1000 layers"),
        ({**GOOD, "layers": [7]}, "not a digest"),
        ({**GOOD, "layers": [{**LAYER, "digest": "sha256:../../../etc/cron.d/x"}]}, "not a digest"),
        ({**GOOD, "layers": [{**LAYER, "digest": LAYER["digest"] + "\n"}]}, "not a digest"),
        ({**GOOD, "layers": [{**LAYER, "digest": LAYER["digest"].upper()}]}, "not a digest"),
        ({**GOOD, "layers": [{**LAYER, "digest": "sha512:" + "a" * 128}]}, "not a digest"),
        ({**GOOD, "layers": [{**LAYER, "size": -1}]}, "has the size"),
        ({**GOOD, "layers": [{**LAYER, "size": True}]}, "has the size"),
        ({**GOOD, "layers": [{**LAYER, "size": 1e3}]}, "has the size"),
        ({**GOOD, "layers": [{**LAYER, "size": 1 << 70}]}, "has the size"),
        ({**GOOD, "layers": [LAYER, {**LAYER, "size": 4}]}, "two sizes"),
        ({**GOOD, "layers": [{**LAYER, "mediaType": f"{OCI}.layer.nondistributable.v1.tar+gzip"}]}, "foreign"),
        ({**GOOD, "layers": [{**LAYER, "mediaType": f"{DOCKER}.image.rootfs.foreign.diff.tar.gzip"}]}, "foreign"),
        ({**GOOD, "layers": [{**LAYER, "mediaType": "application/x\x1b[2J"}]}, "layer of type application/x$"),
        ({**GOOD, "config": {**GOOD["config"], "mediaType": "application/vnd.oci.empty.v1+json"}}, "its configuration"),
        ({**GOOD, "config": {**GOOD["config"], "size": 9 << 20}}, "has the size"),
        ({**GOOD, "config": None}, "not a digest"),
        (
            {**GOOD, "layers": [{**LAYER, "digest": f"sha256:{n:064x}", "size": 1 << 19} for n in range(1, 4)]},
            "limit of one image",
        ),
    ],
)
def test_a_hostile_manifest_is_refused(found: object, why: str) -> None:
    with pytest.raises(ImageError, match=why):
        checked(found)


def test_addresses_in_a_manifest_are_not_used() -> None:
    assert checked({**GOOD, "layers": [{**LAYER, "urls": ["http://192.0.2.1/"]}]}).layers == checked(GOOD).layers[:1]


def test_an_index_has_the_image_for_this_machine() -> None:
    made = read(index({"arm64": manifest(CONFIG, [b"other"]), "amd64": CHILD}))
    assert manifests.manifest_for(made, "amd64", "name").size == len(CHILD)
    with raises(ImageError, "linux/riscv64", "linux/arm64", "linux/amd64"):
        manifests.manifest_for(made, "riscv64", "name")


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([descriptor(CHILD, f"{OCI}.index.v1+json", platform=OURS)], "contains an index"),
        ([descriptor(CHILD, f"{DOCKER}.distribution.manifest.list.v2+json", platform=OURS)], "contains an index"),
        ([descriptor(CHILD, "text/plain", platform=OURS)], "not a manifest"),
        ([{**descriptor(CHILD, f"{OCI}.manifest.v1+json", platform=OURS), "digest": "sha256:/"}], "not a digest"),
        ([{**descriptor(CHILD, f"{OCI}.manifest.v1+json", platform=OURS), "size": 5 << 20}], "has the size"),
        ([7, None, {"platform": []}, {"platform": {"os": ["linux"]}}], "no image for linux/amd64"),
        ([{}] * 1001, "at most 1000"),
        ("amd64", "at most 1000"),
    ],
)
def test_a_hostile_index_is_refused(entries: object, why: str) -> None:
    made = read({"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": entries})
    with pytest.raises(ImageError, match=why):
        manifests.manifest_for(made, "amd64", "name")


@pytest.mark.parametrize(
    "config", [b"", b"[]", b'{"os": "windows"}', b'{"architecture": "arm64"}', b'{"os": {"a": 1}}']
)
def test_a_configuration_of_another_machine_is_refused(config: bytes) -> None:
    with pytest.raises(ImageError):
        manifests.check_platform(config, "amd64", "name")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=30)
@given(
    st.dictionaries(st.sampled_from(["layers", "config", "manifests", "schemaVersion"]), _JSON), st.booleans(), _JSON
)
def test_whatever_a_registry_sends_is_an_image_or_an_error(fields: dict[str, Any], is_index: bool, part: Any) -> None:
    kind = f"{OCI}.index.v1+json" if is_index else f"{OCI}.manifest.v1+json"
    listed = {"manifests": [part]} if is_index else {"layers": [part], "config": part}
    for found in ({**fields, "mediaType": kind}, {**listed, "mediaType": kind}):
        try:
            made = read(found)
            if is_index:
                manifests.manifest_for(made, "amd64", "name")
            else:
                manifests.image_manifest(made, Blob(f"sha256:{'0' * 64}", 1), "name", 1 << 20)
        except ImageError:
            continue
        raise AssertionError(found)  # no such text has a digest
