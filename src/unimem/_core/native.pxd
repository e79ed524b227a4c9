# The public C API for Cython. The comments of the headers in native/include are the manual.
from libc.stdint cimport int16_t, int32_t, uint8_t, uint32_t, uint64_t

cdef extern from "unimem.h" nogil:
    enum:
        UM_VERSION_MAJOR, UM_VERSION_MINOR, UM_VERSION_PATCH, UM_SOVERSION

    const char *um_version()

    ctypedef enum um_status:
        UM_OK, UM_E_INVALID, UM_E_FULL, UM_E_NOMEM, UM_E_OS, UM_E_FORMAT, UM_E_IO, UM_E_STATE,
        UM_E_BUSY

    ctypedef enum um_detail:
        UM_DETAIL_NONE, UM_MARKS_FULL, UM_BLOCK_NO_POLICY, UM_BLOCK_PAST_FILE, UM_TAPE_FULL,
        UM_TAPE_FROZEN, UM_GRID_FULL, UM_GRID_FREE, UM_HEADER_FULL, UM_KV_FULL, UM_KV_ROWS,
        UM_KV_OVERWRITTEN, UM_KV_RESERVED, UM_KV_UNRESERVED, UM_KV_UNEVEN, UM_PAGED_FULL,
        UM_PAGED_UNHELD, UM_PAGED_UNEVEN, UM_PIECES_FULL, UM_PIECES_HELD, UM_PIECES_INTERRUPTED,
        UM_PIECES_FORKED

    ctypedef struct um_error:
        um_status status
        um_detail detail
        int os_errno
        uint64_t limit, used, asked, offset
        const char *what

    const char *um_status_name(um_status status)

    ctypedef enum um_category:
        UM_CAT_OTHER, UM_CAT_WEIGHTS, UM_CAT_SCRATCH, UM_CAT_HISTORY, UM_CAT_STAGING,
        UM_CAT_DIAGNOSTICS, UM_CAT_LOGITS, UM_CAT_TOKENS, UM_CAT_COUNT

    ctypedef struct um_ledger_row:
        uint64_t n_mappings, mapped_bytes, high_water_bytes

    ctypedef struct um_counters:
        uint64_t n_os_calls, n_allocations, allocated_bytes

    um_status um_ledger_read(um_category category, um_ledger_row *out, um_error *err)
    void um_counters_read(um_counters *out)
    const char *um_category_name(um_category category)

    enum:
        UM_MAX_MARKS

    um_status um_marks_begin(unsigned *out, um_error *err)
    void um_marks_read(unsigned marks, uint64_t *out)
    void um_marks_end(unsigned marks)

    ctypedef enum um_pages:
        UM_PAGES_AUTO, UM_PAGES_4K, UM_PAGES_THP, UM_PAGES_2M, UM_PAGES_1G

    enum:
        UM_MAX_NODES

    ctypedef enum um_numa_mode:
        UM_NUMA_NONE, UM_NUMA_BIND, UM_NUMA_INTERLEAVE, UM_NUMA_WEIGHTED, UM_NUMA_PREFERRED

    # Arrays of UM_MAX_NODES / 64 words and of UM_MAX_NODES words.
    ctypedef struct um_numa:
        um_numa_mode mode
        uint64_t nodes[16]

    ctypedef enum um_lock:
        UM_LOCK_NONE, UM_LOCK_NOW, UM_LOCK_ONFAULT

    ctypedef enum um_sharing:
        UM_SHARING_NONE, UM_SHARING_MEMFD, UM_SHARING_FD

    ctypedef enum um_access:
        UM_ACCESS_READ, UM_ACCESS_PRIVATE, UM_ACCESS_SHARED

    ctypedef enum um_advice:
        UM_ADVICE_WILLNEED, UM_ADVICE_SEQUENTIAL, UM_ADVICE_RANDOM, UM_ADVICE_DONTNEED,
        UM_ADVICE_HUGEPAGE, UM_ADVICE_NOHUGEPAGE

    ctypedef struct um_placement:
        um_pages pages
        uint64_t page_bytes, resident_bytes, pss_bytes, huge_bytes, locked_bytes, swapped_bytes
        uint64_t node_bytes[1024]

    ctypedef struct um_block_options:
        um_pages pages
        um_category category
        um_numa numa
        um_sharing sharing
        int fd
        size_t reserve_nbytes, mirror_nbytes, mirror_other_nbytes, mirror_run
        const char *name

    ctypedef struct um_block:
        void *base
        size_t nbytes, requested_nbytes
        um_pages requested_pages
        um_category category
        um_numa numa
        um_lock lock
        um_sharing sharing
        um_access access
        size_t mirror_nbytes, mirror_other_nbytes, mirror_run, step_nbytes, reserved_nbytes
        size_t committed_nbytes
        uint64_t *committed
        uint64_t *overlaid
        void *map_base
        size_t map_nbytes
        int fd, is_file, is_cache_hidden

    um_status um_block_map(um_block *out, size_t nbytes, const um_block_options *options,
                           um_error *err)
    um_status um_block_map_file(um_block *out, int fd, uint64_t offset, size_t nbytes,
                                um_access access, um_category category, um_error *err)
    um_status um_block_attach(um_block *out, int fd, um_access access, um_category category,
                              um_error *err)
    um_status um_block_copy_sealed(um_block *out, const um_block *block,
                                   const um_block_options *options, um_error *err)
    um_status um_block_commit(um_block *block, size_t offset, size_t nbytes, um_error *err)
    um_status um_block_release(um_block *block, size_t offset, size_t nbytes, size_t *out_nbytes,
                               um_error *err)
    um_status um_block_discard(um_block *block, size_t offset, size_t nbytes, size_t *out_nbytes,
                               um_error *err)
    um_status um_block_overlay(um_block *block, size_t offset, int fd, uint64_t file_offset,
                               size_t nbytes, um_error *err)
    bint um_block_is_committed(const um_block *block, size_t offset, size_t nbytes)
    bint um_block_is_overlaid(const um_block *block, size_t offset, size_t nbytes)
    um_status um_block_lock(um_block *block, um_lock lock, um_error *err)
    um_status um_block_warm(um_block *block, size_t offset, size_t nbytes, unsigned n_threads,
                            const int *cpus, um_error *err)
    um_status um_block_warm_to_write(um_block *block, size_t offset, size_t nbytes,
                                     unsigned n_threads, const int *cpus, um_error *err)
    um_status um_block_collapse(um_block *block, um_error *err)
    um_status um_block_advise(um_block *block, um_advice advice, um_error *err)
    void um_block_will_need(const um_block *block, size_t offset, size_t nbytes)
    um_status um_block_verify(const um_block *block, um_placement *out, um_error *err)
    um_status um_block_repair(um_block *block, uint64_t *out_nbytes, um_error *err)
    um_status um_block_resident(const um_block *block, size_t offset, size_t nbytes,
                                uint64_t *out_bytes, um_error *err)
    enum:
        UM_PAGE_IN_RAM, UM_PAGE_MAPPED, UM_PAGE_HUGE, UM_PAGE_LOCKED, UM_PAGE_UNKNOWN

    um_status um_block_pages(const um_block *block, size_t offset, size_t nbytes,
                             uint8_t *out_pages, int16_t *out_nodes, um_error *err)
    um_status um_block_unmap(um_block *block, um_error *err)
    void um_block_forget(um_block *block)
    size_t um_page_bytes()
    size_t um_huge_page_bytes()

    um_status um_file_read(int fd, uint64_t offset, void *out, size_t nbytes, um_error *err)

    um_status um_tmpfs_open(int *out_fd, uint64_t nbytes, int huge, um_error *err)
    um_status um_tmpfs_seal(int fd, um_error *err)

    ctypedef struct um_load_part:
        int fd
        uint64_t offset
        void *to
        size_t nbytes

    ctypedef struct um_load_options:
        unsigned n_threads
        const int *cpus
        size_t request_nbytes
        int direct

    ctypedef struct um_load:
        pass

    um_status um_load_start(um_load **out, const um_load_part *parts, size_t n_parts,
                            const um_load_options *options, um_error *err)
    void um_load_wait(um_load *load, unsigned milliseconds, uint64_t *out_nbytes, int *out_running)
    um_status um_load_end(um_load *load, size_t *out_part, um_error *err)

    ctypedef void um_guarded(void *context) noexcept nogil
    um_status um_guard_run(const void *base, size_t nbytes, um_guarded *run, void *context,
                           um_error *err)
    um_status um_guard_copy(void *out, const void *from_, size_t nbytes, um_error *err)

    # The fields of the tape, grid and cache that change are atomics, which Cython cannot read: only
    # those that never change are declared.
    ctypedef struct um_tape:
        unsigned char *base
        size_t total

    um_status um_tape_init(um_tape *tape, void *base, size_t total, um_error *err)
    um_status um_tape_take(um_tape *tape, size_t nbytes, size_t align, void **out, um_error *err)
    void um_tape_clear(um_tape *tape)
    void um_tape_keep(um_tape *tape)
    size_t um_tape_mark(const um_tape *tape)
    um_status um_tape_rewind(um_tape *tape, size_t mark, um_error *err)
    um_status um_tape_freeze(um_tape *tape, size_t limit, um_error *err)
    void um_tape_thaw(um_tape *tape)
    bint um_tape_frozen(const um_tape *tape)
    size_t um_tape_used(const um_tape *tape)
    size_t um_tape_kept(const um_tape *tape)
    size_t um_tape_high_water(const um_tape *tape)
    uint64_t um_tape_n_takes(const um_tape *tape)
    bint um_tape_owns(const um_tape *tape, const void *address)

    ctypedef struct um_grid:
        unsigned char *base
        size_t cell_bytes
        uint32_t n_cells

    um_status um_grid_bytes(size_t cell_bytes, uint32_t n_cells, size_t *out, um_error *err)
    um_status um_grid_init(um_grid *grid, um_tape *tape, size_t cell_bytes, uint32_t n_cells,
                           um_error *err)
    um_status um_grid_init_apart(um_grid *grid, void *cells, void *links, size_t cell_bytes,
                                 uint32_t n_cells, um_error *err)
    um_status um_grid_take(um_grid *grid, uint32_t *out_id, um_error *err)
    um_status um_grid_give(um_grid *grid, uint32_t id, um_error *err)
    void *um_grid_cell(const um_grid *grid, uint32_t id)
    uint32_t um_grid_n_available(const um_grid *grid)

    ctypedef enum um_dtype:
        UM_F32, UM_F16, UM_BF16, UM_Q8_0, UM_Q4_0, UM_Q4_1, UM_Q5_0, UM_Q5_1, UM_IQ4_NL,
        UM_DTYPE_COUNT

    ctypedef struct um_dtype_info:
        const char *name
        uint32_t block_values, block_bytes, ggml_type

    const um_dtype_info *um_dtype_describe(um_dtype type)

    size_t um_dtype_block_values(um_dtype type)
    size_t um_dtype_block_bytes(um_dtype type)
    um_status um_convert(void *out, um_dtype out_type, const void *inp, um_dtype in_type, size_t n,
                         um_error *err)
    const char *um_convert_isa()
    void um_copy_hashed(void *out, const void *inp, size_t nbytes, size_t n_zeros,
                        uint8_t *out_hash)

