#!/bin/bash
set -e
wc -l < text.txt > lines.txt
wc -w < text.txt > words.txt
