# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The functions of ggml that unimem uses, compiled against ggml's headers.

Tensors, graphs, contexts and buffers are plain addresses (`int`), and no memory is owned here. A
check of ggml that fails while headers are made raises `GgmlError` instead of ending the process.
"""
import os

from libc.stdint cimport int64_t, uintptr_t
from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlclose, dlerror, dlopen, dlsym

cdef extern from "<stdbool.h>":
    ctypedef bint c_bool "bool"

cdef extern from "guard.h":
    const int GGML_MAX_DIMS, GGML_MAX_SRC, GGML_TYPE_COUNT, GGML_PREC_F32
    const int GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0
    const int GGML_TYPE_I32, GGML_TYPE_I64, GGML_ROPE_TYPE_NORMAL, GGML_ROPE_TYPE_NEOX

    ctypedef struct context_t:
        pass
    ctypedef struct backend_buffer "struct ggml_backend_buffer":
        pass
    ctypedef struct buffer_type "struct ggml_backend_buffer_type":
        pass
    ctypedef struct buffer_i "struct ggml_backend_buffer_i":
        pass
    ctypedef struct tensor_t:
        int type
        backend_buffer *buffer
        int64_t *ne
        size_t *nb
        tensor_t **src
        tensor_t *view_src
        size_t view_offs
        void *data
        void *extra
    const size_t ne_offset, nb_offset, data_offset
    ctypedef struct cgraph "struct ggml_cgraph":
        pass
    ctypedef struct cplan "struct ggml_cplan":
        size_t work_size
        unsigned char *work_data
        int n_threads
        c_bool (*abort_callback)(void *) noexcept nogil
        void *abort_callback_data
    ctypedef struct init_params "struct ggml_init_params":
        size_t mem_size
        void *mem_buffer
        c_bool no_alloc
    ctypedef struct threadpool "struct ggml_threadpool":
        pass
    ctypedef struct threadpool_params "struct ggml_threadpool_params":
        pass
    ctypedef void (*to_float_t "ggml_to_float_t")(const void *, float *, int64_t) noexcept nogil
    ctypedef struct type_traits "struct ggml_type_traits":
        to_float_t to_float
    ctypedef struct type_traits_cpu "struct ggml_type_traits_cpu":
        void *vec_dot
    ctypedef struct feature "struct ggml_backend_feature":
        const char *name
        const char *value
    ctypedef void *reg_t "ggml_backend_reg_t"
    ctypedef void *dev_t "ggml_backend_dev_t"
    ctypedef void (*custom_t "ggml_custom1_op_t")(void *, const void *, int, int, void *)

    char *guard_text
    void guard_set_up()
    void guard_take_log(char *into, size_t size)

    const char *ggml_version()
    const char *ggml_commit()
    const char *ggml_type_name(int)
    int64_t ggml_blck_size(int)
    size_t ggml_type_size(int)
    size_t ggml_row_size(int, int64_t)
    const type_traits *ggml_get_type_traits(int)
    size_t ggml_quantize_chunk(int, const float *, void *, int64_t, int64_t, int64_t,
                               const float *) nogil
    size_t ggml_tensor_overhead()
    size_t ggml_graph_overhead_custom(size_t, c_bool)
    context_t *ggml_init(init_params)
    void ggml_reset(context_t *)
    void ggml_free(context_t *)
    size_t ggml_nbytes(const tensor_t *)
    void ggml_set_input(tensor_t *)
    void ggml_set_output(tensor_t *)
    c_bool ggml_prec_set_acc(tensor_t *, int)
    int ggml_graph_n_nodes(cgraph *)
    tensor_t **ggml_graph_nodes(cgraph *)
    threadpool_params ggml_threadpool_params_default(int)

    void *ggml_backend_reg_get_proc_address(reg_t, const char *)
    dev_t ggml_backend_reg_dev_get(reg_t, size_t)
    c_bool ggml_backend_dev_supports_op(dev_t, const tensor_t *)
    const char *ggml_backend_buft_name(buffer_type *)
    size_t ggml_backend_buft_get_alignment(buffer_type *)
    size_t ggml_backend_buft_get_alloc_size(buffer_type *, const tensor_t *)
    backend_buffer *ggml_backend_buffer_init(buffer_type *, buffer_i, void *, size_t)
    int ggml_backend_buffer_init_tensor(backend_buffer *, tensor_t *)
    void ggml_backend_buffer_free(backend_buffer *)
    void ggml_backend_tensor_set(tensor_t *, const void *, size_t, size_t) nogil
    c_bool buffer_interface(buffer_type *, size_t, buffer_i *)

    void *guarded_new_tensor(context_t *, int, int, const int64_t *)
    void *guarded_get_rows(context_t *, tensor_t *, tensor_t *)
    void *guarded_set_rows(context_t *, tensor_t *, tensor_t *, tensor_t *)
    void *guarded_rms_norm(context_t *, tensor_t *, float)
    void *guarded_mul(context_t *, tensor_t *, tensor_t *)
    void *guarded_add(context_t *, tensor_t *, tensor_t *)
    void *guarded_div(context_t *, tensor_t *, tensor_t *)
    void *guarded_mul_mat(context_t *, tensor_t *, tensor_t *)
    void *guarded_mul_mat_id(context_t *, tensor_t *, tensor_t *, tensor_t *)
    void *guarded_add_id(context_t *, tensor_t *, tensor_t *, tensor_t *)
    void *guarded_scale(context_t *, tensor_t *, float)
    void *guarded_clamp(context_t *, tensor_t *, float, float)
    void *guarded_sum_rows(context_t *, tensor_t *)
    void *guarded_soft_max(context_t *, tensor_t *)
    void *guarded_argsort_top_k(context_t *, tensor_t *, int)
    void *guarded_swiglu_split(context_t *, tensor_t *, tensor_t *)
    void *guarded_swiglu_oai(context_t *, tensor_t *, tensor_t *, float, float)
    void *guarded_geglu_split(context_t *, tensor_t *, tensor_t *)
    void *guarded_cont(context_t *, tensor_t *)
    void *guarded_reshape_2d(context_t *, tensor_t *, int64_t, int64_t)
    void *guarded_reshape_3d(context_t *, tensor_t *, int64_t, int64_t, int64_t)
    void *guarded_view_2d(context_t *, tensor_t *, int64_t, int64_t, size_t, size_t)
    void *guarded_view_3d(context_t *, tensor_t *, int64_t, int64_t, int64_t, size_t, size_t,
                          size_t)
    void *guarded_permute(context_t *, tensor_t *, int, int, int, int)
    void *guarded_map_custom1_inplace(context_t *, tensor_t *, custom_t, int, void *)
    void *guarded_rope_ext(context_t *, tensor_t *, tensor_t *, tensor_t *, int, int, int, float,
                           float, float, float, float, float)
    void *guarded_flash_attn_ext(context_t *, tensor_t *, tensor_t *, tensor_t *, tensor_t *,
                                 float, float, float)
    void *guarded_with_sinks(tensor_t *, tensor_t *)
    void *guarded_new_graph_custom(context_t *, size_t, c_bool)
    void *guarded_expanded(cgraph *, tensor_t *)
    void *guarded_planned(cplan *, cgraph *, int, threadpool *)

    struct cpu_functions:
        void (*init)()
        int (*compute)(cgraph *, cplan *) noexcept nogil
        threadpool *(*threadpool_new)(threadpool_params *)
        void (*threadpool_free)(threadpool *)
        const type_traits_cpu *(*traits)(int)
        reg_t (*reg)()
    cpu_functions cpu


class GgmlError(RuntimeError):
    """ggml refuses what it is asked for, for the reason in the message."""


# ---- the libraries ----

cdef const char *FUNCTIONS[7]
FUNCTIONS[:] = [b"ggml_cpu_init", b"ggml_graph_plan", b"ggml_graph_compute",
                b"ggml_threadpool_new", b"ggml_threadpool_free", b"ggml_get_type_traits_cpu",
                b"ggml_backend_cpu_reg"]


cdef int score(path) except -1:
    """Return how well a build of the CPU backend suits this CPU; 0 if it does not run here."""
    cdef void *library = dlopen(os.fsencode(path), RTLD_NOW | RTLD_LOCAL)
    cdef void *function
    if library == NULL:
        raise ImportError(f"{path}: {dlerror().decode()}")
    function = dlsym(library, b"ggml_backend_score")
    # A backend that was built for this machine has no score.
    found = 1 if function == NULL else (<int (*)() noexcept>function)()
    dlclose(library)
    return found


def _load():
    """Load the build of the CPU backend that suits this CPU best; return its path."""
    cdef void *library
    cdef void **into = <void **>&cpu
    folder = os.path.dirname(__file__)
    prefix, builds = "libunimem-ggml-cpu", {}
    for name in sorted(os.listdir(folder)):
        if name.startswith(prefix):
            level = name.removeprefix(prefix).removesuffix(".so").lstrip("-") or "native"
            builds[level] = os.path.join(folder, name)
    wanted = os.environ.get("UNIMEM_GGML_CPU")  # for tests and benchmarks: "haswell"
    if wanted and wanted not in builds:
        raise ImportError(f"UNIMEM_GGML_CPU={wanted}: expected one of {', '.join(builds)}")
    scores = {path: score(path) for level, path in builds.items() if level == (wanted or level)}
    path = max(scores, key=scores.get, default=None)
    if path is None or not scores[path]:
        raise ImportError(
            f"ggml has no CPU backend for this CPU (tried {', '.join(scores) or 'none'}): "
            "install unimem-ggml from its sources, which builds one for it")
    library = dlopen(os.fsencode(path), RTLD_NOW | RTLD_LOCAL)
    for i in range(7):
        into[i] = dlsym(library, FUNCTIONS[i])
        if into[i] == NULL:
            raise ImportError(f"{path} has no function {FUNCTIONS[i].decode()}")
    # libgomp keeps threads for the next graph; other builds of OpenMP handle forks.
    return path, dlsym(library, b"GOMP_parallel") != NULL


guard_set_up()
CPU_LIBRARY, USES_GOMP = _load()
BASE_LIBRARY = os.path.join(os.path.dirname(CPU_LIBRARY), "libunimem-ggml-base.so")
LIBRARIES = (BASE_LIBRARY, CPU_LIBRARY)
"""Paths of ggml's files."""
cpu.init()