# Movers are called with the interpreter's lock where the calls that move rows are made with it.
cdef extern from "unimem.h":
    ctypedef um_status um_kv_mover(void *context, void *to, const void *from_, size_t nbytes)

cdef extern from "unimem.h" nogil:
    um_status um_rotate(float *values, size_t n, size_t block, um_error *err)
    size_t um_rotation_block(uint32_t head_dim, int v)

    enum:
        UM_ROTATION_LEAST, UM_ROTATION_MOST
    const uint32_t UM_KV_NO_V

    ctypedef struct um_kv_spec:
        uint32_t n_layers, n_kv_heads, head_dim, batch
        uint64_t max_seq_len, window
        um_dtype type, v_type
        uint32_t v_head_dim
        int rotate

    ctypedef struct um_kv_storage:
        void *base
        size_t lane_stride, v_lane_stride
        uint64_t n_rows, usable_rows

    ctypedef struct um_kv:
        um_kv_spec spec
        unsigned char *base
        size_t row_bytes, v_row_bytes, lane_stride, v_lane_stride
        uint64_t n_rows, usable_rows, shift, first
        um_kv_mover *mover
        void *mover_context

    um_status um_kv_row_bytes(const um_kv_spec *spec, int v, size_t *out, um_error *err)
    um_status um_kv_storage_bytes(const um_kv_spec *spec, size_t *out, um_error *err)
    um_status um_kv_init(um_kv *kv, const um_kv_spec *spec, const um_kv_storage *storage,
                         um_error *err)
    void um_kv_free(um_kv *kv)
    void *um_kv_lane(const um_kv *kv, uint32_t layer, int v, uint32_t stream)
    uint64_t um_kv_row(const um_kv *kv, uint64_t position)

    ctypedef enum um_kv_order:
        UM_KV_TOKEN_MAJOR, UM_KV_HEAD_MAJOR

    um_status um_kv_append(um_kv *kv, uint32_t layer, const void *k, const void *v, um_dtype type,
                           um_kv_order order, uint64_t n, um_error *err)
    um_status um_kv_append_all(um_kv *kv, const void *k, const void *v, um_dtype type,
                               um_error *err)
    um_status um_kv_append_begin(const um_kv *kv, uint32_t layer, uint64_t n, uint64_t *out_row,
                                 um_error *err)
    void um_kv_append_end(um_kv *kv, uint32_t layer, uint64_t n)
    um_status um_kv_reserve(um_kv *kv, uint64_t n, uint64_t *out_row, um_error *err)
    um_status um_kv_commit(um_kv *kv, uint64_t n, um_error *err)
    void um_kv_rollback(um_kv *kv)
    void um_kv_rollback_to(um_kv *kv, uint64_t position)
    uint64_t um_kv_seq_len(const um_kv *kv)
    uint64_t um_kv_next_position(const um_kv *kv)
    uint64_t um_kv_first_position(const um_kv *kv)
    uint64_t um_kv_oldest_position(const um_kv *kv)
    uint64_t um_kv_layer_len(const um_kv *kv, uint32_t layer, uint64_t *out_first_position)
    um_status um_kv_read(const um_kv *kv, uint32_t layer, int v, uint64_t position, uint64_t n,
                         void *out, um_dtype type, um_error *err)
    um_status um_kv_crop(um_kv *kv, uint64_t n, um_error *err)
    um_status um_kv_crop_to(um_kv *kv, uint64_t position, um_error *err)
    uint64_t um_kv_lowest_crop(const um_kv *kv)
    um_status um_kv_trim(um_kv *kv, uint64_t n, uint64_t keep_first, um_error *err)
    void um_kv_clear(um_kv *kv)
    uint64_t um_kv_lost_before(const um_kv *kv, uint64_t end)
    void um_kv_set_first(um_kv *kv, uint64_t first, uint64_t held)
    void um_kv_limit_end(um_kv *kv, uint64_t position)
    um_status um_kv_set_usable(um_kv *kv, uint64_t n, um_error *err)
    um_status um_kv_move(um_kv *kv, uint64_t row, um_error *err)
    um_status um_kv_adopt(um_kv *kv, uint64_t next_position, uint64_t n, um_error *err)

    ctypedef struct um_paged_spec:
        uint32_t n_layers, n_kv_heads, head_dim, n_blocks, block_tokens
        um_dtype type, v_type

    ctypedef struct um_paged_block:
        pass

    ctypedef struct um_paged:
        um_paged_spec spec
        unsigned char *base
        size_t head_bytes, v_head_bytes, lane_bytes, v_lane_bytes, block_bytes
        uint32_t n_free, n_evictable
        um_paged_block *blocks

    ctypedef struct um_paged_seq:
        um_paged *paged
        uint32_t n_blocks
        const int32_t *table

    ctypedef struct um_paged_pending:
        um_paged_seq *seq
        const void *rows[2]
        um_dtype types[2]
        um_kv_order order
        uint32_t layer, n_layers
        uint64_t at, n
        uint32_t first_block

    um_status um_paged_storage_bytes(const um_paged_spec *spec, size_t *out, um_error *err)
    um_status um_paged_init(um_paged *paged, const um_paged_spec *spec, void *storage,
                            um_error *err)
    void um_paged_free(um_paged *paged)
    void *um_paged_lane(const um_paged *paged, uint32_t block, uint32_t layer, int v)
    uint32_t um_paged_n_holders(const um_paged *paged, uint32_t block)
    uint32_t um_paged_n_in_use(const um_paged *paged)
    bint um_paged_is_cached(const um_paged *paged, uint32_t block)
    um_status um_paged_cache(um_paged *paged, uint32_t block, um_error *err)
    void um_paged_uncache(um_paged *paged, uint32_t block)
    um_status um_paged_seq_init(um_paged_seq *out, um_paged *paged, const int32_t *blocks,
                                uint32_t n_blocks, um_error *err)
    um_status um_paged_seq_fork(um_paged_seq *out, const um_paged_seq *seq, um_error *err)
    void um_paged_seq_clear(um_paged_seq *seq)
    void um_paged_seq_free(um_paged_seq *seq)
    uint64_t um_paged_seq_len(const um_paged_seq *seq)
    uint64_t um_paged_layer_len(const um_paged_seq *seq, uint32_t layer)
    bint um_paged_will_copy(const um_paged_seq *seq, uint32_t layer)
    um_status um_paged_append(um_paged_seq *seq, uint32_t layer, const void *k, const void *v,
                              um_dtype type, um_kv_order order, uint64_t n, um_error *err)
    um_status um_paged_append_all(um_paged_seq *seq, const void *k, const void *v, um_dtype type,
                                  um_error *err)
    um_status um_paged_append_begin(um_paged_pending *out, um_paged_seq *seq, uint32_t layer,
                                    const void *k, const void *v, um_dtype type,
                                    um_kv_order order, uint64_t n, um_error *err)
    um_status um_paged_append_stored_begin(um_paged_pending *out, um_paged_seq *seq,
                                           uint32_t layer, const void *k, const void *v,
                                           um_kv_order order, uint64_t n, um_error *err)
    um_status um_paged_append_all_begin(um_paged_pending *out, um_paged_seq *seq, const void *k,
                                        const void *v, um_dtype type, um_error *err)
    void um_paged_append_write(const um_paged_pending *pending)
    void um_paged_append_end(const um_paged_pending *pending)
    void um_paged_rollback(um_paged_seq *seq)
    um_status um_paged_crop(um_paged_seq *seq, uint64_t n, um_error *err)
    um_status um_paged_gather(const um_paged_seq *seq, uint32_t layer, int v, uint64_t n,
                              void *out, size_t head_stride, um_dtype type, um_error *err)

