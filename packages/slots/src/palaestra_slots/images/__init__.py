"""Root file systems of tasks: Dockerfiles, images that were pulled or built, and files that describe tasks."""
