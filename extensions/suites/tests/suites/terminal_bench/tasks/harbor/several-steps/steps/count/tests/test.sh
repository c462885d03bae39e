#!/bin/bash
. /tests/helper.sh
[ -e /app/more.txt ] && pay 0 && exit
[ "$(cat /app/count.txt)" = 2 ] && pay 1 || pay 0
