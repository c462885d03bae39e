"""Scripts that `harness.send_scripts` copies into slots: standard library and pytest only, and each other by bare name.

The rest of the package does not import them.
"""
