#!/bin/bash
wc -l < fruit.txt > count.txt
cp count.txt /tmp/count.txt
