"""The page of a run, which is also its report: `palaestra view` and `palaestra report`."""
