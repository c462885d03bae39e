"""Terminal tasks: folders of Harbor and Terminal-Bench, their images, verifiers and scores."""
