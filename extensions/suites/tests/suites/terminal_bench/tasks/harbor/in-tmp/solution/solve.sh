#!/bin/bash
set -e
echo ready > /tmp/state
