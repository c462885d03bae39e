#!/bin/bash
mkdir -p deep/down
chmod 700 deep/down
