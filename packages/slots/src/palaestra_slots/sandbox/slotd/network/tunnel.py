"""Carries the traffic of slots with the network on. It turns the slots' packets into connections of this process, whose
packets the host's kernel sends. It serves all TUN devices of one server (`tunnel_device.py`).

For TCP, a SYN to X:p opens a connection to X:p. Once that connection is established, the slot's packets are rewritten
so that they seem to come from the gateway and go to the listening socket in the slot's namespace. The kernel thus
terminates the slot's connection at this socket, and the two connections are joined. For UDP, each pair of addresses has
a socket. Packets of other protocols are dropped.

Invariant: every destination is judged (`refusal`), and connections go to the judged address. The host's own addresses,
above all its loopback, are refused, except for the ports in `host_ports`, which slots reach at the gateway's address.
Cloud metadata addresses are refused too, except for port 53, where some clouds have their resolver. The gateway's port
53 is the host's resolver.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import os
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from . import allowlist
from .allowlist import Address
from .forward import copy
from .tunnel_device import GATEWAY, SLOT

MOST_CONNECTIONS, MOST_UDP = 512, 256  # of one slot at a time
_FEWEST_CONNECTIONS, _KEPT_DESCRIPTORS = 16, 256
_MOST_FLOWS = 16_384  # including flows that have ended
_PACKET, _BURST = 1 << 16, 64
_CONNECT_S, _ACCEPT_S, _LINGER_S, _UDP_S = 30.0, 30.0, 30.0, 120.0
_DNS = 53
_TCP, _UDP = 6, 17
_FIN, _SYN, _RST, _ACK = 1, 2, 4, 16
_FIRST_PORT, _LAST_PORT = 1024, 65535

_PORTS = struct.Struct("!HH")
_TCP_HEAD = struct.Struct("!HHIIBBHHH")


def refusal(address: Address, port: int) -> str | None:
    """Return the reason why no slot may reach an address; None if slots may reach it."""
    # On Google's machines, the name server has the address of the metadata server.
    if allowlist.is_metadata(address) and port != _DNS:
        return "it serves cloud metadata"
    # An IPv6 address may contain an IPv4 address, to which a gateway would pass the connection on.
    for one in allowlist.meanings(address):
        if one.is_loopback or one.is_unspecified or one.is_multicast or one == ipaddress.ip_address("255.255.255.255"):
            return "it is not a host of the network"
        if is_own(one):
            return "it is this host"
    return None


def is_own(address: Address) -> bool:
    """Return whether an address belongs to this machine. To reach such an address, the kernel uses the same address as
    the source."""
    with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), 9))
        except OSError:
            return False
        return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]) == address


def connections_per_tunnel(descriptors: int, tunnels: int) -> int:
    """Return the maximum number of connections per tunnel, so that no tunnel uses up the other tunnels' descriptors. A
    connection takes two descriptors, and datagrams take some."""
    return max(_FEWEST_CONNECTIONS, min(MOST_CONNECTIONS, (descriptors - _KEPT_DESCRIPTORS) // (3 * max(1, tunnels))))


def resolvers() -> list[str]:
    """Return the host's resolvers, from resolv.conf(5)."""
    with contextlib.suppress(OSError), open("/etc/resolv.conf", encoding="utf-8", errors="replace") as file:
        lines = [line.split() for line in file]
        return [words[1] for words in lines if len(words) > 1 and words[0] == "nameserver"]
    return []


@dataclass(slots=True, eq=False)
class _Flow:
    """One TCP connection. `key` holds the addresses and ports of its packets from the slot, `port` is the gateway's
    port, and `syn` is the packet that waits for the connection to the outside."""

    key: bytes
    port: int
    syn: bytes
    inward: tuple[bytes, bytes, int, int]  # new addresses and ports for packets, and the changes of both checksums
    outward: tuple[bytes, bytes, int, int]
    outside: tuple[StreamReader, StreamWriter] | None = None
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False


