"""The tools that come with the package, one file each. Importing this registers nothing."""
