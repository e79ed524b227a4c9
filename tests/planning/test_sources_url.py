"""Plans of models on a server: fetched ranges, equality with local plans, and faulty servers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files import gguf_files as g
from support.files import safetensors_files as st
from support.project.checkout import ROOT
from support.servers.model_server import ModelServer, serving
from support.terminal.screens import show
from unimem.engine import embedded_model
from unimem.remote import client
from unimem.weights import remote_files
from unimem.weights.files import open_model

pytest.importorskip("fsspec", reason="fsspec reads URLs: pip install '.[remote]'")
pytest.importorskip("aiohttp", reason="aiohttp reads URLs: pip install '.[remote]'")

TINY = embedded_model()
M = "/m.gguf"
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", "")
    with serving() as state:
        yield state


def said(plan: um.Plan) -> dict[str, Any]:
    """Return the parts of a plan that depend on neither the moment nor the model's location."""
    found = plan.to_dict()
    for name in ("checks", "available_bytes", "spilled_bytes", "fits", "advice", "unhashed_bytes"):
        del found[name]
    places = ("model", "read_bytes", "file_bytes")
    facts = {name: fact for name, fact in plan.facts.items() if name not in places}
    return found | {"facts": facts}


def long_header(path: Path, nbytes: int = 100_000) -> Path:
    """Write a GGUF file whose header, with a vocabulary, has about 50 kB."""
    words = [g.string(f"word {i}") for i in range(3000)]
    kvs = [
        g.kv("general.architecture", g.STRING, g.string("odd")),
        g.kv("tokenizer.ggml.tokens", g.ARRAY, g.array(g.STRING, len(words), *words)),
    ]
    tensors = [g.tensor("one", (nbytes,), g.I8, 0)]
    path.write_bytes(g.with_data(g.head(1, len(kvs)), *kvs, *tensors, nbytes=nbytes)[0])
    return path


def safetensors_of_two(folder: Path) -> list[Path]:
    """Write an index, a config and two files, one with a name that URLs escape."""
    names = {"a": "first part #1.safetensors", "b": "second.safetensors"}
    for tensor, name in names.items():
        (folder / name).write_bytes(st.write({tensor: ("F32", (64, 64))}))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return [index, folder / "config.json", *(folder / name for name in names.values())]


def escaped_files(server: ModelServer, paths: list[Path]) -> str:
    url = server.add(*paths)
    server.files = {path.replace(" ", "%20").replace("#", "%23"): data
                    for path, data in server.files.items()}  # fmt: skip
    return url


@pytest.mark.parametrize("options", [
    {}, {"load": "copy", "ctx": 100, "sessions": 2}, {"load": "direct", "kv_dtype": "q8_0"},
])  # fmt: skip
def test_a_plan_equals_that_of_the_file(
    server: ModelServer, options: dict[str, Any], gives_memory_back: None
) -> None:
    url = server.add(Path(TINY))
    plan = um.plan(url, **options)
    assert said(plan) == said(um.plan(TINY, **options))
    size = os.path.getsize(TINY)
    assert server.asked == [("GET", "/tiny.gguf", "0-262143")]
    assert server.sent_bytes == plan.facts["read_bytes"] == 262_144
    assert (plan.facts["model"], plan.facts["file_bytes"]) == (url, size)


def test_a_range_grows_until_the_header_is_whole(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "FIRST_BYTES", 10_000)
    path = long_header(tmp_path / "long.gguf")
    with open_model(path) as model:
        assert 40_000 < model.files[0].header.nbytes < 80_000
    plan = um.plan(server.add(path))
    ranges = ["0-9999", "10000-19999", "20000-39999", "40000-79999"]
    assert [asked[2] for asked in server.asked] == ranges
    assert server.sent_bytes == plan.facts["read_bytes"] == 80_000
    assert said(plan) == said(um.plan(path))


