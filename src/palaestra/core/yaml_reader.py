"""Reading YAML that somebody else wrote: one reader, one kind of error."""

from __future__ import annotations

from palaestra.core.types import JSON


def read_yaml(text: str) -> JSON:
    """The one document of a text, as plain data. Raises `ValueError` for a text that is none.

    The library's own errors are not all: its constructors raise what they meet in a value that does not fit its tag
    (`!!bool maybe`, a KeyError), and text that nests deeply is a RecursionError.
    """
    import yaml  # here, because most runs read none

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
