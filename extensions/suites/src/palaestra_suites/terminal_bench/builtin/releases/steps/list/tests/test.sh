#!/bin/bash
. /tests/compare.sh 1.2 1.9 1.10 2.0
