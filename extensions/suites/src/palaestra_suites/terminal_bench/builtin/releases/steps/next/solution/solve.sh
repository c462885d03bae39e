#!/bin/bash
version=$(head -1 inbox.md | cut -d" " -f2)
mv inbox.md notes/$version.md
ls notes | sed "s/\.md$//" | sort -V > versions.txt
