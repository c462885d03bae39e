#!/bin/bash
set -e
cat > total.py <<'END'
import sys

print(sum(map(int, sys.stdin.read().split())))
END
