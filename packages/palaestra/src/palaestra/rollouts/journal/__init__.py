"""The journal of a run, with its one reader."""
