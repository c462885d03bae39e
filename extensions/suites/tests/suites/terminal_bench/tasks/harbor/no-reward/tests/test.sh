#!/bin/bash
test -f anything.txt
