"""The interpreters, packages and build tools that the tests of a repository need."""
