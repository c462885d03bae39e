"""The tools that come with the package, one module each. Importing this package registers nothing."""
