#!/bin/bash
ls notes | sed "s/\.md$//" | sort -V > versions.txt
