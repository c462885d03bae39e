#!/bin/bash
sort fruit.txt more.txt > sorted.txt
