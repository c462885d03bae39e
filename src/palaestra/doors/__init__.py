"""The front doors beside the command line: conversations in the terminal and in editors (`chat`), chat platforms
(`gateway`), files of prompts (`batch`) and the API of the E2B SDKs (`e2b`).

The doors are built on environments, agents and slots, none of which imports a door. Entry points name the doors'
commands.
"""
