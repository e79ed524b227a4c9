"""Weights in the order that the CPU multiplies fastest: when they are ready, and how many copies.

A start repacks them, or uses an image that an earlier start kept on disk, or one that is staged in
shared memory. llama.cpp makes a private copy at each start, in each process.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import unimem as um
from unimem.weights.loading import EngineLoad
from unimem_bench import decoding, states
from unimem_bench.decoders import DecoderProcess
from unimem_bench.llama_build import NoPeer
from unimem_bench.llama_cpp import Flags
from unimem_bench.memory import PeakMemory, private_bytes, pss_bytes
from unimem_bench.models import Kind
from unimem_bench.rounds import Side
from unimem_bench.suite import Measure, NotMeasured, Suite, at_most, costs

SUITE = Suite("repack", "What do repacked weights cost at the start, and in memory?")

KIND: Kind = "q4_k_m"
KEPT, STAGED = "unimem", "unimem, staged"
MAPPED, FIRST, ON_DISK = "unimem, mapped", "unimem, first start", "unimem, from the disk"
ONE = decoding.PROMPT[:1]  # with a longer prompt, prefill would be most of the time
N_COPIES = 5  # of the weights: two files, an image on disk, a staged and a repacked one
N_SHARING = 4  # processes
# Its defaults repack; the other one computes with the weights as they lie in the mapped file.
PEERS = {"llama.cpp-mapped": Flags(repack=False, load_mode="mmap"), "llama.cpp": Flags()}


class Starts:
    """Starts decoders of one model, and checks where their weights come from."""

    def __init__(self, measure: Measure) -> None:
        self.path, self._cpus = decoding.prepared(measure, KIND, N_COPIES)
        self.nbytes = self.path.stat().st_size
        self._measure = measure
        self._options: dict[str, Any] = {"threads": len(self._cpus), "ctx": decoding.N_CTX}

    def prepare(self, image: str | Path | None = None) -> None:
        """Make memory ready, and read the model and an image into the page cache."""
        states.ready(2 * self.nbytes, self._cpus)
        for path in (self.path, *([] if image is None else [image])):
            states.read_through(Path(path))  # repacking drops weights from the page cache

    @contextmanager
    def start(
        self,
        load: EngineLoad,
        *,
        path: str | None = None,
        image: str | Path | None = None,
        **how: Any,
    ) -> Iterator[DecoderProcess]:
        """Start a decoder of unimem, with options of `DecoderProcess`.

        `path` may be the link beside a staged image; `image` is the one that weights must come
        from. NotMeasured if this CPU has no other order for the model; AssertionError if they come
        from elsewhere.
        """
        with DecoderProcess(path or self.path, load=load, **self._options, **how) as process:
            if process.facts["load"] != load:
                raise NotMeasured(f"wants repacked weights: {decoding.NOT_REPACKED}")
            found = process.facts["image"]
            if (found is None) != (image is None) or (image and not os.path.samefile(found, image)):
                raise AssertionError(f"weights must come from the image {image}, not {found}")
            yield process

    def can_start(self, name: str) -> bool:
        """Try to start one of `PEERS`, or leave it out."""
        try:
            peer = decoding.Peer(decoding.llama_cpp(self._measure), PEERS[name])
        except NoPeer as reason:
            self._measure.leave_out(name, str(reason))
            return False
        process = decoding.start_peer(self._measure, name, self.path, peer, **self._options)
        if process is not None:
            process.close()
        return process is not None

    def start_peer(self, name: str, **how: Any) -> DecoderProcess:
        """Start one of `PEERS`."""
        return DecoderProcess(
            self.path, kind="llama.cpp", flags=PEERS[name], **self._options, **how
        )

    def keep_image(self, folder: Path) -> Path:
        """Let a start keep its image in a folder, and return the image."""
        with self.start("repack", images=folder):
            pass
        found = [path for path in folder.iterdir() if not path.name.startswith(".")]
        if len(found) != 1:
            raise NotMeasured(
                f"wants a repacked image of {self.path}, which is not kept if other users may "
                "write the model or its folder: 'chmod go-w'"
            )
        return found[0]


@contextmanager
def image_folder(measure: Measure) -> Iterator[Path]:
    """Make an empty folder for images, and delete it at the end."""
    with tempfile.TemporaryDirectory(prefix="images-", dir=measure.folder) as folder:
        yield Path(folder)


@contextmanager
def staged(path: Path) -> Iterator[um.Stage]:
    """Stage a repacked model without reading or keeping images; NotMeasured if that fails."""
    before = os.environ.get("UNIMEM_CACHE")
    os.environ["UNIMEM_CACHE"] = "off"
    try:
        stage = um.stage(path, repack=True)
    except (um.CapacityError, um.PlacementError) as reason:
        raise NotMeasured(f"wants a staged model: {reason}") from None
    finally:
        os.environ.pop("UNIMEM_CACHE")
        if before is not None:
            os.environ["UNIMEM_CACHE"] = before
    with stage:
        yield stage


def first_token(process: DecoderProcess) -> float:
    """Return the time from the path to the first token after a prompt of one; ms."""
    return 1e3 * (float(process.facts["start_s"]) + len(ONE) / process.prefill(ONE))


@SUITE.case(
    "first-token",
    "How soon is the first token there, with a Q4_K_M model in the page cache?",
    unit="ms",
    targets=[
        costs(MAPPED, 1.3, issue=18),
        costs("llama.cpp", 0.4, issue=18),
        costs(MAPPED, 1.1, issue=18, side=STAGED),
    ],
    in_quick=False,
)
def compare_first_tokens(measure: Measure) -> None:
    """Start a process each time, up to the first token; Python's start is not counted.

    The model is in the page cache, and so is the image unless its side says otherwise.
    """
    starts = Starts(measure)

    def start(load: EngineLoad, image: str | Path | None = None, **how: Any) -> float:
        starts.prepare(image)
        with starts.start(load, image=image, **how) as process:
            return first_token(process)

    def start_from_disk(image: Path, folder: Path) -> float:
        starts.prepare()
        states.drop(image)
        with starts.start("repack", image=image, images=folder) as process:
            return first_token(process)

    def start_first() -> float:
        with image_folder(measure) as folder:
            return start("repack", images=folder)

    def start_peer(name: str) -> float:
        starts.prepare()
        with starts.start_peer(name) as process:
            return first_token(process)

    with ExitStack() as stack:
        folder = stack.enter_context(image_folder(measure))
        image = starts.keep_image(folder)
        measure.fact("image_bytes", image.stat().st_size)
        ours: dict[str, Side] = {
            KEPT: partial(start, "repack", image, images=folder),
            MAPPED: partial(start, "map"),
            FIRST: start_first,
        }
        try:
            # A copy of the model, since decoders of the model itself would find its staged image.
            copy = shutil.copy(starts.path, stack.enter_context(image_folder(measure)))
            stage = stack.enter_context(staged(Path(copy)))
            ours[STAGED] = partial(start, "repack", stage.paths[0], path=stage.path)
        except NotMeasured as reason:
            measure.leave_out(STAGED, str(reason))
        try:
            states.drop(image)
            ours[ON_DISK] = partial(start_from_disk, image, folder)
        except NotMeasured as reason:
            measure.leave_out(ON_DISK, str(reason))
        peers: dict[str, Side] = {
            name: partial(start_peer, name) for name in PEERS if starts.can_start(name)
        }
        measure.compare(ours, peers, rounds=7, quick_rounds=3, warmup=1)


@SUITE.case(
    "peak-memory",
    "How much memory does a start take at its peak, beside KV cache and scratch?",
    unit="% of the model",
    targets=[at_most(105, issue=18)],
    in_quick=False,
)
def compare_peaks(measure: Measure) -> None:
    """Start from the page cache; unimem repacks, and keeps the image.

    Private memory counts, and the pages of the model and its image in the page cache. The private
    memory of a decoder of the same library on the mapped file is subtracted: KV cache, scratch, and
    Python.
    """
    starts = Starts(measure)

    def peak(rest_bytes: int, open_side: Any) -> float:
        with image_folder(measure) as folder:
            starts.prepare()
            with (
                PeakMemory(lambda: [starts.path, *folder.iterdir()]) as found,
                open_side(images=folder, watch=found.watch) as process,
            ):
                process.prefill(ONE)
                found.look()
        return 100 * (found.nbytes - rest_bytes) / starts.nbytes

    n = 1 if measure.quick else 5
    with starts.start("map") as mapped:
        rest_bytes = settled_bytes(mapped)
    repacking = partial(starts.start, "repack")
    measure.count("unimem", [peak(rest_bytes, repacking) for _ in range(n)])
    peers = [name for name in PEERS if starts.can_start(name)]
    if len(peers) == len(PEERS):
        with starts.start_peer("llama.cpp-mapped") as theirs:
            rest_bytes = settled_bytes(theirs)
        copying = partial(starts.start_peer, "llama.cpp")
        measure.count("llama.cpp", [peak(rest_bytes, copying) for _ in range(n)], "peer")


def settled_bytes(process: DecoderProcess) -> int:
    """Count the private memory of a decoder after its first token."""
    process.prefill(ONE)
    return private_bytes(process.pid)


@SUITE.case(
    "sharing",
    "How much memory does one more process take of a staged model?",
    unit="% of the model",
    targets=[at_most(2, issue=18)],
    in_quick=False,
)
def share(measure: Measure) -> None:
    """Start four decoders of one staged model, and sum up their memory by shares (Pss).

    The sum grows by what each new decoder does not share. The private memory of a decoder on the
    mapped file is subtracted: KV cache, scratch, and Python.
    """
    starts = Starts(measure)
    with starts.start("map") as mapped:
        rest_bytes = settled_bytes(mapped)
    with starts.start("repack"):
        pass  # to see whether there is another order
    with ExitStack() as stack:
        stage = stack.enter_context(staged(starts.path))
        measure.fact("staged", f"{stage.backing}: {stage.granted}")
        starts.prepare()
        pids, totals = [os.getpid()], []
        for _ in range(N_SHARING):
            start = starts.start("repack", path=stage.path, image=stage.paths[0])
            process = stack.enter_context(start)
            process.prefill(ONE)
            pids.append(process.pid)
            totals.append(sum(map(pss_bytes, pids)))
    grown = [after - before - rest_bytes for before, after in pairwise(totals)]
    measure.count("unimem", [100 * nbytes / starts.nbytes for nbytes in grown])
