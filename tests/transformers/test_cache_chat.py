"""The example of a chat goes on in another process as if it had never ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch

from support.models import tiny_transformers as tiny
from support.models.architectures import CACHE
from support.project.checkout import ROOT

pytestmark = pytest.mark.slow

N = 6


@pytest.mark.skipif(CACHE != "cache", reason="the example names the cache as the newest does")
def test_a_chat_goes_on_after_a_restart(tmp_path: Path) -> None:
    model, tokenizer = tiny.model("llama"), tiny.tokenizer()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    command = [sys.executable, str(ROOT / "examples/transformers_chat.py")]
    command += [str(tmp_path / "model"), str(tmp_path / "chat"), "-n", str(N)]
    ids: list[int] = []
    for text in ("a1 b9 c2 f5 g30 h7 a8 b17 c18 d3", "e12 f13 a16"):
        known = max(0, len(ids) - 1)  # the last token has no rows yet
        ids += tokenizer(text, add_special_tokens=not ids).input_ids
        given = torch.tensor([ids])
        mask = torch.ones_like(given)
        whole = model.generate(given, attention_mask=mask, max_new_tokens=N, do_sample=False)
        done = subprocess.run(
            [*command, text],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said = tokenizer.decode(whole[0, len(ids) :])
        counted = f"{known} of {len(ids)} tokens were computed before"
        assert done.stdout.splitlines() == [counted, said]
        ids = json.loads((tmp_path / "chat/chat.json").read_text())
        assert ids == whole[0].tolist()
