"""Names whose owner lies: a real DNS server gives public and special addresses, in any order and form.

Everything runs in a network of its own, so that services can listen on port 80 of the loopback and of the metadata
address. No client may connect to them; each must reach the public server.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own needs root"),
    pytest.mark.skipif(None in map(shutil.which, ("unshare", "ip", "mount")), reason="needs unshare, ip and mount"),
]

PUBLIC, SILENT = "93.184.216.34", "93.184.216.35"
SPECIAL = ("127.0.0.1", "169.254.169.254", "10.1.2.3")
OTHER_SPECIAL = ("::1", "fd00:ec2::254")
NAMES = {
    "public.test": [PUBLIC],
    "loopback-second.test": [SILENT, "127.0.0.1"],
    "metadata-second.test": [SILENT, "169.254.169.254"],
    "own-second.test": [SILENT, "10.1.2.3"],
    "loopback-six-second.test": [SILENT, "::1"],
    "metadata-six-second.test": [SILENT, "fd00:ec2::254"],
    "mapped.test": [SILENT, "::ffff:127.0.0.1"],
    "mapped-metadata.test": ["::ffff:169.254.169.254"],
    "compatible.test": ["::127.0.0.1"],
    "translated.test": ["64:ff9b::127.0.0.1"],
    "translated-metadata.test": ["64:ff9b::169.254.169.254"],
    "translated-locally.test": ["64:ff9b:1:a9fe:a9:fe00:808:808"],
    "tunnelled.test": ["2002:7f00:1::"],
    "nothing.test": ["0.0.0.0"],
}
"""The answers to each name; that of `flips.test` changes from one question to the next."""

PROGRAM = r"""
import asyncio, itertools, json, socket, struct, subprocess, sys, threading
from concurrent.futures import ThreadPoolExecutor

