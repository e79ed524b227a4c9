"""Run allocator suites and programs under `unimem exec`, beside four allocators, and compare.

glibc's own malloc tests (its sources are fetched at a pinned version), stress-ng's stressors of
memory, and ten programs, each beside glibc's malloc, jemalloc, mimalloc and tcmalloc (packages of
Debian and PyPI, unpacked below `build`); and calls of the whole family at random, in parts of 10
million that an interrupted run goes on with. Each output is compared with the one without
`unimem exec`.

    python tools/exec_programs.py [glibc] [stress-ng] [programs] [random] [--calls N]

The results join `bench/results/exec_programs.json`, and become the table of docs/exec.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import recorded

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build/exec-programs"
LIBRARIES = WORK / "root/usr/lib/x86_64-linux-gnu"
RECORD = ROOT / "bench/results/exec_programs.json"
PAGE = ROOT / "docs/exec.md"
BEGIN, END = "<!-- programs: tools/exec_programs.py -->\n", "<!-- end of programs -->\n"
GLIBC = "http://deb.debian.org/debian/pool/main/g/glibc/glibc_2.36.orig.tar.xz"
GLIBC_SHA256 = "a543c02070d46ccaf866957efd13f10c924daa74c86a90a0254db09a92a708ee"
ALLOCATORS = {  # package of Debian or, with a version, of PyPI, and its library
    "glibc": ("libc6", ""),
    "jemalloc": ("libjemalloc2", "libjemalloc.so.2"),
    "mimalloc": ("cmeel-mimalloc==3.4.3", "libmimalloc.so.3"),
    "tcmalloc": ("libtcmalloc-minimal4", "libtcmalloc_minimal.so.4"),
}
STRESS = ("stress-ng", "libipsec-mb1", "libjudydebian1", "libsctp1")
STRESSORS = {  # a fixed amount of work each, so that it ends alike
    "malloc": "--malloc 2 --malloc-ops 2000 --malloc-bytes 16M --malloc-max 64 --malloc-touch",
    "malloc threads": "--malloc 1 --malloc-pthreads 4 --malloc-ops 1000 --malloc-bytes 4M",
    "bigheap": "--bigheap 1 --bigheap-ops 100 --bigheap-growth 1M",
    "mmap": "--mmap 1 --mmap-ops 5 --mmap-bytes 16M",
    "mremap": "--mremap 1 --mremap-ops 50 --mremap-bytes 16M",
    "vm": "--vm 1 --vm-ops 300 --vm-bytes 16M",
    "memthrash": "--memthrash 1 --memthrash-ops 2",
    "madvise": "--madvise 1 --madvise-ops 20",
    "mprotect": "--mprotect 1 --mprotect-ops 200",
    "fork": "--fork 1 --fork-ops 100",
}
PART = 10_000_000  # random calls
EXEC = [sys.executable, "-P", "-c", "import sys; from unimem_command import main; sys.exit(main())"]
EXEC += ["exec", "--min-bytes"]
MOST_S = 100
MOST_PART_S = 3600  # glibc's took up to 495 s
FAMILY = str(ROOT / "tests/exec/family.cpp")
JAVA = """public class Big { public static void main(String[] words) {
    int[] a = new int[1 << 23]; int n = 0;
    for (int i = 0; i < a.length; i++) { a[i] = i * 31 ^ i; n += a[i]; }
    System.out.println(n); } }"""
NODE = "let a=[];for(let i=0;i<1e6;i++)a.push(i*7%1000003+'');a.sort();console.log(a[5],a.length)"
PERL = (
    "my %h; $h{$_ * 7 % 1000003} .= 'x' x 20 for 1 .. 500000; print scalar(keys %h), length $h{7}"
)
PYTHON = (
    "b = bytearray(300 << 20); b[::4096] = b'x' * 76800; d = {str(i): [i] for i in range(10**6)}"
)
SQL = """CREATE TABLE t(a, b); WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n
    LIMIT 500000) INSERT INTO t SELECT i * 7 % 1000003, hex(i) FROM n; CREATE INDEX i ON t(b);
    SELECT count(*), sum(a), max(b) FROM t ORDER BY b;"""
MAKE = "all: $(shell seq 3000)\n\t@echo $(words $^)\n%:\n\t@:\n"


def programs() -> dict[str, list[str]]:
    """Return ten programs whose output is always the same."""
    java, make, text = WORK / "Big.java", WORK / "Makefile", WORK / "text"
    java.write_text(JAVA)
    make.write_text(MAKE)
    text.write_bytes(
        b"".join(hashlib.sha256(bytes([i & 255, i >> 8])).digest() * 99 for i in range(9999))
    )
    return {
        "git": ["git", "-C", str(ROOT), "log", "--stat", "--format=%h %s", "-n", "50"],
        "g++": ["g++", "-std=c++17", "-O2", "-S", "-o", "-", FAMILY],
        "python": [sys.executable, "-I", "-c", f"{PYTHON}; print(sum(b), len(d), d['77'])"],
        "sqlite3": ["sqlite3", ":memory:", SQL],
        "java": ["java", "-Xmx256m", str(java)],
        "node": ["node", "-e", NODE],
        "perl": ["perl", "-e", PERL],
        "gzip": ["gzip", "-nc", str(text)],
        "xz": ["xz", "-T2", "-c", str(text)],
        "make": ["make", "-s", "-f", str(make)],
    }


def run(
    words: list[str], beside: str, min_bytes: str = "", report: str = "", most_s: int = MOST_S
) -> tuple[Any, ...]:
    """Return the exit code and output of a program, under exec if `min_bytes` is given."""
    prefix = (
        [*EXEC, min_bytes, *(["--report", report] if report else []), "--"] if min_bytes else []
    )
    preload = str(LIBRARIES / beside) if beside else ""
    try:
        done = subprocess.run(
            [*prefix, *words],
            env=os.environ | {"LD_PRELOAD": preload, "LD_LIBRARY_PATH": str(LIBRARIES)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=WORK,
            check=False,
            timeout=most_s,
        )
    except subprocess.TimeoutExpired:
        return ("time", "", b"")
    return (done.returncode, hashlib.sha256(done.stdout).hexdigest(), done.stdout[-200:])


def unpack(*packages: str) -> None:
    """Fetch packages, and unpack them below the work folder."""
    folder, root = WORK / "packages", WORK / "root"
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages:
        name, _, pinned = package.partition("==")
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", package]
        words = pip if pinned else ["apt-get", "download", "-qq", package]
        subprocess.run(words, cwd=folder, check=True)
        for file in folder.glob(f"{name}_*.deb"):
            subprocess.run(["dpkg", "-x", file, root], check=True)
        for file in folder.glob(f"{name.replace('-', '_')}-{pinned}-*.whl"):
            with zipfile.ZipFile(file) as wheel:
                for member in wheel.namelist():
                    if member.startswith("cmeel.prefix/lib/lib"):
                        (LIBRARIES / Path(member).name).write_bytes(wheel.read(member))


def version(package: str) -> str:
    """Return the version of a package that was unpacked; for the C library, the running one."""
    if package == "libc6":
        return platform.libc_ver()[1]
    if "==" in package:
        return package.partition("==")[2]
    return next((WORK / "packages").glob(f"{package}_*.deb")).name.split("_")[1]


def glibc() -> list[dict[str, Any]]:
    """Build those malloc tests of glibc that need nothing private of it, and compare results."""
    source, folder = WORK / "glibc", WORK / "tests"
    if not source.exists():
        with urlopen(GLIBC, timeout=60) as answer:
            data = answer.read()
        if hashlib.sha256(data).hexdigest() != GLIBC_SHA256:
            raise RuntimeError(f"{GLIBC}: not the pinned file")
        (WORK / "glibc.tar.xz").write_bytes(data)
        with tarfile.open(WORK / "glibc.tar.xz") as archive:
            archive.extractall(WORK, filter="data")
        (WORK / "glibc-2.36").rename(source)
    include = folder / "include"
    shutil.rmtree(folder, ignore_errors=True)
    include.mkdir(parents=True)
    for name in ("support", "malloc", "test-skeleton.c"):
        (include / name).symlink_to(source / name)
    headers = ["include/libc-diag.h", "include/array_length.h", "include/intprops.h"]
    headers += ["include/libc-pointer-arith.h", "sysdeps/generic/malloc-size.h"]
    for name in [*headers, "sysdeps/generic/malloc-alignment.h"]:
        shutil.copy(source / name, include)
    flags = "-O1 -w -fno-builtin -std=gnu11 -D_GNU_SOURCE -DTIMEOUTFACTOR=20 -include limits.h"
    paths = set(re.findall(r"-D(\w+)=something", (source / "support/support_paths.c").read_text()))
    words = ["gcc", *flags.split(), f"-I{include}", f"-I{include / 'support'}", "-pthread"]
    words += [f'-D{name}="/"' for name in paths]
    objects: list[Path] = []
    for file in (source / "support").glob("*.c"):
        out = folder / f"{file.stem}.o"
        done = subprocess.run([*words, "-c", "-o", out, file], capture_output=True, check=False)
        program = re.match(r"tst|test|shell|echo|true|links", file.name)
        objects += [out] if done.returncode == 0 and not program else []
    subprocess.run(["ar", "rc", folder / "support.a", *objects], check=True)
    found, missed, differ = 0, [], []
    for file in sorted((source / "malloc").glob("tst-*.c")):
        out = folder / file.stem
        more: list[str | Path] = [f"-I{source / 'malloc'}", "-o", out, file, folder / "support.a"]
        if subprocess.run([*words, *more], capture_output=True, check=False).returncode != 0:
            missed.append(file.stem)
            continue
        plain, under = run([str(out)], "")[0], run([str(out)], "", "4096")[0]
        print(file.stem, plain, under, flush=True)
        found += 1
        differ += [f"{file.stem} ({plain}, {under})"] if plain != under else []
    row: dict[str, Any] = {"suite": "glibc 2.36's malloc tests", "allocator": "glibc", "n": found}
    return [row | {"differ": differ, "missed": missed}]


def stress() -> list[dict[str, Any]]:
    """Run stress-ng's stressors of memory, which look at what the memory holds."""
    unpack(*STRESS)
    program = str(WORK / "root/usr/bin/stress-ng")
    rows: list[dict[str, Any]] = []
    for name, (_, library) in ALLOCATORS.items():
        row: dict[str, Any] = {"suite": f"stress-ng {version('stress-ng')}", "allocator": name}
        row |= {"n": 0, "differ": [], "missed": []}
        for stressor, words in STRESSORS.items():
            line = [program, "--verify", *words.split()]
            plain, under = run(line, library)[0], run(line, library, "4096")[0]
            print("stress-ng", name, stressor, plain, under, flush=True)
            row["n"] += 1
            row["differ"] += [f"{stressor} ({plain}, {under})"] if plain != under else []
        rows.append(row)
    return rows