def test_all_parts_of_a_split_model(server: ModelServer, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf (extra test) splits the model: pip install '.[test]'")
    (tmp_path / "m.gguf").write_bytes(Path(TINY).read_bytes())
    parts = g.split(tmp_path / "m.gguf", 10)
    assert len(parts) > 2
    server.add(*parts)
    plan = um.plan(f"{server.url}/{parts[1].name}?download=true")
    assert said(plan) == said(um.plan(parts[1]))
    # Each part is fetched once, with the original query.
    assert sorted(path for _, path, _ in server.asked) == [
        f"/{p.name}?download=true" for p in parts
    ]
    assert plan.facts["read_bytes"] == sum(min(p.stat().st_size, 262_144) for p in parts)
    del server.files[f"/{parts[-1].name}"]
    with pytest.raises(
        FileNotFoundError, match=rf"Part {len(parts)} of .* is missing: '{server.url}"
    ):
        um.plan(f"{server.url}/{parts[0].name}")


def test_an_index_of_safetensors_and_its_config(server: ModelServer, tmp_path: Path) -> None:
    paths = safetensors_of_two(tmp_path)
    plan = um.plan(escaped_files(server, paths))
    assert said(plan) == said(um.plan(paths[0]))
    assert plan.scratch_bytes > 0, "the config was read"
    assert plan.facts["read_bytes"] == sum(path.stat().st_size for path in paths)
    assert len(server.asked) == 4
    # Without a config, the plan says so and keeps the known parts.
    del server.files["/config.json"]
    plan = um.plan(server.url + "/model.safetensors.index.json")
    assert any("config.json: The server has no such file" in text for text in plan.unknown)


def test_a_server_without_ranges_does_not_send_a_model(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "FIRST_BYTES", 10_000)
    url = server.add(long_header(tmp_path / "long.gguf", 64 << 20))
    server.has_ranges = False
    assert um.plan(url).facts["read_bytes"] == 80_000
    assert len(server.asked) == 1
    monkeypatch.setattr(remote_files, "MOST_BYTES", 20_000)
    with pytest.raises(OSError, match="no ranges but the whole file: download the file") as caught:
        um.plan(url)
    assert caught.value.filename == url
    assert server.sent_bytes < len(server.files["/long.gguf"])


def test_an_endless_header(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "FIRST_BYTES", 10_000)
    monkeypatch.setattr(remote_files, "MOST_BYTES", 30_000)
    url = server.add(long_header(tmp_path / "long.gguf"))
    with pytest.raises(OSError, match=r"does not end within 29\.3 KiB, and no more is read"):
        um.plan(url)
    assert server.sent_bytes == 30_000


@pytest.mark.parametrize(("limit", "error", "text"), [
    ("MOST_MODEL_BYTES", OSError, "The headers before this one have .*, and no more is read of"),
    ("TOTAL_S", TimeoutError, "The headers before this one were not read within .* s: try again"),
])  # fmt: skip
def test_a_model_of_too_many_files(
    server: ModelServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    error: type[Exception],
    text: str,
) -> None:
    paths = safetensors_of_two(tmp_path)
    # Together, the index and one file exceed it.
    monkeypatch.setattr(remote_files, limit, paths[0].stat().st_size + 1)
    seconds = iter([0, 1, 1 << 30])
    monkeypatch.setattr(remote_files, "monotonic", lambda: next(seconds))
    with pytest.raises(error, match=text) as caught:
        um.plan(escaped_files(server, paths))
    assert str(caught.value).endswith(("part%20%231.safetensors'", "/second.safetensors'"))
    assert len(server.asked) == 2


def compress(server: ModelServer) -> None:
    server.has_ranges = False
    server.headers["Content-Encoding"] = "gzip"


WRONG: dict[str, tuple[Callable[[ModelServer], object], type[Exception], str]] = {
    "no file": (lambda s: s.files.clear(), FileNotFoundError, "no such file: look at the address"),
    "403": (lambda s: s.statuses.update({M: 403}), PermissionError, "refuses access"),
    "401": (lambda s: s.statuses.update({M: 401}), PermissionError, "HF_TOKEN"),
    "503": (lambda s: s.statuses.update({M: 503}), OSError, "HTTP status 503: try again later"),
    "circle": (lambda s: s.redirects.update({M: M}), OSError, "redirects in a circle"),
    "to a path": (
        lambda s: s.redirects.update({M: "file:///etc/passwd"}), OSError, "The request to",
    ),
    "silence": (lambda s: setattr(s, "silent", True), TimeoutError, "did not answer within"),
    "cut off": (lambda s: setattr(s, "lost_bytes", 10), OSError, "try again later"),
    "other range": (
        lambda s: s.headers.update({"Content-Range": "bytes 5-9/10"}), OSError, "another range",
    ),
    "compressed": (compress, OSError, "does not say how long the file is: try again"),
    "HTML": (
        lambda s: s.files.update({M: b"\n<!DOCTYPE html><p>GGUF"}), um.FormatError,
        "an HTML page, and no model file: give the link to the file itself",
    ),
    "version": (lambda s: s.files.update({M: b"GGUF" + bytes(10)}), um.GGUFError, "version"),
    "no model": (lambda s: s.files.update({M: bytes(1 << 20)}), um.GGUFError, "begin with GGUF"),
    "short": (
        lambda s: s.files.update({M: Path(TINY).read_bytes()[:9000]}), um.GGUFError, "the file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_faulty_servers(server: ModelServer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    change, kind, text = WRONG[name]
    monkeypatch.setattr(client, "WAIT_S", 0.5)
    server.files[M] = Path(TINY).read_bytes()
    url = server.url + M
    change(server)
    with pytest.raises(kind, match=text) as caught:
        um.plan(url)
    assert url in str(caught.value)
    assert caught.value.__cause__ is None
    # Nothing more is read if the first bytes are enough.
    assert server.sent_bytes <= 262_144 or not server.has_ranges


def test_no_server(server: ModelServer) -> None:
    url = "http://127.0.0.1:1/m.gguf"
    with pytest.raises(ConnectionRefusedError, match="cannot be reached: look at the address"):
        um.plan(url)
    screen = show("plan", url)
    assert (screen.code, screen.out) == (1, "")
    assert screen.err.startswith(f"unimem: {url}: The server cannot be reached")
    assert screen.err.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    ["replaced while its header was read: try again, or download the file", "sends no ranges"],
)
def test_a_file_that_changes_on_the_server(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(remote_files, "FIRST_BYTES", 10_000)
    url = server.add(long_header(tmp_path / "long.gguf"))

    class Changing(dict[str, bytes]):
        def get(self, path: str, default: Any = None) -> Any:
            if "ranges" in text:
                server.has_ranges = len(server.asked) < 2
                return self[path]
            return self[path] + bytes(len(server.asked))

    server.files = Changing(server.files)
    with pytest.raises(OSError, match=text) as caught:
        um.plan(url)
    assert caught.value.filename == url
    assert len(server.asked) == 2


def test_redirects_and_secrets(server: ModelServer) -> None:
    server.add(Path(TINY))
    server.redirects["/latest"] = f"{server.url}/tiny.gguf?Signature=s3cret"
    host = server.url.removeprefix("http://")
    url = f"http://me:pass%20word@{host}/latest?key=s3cret#part"
    shown = f"{server.url}/latest"
    plan = um.plan(url)
    assert plan.facts["model"] == shown
    asked = [path for _, path, _ in server.asked]
    assert asked == ["/latest?key=s3cret", "/tiny.gguf?Signature=s3cret"]
    assert server.tokens[0] == "Basic bWU6cGFzcyB3b3Jk"
    screen = show("plan", url)
    assert f"file      {shown}" in screen.lines
    assert "s3cret" not in screen.out
    assert "pass" not in screen.out
    server.redirects.clear()
    with pytest.raises(FileNotFoundError) as caught:
        um.plan(url)
    assert str(caught.value).endswith(f": '{shown}'")


def test_files_of_hugging_face(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub", reason="for hf://: pip install '.[remote]'")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    with serving() as other:
        target = other.add(Path(TINY), folder="/cdn/")
        for revision in ("main", "v2"):
            server.redirects[f"/me/stories/resolve/{revision}/gguf/tiny.gguf"] = target
        for url in ("hf://me/stories/gguf/tiny.gguf", "hf://me/stories@v2/gguf/tiny.gguf"):
            plan = um.plan(url)
            assert said(plan) == said(um.plan(TINY))
            assert plan.facts["model"] == url
        assert set(server.tokens) == {"Bearer hf_token"}
        assert set(other.tokens) == {None}, "the token is for one server alone"
    with pytest.raises(FileNotFoundError, match="hf://me/stories/none"):
        um.plan("hf://me/stories/none")
    with pytest.raises(ValueError, match="expected hf://owner/repository/file, got 'hf://me'"):
        um.plan("hf://me")


@pytest.fixture
def s3_url(server: ModelServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Serve a file with a long header from a bucket that needs credentials."""
    pytest.importorskip("obstore", reason="obstore is for s3://: pip install '.[remote]'")
    for name, value in {
        "AWS_ENDPOINT_URL": server.url, "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "key",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote_files, "FIRST_BYTES", 10_000)
    server.headers |= {"ETag": '"1"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
    server.add(long_header(tmp_path / "long.gguf"), folder="/bucket/models/")
    return "s3://bucket/models/long.gguf"


def test_files_of_s3(server: ModelServer, s3_url: str, tmp_path: Path) -> None:
    plan = um.plan(s3_url)
    assert said(plan) == said(um.plan(tmp_path / "long.gguf"))
    ranges = [asked[2] for asked in server.asked if asked[0] == "GET"]
    assert ranges == ["0-9999", "10000-19999", "20000-39999", "40000-79999"]
    assert plan.facts["read_bytes"] == 80_000
    assert all(token and token.startswith("AWS4") for token in server.tokens)


@pytest.mark.slow
def test_s3_refusals(server: ModelServer, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    # Public files need no credentials.
    assert um.plan(s3_url).facts["read_bytes"] == 80_000
    assert set(server.tokens) == {None}
    server.statuses["/bucket/models/long.gguf"] = 403
    with pytest.raises(PermissionError, match=f"credentials of AWS.*'{s3_url}'"):
        um.plan(s3_url)
    with pytest.raises(FileNotFoundError, match="no such file: look at the address: 's3://b/no'"):
        um.plan("s3://b/no")
    monkeypatch.setattr(client, "WAIT_S", 0.5)
    server.silent = True
    with pytest.raises(TimeoutError, match="did not answer within"):
        um.plan(s3_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ConnectionRefusedError, match="cannot be reached"):
        um.plan(s3_url)


def test_other_urls_and_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"s3://, gs://, az://, hf://, https:// .*got 'odd://a/m\.gguf'"
    ):
        um.plan("odd://a/m.gguf")
    with pytest.raises(ValueError, match=r"'https://\[a/b' is no URL"):
        um.plan("https://[a/b")
    with pytest.raises(OSError, match=r"no URL that can be opened: 'https:///b'"):
        um.plan("https:///b?secret")
    for missing, url in (
        ("fsspec", "https://a/b"),
        ("obstore", "s3://a/b"),
        ("huggingface_hub", "hf://a/b/c"),
    ):
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(
            ImportError, match=r"needs .*: install unimem-llm with the extra 'remote'"
        ):
            um.plan(url)
    assert "install unimem-llm with the extra 'remote'" in show("plan", "https://a/b").err


def test_the_command(server: ModelServer) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="for documents: pip install '.[test]'")
    url = server.add(Path(TINY))
    screen = show("plan", url)
    assert (screen.code, screen.err) == (0, "")
    assert screen.lines[3:5] == [f"file      {url}", "read      256.0 KiB of 1.0 MiB"]
    document = json.loads(show("plan", url, "--json").out)
    schema = ROOT / "docs" / "schemas" / "plan-2.json"
    jsonschema.validate(document, json.loads(schema.read_text()))
    assert document["facts"]["read_bytes"] == 262_144


def test_inspect_before_the_download(server: ModelServer) -> None:
    url = server.add(Path(TINY))
    for options in ([], ["--tensors"], ["--json"], ["--metadata", "general.name"]):
        of_url, of_file = show("inspect", url, *options), show("inspect", TINY, *options)
        assert (of_url.code, of_url.err) == (0, "")
        assert of_url.out.replace(url, str(TINY)) == of_file.out
    assert server.sent_bytes == 4 * 262_144
    for option in ("--residency", "--content-hash"):
        screen = show("inspect", url, option)
        assert (screen.code, screen.out) == (2, "")
        assert "only headers of a URL are read" in " ".join(screen.err.split())
