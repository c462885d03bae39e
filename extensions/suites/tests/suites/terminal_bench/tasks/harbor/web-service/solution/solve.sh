#!/bin/bash
set -e
nohup python3 -m http.server 8765 --bind 127.0.0.1 --directory /app/site > /dev/null 2>&1 &
for i in $(seq 100); do python3 -c 'import socket; socket.create_connection(("127.0.0.1", 8765))' 2> /dev/null && break; sleep 0.1; done
