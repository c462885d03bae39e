pay() { [ "$WANTED" = "from the task" ] && echo "{\"reward\": $1, \"tidy\": 1}" > /logs/verifier/reward.json; }
