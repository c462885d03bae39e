"""Float32 matrix products by oneDNN, where MKL is slow: twice as fast, and as exact.

Torch takes MKL for float32 products on a CPU, and MKL uses no AVX-512 on processors of AMD. Torch's only setting that
selects oneDNN is a lower precision, with which oneDNN rounds to bfloat16 on processors that are fast at it; on others,
it computes in float32. So it is used on processors of AMD, if a product is as exact with it as without.

Attention stays with MKL in forward passes: when sampling, its products are many and small, and oneDNN takes longer to
begin each. In backward passes this costs little, so they are computed by oneDNN whole.

Importing this module loads torch (the extra `train`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

PROCESSOR = Path("/proc/cpuinfo")

CACHES, MOST_SHAPES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "64"
"""How many shapes of products torch and oneDNN keep code for: with their own limits of 1,024, sampling and training of
rows of many lengths took 0.8 GiB more, and no less time. Both read these variables at the first product."""


class FastLinear(torch.nn.Linear):  # type: ignore[misc]  # torch is not installed where types are checked
    """A linear layer whose forward pass is computed by oneDNN."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with by_onednn():
            # Of rows that are not contiguous, such as the last tokens, torch would copy the weights for each row.
            return super().forward(values.contiguous())


def take_onednn(model: torch.nn.Module) -> None:
    """Let oneDNN compute the linear layers of a model on a CPU, where it is faster and as exact."""
    if not faster():
        return
    for layer in model.modules():
        if type(layer) is torch.nn.Linear and layer.weight.dtype is torch.float32 and layer.weight.device.type == "cpu":
            layer.__class__ = FastLinear


@contextmanager
def by_onednn() -> Iterator[None]:
    """Let oneDNN compute the products within the block, where it is faster and as exact. A user's setting stays."""
    if not faster() or torch.get_float32_matmul_precision() != "highest":
        yield
        return
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@functools.cache
def faster() -> bool:
    """Return whether oneDNN is faster on this machine, and as exact."""
    if torch.cuda.is_available():  # the setting would lower its precision too
        return False
    try:
        processor = PROCESSOR.read_text(errors="replace")
    except OSError:  # not Linux
        return False
    if "AuthenticAMD" not in processor or "avx512f" not in processor:
        return False
    for name in CACHES:
        os.environ.setdefault(name, MOST_SHAPES)
    left, right = torch.linspace(0, 1, 64 * 512).view(64, 512), torch.linspace(1, 2, 512 * 64).view(512, 64)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = left @ right
    finally:
        torch.set_float32_matmul_precision(before)
    return bool(torch.allclose(found.double(), left.double() @ right.double(), rtol=1e-5))