F32, F16, Q8_0 = GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0
I32, I64 = GGML_TYPE_I32, GGML_TYPE_I64
ROPE_NORMAL, ROPE_NEOX = GGML_ROPE_TYPE_NORMAL, GGML_ROPE_TYPE_NEOX
N_TYPES = GGML_TYPE_COUNT
# Offsets of the fields of a tensor that the engine changes in place.
NE_OFFSET, NB_OFFSET, DATA_OFFSET = ne_offset, nb_offset, data_offset
PLAN_BYTES = sizeof(cplan)


def version():
    """Return ggml's version and commit."""
    return {"version": ggml_version().decode(), "commit": ggml_commit().decode()}


def take_log():
    """Return the last warning or error that ggml logged since the last call, or ""."""
    cdef char text[512]
    guard_take_log(text, sizeof(text))
    return text.decode(errors="replace").strip()


# ---- types ----

cdef int known(int kind) except -1:
    if not 0 <= kind < GGML_TYPE_COUNT:
        raise ValueError(f"type: expected a number below {GGML_TYPE_COUNT}, got {kind}")
    return kind


def type_name(int kind):
    """Return ggml's name of a type."""
    return ggml_type_name(known(kind)).decode()


def type_size(int kind):
    """Return the bytes of a block."""
    return ggml_type_size(known(kind))


