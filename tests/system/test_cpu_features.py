"""Features of CPUs: those that a library needs and this machine lacks are named."""

from __future__ import annotations

import platform

import pytest

from support.kernel.cgroup_tree import Write
from unimem.system.cpu_features import cpu_features, missing_cpu_features

OLD = "processor\t: 0\nflags\t\t: fpu sse2 pni ssse3 sse4_1 sse4_2 avx abm\nbogomips\t: 5000"
NEW = (
    f"{OLD.replace('avx', 'avx f16c fma avx2 avx512f avx512_vnni')}\n\nprocessor\t: 1\nflags\t: fpu"
)
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm sve"


@pytest.mark.parametrize(
    ("info", "needed", "missing"),
    [
        (OLD, "SSE3 SSE4.2 AVX LZCNT", ""),
        (OLD, "AVX2 AVX FMA f16c", "AVX2 FMA f16c"),
        (NEW, "AVX2 FMA F16C AVX512F AVX512_VNNI avx512vnni", ""),
        (NEW, "AVX512_BF16 amx-int8", "AVX512_BF16 amx-int8"),
        (ARM, "NEON DOTPROD i8mm SVE", ""),
        (ARM, "sve2 avx2", "sve2 avx2"),
        ("", "avx2", "avx2"),
        (OLD, "", ""),
    ],
)
def test_what_is_missing_is_named_as_it_was_asked_for(
    tree: Write, info: str, needed: str, missing: str
) -> None:
    tree("proc/cpuinfo", info)
    assert missing_cpu_features(needed.split()) == tuple(missing.split())


def test_features_of_this_machine() -> None:
    baseline = {"x86_64": "sse2", "aarch64": "neon"}.get(platform.machine())
    if baseline is None:
        pytest.skip(f"no feature is known that every {platform.machine()} has")
    assert missing_cpu_features([baseline, "none"]) == ("none",)
    assert len(cpu_features()) > 3
