#!/bin/bash
[ ! -e /tests ] && [ ! -e /logs/verifier/reward.txt ] && cp /app/pid /app/again