def block_size(int kind):
    """Return the values of a block; 0 for a number that is no type."""
    return ggml_blck_size(known(kind))


def row_size(int kind, int64_t n):
    """Return the bytes of n values."""
    return ggml_row_size(known(kind), n)


def multiplies(int kind):
    """Return whether the CPU backend multiplies with matrices of a type."""
    return cpu.traits(known(kind)).vec_dot != NULL


def has_to_float(int kind):
    """Return whether ggml converts blocks of a type to float32."""
    return 0 <= kind < GGML_TYPE_COUNT and ggml_get_type_traits(kind).to_float != NULL


def to_float(int kind, uintptr_t blocks, uintptr_t values, int64_t n):
    """Convert the blocks of n values to float32, with the interpreter's lock released."""
    cdef to_float_t convert = ggml_get_type_traits(known(kind)).to_float
    if convert == NULL:
        raise ValueError(f"type {kind}: ggml has no conversion to float32")
    with nogil:
        convert(<void *>blocks, <float *>values, n)


def quantize(int kind, uintptr_t values, uintptr_t blocks, int64_t n_rows, int64_t row_values,
             uintptr_t importance=0):
    """Convert rows of float32 to blocks of a type; return the bytes written.

    `importance` is the address of a weight for each value of a row, which some types need.
    """
    cdef size_t nbytes
    cdef int number = known(kind)
    with nogil:
        nbytes = ggml_quantize_chunk(number, <float *>values, <void *>blocks, 0, n_rows,
                                     row_values, <float *>importance)
    return nbytes


