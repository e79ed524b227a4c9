"""`unimem.torch` without torch, or before it is used."""

from __future__ import annotations

from typing import Any


def test_it_is_imported_where_it_is_used_and_says_what_to_install(run_python: Any) -> None:
    answer = run_python(
        """
        import sys
        import unimem.torch as ut
        assert "torch" not in sys.modules
        sys.modules["torch"] = None
        for call in (lambda: ut.tensor(None), lambda: ut.load_state_dict(None, None)):
            try:
                call()
            except ImportError as error:
                assert "unimem.torch needs torch: install unimem-llm with the" in str(error)
            else:
                raise AssertionError
        """
    )
    assert (answer.returncode, answer.stderr) == (0, "")
