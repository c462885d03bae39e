"""Translate the columns of published data sets into those of SWE-bench, which `swe_row.py` reads.

- SWE-bench Pro: `fail_to_pass` and `pass_to_pass` as the text of a Python list; `requirements` and `interface` are part
  of the prompt.
- SWE-rebench V2: `interface` is part of the prompt.
- NeMo Gym (Nemotron): the row is in `responses_create_params.metadata`, whole or as the JSON text `instance_dict`.
- SWE-bench-Live: `test_cmds` and `docker_image`, which are read under their own names.

R2E-Gym has no diff, only an image and the expected outcomes of its hidden tests. Such rows are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON
from palaestra_suites.swe.row_recipe import as_list

_TITLES = {"requirements": "Requirements", "interface": "Interface"}


def published(raw: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return a row with the columns of SWE-bench. Raises `TaskError` for a row of a set that cannot be read."""
    row = dict(_unwrapped(raw))
    if "expected_output_json" in row and "patch" not in row:
        raise TaskError(
            "R2E-Gym rows are not read: they have no diff, and their hidden tests are only in their images; its Harbor "
            "adapter makes task folders of them, which terminalbench_2 runs"
        )
    for name in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        if name not in row and name.lower() in row:
            row[name] = row[name.lower()]
        text = row.get(name)
        if isinstance(text, str) and not _is_json(text) and (read := as_list(text)) != [text.strip()]:
            row[name] = read
    pro = "before_repo_set_cmd" in row or "selected_test_files_to_run" in row
    if pro or "interface" in row:
        names = tuple(_TITLES) if pro else ("interface",)
        parts = [str(row.get("problem_statement") or "")]
        parts += [f"{_TITLES[name]}:\n{text}" for name in names if (text := str(row.get(name) or "").strip())]
        row["problem_statement"] = "\n\n".join(part.strip() for part in parts if part.strip())
    if pro:
        row.pop("requirements", None)  # prose, not packages
    return row


def _unwrapped(raw: Mapping[str, JSON]) -> Mapping[str, JSON]:
    request = raw.get("responses_create_params")
    metadata = request.get("metadata") if isinstance(request, Mapping) else None
    if not isinstance(metadata, Mapping):
        return raw
    whole = metadata.get("instance_dict")
    if isinstance(whole, str) and _is_json(whole):
        whole = json.loads(whole)
    found = {**metadata, **whole} if isinstance(whole, Mapping) else dict(metadata)
    if "patch" not in found and "golden_patch" in found:
        found["patch"] = found["golden_patch"]
    return found


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
