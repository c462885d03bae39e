"""Cross-signing of the bot's own Matrix device: the account's keys state that the device belongs to the account.

Many clients share keys only with devices that their owner has signed. The account's master and self-signing key are
made at the first start, unless another client of the account has made them. Their secret parts are in the gateway's
home.

Format: https://spec.matrix.org/latest/client-server-api/#cross-signing
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from Crypto.PublicKey import ECC
from Crypto.Signature import eddsa
from nio import Api
from unpaddedbase64 import decode_base64, encode_base64

KEYS = "cross_signing.json"


class CrossSigning:
    """The two keys of the account `user_id`, which `folder` keeps."""

    def __init__(self, user_id: str, folder: Path) -> None:
        self._user_id, self._path = user_id, folder / KEYS
        self._seeds: dict[str, str] = json.loads(self._path.read_text()) if self._path.exists() else {}

    @property
    def exists(self) -> bool:
        return bool(self._seeds)

    def make(self) -> None:
        """Make new keys, which are on the disk when this returns."""
        self._seeds = {usage: encode_base64(ECC.generate(curve="Ed25519").seed) for usage in ("master", "self_signing")}
        made = self._path.with_suffix(".new")
        with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(self._seeds, file)
            file.flush()
            os.fsync(file.fileno())
        made.replace(self._path)

    def public(self, usage: str) -> str:
        """Return the public part of the key `master` or `self_signing`, in base64."""
        return str(encode_base64(self._key(usage).public_key().export_key(format="raw")))

    def upload(self) -> dict[str, Any]:
        """Return the body of `/keys/device_signing/upload`."""
        self_signing = self._signed(self._description("self_signing"), "master")
        return {"master_key": self._description("master"), "self_signing_key": self_signing}

    def signed_device(self, device: dict[str, Any]) -> dict[str, Any]:
        """Return a device, in the form of `/keys/query`, with the signature of the account."""
        plain = {name: value for name, value in device.items() if name not in ("signatures", "unsigned")}
        return self._signed(plain, "self_signing")

    def has_signed(self, device: dict[str, Any]) -> bool:
        """Return whether a device has a signature of this account."""
        signatures = device.get("signatures", {}).get(self._user_id, {})
        return f"ed25519:{self.public('self_signing')}" in signatures

    def _key(self, usage: str) -> ECC.EccKey:
        return ECC.construct(curve="Ed25519", seed=decode_base64(self._seeds[usage]))

    def _description(self, usage: str) -> dict[str, Any]:
        public = self.public(usage)
        return {"user_id": self._user_id, "usage": [usage], "keys": {f"ed25519:{public}": public}}

    def _signed(self, content: dict[str, Any], usage: str) -> dict[str, Any]:
        """Return `content`, which has no signatures, with the signature of a key."""
        signature = eddsa.new(self._key(usage), "rfc8032").sign(Api.to_canonical_json(content).encode())
        name = f"ed25519:{self.public(usage)}"
        return {**content, "signatures": {self._user_id: {name: encode_base64(signature)}}}
