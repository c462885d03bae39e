#!/bin/bash
# Two checks, each with a reward of its own, and no pytest.
lines=0; words=0
[ "$(tr -d ' \n' < lines.txt 2>/dev/null)" = 3 ] && lines=1
[ "$(tr -d ' \n' < words.txt 2>/dev/null)" = 6 ] && words=1
cat > /logs/verifier/reward.json <<END
{"reward": $(( lines && words )), "lines": $lines, "words": $words}
END
