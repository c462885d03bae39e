"""Images: from a tar file or an OCI layout to a directory that slots have below their root."""
