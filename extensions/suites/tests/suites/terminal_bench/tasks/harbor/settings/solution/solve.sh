#!/bin/bash
set -e
echo "$COLOUR" > colour.txt
echo "$NOTE" >> colour.txt