cdef extern from "unimem_formats.h" nogil:
    enum:
        UM_GGUF_MAX_DIMS, UM_SAFETENSORS_MAX_DIMS

    ctypedef enum um_gguf_type:
        UM_GGUF_UINT8, UM_GGUF_INT8, UM_GGUF_UINT16, UM_GGUF_INT16, UM_GGUF_UINT32, UM_GGUF_INT32,
        UM_GGUF_FLOAT32, UM_GGUF_BOOL, UM_GGUF_STRING, UM_GGUF_ARRAY, UM_GGUF_UINT64, UM_GGUF_INT64,
        UM_GGUF_FLOAT64, UM_GGUF_TYPE_COUNT

    ctypedef struct um_gguf_kv:
        uint64_t key_offset, key_nbytes, value_offset, value_nbytes, n_items
        um_gguf_type type, item_type

    ctypedef struct um_gguf_tensor:
        uint64_t name_offset, name_nbytes
        uint64_t ne[4], offset, nbytes
        uint32_t n_dims, type

    ctypedef struct um_gguf:
        uint32_t version
        uint64_t alignment, header_nbytes, data_offset, n_kv, n_tensors
        um_gguf_kv *kv
        um_gguf_tensor *tensors

    ctypedef struct um_gguf_tensor_type:
        const char *name
        uint32_t block_values, block_bytes

    const um_gguf_tensor_type *um_gguf_type_of_tensor(uint32_t type)
    um_status um_gguf_parse(um_gguf *out, const void *data, size_t nbytes, uint64_t file_nbytes,
                            um_error *err)
    void um_gguf_free(um_gguf *gguf)

    ctypedef enum um_safetensors_type:
        UM_ST_BOOL, UM_ST_F4, UM_ST_F6_E2M3, UM_ST_F6_E3M2, UM_ST_U8, UM_ST_I8, UM_ST_F8_E5M2,
        UM_ST_F8_E4M3, UM_ST_F8_E8M0, UM_ST_F8_E4M3FNUZ, UM_ST_F8_E5M2FNUZ, UM_ST_I16, UM_ST_U16,
        UM_ST_F16, UM_ST_BF16, UM_ST_I32, UM_ST_U32, UM_ST_F32, UM_ST_C64, UM_ST_F64, UM_ST_I64,
        UM_ST_U64, UM_ST_TYPE_COUNT

    ctypedef struct um_safetensors_text:
        uint32_t offset, nbytes

    ctypedef struct um_safetensors_kv:
        um_safetensors_text key, value

    ctypedef struct um_safetensors_tensor:
        um_safetensors_text name
        uint64_t offset, nbytes
        uint32_t first_dim, n_dims
        um_safetensors_type type
        uint32_t place

    ctypedef struct um_safetensors:
        uint64_t n_kv, n_tensors, n_dims
        um_safetensors_kv *kv
        um_safetensors_tensor *tensors
        uint64_t *dims
        uint64_t header_nbytes

    const char *um_safetensors_type_name(um_safetensors_type type)
    unsigned um_safetensors_type_bits(um_safetensors_type type)
    um_status um_safetensors_parse(um_safetensors *out, const void *data, size_t nbytes,
                                   uint64_t file_nbytes, um_error *err)
    size_t um_safetensors_write_text(const void *data, um_safetensors_text text, char *out)
    void um_safetensors_free(um_safetensors *safetensors)

