#!/bin/bash
[ ! -e /app/inbox.md ] && grep -qx "One thing was mended." /app/notes/1.11.md && . /tests/compare.sh 1.2 1.9 1.10 1.11 2.0 \
  || echo 0 > /logs/verifier/reward.txt
