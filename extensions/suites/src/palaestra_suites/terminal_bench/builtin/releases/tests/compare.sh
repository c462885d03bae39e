if [ "$(cat /app/versions.txt)" = "$(printf '%s\n' "$@")" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
