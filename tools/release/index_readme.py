"""README.md as a package index shows it, without the files beside it.

scikit-build-core calls `dynamic_metadata` when it makes the metadata of a distribution. A link to a
file leads to the repository that `[project.urls]` names as Repository, at the tag of the version.
Without a repository, a link is its text, and a picture its description.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


def absolute(text: str, repository: str | None, version: str) -> str:
    """Return Markdown whose links to files lead to a repository, or are text without one.

    `text` is a document in the top folder of the repository. The tag is `v` and the version.
    """

    def lead(match: re.Match[str]) -> str:
        picture, words, path = match.groups()
        if repository is None:
            return words
        kind = "raw" if picture else "blob"
        return f"{picture}[{words}]({repository.rstrip('/')}/{kind}/v{version}/{path})"

    return LINK.sub(lead, text)


def dynamic_metadata(
    field: str, settings: Mapping[str, Any], project: Mapping[str, Any]
) -> dict[str, str]:
    """Return the table `readme` of the metadata; a hook of scikit-build-core."""
    if field != "readme" or settings:
        raise ValueError(f"index_readme makes 'readme' without settings, got {field!r}")
    # Where it lacks a key, scikit-build-core's mapping raises other errors than `get` expects.
    urls = project["urls"] if "urls" in project else {}  # noqa: SIM401
    text = Path("README.md").read_text(encoding="utf-8")
    made = absolute(text, urls.get("Repository"), project["version"])
    return {"content-type": "text/markdown", "text": made}
