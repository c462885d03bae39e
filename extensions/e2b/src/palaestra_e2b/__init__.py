"""Serves the HTTP API that the SDKs of E2B call, over Palaestra's slots and images: `palaestra serve e2b`.

`control_api.py` is what the SDK calls the API (sandboxes, snapshots, templates); `envd.py`, `process_service.py`,
`filesystem_service.py` and `file_transfer.py` are what it finds inside a sandbox. Nothing of the SDK is imported.
Source: the packages `e2b` 2.63.0 (PyPI) and 2.51.0 (npm), and the protocol of Connect (connectrpc.com/docs/protocol).
"""
