#!/bin/bash
tail -n +2 stock.csv | while IFS=, read -r warehouse item pieces; do
  [[ "$pieces" =~ ^[0-9]+$ ]] && echo "$warehouse $pieces"
done | awk '{sum[$1] += $2} END {for (name in sum) print name, sum[name]}' | sort > totals.txt
