#!/bin/bash
set -e
mv late.txt more.txt