# ---- contexts and headers ----

cdef uintptr_t made(void *address) except 0:
    if address == NULL:
        texts = guard_text.decode(errors="replace") or "ggml made nothing", take_log()
        raise GgmlError("; ".join(filter(None, texts)))
    return <uintptr_t>address


cdef inline context_t *_c(uintptr_t address) noexcept:
    return <context_t *>address


cdef inline tensor_t *_t(uintptr_t address) noexcept:
    return <tensor_t *>address


def tensor_overhead():
    """Return the bytes of a context that a tensor takes."""
    return ggml_tensor_overhead()


def graph_overhead(size_t size):
    """Return the bytes of a context that a graph of up to `size` nodes takes."""
    return ggml_graph_overhead_custom(size, False)


def new_context(uintptr_t address, size_t nbytes):
    """Make a context whose headers and graphs lie in [address, address + nbytes)."""
    cdef init_params params
    params.mem_size, params.mem_buffer, params.no_alloc = nbytes, <void *>address, True
    return made(ggml_init(params))


def reset(uintptr_t context):
    """Drop all headers of a context."""
    ggml_reset(_c(context))


def free(uintptr_t context):
    """Free what ggml holds of a context beside the given memory."""
    ggml_free(_c(context))


def new_tensor(uintptr_t context, int kind, *ne):
    """Make a tensor header of type number `kind`; its `data` is NULL."""
    cdef int64_t sizes[4]  # GGML_MAX_DIMS
    cdef int i
    if not 1 <= len(ne) <= GGML_MAX_DIMS or min(ne) < 0:
        raise ValueError(f"ne: expected 1 to {GGML_MAX_DIMS} sizes of at least 0, got {ne}")
    for i in range(len(ne)):
        sizes[i] = ne[i]
    return made(guarded_new_tensor(_c(context), known(kind), len(ne), sizes))


