"""A task with three services: the agent's, a shop that answers over HTTP, and a stock that the shop asks."""

from __future__ import annotations

import textwrap
from pathlib import Path

from suites.terminal_bench.mini import written

TOML = """\
schema_version = "1.4"
artifacts = ["/app/total.txt", { source = "/data/orders.txt", service = "shop" }]
[agent]
timeout_sec = 60
[verifier]
environment_mode = "separate"
timeout_sec = 60
[[verifier.collect]]
command = "mkdir -p /evidence && wc -l < /data/orders.txt > /data/count.txt"
service = "shop"
[environment]
workdir = "/app"
[environment.env]
CURRENCY = "EUR"
"""
COMPOSE = """\
x-check: &check {interval: 200ms, timeout: 5s, retries: 50}
services:
  main:
    depends_on:
      shop: {condition: service_healthy}
  shop:
    build: {context: ./shop, args: {KIND: books}}
    environment: [STOCK=http://warehouse:8000/stock.txt, "CURRENCY=${CURRENCY:?}"]
    depends_on:
      stock: {condition: service_healthy}
      seed: {condition: service_completed_successfully}
    volumes: [orders:/data]
    expose: [80]
    healthcheck: {<<: *check, test: [CMD, python3, -c, "import socket; socket.create_connection(('localhost', 80))"]}
    restart: on-failure:5
    networks: {default: {aliases: [store]}}
  stock:
    build: ./stock
    command: python3 -m http.server 8000 --directory /srv/stock
    env_file: stock.env
    volumes: ["./stock/goods:/srv/stock:ro"]
    networks: {default: {aliases: [warehouse]}}
    healthcheck: {<<: *check, test: "python3 -c 'import socket; socket.create_connection((\\"stock\\", 8000))'"}
    deploy: {resources: {limits: {memory: 256m, cpus: "0.5"}}}
  seed:
    build: ./stock
    command: ["sh", "-c", "echo seeded"]
  unused:
    image: nobody/has-this
    profiles: [debug]
volumes: {orders: }
"""
SHOP_PY = """\
import http.server, os, urllib.request
fails = "/data/failed"
if not os.path.exists(fails):  # the first start fails, as that of a service does whose port is not free yet
    open(fails, "w").close()
    raise SystemExit("not yet")

class Shop(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        stock = urllib.request.urlopen(os.environ["STOCK"]).read().decode().strip()
        body = f"{stock} {os.environ['KIND']} {os.environ['CURRENCY']}".encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        order = self.rfile.read(int(self.headers["Content-Length"])).decode()
        with open("/data/orders.txt", "a") as file:
            file.write(order + "\\n")
        self.send_response(200)
        self.end_headers()

print("open", flush=True)
http.server.HTTPServer(("0.0.0.0", 80), Shop).serve_forever()
"""
SOLVE = """\
#!/bin/bash
python3 - <<'END'
import urllib.request
open("/app/total.txt", "wb").write(urllib.request.urlopen("http://store/").read())
for order in ("one", "two"):
    urllib.request.urlopen("http://shop/", data=order.encode())
END
"""
TEST_SH = """\
#!/bin/bash
[ "$(cat /app/total.txt)" = "7 books EUR" ] && [ "$(cat /data/orders.txt)" = "one
two" ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""


def make_shop(folder: Path, name: str = "shop", **changed: str) -> Path:
    """Write the task; `changed` replaces texts of its files, by path."""
    files = {
        "task.toml": TOML,
        "instruction.md": "Write what http://store/ answers to /app/total.txt, and order `one` and `two` there.\n",
        "environment/docker-compose.yaml": COMPOSE,
        "environment/Dockerfile": "FROM debian\nWORKDIR /app\n",
        "environment/stock.env": "# the stock\nKIND='records'\n",
        "environment/shop/Dockerfile": textwrap.dedent("""\
            FROM debian
            ARG KIND=none
            ENV KIND=$KIND
            COPY shop.py /srv/
            CMD ["python3", "/srv/shop.py"]
        """),
        "environment/shop/shop.py": SHOP_PY,
        "environment/stock/Dockerfile": "FROM debian\nWORKDIR /srv\n",
        "environment/stock/goods/stock.txt": "7\n",
        "solution/solve.sh": SOLVE,
        "tests/test.sh": TEST_SH,
        "tests/Dockerfile": "FROM debian\nCOPY . /tests\n",
    }
    return written(folder / name, files | changed)
