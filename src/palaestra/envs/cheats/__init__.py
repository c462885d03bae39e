"""The cheat bank: published ways of being paid without doing the work, and the check that none of them pays here."""