cdef extern from "unimem_pieces.h" nogil:
    enum:
        UM_PIECES_MAX_PARTS

    ctypedef struct um_pieces_range:
        uint32_t file
        uint64_t offset

    # Arrays of UM_PIECES_MAX_PARTS.
    ctypedef struct um_pieces_pool:
        uint32_t n_parts
        size_t part_nbytes[8]
        size_t part_offset[8]
        size_t stride
        void *base
        uint32_t n_slots, max_slots

    ctypedef enum um_pieces_policy:
        UM_PIECES_FREQUENT, UM_PIECES_RECENT, UM_PIECES_CYCLE, UM_PIECES_POLICY_COUNT

    ctypedef enum um_pieces_io:
        UM_PIECES_IO_AUTO, UM_PIECES_IO_RING, UM_PIECES_IO_THREADS, UM_PIECES_IO_COUNT

    ctypedef struct um_pieces_spec:
        const int *fds
        uint32_t n_files
        um_pieces_pool *pools
        uint32_t n_pools, n_pieces
        const uint32_t *pool_of
        const um_pieces_range *ranges
        const uint32_t *group_of
        uint32_t n_groups
        um_pieces_policy policy
        um_pieces_io io
        uint32_t n_reads

    ctypedef struct um_pieces:
        pass

    ctypedef struct um_pieces_holder:
        pass

    ctypedef struct um_pieces_stat:
        uint64_t hits, misses, prefetched, prefetch_hits, evicted, failed, n_reads, read_bytes
        uint64_t waited_ns, resident, resident_bytes

    um_status um_pieces_layout(um_pieces_spec *spec, um_error *err)
    um_status um_pieces_create(um_pieces **out, const um_pieces_spec *spec, um_error *err)
    void um_pieces_destroy(um_pieces *pieces)
    um_status um_pieces_holder_create(um_pieces_holder **out, um_pieces *pieces, um_error *err)
    void um_pieces_holder_destroy(um_pieces_holder *holder)
    um_status um_pieces_ensure(um_pieces *pieces, um_pieces_holder *holder, const int32_t *ids,
                               size_t n, int32_t *slots, um_error *err)
    void um_pieces_release(um_pieces *pieces, um_pieces_holder *holder)
    um_status um_pieces_prefetch(um_pieces *pieces, const int32_t *ids, size_t n, um_error *err)
    um_status um_pieces_resize(um_pieces *pieces, uint32_t pool, uint32_t n_slots, um_error *err)
    int32_t um_pieces_slot(um_pieces *pieces, int32_t id)
    void um_pieces_stat_read(um_pieces *pieces, um_pieces_stat *out)
    uint64_t um_pieces_fetched(um_pieces *pieces, uint32_t pool)
    bint um_pieces_has_ring(const um_pieces *pieces)
    bint um_pieces_is_direct(um_pieces *pieces, uint32_t file)

cdef extern from "unimem.h":
    void um_kv_set_mover(um_kv *kv, um_kv_mover *mover, void *context)
