"""Planning the memory of a model, before anything is mapped or loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Unpack

from unimem._core.status import device_bytes
from unimem.accounting.row import Row, in_order
from unimem.base.arguments import integer
from unimem.base.text import format_bytes, format_ranges
from unimem.buffers.decode_buffers import DecodeBuffers
from unimem.kv.types import kv_name, kv_pair
from unimem.models.dims import ModelDims
from unimem.models.shapes import Shape
from unimem.planning.companions import Companions, open_companions
from unimem.planning.gpu_bytes import RESERVE_BYTES, STAGING_BYTES, round_to_pages
from unimem.planning.hosts import DescribedHost, Host, find_host
from unimem.planning.llama_cpp import CACHE_RAM, NO_COMPUTE, NOT_EXACT, Engine, LlamaSession, Slots
from unimem.planning.needs import (
    Budget,
    MachineBudget,
    Mode,
    Need,
    Session,
    Storage,
    default_threads,
    diagnostics_need,
)
from unimem.planning.new_process import measure_process, own_bytes
from unimem.planning.repack_gain import NO_ROOM, NO_ROOM_TO_COPY
from unimem.planning.result import Check, Plan, is_as_asked
from unimem.planning.search import find_largest
from unimem.planning.sources import DimsSource, FileSource, ModelSource, WeightsSource
from unimem.planning.spread import NodeSpread, spread
from unimem.planning.streaming import WHY_STREAMED, Reading, StreamedWeights
from unimem.remote.client import is_url
from unimem.system import limits, policy
from unimem.system.disks import disk_of
from unimem.system.machine import MachineFacts
from unimem.system.placement import PlacementOptions
from unimem.system.policy import NumaPolicy
from unimem.system.sizes import parse_size
from unimem.weights import loading
from unimem.weights.loading import EngineLoad
from unimem.weights.node_copies import is_mirrored, without_lone_mirror
from unimem.weights.opened import Weights
from unimem.weights.remote_files import open_files

DEFAULT_CTX = 4096
_MOST = 2**31 - 1  # tokens: ggml counts them in 32 bits
MOST_SESSIONS = 4096


def plan(
    path_or_dims: str | os.PathLike[str] | Weights | ModelDims,
    *,
    ctx: int | None = None,
    batch: int = 1,
    kv_dtype: str = "f16",
    window: int | None = None,
    threads: int | None = None,
    load: EngineLoad = "auto",
    weights_budget: int | str | None = None,
    sessions: int = 1,
    device: str | None = None,
    engine: Engine | None = None,
    slots: int | str | None = None,
    mmproj: str | os.PathLike[str] | None = None,
    draft: str | os.PathLike[str] | None = None,
    cache_ram: int | str | None = None,
    machine: MachineFacts | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    min_ctx: int = 1,
    process: bool = False,
    now: bool = False,
    **placement: Unpack[PlacementOptions],
) -> Plan:
    """Plan the memory of a model. Only the header of a file is read, and no memory is taken.

    Parameters
    ----------
    path_or_dims : path-like, Weights or ModelDims
        A model file of any architecture, with all parts of a split one and the ``config.json``
        beside safetensors; the URL of one (``https``, ``http``, ``s3``, or
        ``hf://owner/repository/file``), whose headers are fetched with the extra ``remote``; an
        opened one; or dimensions of a dense model, whose weights are estimated at two bytes a
        value, or 34 bytes for 32 quantized values.
    ctx : int, optional
        Tokens of context; by default the smallest of the model's, 4096 and what fits.
    batch : int, default 1
        Streams of the KV cache.
    kv_dtype : {"f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"}
        Type of the KV cache; dtypes, and NumPy's names for the first three, are accepted. Two, as
        in ``"q8_0,q4_0"``, are those of K and of V.
    window : int, optional
        Tokens that attention sees, in a ring; by default all.
    threads : int, optional
        Threads that compute; by default one for each 32 MiB of weights, within the physical cores
        of the process.
    load : {"auto", "map", "copy", "direct", "repack"}
        The load mode, as for `open_weights`; or repacking, which ``"auto"`` chooses for the engine
        if the model gains by it and everything fits. This machine's CPU decides which types gain.
        ``"stream"`` reads experts or layers while tokens are computed, which ``"auto"`` chooses for
        a GGUF file here that would not stay in memory.
    weights_budget : int or str, optional
        The most memory that the weights of a streamed model take: bytes, a size such as ``"8G"``,
        or a share such as ``"50%"``; by default what there is room for. ``"auto"`` streams with it.
    sessions : int, default 1
        Conversations at the same time: decoders over the same weights, each with its own KV cache,
        scratch and repacked tensors.
    device : str, optional
        ``"cuda:0"``: for that GPU, as `unimem.cuda.Layout.for_model`.
    engine : {"unimem", "llama.cpp"}, optional
        The engine that runs it; by default unimem's own for what that runs, and for all but GGUF,
        else llama.cpp (build b11549, with llama-server's defaults: batches of 512).
    slots : int or str, optional
        Conversations of one llama-server, which share the context, as is its default; or, as in
        ``"4:divided"``, have an equal part of it each (``--no-kv-unified``). Each stream of a
        `batch` has the whole context, and each of `sessions` is a process of its own.
    mmproj : path-like, optional
        A projector that llama.cpp loads beside the model.
    draft : path-like, optional
        A draft model that llama.cpp loads beside it; or ``"mtp"``, for the model's own layers that
        predict further tokens.
    cache_ram : int or str, optional
        The most memory that llama-server keeps earlier prompts in (``--cache-ram``); by default
        none, but with `process` llama-server's own default of 8 GiB, which a busy one fills.
    machine : Machine, mapping, str or path-like, optional
        Another machine, whose limits count: the result of `doctor` there; or its figures, as in
        ``{"memory": "16G", "cpus": 8, "pools": {"2m": 4096}, "nodes": 2}``, where only the
        memory is necessary (one core, no pool, one node; nothing else runs there and nothing limits
        locking). Or the folder of a cgroup of this machine, for a process in it. By default this
        process.
    min_ctx : int, default 1
        The least context that is of use: without `ctx`, or a model of less, none below it is
        planned. If it does not fit, the model does not.
    process : bool, default False
        Plan for a process that is not started yet, as `unimem plan` does: the interpreter, its
        libraries and a tokenizer count, as measured once a machine in a child, and page cache
        that others have filled does not. By default they are those of this process.
    now : bool, default False
        With `process`: say in `Plan.spilled_now_bytes` what the page cache of this moment changes.
    **placement
        See `PlacementOptions`. Without `strict`, the rows show what a block falls back to if it
        cannot have its placement, and the checks say what is missing.

    Raises
    ------
    GGUFError, SafetensorsError, OSError
        The file or its server cannot be used.
    CapacityError
        The `weights_budget` is below the least that works.
    FormatError
        A URL leads to a page of HTML.
    TypeError, ValueError
        An option is unknown or out of range, or differs from that of opened weights; or a GPU or
        opened weights, which are here, are planned for another `machine`.
    ImportError
        `device` without CuPy or a GPU; or a URL without the extra ``remote``.

    Notes
    -----
    For the architectures of the engine, each row is exact to the byte: ``other`` has private copies
    of the files' headers, and ``diagnostics`` the memory that a process publishes from its first
    `Decoder` on, which a `Layout` without one lacks. For llama.cpp the KV cache and the states are
    what it prints. `Plan.unknown` lists the rest, which no row has.

    Examples
    --------
    >>> import unimem as um
    >>> p = um.plan(um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512))
    >>> p.ctx, [row.category for row in p.rows][2:]
    (512, ['kv', 'scratch', 'logits', 'tokens', 'diagnostics'])
    """
    host = find_host(machine)
    if machine is not None and device is not None:
        raise ValueError(f"device={device!r}: a GPU of this machine: leave out machine")
    if machine is not None and isinstance(path_or_dims, Weights):
        raise ValueError(
            "machine: opened weights are in memory here: plan their file, "
            f"{path_or_dims.files[0]!r}, for another machine"
        )
    options = PlanOptions.from_arguments(
        ctx=ctx,
        batch=batch,
        kv_dtype=kv_dtype,
        window=window,
        threads=threads,
        load=load,
        weights_budget=weights_budget,
        sessions=sessions,
        device=device,
        engine=engine,
        slots=slots,
        cache_ram=cache_ram,
        min_ctx=min_ctx,
        process=process,
        now=now,
        placement=placement,
    )
    with open_companions(mmproj, draft) as beside:
        if isinstance(path_or_dims, ModelDims):
            return _Planner(DimsSource(path_or_dims), host, beside).plan(options)
        if isinstance(path_or_dims, Weights):
            return _Planner(WeightsSource(path_or_dims), host, beside).plan(options)
        with open_files(path_or_dims, tries=1) as model:
            is_here = not isinstance(host, DescribedHost)
            return _Planner(FileSource(model, is_here=is_here), host, beside).plan(options)


@contextmanager
def plans_of(path: str) -> Iterator[Callable[..., Plan]]:
    """Open a model, a path or URL as for `plan`, once, to plan it for many machines.

    It yields ``of(machine, *, ctx, kv_dtype, load, sessions)``, which plans for another machine.
    """
    with open_files(path, tries=1) as model:
        source = FileSource(model, is_here=False)

        def of(
            machine: MachineFacts | Mapping[str, Any],
            *,
            ctx: int | None,
            kv_dtype: str,
            load: EngineLoad,
            sessions: int = 1,
        ) -> Plan:
            options = PlanOptions.from_arguments(
                ctx=ctx, kv_dtype=kv_dtype, load=load, sessions=sessions
            )
            return _Planner(source, find_host(machine)).plan(options)

        yield of


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The checked options of `plan`."""

    ctx: int | None
    batch: int
    kv_dtype: str
    window: int | None
    threads: int | None
    load: EngineLoad
    weights_budget: int | str | None
    sessions: int
    device: int | None
    engine: Engine | None
    slots: Slots | None
    cache_ram: int | None
    min_ctx: int
    process: bool
    now: bool
    placement: PlacementOptions

    @classmethod
    def from_arguments(cls, **given: Any) -> PlanOptions:
        """Check arguments, by default those of `plan`; an error names the option."""
        given = _DEFAULTS | given
        loading.check_load(given["load"], for_engine=True)
        policy.check_options(given["placement"])
        if (budget := given["weights_budget"]) is not None:
            parse_size(budget, "weights_budget")
            if given["load"] not in ("auto", "stream"):
                raise ValueError(
                    f"weights_budget={budget!r}: load={given['load']!r} streams nothing: leave out "
                    "one of them, or take load='stream'"
                )
        threads, window, ctx = given["threads"], given["window"], given["ctx"]
        device = given["device"]
        if device is not None:
            found = re.fullmatch(r"cuda:([0-9]{1,3})", device) if isinstance(device, str) else None
            if found is None:
                raise ValueError(f"device: expected 'cuda:N', as in 'cuda:0', got {device!r}")
            if window is not None:
                raise ValueError(f"window={window}: a GPU has no ring, which is mapped twice")
            device = int(found[1])
            others = {"load": given["load"], "weights_budget": budget} | given["placement"]
            for name, value in others.items():
                if value not in (None, False, "auto"):
                    raise ValueError(
                        f"{name}={value!r}: a plan for a GPU is of its memory, into which the "
                        "weights are copied: leave it out"
                    )
        engine, slots = given["engine"], given["slots"]
        if engine not in (None, "unimem", "llama.cpp"):
            raise ValueError(f"engine: expected unimem or llama.cpp, got {engine!r:.40}")
        return cls(
            None if ctx is None else _count("ctx", ctx, _MOST),
            _count("batch", given["batch"], 2**20),
            kv_name(*kv_pair(given["kv_dtype"])),
            None if window is None else _count("window", window, _MOST),
            None if threads is None else _count("threads", threads, 512),
            given["load"],
            budget,
            _count("sessions", given["sessions"], MOST_SESSIONS),
            device,
            engine,
            None if slots is None else Slots.parse(slots),
            _size("cache_ram", given["cache_ram"]),
            _count("min_ctx", given["min_ctx"], _MOST),
            bool(given["process"]),
            bool(given["now"]),
            given["placement"],
        )

    def for_engine(self, shape: Shape, *, is_gguf: bool, with_others: bool) -> PlanOptions:
        """Return a copy for one engine; refuse what that does not have."""
        of_unimem = [
            f"{name}={getattr(self, name)}"
            for name in ("window", "device")
            if getattr(self, name) is not None
        ]
        of_llama_cpp = [n for n in ("slots", "cache_ram") if getattr(self, n) is not None]
        of_llama_cpp += ["mmproj and draft"] if with_others else []
        engine = self.engine
        if engine is None:
            is_own = of_unimem or not is_gguf or shape.is_run
            engine = "unimem" if is_own and not of_llama_cpp else "llama.cpp"
        wrong = of_llama_cpp if engine == "unimem" else of_unimem
        if wrong:
            raise ValueError(
                f"{wrong[0]}: {engine} has no such option: leave it out, or take the other engine"
            )
        return replace(self, engine=engine)

    def with_changes(self, changes: Mapping[str, Any]) -> PlanOptions:
        """Return a copy with some options of `plan` changed."""
        own = {name: value for name, value in changes.items() if name in _OWN_OPTIONS}
        if "cache_ram" in own:
            own["cache_ram"] = _size("cache_ram", own["cache_ram"])
        rest: Any = {name: value for name, value in changes.items() if name not in _OWN_OPTIONS}
        return replace(self, **own, placement=self.placement | rest)


_DEFAULTS: dict[str, Any] = dict.fromkeys(
    ("ctx", "window", "threads", "weights_budget", "device", "engine", "slots", "cache_ram")
) | {"batch": 1, "min_ctx": 1, "process": False, "now": False, "placement": {}}
_OWN_OPTIONS = {item.name for item in fields(PlanOptions)} - {"placement"}


def _count(name: str, value: object, most: int) -> int:
    try:
        return integer(value, name, 1, most)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _size(name: str, value: int | str | None) -> int | None:
    """Check a size, which may be 0, and no share of a machine that need not be the planned one."""
    if isinstance(value, str) and "%" in value:
        raise ValueError(f"{name}: expected a size, as in 8G, got {value!r}")
    return None if value is None else 0 if value in (0, "0") else parse_size(value, name)


class _Planner:
    """A planner of one model, which reads the host's figures once. For one thread."""

    def __init__(self, source: ModelSource, host: Host, beside: Companions | None = None) -> None:
        self._source, self._host, self._beside = source, host, beside
        self._machine = MachineBudget(host)
        self._facts = source.facts | ({} if host is limits else {"machine": str(host)})
        self._is_elsewhere = isinstance(host, DescribedHost)
        self._cached: int | None = 0 if self._is_elsewhere else None
        self._process_bytes = self._making_bytes = self._ended_bytes = 0

    def plan(self, options: PlanOptions) -> Plan:
        """Make a plan, with advice if it does not fit."""
        options = options.for_engine(
            self._source.shape,
            is_gguf=self._source.facts["format"] == "GGUF",
            with_others=self._beside is not None,
        )
        if options.engine == "llama.cpp":
            self._facts.pop("ggml", None)
        if options.threads is None:
            weight_bytes = sum(self._source.by_type().values())
            n_threads = default_threads(weight_bytes, self._host.thread_count())
            options = replace(options, threads=n_threads)
        if options.process and options.device is None:
            self._count_process(options)
        made = self._make(options)
        if is_as_asked(made):
            return made

        def replan(changes: Mapping[str, Any]) -> Plan:
            # The context stays the plan's own, so that nothing else differs.
            return self._make(options.with_changes({"ctx": made.ctx} | dict(changes)))

        from unimem.planning.advice import advise

        return replace(made, advice=advise(made, replan, self._source.by_type()))

    def _count_process(self, options: PlanOptions) -> None:
        """Count a process that is not started yet, and not this one, which ends before it."""
        self._ended_bytes = own_bytes() if self._host is limits else 0
        if options.engine == "unimem" and not isinstance(found := measure_process(), str):
            shape, source = self._source.shape, self._source
            n_tokens = 0 if source.no_tokenizer else shape.vocab_size or 0
            self._process_bytes = found.nbytes(n_tokens, sum(source.by_type().values()))
            self._making_bytes = found.making_bytes * n_tokens
            self._facts.pop("ggml", None)  # its own memory is counted with the process

    def _make(self, options: PlanOptions) -> Plan:
        if options.device is not None:
            return self._make_for_device(options, options.device)
        budget = Budget(self._machine)
        asked, placement = options.placement, without_lone_mirror(options.placement, budget)
        if options.load == "repack" and is_mirrored(placement):
            raise ValueError(
                f"numa={placement['numa']!r}: load='repack' makes memory of one decoder, "
                "without copies: run a decoder on each node (numactl --cpunodebind) with "
                "load='repack', and leave out numa"
            )
        options = replace(options, placement=placement)
        # Another machine's CPU is unknown, and llama.cpp has its own way.
        repacks = not self._is_elsewhere and options.engine == "unimem"
        load = options.load if options.weights_budget is None else "stream"
        choice = self._source.mode(load, placement, budget, repacks=repacks)
        made = self._make_as(options, choice.mode, choice.reason)
        if made.verdict != "fits" and choice.is_wish:
            no_room = NO_ROOM if choice.mode == "repack" else NO_ROOM_TO_COPY
            made = self._make_as(options, "map", f"{loading.WHY_MAPPED}; {no_room}")
        if load == "auto" and made.verdict == "reads from disk" and options.engine == "unimem":
            made = self._stream_instead(options, made)
        if asked is placement:
            return made
        return replace(made, numa=asked["numa"], facts=made.facts | {"numa": loading.ONE_COPY})

    def _stream_instead(self, options: PlanOptions, mapped: Plan) -> Plan:
        """Plan to stream a model that does not stay in memory, if that can be done."""
        try:
            self._source.mode("stream", options.placement, Budget(self._machine))
        except ValueError:
            return mapped
        made = self._make_as(options, "stream", WHY_STREAMED)
        return made if made.verdict == "streams" else mapped

    def _make_as(self, options: PlanOptions, mode: Mode, reason: str) -> Plan:
        storage = Storage.from_options(options.placement)
        streamed = self._source.streamed if mode == "stream" else None
        most_slots = None if streamed is None else streamed.most_slots
        session = self._session(options, storage.beside_weights(), most_slots)
        beside = self._beside
        budget = Budget(self._machine)
        fixed = self._source.weights(mode, storage, budget, options.sessions)
        n_weights = len(fixed)
        if options.engine == "unimem" and self._source.shape.dims is not None:
            fixed.append(diagnostics_need())
        fixed += [] if beside is None else beside.weights(storage, budget, options.sessions)

        def needs(ctx: int) -> list[Need]:
            found = _session_needs(session, ctx, options.sessions, budget.copy())
            if beside is not None and isinstance(session, LlamaSession):
                found += beside.caches(session, ctx) * options.sessions
            return fixed + found

        max_ctx = self._find_longest(needs, storage, options) if session.is_known else None
        ctx = options.ctx
        if ctx is None and max_ctx is not None:
            # If no context fits, the plan is for one token, and says so.
            least = min(options.min_ctx, self._source.shape.max_ctx or _MOST)
            ctx = max(least, min(max(DEFAULT_CTX, options.window or 0), max_ctx))
        if options.window is not None and ctx is not None and options.window > ctx:
            raise ValueError(f"window: expected at most the context, {ctx}, got {options.window}")
        found = needs(ctx or 1)
        if streamed is not None and not streamed.is_open:
            rest = self._missing(found[n_weights:], self._process(found))
            streamed.divide(options.weights_budget, self._machine.memory, rest)
            budget = Budget(self._machine)
            fixed[:n_weights] = self._source.weights(mode, storage, budget, options.sessions)
            found = needs(ctx or 1)
        spilled = self._spilled(found, options)
        return self._new_plan(
            options,
            facts=self._facts
            | self._image_facts(mode, storage)
            | self._numa_facts(storage.numa, found),
            rows=_rows(found),
            checks=self._checks(found, storage),
            ctx=ctx,
            load=mode,
            load_reason=reason,
            max_ctx=max_ctx,
            required_bytes=sum(need.nbytes - need.file_bytes for need in found),
            spilled_bytes=spilled,
            weights_budget=None if streamed is None else streamed.division.nbytes,
            reading=self._reading(streamed, spilled, options.engine),
            unread_bytes=sum(need.unread_bytes for need in found),
            pool_bytes=_pool_bytes(found),
            scratch_bytes=session.scratch_bytes(ctx or 1),
            history_bytes=session.history_bytes(ctx) if ctx is not None else 0,
            **self._container(found),
            spilled_now_bytes=self._spilled(found) if options.now else None,
            spread=None if mode == "stream" else self._spread(found, n_weights, options.sessions),
        )

    def _spread(self, needs: list[Need], n_weights: int, sessions: int) -> NodeSpread | None:
        """Return how weights and what is beside them could be spread over nodes."""
        weights = needs[:n_weights]
        if any(need.on_nodes for need in weights):  # of one copy
            weight_bytes = sum(self._source.by_type().values())
        else:
            weight_bytes = sum(need.nbytes - need.unread_bytes for need in weights)
        rest_bytes = self._process(needs) + sum(need.nbytes for need in needs[n_weights:])
        room = min(limit.room_bytes for limit in self._machine.memory)
        return spread(weight_bytes, rest_bytes, sessions, self._machine.nodes, room)

    def _container(self, needs: list[Need]) -> dict[str, int | None]:
        """Return the bytes of the process, and the least limit of a container for it."""
        process = self._process(needs)
        room = process + sum(need.room_bytes + need.loose_bytes for need in needs)
        return {"process_bytes": process, "container_bytes": room if process else None}

    def _process(self, needs: list[Need]) -> int:
        """Return the bytes of the process beside what is needed.

        The tokenizer is made before scratch and history are used, so the larger of both counts.
        """
        later = sum(
            need.room_bytes for need in needs if "kv" in need.rows or "scratch" in need.rows
        )
        return self._process_bytes + max(0, self._making_bytes - later)

    def _taken(self, needs: list[Need]) -> int:
        """Return the bytes of needs that are there already, and of this process if it ends before.

        Its private memory counts once. On another machine or in another cgroup, it is not there.
        """
        if self._is_elsewhere:
            return 0
        stays = self._host is limits and not self._ended_bytes
        taken = sum(need.taken_bytes for need in needs if stays or not need.is_private)
        return taken + self._ended_bytes

    def _missing(self, needs: list[Need], process_bytes: int) -> int:
        """Return the bytes of needs and a process that are not there yet."""
        return sum(need.room_bytes for need in needs) + process_bytes - self._taken(needs)

    def _reading(
        self, streamed: StreamedWeights | None, spilled_bytes: int, engine: Engine | None
    ) -> Reading | None:
        """Return what a token reads from the disk, if that is known, and may be anything."""
        if streamed is None and not spilled_bytes:
            return None
        path = self._facts.get("model")
        disk = None if self._is_elsewhere or path is None or is_url(path) else disk_of(path)
        if streamed is not None:
            return streamed.reading().on(disk)
        found = self._source.pieces(Budget(self._machine))
        ahead = None if disk is None else disk.read_ahead_bytes
        # unimem's engine asks the kernel for what it needs, and no more.
        ahead = ahead or 0 if engine == "llama.cpp" else 0
        return None if found is None else found.mapped_reading(spilled_bytes, ahead).on(disk)

    def _session(
        self, options: PlanOptions, storage: Storage, most_slots: int | None = None
    ) -> Session | LlamaSession:
        assert options.threads is not None  # since `plan`
        if options.engine == "llama.cpp":
            predicts = self._beside is not None and self._beside.predicts
            source = self._source
            return LlamaSession(
                source.shape,
                options.batch,
                options.kv_dtype,
                options.slots or Slots(),
                source.widths,
                predicts,
                options.cache_ram if options.cache_ram is not None else options.process * CACHE_RAM,
            )
        return Session(
            self._source.shape,
            options.batch,
            options.kv_dtype,
            options.window,
            options.threads,
            storage,
            most_slots,
        )

    def _new_plan(self, options: PlanOptions, **figures: Any) -> Plan:
        numa = options.placement.get("numa")
        checks, shape = figures["checks"], self._source.shape
        is_own = options.engine == "unimem"
        assert options.threads is not None  # since `plan`
        return Plan(
            advice=(),
            unknown=(*shape.unknown, *self._not_counted(options)),
            batch=options.batch,
            kv_dtype=options.kv_dtype,
            window=options.window,
            threads=options.threads,
            sessions=options.sessions,
            min_ctx=options.min_ctx,
            pages=options.placement.get("pages", "auto"),
            numa=numa,
            available_bytes=min(one.available_bytes for one in checks if one.is_hard),
            model_ctx=shape.max_ctx,
            layers=shape.layers,
            engine=options.engine or "unimem",
            slots=None if options.slots is None else str(options.slots),
            no_tokenizer=self._source.no_tokenizer if is_own else None,
            unhashed_bytes=self._source.unhashed_bytes if is_own else 0,
            is_counted=shape.is_counted
            and (is_own or self._is_computed)
            and (self._beside is None or self._beside.is_counted),
            **figures,
        )

    @property
    def _is_computed(self) -> bool:
        """Whether the compute buffers of llama.cpp are known."""
        return self._source.widths is not None and self._source.shape.vocab_size is not None

    def _not_counted(self, options: PlanOptions) -> tuple[str, ...]:
        """Explain which parts of drafts and scratch memory no row has, or not exactly."""
        no_scratch = self._source.shape.no_scratch
        if options.engine == "llama.cpp":
            beside = () if self._beside is None else self._beside.unknown
            return (*beside, NOT_EXACT if self._is_computed else NO_COMPUTE)
        not_measured = measure_process() if options.process and options.device is None else ()
        why = (not_measured,) if isinstance(not_measured, str) else ()
        return (*why, no_scratch) if no_scratch else why

    def _find_longest(
        self, needs: Callable[[int], list[Need]], storage: Storage, options: PlanOptions
    ) -> int:
        """Find the longest context that fits and that causes no avoidable spilling.

        Limits at which a block falls back do not shorten it.
        """

        def fits(found: list[Need]) -> bool:
            return all(check.fits for check in self._checks(found, storage) if check.is_hard)

        def is_good(ctx: int) -> bool:
            found = needs(ctx)
            return fits(found) and self._spilled(found, options) == 0

        shape, asked = self._source.shape, options.ctx or 0
        most = shape.max_ctx or _MOST
        if options.engine == "unimem":
            most = shape.longest_ctx(options.window)
        longer = max(most, asked)
        if is_good(longer):  # the usual case
            return longer
        if self._spilled(needs(1), options):
            return find_largest(most, lambda ctx: fits(needs(ctx)), asked=asked)
        return find_largest(most, is_good)

    def _spilled(self, needs: list[Need], options: PlanOptions | None = None) -> int:
        """Return the bytes of files that cannot stay in RAM beside the rest.

        For a process that is not started yet, what lies in the page cache by chance is no help.
        """
        is_later = options is not None and options.process
        nbytes = sum(need.loose_bytes for need in needs)
        rest = self._missing(needs, self._process(needs))
        most = 0
        found = limits.room_for_files(
            self._machine.memory,
            nbytes + max(0, rest),
            lambda: 0 if is_later else min(self._cached_bytes(), nbytes),
        )
        for _, needed, room in found:
            most = max(most, needed - room)
        return min(nbytes, most)

    def _cached_bytes(self) -> int:
        if self._cached is None:  # once, since it is slow for large files
            self._cached = self._source.cached_bytes()
        return self._cached

    # ---- limits ---------------------------------------------------------------------------------

    def _checks(self, needs: list[Need], storage: Storage) -> tuple[Check, ...]:
        needed = sum(need.room_bytes for need in needs) + self._process(needs)
        taken = self._taken(needs)
        files = sum(need.loose_bytes for need in needs)
        checks = [
            Check(
                one.name,
                needed,
                one.room_bytes + taken,
                one.limit_bytes,
                # A limit with room for the rest may lack room for files that stay in RAM.
                one.remedy_for(needed - taken + (files if one.room_bytes >= needed - taken else 0)),
            )
            for one in self._machine.memory
        ]
        locked = sum(need.lock_bytes for need in needs)
        limit = self._machine.memlock if locked else None
        if limit is not None:
            checks.append(
                Check(
                    limit.name,
                    locked,
                    limit.room_bytes,
                    limit.limit_bytes,
                    limit.remedy,
                    storage.strict,
                )
            )
        for size in policy.HUGETLB:
            asked = sum(need.asked_bytes.get(size, 0) for need in needs)
            if asked:
                checks.append(self._pool_check(size, asked, storage))
        if storage.is_mirrored:
            for need in needs:
                for node, nbytes in need.on_nodes.items():
                    checks.append(self._node_check((node,), nbytes, storage.strict))
        elif storage.numa is not None:
            on_nodes = sum(need.ram_bytes for need in needs if need.numa is not None)
            checks += self._node_checks(storage.numa, on_nodes, storage.strict)
        return tuple(checks)

    def _pool_check(self, size: str, asked: int, storage: Storage) -> Check:
        pool = self._machine.pools.get(size)
        name = f"hugetlb pool of {size} pages"
        if pool is None:
            remedy = f"'hugepagesz={size.upper()}' on the kernel's command line, if the CPU has it"
            return Check(name, asked, 0, 0, remedy, storage.strict)
        limit = pool.limit(asked)
        room = policy.pool_room(pool, storage.numa)
        return Check(limit.name, asked, room, limit.limit_bytes, limit.remedy, storage.strict)

    def _node_checks(self, numa: NumaPolicy, nbytes: int, strict: bool) -> list[Check]:
        nodes = self._machine.nodes
        wanted = numa.nodes or tuple(
            sorted(n for n, node in nodes.items() if node.allowed and node.total_bytes)
        )
        if numa.mode == "bind":
            return [self._node_check(wanted, nbytes, strict)]
        shares = self._machine.node_shares(replace(numa, nodes=wanted), nbytes)
        return [self._node_check((node,), share, strict) for node, share in shares.items()]

    def _node_check(self, chosen: tuple[int, ...], needed: int, strict: bool) -> Check:
        found = (self._machine.nodes.get(n) for n in chosen)
        there = [node for node in found if node is not None and node.allowed]
        return Check(
            f"node{'s' * (len(chosen) > 1)} {format_ranges(chosen)}",
            needed,
            sum(node.available_bytes for node in there if node.total_bytes),
            sum(node.total_bytes for node in there),
            "free memory there, or name other nodes ('numactl --hardware' shows them)",
            strict,
        )

    def _image_facts(self, mode: Mode, storage: Storage) -> dict[str, str]:
        """Name the repacked image that is used."""
        origin = self._source.origin(storage) if mode == "repack" else None
        return {} if origin is None else {"image": origin}

    def _numa_facts(self, numa: NumaPolicy | None, needs: list[Need]) -> dict[str, str]:
        """Name preferred nodes without enough room, which are no limit, or the nodes of copies."""
        if numa is not None and numa.mode == "mirror":
            with_copies = [n for need in needs for n in need.on_nodes if need.rows]
            if not with_copies:
                return {}
            where = f"node{'s' * (len(with_copies) > 1)} {format_ranges(with_copies)}"
            n = "one copy" if len(with_copies) == 1 else f"{len(with_copies)} copies"
            return {"numa": f"{numa}: {n} of the weights, on {where}"}
        if numa is None or numa.mode != "preferred":
            return {}
        nodes = (self._machine.nodes.get(n) for n in numa.nodes)
        room = sum(node.available_bytes for node in nodes if node is not None and node.allowed)
        nbytes = sum(need.ram_bytes for need in needs if need.numa is not None)
        if nbytes <= room:
            return {}
        text = (
            f"{numa}: there is room for {format_bytes(room)} of {format_bytes(nbytes)}, and the "
            "rest will lie on other nodes"
        )
        return {"numa": text}

    # ---- a GPU ----------------------------------------------------------------------------------

    def _make_for_device(self, options: PlanOptions, number: int) -> Plan:
        from unimem.backends import cuda_driver  # few plans need it

        driver = cuda_driver.driver(number)
        free, total = driver.room(device_bytes(driver.name))
        shape, n = self._source.shape, options.sessions
        types = {f"weights:{kind}": size for kind, size in self._source.by_type().items() if size}
        weights = round_to_pages(self._source.device_bytes())
        dims = shape.dims and replace(shape.dims, max_batch_size=options.batch)
        scratch = 0 if dims is None else DecodeBuffers.bytes_needed(dims)
        session = self._session(options, Storage())
        fixed = weights + n * round_to_pages(scratch)

        def history(ctx: int) -> int:
            return session.whole_bytes(ctx)

        def needed(ctx: int) -> int:
            return fixed + n * round_to_pages(history(ctx))

        ctx, max_ctx, kept = options.ctx, None, 0
        if session.is_known:
            kept = RESERVE_BYTES if ctx is None else 0
            room = free - kept
            most = shape.longest_ctx(None)
            max_ctx = find_largest(most, lambda tokens: needed(tokens) <= room, asked=ctx or 0)
            if ctx is None:
                ctx = max(min(options.min_ctx, shape.max_ctx or _MOST), min(DEFAULT_CTX, max_ctx))
        rows = types | {"weights:padding": weights - sum(types.values())}
        if ctx is not None:
            rows["kv"] = n * round_to_pages(history(ctx))
        rows["scratch"] = n * round_to_pages(scratch)
        staging = Storage().block(STAGING_BYTES, "staging", Budget(self._machine))
        name = driver.name
        remedy = "free memory of other programs there, or take a smaller ctx, batch or model"
        return self._new_plan(
            options,
            facts=dict(self._facts),
            rows=(
                *(Row(kind, size, device=name) for kind, size in rows.items() if size),
                *_rows([staging]),
            ),
            checks=(
                *self._checks([staging], Storage()),
                Check(name, needed(ctx or 1) + kept, free, total, remedy),
            ),
            ctx=ctx,
            load="map",
            load_reason="the files are read into pinned memory, and copied from there",
            max_ctx=max_ctx,
            required_bytes=staging.nbytes,
            spilled_bytes=0,
            scratch_bytes=scratch,
            history_bytes=0 if ctx is None else history(ctx),
        )


def _session_needs(session: Session | LlamaSession, ctx: int, n: int, budget: Budget) -> list[Need]:
    """List the needs of n conversations, one after the other."""
    found = session.needs(ctx, budget)
    alike = isinstance(session, LlamaSession) or (
        session.storage.numa is None and not session.storage.lock
    )
    if alike and all(need.ram_bytes == need.nbytes for need in found):
        return found * n  # without a pool, a block does not affect the next one
    for _ in range(n - 1):
        found += session.needs(ctx, budget)
    return found


def _pool_bytes(needs: list[Need]) -> dict[str, int]:
    found = {size: sum(need.pool_bytes.get(size, 0) for need in needs) for size in policy.HUGETLB}
    return {size: nbytes for size, nbytes in found.items() if nbytes}


def _rows(needs: list[Need]) -> tuple[Row, ...]:
    totals: dict[str, int] = {}
    for need in needs:
        for category, nbytes in need.rows.items():
            totals[category] = totals.get(category, 0) + nbytes
    rows = (Row(category, nbytes) for category, nbytes in totals.items())
    return tuple(sorted(rows, key=in_order))
