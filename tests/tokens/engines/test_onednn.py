"""Linear layers that oneDNN computes have the numbers that they had before, and leave torch's settings alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the extra 'train': make test-torch"),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cut", ["all", "last", "every second", "one row"])
def test_a_layer_has_the_numbers_it_had_before(bias: bool, cut: str) -> None:
    import torch

    from palaestra_tokens.engines.onednn import take_onednn

    torch.manual_seed(0)
    layer = torch.nn.Linear(192, 320, bias=bias)
    values = torch.randn(8, 24, 192)
    values = {"all": values, "last": values[:, -1:], "every second": values[::2, ::2], "one row": values[0]}[cut]
    wanted = layer.double()(values.double())
    model = torch.nn.Sequential(layer.float())
    take_onednn(model)
    found = model(values)
    assert found.shape == wanted.shape
    assert torch.allclose(found.double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.get_float32_matmul_precision() == "highest"


def test_gradients_are_those_of_before() -> None:
    import torch

    from palaestra_tokens.engines.onednn import by_onednn, take_onednn

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(192, 320), torch.nn.GELU(), torch.nn.Linear(320, 64))
    values = torch.randn(48, 192)
    model.double()(values.double()).square().sum().backward()
    wanted = [each.grad.clone() for each in model.parameters()]
    model.float().zero_grad()
    take_onednn(model)
    with by_onednn():
        model(values).square().sum().backward()
    for each, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(each.grad.double(), gradient, atol=1e-4, rtol=1e-4)


def test_other_layers_and_other_types_of_numbers_stay() -> None:
    import torch

    from palaestra_tokens.engines.onednn import FastLinear, take_onednn

    class Own(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(Own(8, 8), torch.nn.Linear(8, 8, dtype=torch.bfloat16), torch.nn.LayerNorm(8))
    take_onednn(model)
    assert not any(isinstance(each, FastLinear) for each in model.modules())


@pytest.mark.parametrize(
    "processor",
    ["vendor_id\t: GenuineIntel\nflags\t: avx512f amx_tile\n", "vendor_id\t: AuthenticAMD\nflags\t: avx2\n", None],
)
def test_it_is_for_processors_that_gain(processor: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from palaestra_tokens.engines import onednn

    if processor is not None:
        (tmp_path / "cpuinfo").write_text(processor)
    monkeypatch.setattr(onednn, "PROCESSOR", tmp_path / "cpuinfo")
    assert not onednn.faster.__wrapped__()


def test_a_setting_of_the_user_stays() -> None:
    import torch

    from palaestra_tokens.engines.onednn import by_onednn

    torch.set_float32_matmul_precision("high")
    try:
        with by_onednn():
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_product_that_is_less_exact_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from palaestra_tokens.engines import onednn

    (tmp_path / "cpuinfo").write_text("vendor_id\t: AuthenticAMD\nflags\t: avx512f\n")
    monkeypatch.setattr(onednn, "PROCESSOR", tmp_path / "cpuinfo")
    exact = torch.Tensor.__matmul__

    def rounded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if torch.get_float32_matmul_precision() == "medium":
            return exact(left.bfloat16(), right.bfloat16()).to(left.dtype)
        return exact(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert not onednn.faster.__wrapped__()
    assert torch.get_float32_matmul_precision() == "highest"
