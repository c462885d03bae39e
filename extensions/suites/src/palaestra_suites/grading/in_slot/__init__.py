"""Scripts that `harness.send_scripts` copies into slots.

They import only the standard library, pytest, and each other by bare name. The rest of the package does not import
them.
"""
