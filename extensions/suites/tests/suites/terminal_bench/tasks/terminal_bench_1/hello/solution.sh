#!/bin/bash
echo Hello > hello.txt
