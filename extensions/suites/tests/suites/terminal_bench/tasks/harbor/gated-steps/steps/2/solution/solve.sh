#!/bin/bash
[ -z "$(ls -A /tests /logs/verifier | grep -v :)" ] && cp /app/pid /app/again
