#!/bin/bash
score=0
grep -qx a a.txt && score=0.5
grep -qx a a.txt && grep -qx b b.txt && score=1
echo $score > /logs/verifier/reward.txt
exit 3
