"""A training and sampling server on the wire of the Tinker SDK. Extra: `tinker`."""