cdef class Tensor:
    """A view of a tensor's header, whose memory the caller keeps alive."""
    cdef tensor_t *t

    @staticmethod
    def at(uintptr_t address):
        """View the header at an address."""
        cdef Tensor tensor = Tensor.__new__(Tensor)
        if not address:
            raise ValueError("address: expected that of a tensor, got 0")
        tensor.t = <tensor_t *>address
        return tensor

    @property
    def type(self):
        return self.t.type

    @property
    def ne(self):
        return tuple([self.t.ne[i] for i in range(GGML_MAX_DIMS)])

    @property
    def nb(self):
        return tuple([self.t.nb[i] for i in range(GGML_MAX_DIMS)])

    @nb.setter
    def nb(self, strides):
        for i, stride in zip(range(GGML_MAX_DIMS), strides, strict=True):
            self.t.nb[i] = stride

    @property
    def src(self):
        """Addresses of the tensors that it is computed from; 0 for none."""
        return tuple([<uintptr_t>self.t.src[i] for i in range(GGML_MAX_SRC)])

    @property
    def view_src(self):
        return <uintptr_t>self.t.view_src

    @property
    def view_offs(self):
        return self.t.view_offs

    @property
    def nbytes(self):
        return ggml_nbytes(self.t)

    @property
    def extra(self):
        return <uintptr_t>self.t.extra

    @property
    def data(self):
        return <uintptr_t>self.t.data

    @data.setter
    def data(self, uintptr_t address):
        self.t.data = <void *>address

    @property
    def buffer(self):
        return <uintptr_t>self.t.buffer

    @buffer.setter
    def buffer(self, uintptr_t address):
        self.t.buffer = <backend_buffer *>address


def set_input(uintptr_t tensor):
    """Mark a tensor that is an input of graphs."""
    ggml_set_input(_t(tensor))


def set_output(uintptr_t tensor):
    """Mark a tensor that is the output of a graph."""
    ggml_set_output(_t(tensor))


# ---- operations, each as ggml's function of the same name ----

def get_rows(uintptr_t c, uintptr_t a, uintptr_t ids):
    return made(guarded_get_rows(_c(c), _t(a), _t(ids)))


def set_rows(uintptr_t c, uintptr_t into, uintptr_t rows, uintptr_t ids):
    return made(guarded_set_rows(_c(c), _t(into), _t(rows), _t(ids)))


def rms_norm(uintptr_t c, uintptr_t a, float eps):
    return made(guarded_rms_norm(_c(c), _t(a), eps))


def mul(uintptr_t c, uintptr_t a, uintptr_t b):
    return made(guarded_mul(_c(c), _t(a), _t(b)))


def add(uintptr_t c, uintptr_t a, uintptr_t b):
    return made(guarded_add(_c(c), _t(a), _t(b)))


def div(uintptr_t c, uintptr_t a, uintptr_t b):
    return made(guarded_div(_c(c), _t(a), _t(b)))


def mul_mat(uintptr_t c, uintptr_t a, uintptr_t b):
    return made(guarded_mul_mat(_c(c), _t(a), _t(b)))


def mul_mat_id(uintptr_t c, uintptr_t experts, uintptr_t b, uintptr_t ids):
    return made(guarded_mul_mat_id(_c(c), _t(experts), _t(b), _t(ids)))


def add_id(uintptr_t c, uintptr_t a, uintptr_t rows, uintptr_t ids):
    return made(guarded_add_id(_c(c), _t(a), _t(rows), _t(ids)))


def scale(uintptr_t c, uintptr_t a, float s):
    return made(guarded_scale(_c(c), _t(a), s))


def clamp(uintptr_t c, uintptr_t a, float low, float high):
    return made(guarded_clamp(_c(c), _t(a), low, high))


def sum_rows(uintptr_t c, uintptr_t a):
    return made(guarded_sum_rows(_c(c), _t(a)))


def soft_max(uintptr_t c, uintptr_t a):
    return made(guarded_soft_max(_c(c), _t(a)))


def argsort_top_k(uintptr_t c, uintptr_t a, int k):
    return made(guarded_argsort_top_k(_c(c), _t(a), k))


def swiglu_split(uintptr_t c, uintptr_t gate, uintptr_t up):
    return made(guarded_swiglu_split(_c(c), _t(gate), _t(up)))


def swiglu_oai(uintptr_t c, uintptr_t gate, uintptr_t up, float alpha, float limit):
    return made(guarded_swiglu_oai(_c(c), _t(gate), _t(up), alpha, limit))


def geglu_split(uintptr_t c, uintptr_t gate, uintptr_t up):
    return made(guarded_geglu_split(_c(c), _t(gate), _t(up)))


def cont(uintptr_t c, uintptr_t a):
    return made(guarded_cont(_c(c), _t(a)))


