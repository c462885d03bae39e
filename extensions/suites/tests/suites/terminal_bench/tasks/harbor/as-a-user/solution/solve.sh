#!/bin/bash
set -e
whoami > ~/who.txt
