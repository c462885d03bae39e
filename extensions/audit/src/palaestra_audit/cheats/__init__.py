"""Published ways to earn a reward without doing the work, and the check that none of them works."""
