"""Tests of calling a function of the work in its own process: its values, and work that tries to forge them."""

import pytest

from palaestra_slots.core.errors import WorkError
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, Slot
from sandbox.bodies import WithSlot

pytestmark = pytest.mark.slots


@pytest.fixture(params=[Rung.FULL, Rung.CONFINED], ids=lambda rung: rung.label)
def slots(request, slot_servers):
    return lambda body: slot_servers.run(lambda _, slot: body(slot), request.param)


def test_a_value_comes_back_as_plain_json(slots):
    async def body(slot: Slot) -> None:
        await slot.write_text(
            "src/shop/prices.py",
            "class Basket:\n    @staticmethod\n    def total(prices, *, tax=0):\n        print('noise')\n"
            "        return {'total': sum(prices) + tax, 'parts': (1, 2)}\n"
            "async def later(x):\n    return x\n",
        )
        found = await slot.call("shop.prices:Basket.total", [[1, 2]], {"tax": 3}, python_path=["src"])
        assert found == {"total": 6, "parts": [1, 2]}
        assert await slot.call("shop.prices:later", ["é"], python_path=["src"]) == "é"

    slots(body)


HACKS = {
    "end the process": "import os\ndef f(x):\n    os._exit(0)\n",
    "end at import": "import os\nos._exit(0)\n",
    "sys.exit": "import sys\ndef f(x):\n    sys.exit(0)\n",
    "equal to everything": "class A:\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return A()\n",
    "a number equal to everything": "class A(int):\n    def __eq__(self, other):\n        return True\n"
    "    def __repr__(self):\n        return '4'\ndef f(x):\n    return A(3)\n",
    "patched unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef f(x):\n    return 0\n",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x):\n    return 0\n",
    "not a number": "def f(x):\n    return float('nan')\n",
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"value\": NaN}'\ndef f(x):\n    return 3\n",
    "a shadowed module": "def f(x):\n    import json.decoder\n    return 3\n",
}


@pytest.mark.parametrize("name", HACKS)
def test_textbook_hacks_give_no_right_value(slots, name):
    async def body(slot: Slot) -> None:
        await slot.write_text("work.py", HACKS[name])
        await slot.write_text("json.py", "def load(file):\n    return {}\n")
        try:
            found = await slot.call("work:f", [2])
        except WorkError:
            return
        assert type(found) in (int, float)
        assert found != 4

    slots(body)


def test_failures_of_the_work_are_named(with_slot: WithSlot):
    async def body(_: LocalBackend, slot: Slot) -> None:
        await slot.write_text("work.py", "def f(x):\n    raise KeyError('lost')\ndef g():\n    while True: pass\n")
        with pytest.raises(WorkError, match="KeyError: 'lost'"):
            await slot.call("work:f", [1])
        with pytest.raises(WorkError, match="has no attribute 'h'"):
            await slot.call("work:h")
        with pytest.raises(WorkError, match="No module named 'absent'"):
            await slot.call("absent:f")
        with pytest.raises(WorkError, match="timed out after 1s"):
            await slot.call("work:g", timeout_s=1)
        with pytest.raises(ValueError, match=r"write package\.module:function"):
            await slot.call("work.f")
        with pytest.raises(TypeError, match=r"such as \['abc'\]"):
            await slot.call("work:f", "abc")

    with_slot(body)