def ten() -> list[dict[str, Any]]:
    """Run the programs beside each allocator."""
    rows, report = [], WORK / "report.json"
    for name, (_, library) in ALLOCATORS.items():
        row: dict[str, Any] = {"suite": "programs", "allocator": name, "n": 0}
        row |= {"differ": [], "missed": [], "huge_share": {}}
        for program, words in programs().items():
            if shutil.which(words[0]) is None:
                row["missed"].append(program)
                continue
            report.unlink(missing_ok=True)
            plain, under = run(words, library), run(words, library, "64k", str(report))
            row["n"] += 1
            row["differ"] += [program] if plain != under or plain[0] != 0 else []
            facts = (
                json.loads(report.read_text())["facts"].get("exec", {}) if report.exists() else {}
            )
            if resident := facts.get("became_resident_bytes"):
                row["huge_share"][program] = round(facts["became_huge_bytes"] / resident, 3)
            print(name, program, plain[0], under[0], row["huge_share"].get(program), flush=True)
        rows.append(row)
    return rows


def at_random(record: dict[str, Any], calls: int) -> None:
    """Make calls of the whole family until each allocator has that many."""
    program = WORK / "family"
    flags = ["-std=c++17", "-O1", "-fno-builtin"]
    subprocess.run(["g++", *flags, "-o", program, FAMILY], check=True)
    for name, (_, library) in ALLOCATORS.items():
        done = {row["seed"] for row in record["random"] if row["allocator"] == name}
        for seed in sorted(set(range(1, calls // PART + 1)) - done):
            begin = time.perf_counter()
            words = [str(program), str(PART), str(seed)]
            code, _, text = run(words, library, "65536", most_s=MOST_PART_S)
            record["missed"].pop(name, None)
            if code != 0 and run(words, library)[0] == code:
                record["missed"][name] = "fails without unimem exec, too: wrong alignment"
                break
            if code != 0:
                raise RuntimeError(f"{name}, seed {seed}: exit code {code}")
            n, large, placed = map(int, text.split())
            row = {"allocator": name, "seed": seed, "calls": n, "large": large, "placed": placed}
            row |= {
                "seconds": round(time.perf_counter() - begin),
                "commit": recorded.short_commit(),
            }
            record["random"].append(row)
            RECORD.write_text(json.dumps(record, indent=1) + "\n")


def read() -> dict[str, Any]:
    """Return the record as it is."""
    found: dict[str, Any] = {"schema": "unimem.exec_programs/1", "rows": [], "random": []}
    found["missed"] = {}  # reasons, by allocator
    return json.loads(RECORD.read_text()) if RECORD.exists() else found


def table(record: dict[str, Any]) -> str:
    """Return the table of the page."""
    lines = ["| what | beside | results | differ | in huge pages |", "|---|---|---|---|---|"]
    for row in record["rows"]:
        beside = f"{row['allocator']} {record['versions'][row['allocator']]}"
        shares = ", ".join(f"{name} {x:.0%}" for name, x in row.get("huge_share", {}).items() if x)
        differ = ", ".join(row["differ"]) or "0"
        lines.append(f"| {row['suite']} | {beside} | {row['n']} | {differ} | {shares or '-'} |")
    for name in ALLOCATORS:
        parts = [row for row in record["random"] if row["allocator"] == name]
        n, large, placed = (sum(row[key] for row in parts) for key in ("calls", "large", "placed"))
        if n:
            share = f"{large / n:.0%} of 64 KiB or more, {placed / large:.1%} of those placed"
            beside = f"{name} {record['versions'][name]}"
            lines.append(f"| random calls: {share} | {beside} | {n:,} | 0 | - |")
    for name, why in record["missed"].items():
        lines.append(
            f"| random calls: {why} | {name} {record['versions'][name]} | missed | - | - |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the named parts, or all but the random calls."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["glibc", "stress-ng", "programs"])
    parser.add_argument("--calls", type=int, default=100_000_000, help="at random, per allocator")
    asked = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    unpack(*(package for package, library in ALLOCATORS.values() if library))
    versions = {name: version(package) for name, (package, _) in ALLOCATORS.items()}
    for part, work in {"glibc": glibc, "stress-ng": stress, "programs": ten}.items():
        if part in asked.parts:
            rows = work()
            record = read() | {"versions": versions, "commit": recorded.short_commit()}
            kinds = {row["suite"] for row in rows}
            record["rows"] = [row for row in record["rows"] if row["suite"] not in kinds] + rows
            RECORD.write_text(json.dumps(record, indent=1) + "\n")
    if "random" in asked.parts:
        at_random(read() | {"versions": versions}, asked.calls)
    recorded.put(PAGE, BEGIN, table(read()), END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
