"""Make verifiable bug-fixing tasks: download packages, inject bugs, and keep the bugs that their tests detect."""
