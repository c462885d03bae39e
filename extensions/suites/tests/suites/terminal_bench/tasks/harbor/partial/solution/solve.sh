#!/bin/bash
set -e
echo a > a.txt
echo b > b.txt
