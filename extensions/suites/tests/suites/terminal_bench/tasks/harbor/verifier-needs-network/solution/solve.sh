#!/bin/bash
set -e
echo x > anything.txt
