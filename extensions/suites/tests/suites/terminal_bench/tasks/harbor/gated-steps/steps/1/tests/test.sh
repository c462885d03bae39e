#!/bin/bash
kill -0 $(cat /app/pid) && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