names, public, silent, special, special_six = json.loads(sys.argv[1])
far = subprocess.Popen(["unshare", "--net", sys.executable, "-c", '''
import http.server, os, socket, sys, urllib.parse
sys.stdin.readline()
os.system("ip link set lo up; ip link set far up; ip addr add 93.184.216.34/24 dev far; "
          "ip addr add 93.184.216.35/24 dev far")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        where = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query).get("to")
        self.send_response(302 if where else 200)
        if where:
            self.send_header("Location", where[0])
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(b"public page")
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("93.184.216.34", 80), Handler)
print("listens", flush=True)
server.serve_forever()
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
commands = ["ip link set lo up", "ip link add near type veth peer name far"]
commands += [f"ip link set far netns {far.pid}", "ip link set near up", "ip addr add 93.184.216.1/24 dev near"]
commands += [f"ip addr add {address}/32 dev near" for address in special[1:]]
commands += [f"ip addr add {address}/128 dev near nodad" for address in special_six[1:]]
with open("resolv.conf", "w") as file:
    file.write("nameserver 127.0.0.53\noptions timeout:1 attempts:2\n")
with open("nsswitch.conf", "w") as file:
    file.write("hosts: files dns\n")
commands += [f"mount --bind {name} /etc/{name}" for name in ("resolv.conf", "nsswitch.conf")]
import time
time.sleep(0.3)  # until unshare has its network
for command in commands:
    subprocess.run(command.split(), check=True)
print("up", file=far.stdin, flush=True)
assert far.stdout.readline() == "listens\n"

flips = itertools.count()

def answers(name):
    if name == "flips.test":
        return [public if next(flips) == 0 else "127.0.0.1"]
    return names.get(name, [])

def resolve():
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.53", 53))
    while True:
        question, asker = server.recvfrom(512)
        labels, at = [], 12
        while question[at]:
            labels.append(question[at + 1 : at + 1 + question[at]].decode())
            at += 1 + question[at]
        kind = struct.unpack_from("!H", question, at + 1)[0]
        family = {1: socket.AF_INET, 28: socket.AF_INET6}.get(kind)
        found = []
        for text in answers(".".join(labels).lower()) if family else []:
            if (":" in text) == (family == socket.AF_INET6):
                found.append(socket.inet_pton(family, text))
        head = question[:2] + struct.pack("!HHHHH", 0x8180, 1, len(found), 0, 0)
        records = b"".join(struct.pack("!HHHIH", 0xC00C, kind, 1, 0, len(each)) + each for each in found)
        server.sendto(head + question[12 : at + 5] + records, asker)

threading.Thread(target=resolve, daemon=True).start()
reached = []

def trap(address):
    server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    server.bind((address, 80))
    server.listen()
    def serve():
        while True:
            connection, _ = server.accept()
            reached.append(address)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 6\r\n\r\nsecret")
            connection.close()
    threading.Thread(target=serve, daemon=True).start()

for address in (*special, *special_six):
    trap(address)

from palaestra_slots.sandbox.slotd.network import proxy, tunnel
from palaestra_slots.sandbox.slotd.network.allowlist import parse
from palaestra_slots.sandbox.slotd.network.forward import HEAD_BYTES, Forwarder
from palaestra.tools.net.host_policy import AddressPolicy, HostPolicy
from palaestra_toolsets.web.fetch import PageUnreadable, fetch, screen

async def by_fetch(url):
    try:
        return (await fetch(url, AddressPolicy(), timeout_s=10)).body.decode()
    except PageUnreadable as error:
        return str(error)

async def by_screen(url):
    try:
        await screen(url, AddressPolicy())
        return "public page" if url == "http://public.test/" else "not judged"
    except PageUnreadable as error:
        return str(error)

def by_forwarder(judge):
    async def ask(url):
        forwarder = Forwarder(judge, pool, most=8)
        server = await asyncio.start_server(forwarder.accept, "127.0.0.1", 0, limit=HEAD_BYTES)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(f"GET {url} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        server.close()
        return answer.decode().rpartition("\r\n\r\n")[2] if b"302" not in answer[:20] else "redirect"
    return ask

async def by_tunnel(url):
    host, port = url.split("/")[2], 80
    said = "no address"
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError:
        return said
    import ipaddress
    for entry in found:  # as a program in the slot would, address by address
        address = ipaddress.ip_address(entry[4][0].partition("%")[0])
        said = tunnel.refusal(address, port) or "allowed"
        if said == "allowed":
            try:
                reader, writer = await asyncio.open_connection(str(address), port)
            except OSError as error:
                continue
            writer.write(f"GET / HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
            return (await reader.read()).decode().rpartition("\r\n\r\n")[2]
    return said

pool = ThreadPoolExecutor(2)
clients = {
    "web tools": by_fetch,
    "search results": by_screen,
    "browser": by_forwarder(HostPolicy()),
    "slot with a list": by_forwarder(proxy._Rules([parse("*:*")])),
    "slot with the network on": by_tunnel,
}

async def main():
    said = {}
    hosts = [*names, "flips.test", "flips.test"]
    urls = [f"http://{host}/" for host in hosts]
    places = ["http://127.0.0.1/", "http://169.254.169.254/latest", "http://[::ffff:127.0.0.1]/", "http://2130706433/",
              "//127.1/", "http://[64:ff9b::7f00:1]/", "http://0x7f.1/", "http://loopback-second.test/",
              "http://mapped-metadata.test/", "http://[::ffff:a9fe:a9fe]/", "http://0/", "http://flips.test/",
              "http://127.0.0.1.:80/", "http://\uff11\uff12\uff17.0.0.1/"]
    from urllib.parse import quote
    redirects = [f"http://public.test/?to={quote(place, safe='')}" for place in places]
    for client, ask in clients.items():
        asked = [*urls, *redirects] if client == "web tools" else urls
        said[client] = {}
        for url in asked:
            before = len(reached)
            said[client][url] = await ask(url)
            await asyncio.sleep(0.01)
            if len(reached) > before:
                said[client][url] = f"REACHED {reached[before:]}"
    print(json.dumps(said))

asyncio.run(main())
far.kill()
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What each client got for each address."""
    arguments = json.dumps([NAMES, PUBLIC, SILENT, SPECIAL, OTHER_SPECIAL])
    argv = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", sys.executable, "-c", PROGRAM, arguments]
    folder: Path = tmp_path_factory.mktemp("dns")
    ran = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    if ran.returncode and "Operation not permitted" in ran.stderr.partition("Traceback")[0]:
        pytest.skip(f"no network of its own here: {ran.stderr}")
    assert ran.returncode == 0, ran.stderr
    found: dict[str, dict[str, str]] = json.loads(ran.stdout)
    return found


CLIENTS = ("web tools", "search results", "browser", "slot with a list", "slot with the network on")


@pytest.mark.parametrize("client", CLIENTS)
def test_no_answer_leads_to_this_machine(said: dict[str, dict[str, str]], client: str) -> None:
    reached = {url: text for url, text in said[client].items() if text.startswith("REACHED") or "secret" in text}
    assert not reached


@pytest.mark.parametrize("client", CLIENTS)
def test_a_public_answer_is_reached(said: dict[str, dict[str, str]], client: str) -> None:
    assert said[client]["http://public.test/"] == "public page"
