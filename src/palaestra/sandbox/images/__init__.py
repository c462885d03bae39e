"""Images: turns a tar file or an OCI layout into a directory that slots have below their root."""
