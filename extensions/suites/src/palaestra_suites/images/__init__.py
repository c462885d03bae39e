"""The root folders that tasks run in: packages of Debian, image archives, layers of Dockerfiles."""
