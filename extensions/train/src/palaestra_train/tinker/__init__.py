"""A training and sampling server for clients of the Tinker SDK. Needs the extra `tinker`."""
