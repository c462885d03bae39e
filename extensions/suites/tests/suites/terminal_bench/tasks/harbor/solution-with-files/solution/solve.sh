#!/bin/bash
set -e
python3 /solution/order.py names.txt > sorted.txt
