#!/bin/bash
set -e
echo 41 > answer.txt
