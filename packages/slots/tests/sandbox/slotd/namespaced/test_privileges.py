"""The filter's verdicts, by running its program here, for both architectures."""

from __future__ import annotations

import struct

import pytest

from palaestra_slots.sandbox.slotd.namespaced import privileges

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50001, 0x50026


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None, **options: bool) -> int:
    """What the kernel would answer (classic BPF over struct seccomp_data)."""
    padded = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    audit = privileges._AUDIT[machine] if architecture is None else architecture
    data = struct.pack("=IIQ6Q", number, audit, 0, *padded)
    program = list(struct.iter_unpack("=HBBI", privileges.program(machine, **options)))
    accumulator, counter = 0, 0
    while True:
        code, if_true, if_false, constant = program[counter]
        counter += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, constant)
        elif code == 0x06:
            return int(constant)
        elif code == 0x05:
            counter += constant
        else:
            tests = {0x15: accumulator == constant, 0x35: accumulator >= constant, 0x45: bool(accumulator & constant)}
            counter += if_true if tests[code] else if_false


@pytest.mark.parametrize(
    ("machine", "calls"),
    [
        ("x86_64", {"read": 0, "clone": 56, "socket": 41, "ioctl": 16, "mount": 165, "unshare": 272, "bpf": 321}),
        ("aarch64", {"read": 63, "clone": 220, "socket": 198, "ioctl": 29, "mount": 40, "unshare": 97, "bpf": 280}),
    ],
)
def test_verdicts(machine: str, calls: dict[str, int]) -> None:
    assert verdict(machine, calls["read"]) == ALLOW
    assert verdict(machine, calls["mount"]) == EPERM
    assert verdict(machine, calls["unshare"], 0x10000000) == EPERM
    assert verdict(machine, calls["bpf"]) == ENOSYS
    assert verdict(machine, 425) == ENOSYS
    assert verdict(machine, 435) == ENOSYS
    assert verdict(machine, calls["clone"], 0x11) == ALLOW
    assert verdict(machine, calls["clone"], 0x10000011) == EPERM
    assert verdict(machine, calls["ioctl"], 0, 0x5401) == ALLOW
    assert verdict(machine, calls["ioctl"], 0, 0x5412) == EPERM
    for family, answer in ((1, ALLOW), (2, ALLOW), (10, ALLOW), (16, ALLOW), (40, 0x50061), (38, 0x50061)):
        assert verdict(machine, calls["socket"], family) == answer
    for family in (2, 10):
        for protocol, answer in ((0, ALLOW), (6, ALLOW), (17, ALLOW), (58, ALLOW), (132, 0x5005D), (262, 0x5005D)):
            assert verdict(machine, calls["socket"], family, 1, protocol) == answer
    for protocol, answer in ((0, ALLOW), (4, ALLOW), (2, 0x5005D), (15, 0x5005D), (16, 0x5005D)):
        assert verdict(machine, calls["socket"], 16, 3, protocol) == answer
    assert verdict(machine, calls["socket"], 16, 3, 4, unix=False) == 0x5005D
    assert verdict(machine, calls["socket"], 1, 1, 0) == ALLOW
    assert verdict(machine, calls["read"], architecture=0x40000003) == KILL


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_limits_of_the_init_are_out_of_reach_and_of_others_if_the_user_may_be_theirs(machine: str) -> None:
    for number, argument in privileges._ON_OTHERS[machine].items():
        first = (argument - 16) // 8
        for target, answer in ((0, ALLOW), (1, EPERM), (4000, EPERM)):
            arguments = [0, 0]
            arguments[first] = target
            assert verdict(machine, number, *arguments, own_user=False) == answer
            assert verdict(machine, number, *arguments) == (EPERM if target == 1 else ALLOW)  # 1 is the slot's init


def test_the_second_abi_of_x86_64_is_absent() -> None:
    assert verdict("x86_64", 0x40000000) == ENOSYS
