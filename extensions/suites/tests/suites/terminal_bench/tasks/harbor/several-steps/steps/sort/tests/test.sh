#!/bin/bash
. /tests/helper.sh
good=0
[ "$(tr '\n' ' ' < /app/sorted.txt)" = "apple fig pear " ] && good=1
[ "$(cat /app/count.txt /tmp/count.txt | tr -d '\n')" = 22 ] || good=0
pay $good