def reshape_2d(uintptr_t c, uintptr_t a, int64_t n0, int64_t n1):
    return made(guarded_reshape_2d(_c(c), _t(a), n0, n1))


def reshape_3d(uintptr_t c, uintptr_t a, int64_t n0, int64_t n1, int64_t n2):
    return made(guarded_reshape_3d(_c(c), _t(a), n0, n1, n2))


def view_2d(uintptr_t c, uintptr_t a, int64_t n0, int64_t n1, size_t s1, size_t at):
    return made(guarded_view_2d(_c(c), _t(a), n0, n1, s1, at))


def view_3d(uintptr_t c, uintptr_t a, int64_t n0, int64_t n1, int64_t n2, size_t s1, size_t s2,
            size_t at):
    return made(guarded_view_3d(_c(c), _t(a), n0, n1, n2, s1, s2, at))


def permute(uintptr_t c, uintptr_t a, int i, int j, int k, int l):
    return made(guarded_permute(_c(c), _t(a), i, j, k, l))


def map_custom1_inplace(uintptr_t c, uintptr_t a, uintptr_t function, int n_tasks, uintptr_t data):
    """Apply a C function to a tensor; `n_tasks` of -1 is one for each thread."""
    return made(guarded_map_custom1_inplace(_c(c), _t(a), <custom_t><void *>function, n_tasks,
                                            <void *>data))


def rope_ext(uintptr_t c, uintptr_t a, uintptr_t positions, uintptr_t factors, int n_dims,
             int mode, int original_ctx, float freq_base, float freq_scale, float ext_factor,
             float attn_factor, float beta_fast, float beta_slow):
    return made(guarded_rope_ext(_c(c), _t(a), _t(positions), _t(factors), n_dims, mode,
                                 original_ctx, freq_base, freq_scale, ext_factor, attn_factor,
                                 beta_fast, beta_slow))


def flash_attn_ext(uintptr_t c, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t mask,
                   float scale, float max_bias, float softcap, uintptr_t sinks=0):
    """Attend, with sums in float32; `sinks` has a further score of each head, without a value."""
    cdef uintptr_t tensor = made(guarded_flash_attn_ext(_c(c), _t(q), _t(k), _t(v), _t(mask),
                                                        scale, max_bias, softcap))
    ggml_prec_set_acc(_t(tensor), GGML_PREC_F32)
    if sinks:
        made(guarded_with_sinks(_t(tensor), _t(sinks)))
    return tensor


# ---- graphs ----

def new_graph(uintptr_t context, size_t size):
    """Make a graph of up to `size` nodes."""
    return made(guarded_new_graph_custom(_c(context), size, False))


def expand(uintptr_t graph, uintptr_t tensor):
    """Add a tensor, and what it is computed from, to a graph."""
    made(guarded_expanded(<cgraph *>graph, _t(tensor)))


def n_nodes(uintptr_t graph):
    """Return how many nodes a graph has."""
    return ggml_graph_n_nodes(<cgraph *>graph)


def nodes(uintptr_t graph):
    """Return the address of the array of the nodes' addresses."""
    return <uintptr_t>ggml_graph_nodes(<cgraph *>graph)


def plan(uintptr_t at, uintptr_t graph, int n_threads, uintptr_t pool=0, uintptr_t work=0):
    """Write the plan of a graph's computation to `PLAN_BYTES` at an address.

    It returns the bytes of working memory that the plan needs, whose address is `work`.
    """
    cdef cplan *planned = <cplan *>at
    made(guarded_planned(planned, <cgraph *>graph, n_threads, <threadpool *>pool))
    planned.work_data = <unsigned char *>work
    return planned.work_size


cdef int _compute(void *graph, void *at, int n_threads, c_bool (*is_over)(void *) noexcept nogil,
                  void *data) noexcept nogil:
    cdef cplan *planned = <cplan *>at
    planned.n_threads = n_threads
    planned.abort_callback, planned.abort_callback_data = is_over, data
    return cpu.compute(<cgraph *>graph, planned)