class Tunnel:
    """The device of one slot. At the gateway's address, the slot may reach `ports` of the host's loopback. `most` is
    the maximum number of connections; half of it is the maximum number of address pairs for datagrams."""

    most = MOST_CONNECTIONS

    def __init__(self, device: int, listeners: Sequence[socket.socket], ports: Collection[int]) -> None:
        self._device, self._ports = device, frozenset(ports)
        self._listeners = {4 if each.family == socket.AF_INET else 6: each for each in listeners}
        self._listening = {version: each.getsockname()[1] for version, each in self._listeners.items()}
        self._flows: dict[bytes, _Flow] = {}
        self._by_port: dict[int, _Flow] = {}
        self._udp: dict[bytes, _Datagrams] = {}
        self._live = 0  # connections that have not ended
        self._next = itertools.cycle(range(_FIRST_PORT, _LAST_PORT))
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []

    async def start(self) -> None:
        """Start serving the slot. `close` ends this."""
        for listener in self._listeners.values():
            listener.setblocking(False)
            self._servers.append(await asyncio.start_server(self._accept, sock=listener))
        asyncio.get_running_loop().add_reader(self._device, self._read_packets)

    def close(self) -> None:
        """Close the device and all connections."""
        asyncio.get_running_loop().remove_reader(self._device)
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        for datagrams in list(self._udp.values()):
            datagrams.close()
        os.close(self._device)

    def _read_packets(self) -> None:
        # Only so many in one turn of the loop, so that a flood of one slot does not hold up the others.
        for _ in range(_BURST):
            try:
                packet = os.read(self._device, _PACKET)
            except BlockingIOError:
                return
            except OSError:  # the slot is gone
                asyncio.get_running_loop().remove_reader(self._device)
                return
            with contextlib.suppress(struct.error, IndexError):  # an incomplete packet
                self._take_packet(packet)

    def _send_packet(self, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # networks may lose packets
            os.write(self._device, packet)

    def _take_packet(self, packet: bytes) -> None:
        version = packet[0] >> 4
        if version not in self._listeners:
            return
        if version == 4:
            head, protocol, addresses = 4 * (packet[0] & 15), packet[9], packet[12:20]
            # Only the first fragment has ports. The device takes packets of 65,000 bytes, so programs rarely send
            # fragments.
            if int.from_bytes(packet[6:8], "big") & 0x3FFF:  # a fragment
                return
        else:
            head, protocol, addresses = 40, packet[6], packet[8:40]
        ports = packet[head : head + 4]
        if addresses[: len(addresses) // 2] != SLOT[version].packed:
            return
        if protocol == _TCP:
            self._take_tcp(version, head, packet, addresses + ports)
        elif protocol == _UDP:
            self._take_udp(version, packet[head + 8 :], addresses + ports)

    # TCP

    def _take_tcp(self, version: int, head: int, packet: bytes, key: bytes) -> None:
        source, target = _PORTS.unpack(key[-4:])
        flags = packet[head + 13]
        if source == self._listening[version] and key[-8 if version == 4 else -20 : -4] == GATEWAY[version].packed:
            # A packet of the listening socket: the slot's kernel answers a rewritten packet.
            flow = self._by_port.get(target)
            if flow is not None:
                self._send_packet(_rewritten(packet, head, flow.outward))
            return
        flow = self._flows.get(key)
        # The slot uses a port again before the old connection was forgotten.
        if flow is not None and flow.ended and flags & _SYN:
            self._drop_flow(flow)
            flow = None
        if flow is not None:
            # The slot repeats its SYN while the outside connects. The flow keeps the first one, so these are dropped.
            if flow.outside is not None or flow.ended:
                self._send_packet(_rewritten(packet, head, flow.inward))
        elif flags & (_SYN | _ACK | _RST) == _SYN:
            self._open_flow(version, packet, key)
        # A reset is never answered by a reset (RFC 9293, 3.10.7.1).
        elif not flags & _RST:
            self._send_packet(_reset(version, head, packet))

    def _open_flow(self, version: int, packet: bytes, key: bytes) -> None:
        if self._live >= self.most or len(self._flows) >= _MOST_FLOWS:
            self._send_packet(_reset(version, _header_length(version, packet), packet))
            return
        port = next(port for port in self._next if port not in self._by_port)
        slot, gateway = SLOT[version].packed, GATEWAY[version].packed
        inside = gateway + slot, _PORTS.pack(port, self._listening[version])
        replies = slot + gateway, _PORTS.pack(self._listening[version], port)
        size = len(slot)
        answer = key[size : 2 * size] + key[:size], key[-2:] + key[-4:-2]
        flow = _Flow(
            key, port, packet, (*inside, *_changes(key, *inside)), (*answer, *_changes(b"".join(replies), *answer))
        )
        self._flows[key] = self._by_port[port] = flow
        self._live += 1
        self._start_task(self._serve_flow(flow, version))

    def _start_task(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve_flow(self, flow: _Flow, version: int) -> None:
        head = _header_length(version, flow.syn)
        size = len(SLOT[version].packed)
        address, port = ipaddress.ip_address(flow.key[size : 2 * size]), _PORTS.unpack(flow.key[-4:])[1]
        try:
            flow.outside = await self._connect(address, port)
        except (OSError, TimeoutError):
            self._drop_flow(flow)
            self._send_packet(_reset(version, head, flow.syn))
            return
        try:
            self._send_packet(_rewritten(flow.syn, head, flow.inward))
            async with asyncio.timeout(_ACCEPT_S):
                await flow.accepted.wait()
        except TimeoutError:
            self._drop_flow(flow)
        except asyncio.CancelledError:
            flow.outside[1].close()
            raise

    async def _connect(self, address: Address, port: int) -> tuple[StreamReader, StreamWriter]:
        """Connect to the outside. Raises OSError."""
        failure: OSError = ConnectionRefusedError()
        for host in self._destinations(address, port):
            try:
                async with asyncio.timeout(_CONNECT_S):
                    reader, writer = await asyncio.open_connection(host, port)
            except OSError as error:
                failure = error
                continue
            connected: socket.socket = writer.get_extra_info("socket")
            # A connection may be idle for any time, so only the kernel can find out that the other side has gone.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return reader, writer
        raise failure

    def _destinations(self, address: Address, port: int) -> list[str]:
        """Return the addresses to which a connection is opened; [] if the address is refused."""
        if address == GATEWAY[address.version]:
            if port in self._ports:
                return ["127.0.0.1"]
            return resolvers() if port == _DNS else []
        return [] if refusal(address, port) is not None else [str(address)]

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        address, port = writer.get_extra_info("peername")[:2]
        flow = self._by_port.get(port)
        version = ipaddress.ip_address(address).version
        # Programs of the slot can connect to this socket as well, but not from the gateway's address.
        if flow is None or flow.outside is None or address != str(GATEWAY[version]) or flow.accepted.is_set():
            writer.close()
            return
        flow.accepted.set()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_reader, far_writer = flow.outside
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(copy(reader, far_writer, None))
                both.create_task(copy(far_reader, writer, None))
        except* OSError:
            for each in (writer, far_writer):
                each.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()
            far_writer.close()
            self._end_flow(flow)
            # The slot's kernel still exchanges the last packets.
            asyncio.get_running_loop().call_later(_LINGER_S, self._drop_flow, flow)

    def _end_flow(self, flow: _Flow) -> None:
        self._live -= not flow.ended
        flow.ended = True

    def _drop_flow(self, flow: _Flow) -> None:
        self._end_flow(flow)
        # A new connection may have the same addresses and ports by now.
        if self._flows.get(flow.key) is flow:
            del self._flows[flow.key]
        if self._by_port.get(flow.port) is flow:
            del self._by_port[flow.port]
        if flow.outside is not None and not flow.accepted.is_set():
            flow.outside[1].close()

    # UDP

    def _take_udp(self, version: int, data: bytes, key: bytes) -> None:
        datagrams = self._udp.get(key)
        if datagrams is None:
            size = len(SLOT[version].packed)
            address, port = ipaddress.ip_address(key[size : 2 * size]), _PORTS.unpack(key[-4:])[1]
            hosts = self._destinations(address, port)
            if not hosts:
                return
            if len(self._udp) >= min(MOST_UDP, self.most // 2):
                min(self._udp.values(), key=lambda each: each.last).close()
            try:
                datagrams = _Datagrams(self, version, key, hosts[0], port)
            except OSError:
                return
            self._udp[key] = datagrams
        datagrams.send(data)

    def answer(self, packet: bytes) -> None:
        """Send a packet to the slot."""
        self._send_packet(packet)

    def forget(self, key: bytes) -> None:
        """Forget a pair of addresses."""
        self._udp.pop(key, None)


class _Datagrams:
    """The socket for the datagrams between two addresses. It is closed `_UDP_S` seconds after the last datagram, whose
    time is in `last`, or earlier to make room for another. Raises OSError."""

    def __init__(self, tunnel: Tunnel, version: int, key: bytes, host: str, port: int) -> None:
        self._tunnel, self._version, self._key = tunnel, version, key
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect((host, port))
        except OSError:
            self._socket.close()
            raise
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._receive_datagrams)
        self.last = self._loop.time()
        self._timer = self._loop.call_later(_UDP_S, self._expire)

    def send(self, data: bytes) -> None:
        """Send a datagram from the slot to the outside."""
        self.last = self._loop.time()
        with contextlib.suppress(OSError):
            self._socket.send(data)

    def close(self) -> None:
        """Close the socket."""
        self._timer.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._tunnel.forget(self._key)

    def _expire(self) -> None:
        idle = self._loop.time() - self.last
        if idle >= _UDP_S:
            self.close()
        else:
            self._timer = self._loop.call_later(_UDP_S - idle, self._expire)

    def _receive_datagrams(self) -> None:
        for _ in range(_BURST):
            try:
                data = self._socket.recv(_PACKET)
            except OSError:  # no datagram has arrived, or the other side refused one
                return
            self.last = self._loop.time()
            size = len(SLOT[self._version].packed)
            source, target = self._key[size : 2 * size], self._key[:size]
            ports = self._key[-2:] + self._key[-4:-2]
            body = ports + struct.pack("!HH", 8 + len(data), 0) + data
            self._tunnel.answer(_packet(self._version, _UDP, source + target, body, 6))


def _header_length(version: int, packet: bytes) -> int:
    return 4 * (packet[0] & 15) if version == 4 else 40


def _sum(data: bytes) -> int:
    """Return the ones' complement sum of the 16-bit words (RFC 1071)."""
    if len(data) % 2:
        data += b"\0"
    return _fold(sum(struct.unpack(f"!{len(data) // 2}H", data)))


def _fold(total: int) -> int:
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _changes(old: bytes, addresses: bytes, ports: bytes) -> tuple[int, int]:
    """Return how much new addresses and ports change the sums of a header and of a TCP segment (RFC 1624). `old` holds
    the former addresses and ports."""
    gone = bytes(255 - byte for byte in old)
    header = _sum(gone[:-4]) + _sum(addresses)
    return _fold(header), _fold(header + _sum(gone[-4:]) + _sum(ports))


def _rewritten(packet: bytes, head: int, new: tuple[bytes, bytes, int, int]) -> bytes:
    """Return a TCP packet with new addresses and ports."""
    addresses, ports, header_change, segment_change = new
    changed = bytearray(packet)
    if len(addresses) == 8:
        changed[12:20] = addresses
        _change(changed, 10, header_change)
    else:
        changed[8:40] = addresses
    changed[head : head + 4] = ports
    _change(changed, head + 16, segment_change)
    return bytes(changed)


def _change(packet: bytearray, place: int, change: int) -> None:
    old = int.from_bytes(packet[place : place + 2], "big")
    packet[place : place + 2] = (0xFFFF - _fold(0xFFFF - old + change)).to_bytes(2, "big")


def _reset(version: int, head: int, packet: bytes) -> bytes:
    """Return the RST packet that refuses a TCP packet."""
    source, target, sequence, acknowledged, offset, flags, *_ = _TCP_HEAD.unpack_from(packet, head)
    size = len(SLOT[version].packed)
    begin = 12 if version == 4 else 8
    addresses = packet[begin + size : begin + 2 * size] + packet[begin : begin + size]
    # RFC 9293, 3.10.7.1: the reset has the number that the segment acknowledges. For a segment without ACK, it has the
    # number 0 and acknowledges that segment.
    if flags & _ACK:
        numbers, answer = (acknowledged, 0), _RST
    else:
        length = len(packet) - head - 4 * (offset >> 4) + bool(flags & _SYN) + bool(flags & _FIN)
        numbers, answer = (0, (sequence + length) & 0xFFFFFFFF), _RST | _ACK
    body = _TCP_HEAD.pack(target, source, *numbers, 5 << 4, answer, 0, 0, 0)
    return _packet(version, _TCP, addresses, body, 16)


def _packet(version: int, protocol: int, addresses: bytes, body: bytes, place: int) -> bytes:
    """Return a packet with its checksums. The body's checksum is at `place`."""
    pseudo = addresses + struct.pack("!II", len(body), protocol)
    check = 0xFFFF - _sum(pseudo + body)
    # In UDP, 0 would mean that there is no checksum (RFC 768), which version 6 forbids (RFC 8200, 8.1).
    body = body[:place] + (check or 0xFFFF).to_bytes(2, "big") + body[place + 2 :]
    if version == 6:
        return struct.pack("!IHBB", 6 << 28, len(body), protocol, 64) + addresses + body
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 0, 0x4000, 64, protocol, 0) + addresses
    return head[:10] + (0xFFFF - _sum(head)).to_bytes(2, "big") + head[12:] + body
