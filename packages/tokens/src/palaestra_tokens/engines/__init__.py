"""Model servers, a model in this process, functions and scripts as engines with one interface."""