# int (*)(void *graph, void *plan, int n_threads, bool (*is_over)(void *), void *data), for callers
# without the interpreter's lock. It returns ggml's status: 0 for success, 1 if `is_over` ended it.
compute_address = <uintptr_t>&_compute


def compute(uintptr_t graph, uintptr_t at, int n_threads):
    """Compute a graph by its plan, with the interpreter's lock released; return ggml's status."""
    cdef int status
    with nogil:
        status = _compute(<void *>graph, <void *>at, n_threads, NULL, NULL)
    return status


def new_threadpool(int n_threads):
    """Make the threads that compute graphs; free them with `free_threadpool`."""
    cdef threadpool_params params = ggml_threadpool_params_default(n_threads)
    return made(cpu.threadpool_new(&params))


def free_threadpool(uintptr_t pool):
    """End the threads of a pool."""
    cpu.threadpool_free(<threadpool *>pool)


# ---- the device, and orders of weights ----

cdef void *proc(const char *name) noexcept:
    return ggml_backend_reg_get_proc_address(cpu.reg(), name)


def features():
    """Return the name and value of each CPU feature that this build uses."""
    cdef void *function = proc(b"ggml_backend_get_features")
    cdef feature *found
    result = {}
    if function != NULL:
        found = (<feature *(*)(reg_t) noexcept>function)(cpu.reg())
        while found.name != NULL:
            result[found.name.decode()] = found.value.decode()
            found += 1
    return result


def supports(uintptr_t tensor):
    """Return whether the CPU backend computes a tensor."""
    return ggml_backend_dev_supports_op(ggml_backend_reg_dev_get(cpu.reg(), 0), _t(tensor))


def extra_buffer_types():
    """List the name, alignment and address of each buffer type for weights of this CPU.

    Those that cannot lie in memory of the caller are left out.
    """
    cdef void *function = proc(b"ggml_backend_dev_get_extra_bufts")
    cdef buffer_type **found
    cdef buffer_i interface
    result = []
    if function == NULL:
        return result
    found = (<buffer_type **(*)(dev_t) noexcept>function)(ggml_backend_reg_dev_get(cpu.reg(), 0))
    while found != NULL and found[0] != NULL:
        if buffer_interface(found[0], 4096, &interface):
            result.append((ggml_backend_buft_name(found[0]).decode(),
                           ggml_backend_buft_get_alignment(found[0]), <uintptr_t>found[0]))
        found += 1
    return result


def new_buffer(uintptr_t kind, uintptr_t memory, size_t nbytes):
    """Make a buffer of a type over memory of the caller; free it with `free_buffer`."""
    cdef buffer_i interface
    if not buffer_interface(<buffer_type *>kind, 4096, &interface):
        raise ValueError(
            f"{ggml_backend_buft_name(<buffer_type *>kind).decode()}: its buffers cannot lie in "
            "memory of the caller")
    return made(ggml_backend_buffer_init(<buffer_type *>kind, interface, <void *>memory, nbytes))


def free_buffer(uintptr_t buffer):
    """Free ggml's struct of a buffer; the memory stays."""
    ggml_backend_buffer_free(<backend_buffer *>buffer)


def init_tensor(uintptr_t buffer, uintptr_t tensor):
    """Mark a tensor that lies in a buffer as its type does."""
    ggml_backend_buffer_init_tensor(<backend_buffer *>buffer, _t(tensor))


def alloc_size(uintptr_t kind, uintptr_t tensor):
    """Return the bytes of a tensor in buffers of a type."""
    return ggml_backend_buft_get_alloc_size(<buffer_type *>kind, _t(tensor))


def set_tensor(uintptr_t tensor, uintptr_t source, size_t nbytes):
    """Write a tensor's data as its buffer's type does, with the interpreter's lock released."""
    cdef tensor_t *into = _t(tensor)
    with nogil:
        ggml_backend_tensor_set(into, <void *>source, 0, nbytes)
