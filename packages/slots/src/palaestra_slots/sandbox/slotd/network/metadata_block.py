"""Keeps slots that share the host's network from reaching cloud metadata addresses.

The kernel runs BPF programs for the sockets of a control group (bpf(2), bpf-cgroup). One of the programs refuses
packets to these addresses. Four others refuse connections, so that a program in the slot gets an error instead of no
answer. The kernel removes the programs together with the group. Port 53 stays open, because on some clouds the same
address is the resolver.

This needs root and a control group of version 2, with or without controllers. Slots without a network cannot reach
these addresses, and the proxy refuses them to slots with a list of hosts (`allowlist.py`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from .. import syscalls
from .allowlist import METADATA, Range

_BPF = {"x86_64": 321, "aarch64": 280}.get(syscalls.MACHINE)
_PROG_LOAD, _PROG_ATTACH, _ALLOW_MULTI = 5, 8, 2
_DNS_PORT = 53


class _Hook(IntEnum):
    """The point at which a program is attached (enum bpf_attach_type)."""

    EGRESS = 1
    CONNECT4 = 10
    CONNECT6 = 11
    SENDMSG4 = 14
    SENDMSG6 = 15

    @property
    def kind(self) -> int:
        """The type of its program (enum bpf_prog_type): CGROUP_SKB or CGROUP_SOCK_ADDR."""
        return 8 if self is _Hook.EGRESS else 18

    @property
    def version(self) -> int:
        """The IP version of the addresses that a program for connections gets."""
        return 4 if self in (_Hook.CONNECT4, _Hook.SENDMSG4) else 6


@dataclass(frozen=True, slots=True)
class _Jump:
    """A jump to a label. It is taken if 32 bits of `register` equal `number`, or always if `register` is None."""

    label: str
    register: int | None = None
    number: int = 0


_Code = list[bytes | _Jump | str]  # instructions, jumps and labels
_LOAD, _STORE, _COPY, _SET, _ADD, _AND, _CALL, _EXIT = 0x61, 0x7A, 0xBF, 0xB7, 0x07, 0x54, 0x85, 0x95
_JUMP, _JUMP_IF_EQUAL = 0x05, 0x16  # instructions of 64 bits, except a load, an AND and a comparison of 32
_LOAD_BYTES = 26  # the helper that copies a part of a packet (bpf_skb_load_bytes)
_DESTINATION = {4: (16, 4), 6: (24, 16)}  # offset and size of the address in a packet's header
# The size of a header, and the position and values of the byte that shows that ports follow the header: no options in
# version 4, TCP or UDP in version 6.
_PORTS = {4: (20, (0, (0x45,))), 6: (40, (6, (6, 17)))}
# Offsets of the words of the address in the context of a program for connections (struct bpf_sock_addr).
_CONTEXT = {4: (4,), 6: (8, 12, 16, 20)}


class Guard:
    """Loads the programs once, and attaches them to control groups. Raises OSError if this kernel does not accept
    them."""

    def __init__(self) -> None:
        self._programs = {hook: _load_program(hook) for hook in _Hook}

    def attach(self, directory: str) -> None:
        """Guard all current and future processes of a control group of version 2."""
        group = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for hook, program in self._programs.items():
                # Programs that systemd or a container tool has attached to a group above still run, too.
                _bpf(_PROG_ATTACH, struct.pack("=5I", group, program, hook, _ALLOW_MULTI, 0), "attach")
        finally:
            os.close(group)


def _load_program(hook: _Hook) -> int:
    code = _assemble(_packets() if hook is _Hook.EGRESS else _connections(hook.version))
    program, licence = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"MIT")
    places = ctypes.addressof(program), ctypes.addressof(licence)
    fields = (hook.kind, len(code) // 8, *places, 0, 0, 0, 0, 0, b"metadata", 0, hook)
    return _bpf(_PROG_LOAD, struct.pack("=IIQQIIQII16sII", *fields), "load")


def _bpf(command: int, attributes: bytes, what: str) -> int:
    if _BPF is None:
        raise OSError(errno.ENOSYS, f"no system call table for {syscalls.MACHINE}")
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    return syscalls.check(syscalls.raw(_BPF, command, buffer, len(attributes)), f"bpf {what}")


def _connections(version: int) -> _Code:
    """Return the program that refuses connections. r1 is the context; the address is compared in network byte order."""
    # 24 is the offset of the port in `struct bpf_sock_addr`.
    code: _Code = [_instruction(_LOAD, 2, 1, 24), _Jump("allow", 2, _network_order(_DNS_PORT, 2))]
    for number, network in enumerate(_networks(version)):
        code += _refusal_code(
            [_instruction(_LOAD, 2, 1, offset) for offset in _CONTEXT[version]], network, f"next{number}"
        )
    return [*code, *_verdicts()]


def _packets() -> _Code:
    """Return the program that refuses packets. r6 is the packet, which starts with its IP header; parts of it are
    copied to the stack.

    A packet whose ports do not follow its header directly does not count as DNS.
    """
    code: _Code = [_instruction(_COPY, 6, 1), *_load_code(0, 1), _instruction(_AND, 2, 0, 0, 0xF0)]
    code += [_Jump("version4", 2, 0x40), _Jump("version6", 2, 0x60), _Jump("allow")]
    for version in (4, 6):
        (head, (place, values)), (offset, size) = _PORTS[version], _DESTINATION[version]
        code += [f"version{version}", *_load_code(place, 1), *(_Jump(f"port{version}", 2, value) for value in values)]
        code += [_Jump(f"address{version}"), f"port{version}", *_load_code(head + 2, 2)]
        code += [_Jump("allow", 2, _network_order(_DNS_PORT, 2)), f"address{version}", *_load_code(offset, size)]
        words = [_instruction(_LOAD, 2, 10, -16 + 4 * word) for word in range(size // 4)]
        for number, network in enumerate(_networks(version)):
            code += _refusal_code(words, network, f"next{version}-{number}")
        code.append(_Jump("allow"))
    return [*code, *_verdicts()]


def _networks(version: int) -> list[Range]:
    return [network for network in METADATA if network.version == version]


def _refusal_code(words: Sequence[bytes], network: Range, otherwise: str) -> _Code:
    """Return code that refuses an address in a network. Each of `words` loads one word of the address into r2."""
    code: _Code = []
    address, mask = network.network_address.packed, network.netmask.packed
    last = max(word for word in range(len(words)) if mask[4 * word] or mask[4 * word : 4 * word + 4] != bytes(4))
    for word in range(last + 1):
        wanted, kept = (struct.unpack_from("=i", packed, 4 * word)[0] for packed in (address, mask))
        code += [words[word], _instruction(_AND, 2, 0, 0, kept)]
        if word == last:
            code.append(_Jump("refuse", 2, wanted))
        else:
            code += [_Jump(f"{otherwise}-{word}", 2, wanted), _Jump(otherwise), f"{otherwise}-{word}"]
    return [*code, otherwise]


def _load_code(offset: int, size: int) -> _Code:
    """Return code that copies a part of the packet r6 to the last 16 bytes of the stack, and its first word to r2. If
    the packet is too short, both are zeros."""
    clear = [_instruction(_STORE, 10, 0, place, 0) for place in (-16, -8)]
    copy = [_instruction(_COPY, 1, 6), _instruction(_SET, 2, 0, 0, offset), _instruction(_COPY, 3, 10)]
    copy += [
        _instruction(_ADD, 3, 0, 0, -16),
        _instruction(_SET, 4, 0, 0, size),
        _instruction(_CALL, 0, 0, 0, _LOAD_BYTES),
    ]
    return [*clear, *copy, _instruction(_LOAD, 2, 10, -16)]


def _verdicts() -> _Code:
    allow: _Code = ["allow", _instruction(_SET, 0, 0, 0, 1), _instruction(_EXIT)]
    return [*allow, "refuse", _instruction(_SET, 0, 0, 0, 0), _instruction(_EXIT)]


def _instruction(code: int, target: int = 0, source: int = 0, offset: int = 0, number: int = 0) -> bytes:
    return struct.pack("=BBhi", code, target | source << 4, offset, number)


def _assemble(code: _Code) -> bytes:
    places: dict[str, int] = {}
    position = 0
    for item in code:
        if isinstance(item, str):
            places[item] = position
        else:
            position += 1
    done: list[bytes] = []
    for item in code:
        if isinstance(item, _Jump):
            # A jump counts from the next instruction.
            distance = places[item.label] - len(done) - 1
            known = item.register is not None
            done.append(_instruction(_JUMP_IF_EQUAL if known else _JUMP, item.register or 0, 0, distance, item.number))
        elif isinstance(item, bytes):
            done.append(item)
    return b"".join(done)


def _network_order(number: int, size: int) -> int:
    return int.from_bytes(number.to_bytes(size, "big"), "little")
