"""README.md as a package index shows it, where no file lies beside it.

scikit-build-core calls `dynamic_metadata` when it makes the metadata of a distribution. A link to a
file leads to the repository that `[project.urls]` names as Repository, at the tag of the version.
While it names none, a link is its text, and a picture what it shows, in words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


def absolute(text: str, repository: str | None, version: str) -> str:
    """Return Markdown whose links to files lead to a repository, or are text.

    Parameters
    ----------
    text : str
        The document, which lies in the top folder of the repository.
    repository : str or None
        The address of the repository.
    version : str
        The version, whose tag is `v` and the version.
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
