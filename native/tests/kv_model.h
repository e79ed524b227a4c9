/* A KV cache beside a simple model of it. Each function below makes one call: it works out what
 * must result, makes the call, and compares the status and the um_error, the lengths and positions
 * of all layers, every visible token, and every byte of the storage. The only function of the
 * library that the model uses is um_convert. */
#ifndef UM_KV_MODEL_H
#define UM_KV_MODEL_H

#include <sys/mman.h>
#include <unistd.h>

#include "test.h"

/* SPAN: positions whose tokens the model remembers, more than any cache has rows. */
enum { MAX_LAYERS = 4, SPAN = 512, FILL = 0xCC };

#define NOBODY UINT64_MAX

typedef struct kv_model {
    um_kv kv;
    um_kv_spec spec;
    um_kv_storage storage;
    size_t row_bytes, lane_nbytes, n_lanes; /* lane_nbytes: with the gap behind the lane */
    unsigned char *map;
    size_t map_nbytes;
    bool guarded;         /* pages that hold only unusable rows are inaccessible */
    unsigned char *image; /* what each lane must contain */
    unsigned char *given; /* for each lane and position % SPAN, the row that was given */
    uint64_t *holder;     /* for each layer and row of a ring, its token's position */
    uint64_t first, next[MAX_LAYERS], reserved;
    uint64_t row; /* in a plain cache, the row of `first` */
    uint64_t random;
} kv_model;

static inline bool model_is_ring(const kv_model *m) {
    return m->spec.window != 0;
}

/* ---- storage ---- */

static inline size_t page_up(size_t nbytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (nbytes + page - 1) / page * page;
}

/* The lanes of a ring, each mapped twice. `gap`: inaccessible bytes after each lane. */
static inline void map_ring(kv_model *m, size_t gap) {
    size_t lane = m->lane_nbytes;
    int fd = memfd_create("test_kv", MFD_CLOEXEC);
    REQUIRE(page_up(lane) == lane);
    REQUIRE(fd >= 0);
    REQUIRE(ftruncate(fd, (off_t)(m->n_lanes * lane)) == 0);
    m->storage.lane_stride = 2 * lane + page_up(gap);
    m->map_nbytes = m->n_lanes * m->storage.lane_stride;
    m->map = mmap(NULL, m->map_nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(m->map != MAP_FAILED);
    for (size_t i = 0; i < 2 * m->n_lanes; i++) {
        unsigned char *at = m->map + i / 2 * m->storage.lane_stride + i % 2 * lane;
        REQUIRE(mmap(at, lane, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                     (off_t)(i / 2 * lane)) == at);
        memset(at, FILL, lane);
    }
    close(fd);
}

/* The bytes of a lane that are accessible, and are compared. */
static inline size_t accessible_nbytes(const kv_model *m, uint64_t usable) {
    size_t nbytes = page_up((size_t)usable * m->row_bytes);
    return m->guarded && nbytes < m->lane_nbytes ? nbytes : m->lane_nbytes;
}

static inline void protect_rows(kv_model *m, uint64_t usable) {
    size_t open = accessible_nbytes(m, usable);
    for (size_t lane = 0; m->guarded && lane < m->n_lanes; lane++) {
        unsigned char *at = m->map + lane * m->lane_nbytes;
        REQUIRE(mprotect(at, open, PROT_READ | PROT_WRITE) == 0);
        REQUIRE(mprotect(at + open, m->lane_nbytes - open, PROT_NONE) == 0);
    }
}

/* `gap`: bytes between the lanes, a multiple of 64. They must stay unchanged. */
static inline void map_plain(kv_model *m, size_t gap) {
    size_t rows = (size_t)m->storage.n_rows * m->row_bytes;
    m->lane_nbytes = m->guarded ? page_up(rows + gap) : (rows + 63) / 64 * 64 + gap;
    m->storage.lane_stride = m->lane_nbytes;
    m->map_nbytes = page_up(m->n_lanes * m->lane_nbytes);
    m->map = mmap(NULL, m->map_nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(m->map != MAP_FAILED);
    memset(m->map, FILL, m->n_lanes * m->lane_nbytes);
}

/* An empty cache with n_rows rows in each lane; the first `usable` may be written. */
static inline void make_model(kv_model *m, um_kv_spec spec, uint64_t n_rows, uint64_t usable,
                              size_t gap, bool guarded) {
    memset(m, 0, sizeof *m);
    m->spec = spec;
    m->guarded = guarded;
    m->n_lanes = (size_t)spec.n_layers * 2 * spec.batch;
    m->row_bytes = (size_t)spec.n_kv_heads * spec.head_dim / um_dtype_block_values(spec.type) *
                   um_dtype_block_bytes(spec.type);
    REQUIRE(spec.v_type == spec.type);
    m->storage = (um_kv_storage){.n_rows = n_rows, .usable_rows = usable};
    m->lane_nbytes = (size_t)n_rows * m->row_bytes;
    REQUIRE(spec.n_layers <= MAX_LAYERS);
    REQUIRE(n_rows < SPAN);
    if (spec.window != 0) {
        map_ring(m, gap);
    } else {
        map_plain(m, gap);
    }
    m->storage.base = m->map;
    m->storage.v_lane_stride = m->storage.lane_stride;
    m->image = allocate(m->n_lanes * m->lane_nbytes);
    m->given = allocate(m->n_lanes * SPAN * m->row_bytes);
    m->holder = allocate(spec.n_layers * n_rows * sizeof *m->holder);
    REQUIRE(m->given != NULL);
    REQUIRE(m->holder != NULL);
    memset(m->image, FILL, m->n_lanes * m->lane_nbytes);
    memset(m->holder, 0xFF, spec.n_layers * n_rows * sizeof *m->holder);
    protect_rows(m, usable);
    CHECK_OK(um_kv_init(&m->kv, &m->spec, &m->storage, &test_err));
}

static inline void free_model(kv_model *m) {
    static const um_kv zeroed;
    um_kv_free(&m->kv);
    CHECK(memcmp(&m->kv, &zeroed, sizeof zeroed) == 0);
    munmap(m->map, m->map_nbytes);
    free(m->image);
    free(m->given);
    free(m->holder);
}

/* A model that is freed where its scope ends. */
#define AUTO_MODEL __attribute__((cleanup(free_model))) kv_model

/* ---- what the model expects ---- */

static inline size_t lane_of(const kv_model *m, uint32_t layer, int v, size_t stream) {
    return (layer * 2 + (size_t)v) * m->spec.batch + stream;
}

static inline uint64_t row_of(const kv_model *m, uint64_t position) {
    return model_is_ring(m) ? position % m->storage.n_rows : position - m->first + m->row;
}

static inline unsigned char *given_row(const kv_model *m, size_t lane, uint64_t position) {
    return m->given + (lane * SPAN + (size_t)(position % SPAN)) * m->row_bytes;
}

static inline unsigned char *image_row(const kv_model *m, size_t lane, uint64_t row) {
    return m->image + lane * m->lane_nbytes + (size_t)row * m->row_bytes;
}

static inline uint64_t *holder_of(const kv_model *m, uint32_t layer, uint64_t position) {
    return &m->holder[layer * m->storage.n_rows + position % m->storage.n_rows];
}

static inline bool is_held(const kv_model *m, uint32_t layer, uint64_t position) {
    return !model_is_ring(m) || *holder_of(m, layer, position) == position;
}

static inline bool all_hold(const kv_model *m, uint64_t position) {
    bool held = true;
    for (uint32_t layer = 0; layer < m->spec.n_layers; layer++) {
        held = held && is_held(m, layer, position);
    }
    return held;
}

/* The first visible position if nothing were overwritten. */
static inline uint64_t floor_of(const kv_model *m, uint64_t end) {
    uint64_t window = m->spec.window;
    return model_is_ring(m) && end > window && end - window > m->first ? end - window : m->first;
}

static inline uint64_t model_layer_first(const kv_model *m, uint32_t layer) {
    uint64_t at = m->next[layer], from = floor_of(m, at);
    while (at > from && is_held(m, layer, at - 1)) {
        at--;
    }
    return at;
}

static inline uint64_t model_next(const kv_model *m) {
    uint64_t next = m->next[0];
    for (uint32_t layer = 1; layer < m->spec.n_layers; layer++) {
        next = m->next[layer] < next ? m->next[layer] : next;
    }
    return next;
}

static inline uint64_t model_first(const kv_model *m) {
    uint64_t at = model_next(m), from = floor_of(m, at);
    while (at > from && all_hold(m, at - 1)) {
        at--;
    }
    return at;
}

/* The first position that all layers hold, visible or not; at most the next position. */
static inline uint64_t model_oldest(const kv_model *m) {
    uint64_t at = model_next(m);
    while (at > m->first && all_hold(m, at - 1)) {
        at--;
    }
    return at;
}

static inline uint64_t model_len(const kv_model *m) {
    return model_next(m) - model_first(m);
}

static inline bool model_differs(const kv_model *m) {
    bool differs = false;
    for (uint32_t layer = 1; layer < m->spec.n_layers; layer++) {
        differs = differs || m->next[layer] != m->next[0];
    }
    return differs;
}

/* Compares all of the cache with the model. */
static inline bool check_model(const kv_model *m) {
    const um_kv *kv = &m->kv;
    bool ok = CHECK_EQ(um_kv_next_position(kv), model_next(m));
    ok = CHECK_EQ(um_kv_first_position(kv), model_first(m)) && ok;
    ok = CHECK_EQ(um_kv_seq_len(kv), model_len(m)) && ok;
    uint64_t oldest = um_kv_oldest_position(kv), next = model_next(m);
    /* If a layer is ahead by more than its rows, no token below the next one is left. */
    ok = CHECK_EQ(oldest < next ? oldest : next, model_oldest(m)) && ok;
    bool storage = true, tokens = true;
    for (uint32_t layer = 0; layer < m->spec.n_layers; layer++) {
        uint64_t at = 777, first = model_layer_first(m, layer), len = m->next[layer] - first;
        ok = CHECK_EQ(um_kv_layer_len(kv, layer, &at), len) && ok;
        ok = CHECK_EQ(at, first) && ok;
        ok = CHECK_EQ(um_kv_layer_len(kv, layer, NULL), len) && ok;
        for (size_t i = 0; i < 2 * (size_t)m->spec.batch; i++) {
            int v = (int)(i % 2);
            size_t lane = lane_of(m, layer, v, i / 2);
            const unsigned char *base = um_kv_lane(kv, layer, v, (uint32_t)(i / 2));
            storage = storage && base == m->map + lane * m->storage.lane_stride &&
                      memcmp(base, m->image + lane * m->lane_nbytes,
                             accessible_nbytes(m, m->kv.usable_rows)) == 0;
            /* The rows lie one after the other; those of a ring continue into the mirror. */
            const unsigned char *rows = base + um_kv_row(kv, first) * m->row_bytes;
            for (uint64_t t = 0; t < len; t++) {
                tokens = tokens && memcmp(rows + t * m->row_bytes, given_row(m, lane, first + t),
                                          m->row_bytes) == 0;
            }
        }
    }
    ok = CHECK(storage) && ok;
    return CHECK(tokens) && ok;
}

/* What a call that fails must not change, in addition to what check_model compares. */
typedef struct kv_picture {
    um_kv kv;
    uint64_t words[2 * MAX_LAYERS];
} kv_picture;

static inline kv_picture picture_of(const kv_model *m) {
    kv_picture p;
    memset(&p, 0, sizeof p);
    memcpy(&p.kv, &m->kv, sizeof p.kv);
    for (uint32_t layer = 0; layer < m->spec.n_layers; layer++) {
        p.words[2 * layer] = atomic_load(&m->kv.end[layer]);
        p.words[2 * layer + 1] = atomic_load(&m->kv.top[layer]);
    }
    return p;
}

/* `call` must fail with this status and change nothing. */
#define CHECK_REFUSED(status, m, call)                                                             \
    do {                                                                                           \
        kv_picture before_ = picture_of(m);                                                        \
        CHECK_STATUS(status, call);                                                                \
        kv_picture after_ = picture_of(m);                                                         \
        CHECK(memcmp(&before_, &after_, sizeof before_) == 0);                                     \
        check_model(m);                                                                            \
    } while (0)

/* What a call must return. */
static inline um_error answer(um_status status) {
    return (um_error){.status = status};
}

static inline um_error full(um_detail detail, uint64_t limit, uint64_t used, uint64_t asked) {
    return (um_error){
        .status = UM_E_FULL, .detail = detail, .limit = limit, .used = used, .asked = asked};
}

/* Rows are reserved, or else layers differ. */
static inline um_error not_whole(const kv_model *m) {
    return (um_error){.status = UM_E_STATE,
                      .detail = m->reserved != 0 ? UM_KV_RESERVED : UM_KV_UNEVEN};
}

static inline um_status check_answer(const kv_model *m, const kv_picture *before, um_status got,
                                     um_error expected) {
    if (CHECK_EQ(got, expected.status) && got != UM_OK) {
        kv_picture after = picture_of(m);
        CHECK(memcmp(before, &after, sizeof after) == 0);
        CHECK_EQ(test_err.status, got);
        CHECK_EQ(test_err.detail, expected.detail);
        CHECK_EQ(test_err.limit, expected.limit);
        CHECK_EQ(test_err.used, expected.used);
        CHECK_EQ(test_err.asked, expected.asked);
        REQUIRE(test_err.what != NULL);
        CHECK(test_err.what[0] != '\0');
    } else if (got == UM_OK) {
        um_error pattern;
        test_err_pattern(&pattern);
        CHECK(memcmp(&pattern, &test_err, sizeof pattern) == 0);
    }
    check_model(m);
    return got;
}

/* Makes `call`, which must return `expected`. The model must be updated before. */
#define ANSWER(m, expected, call)                                                                  \
    (test_err_pattern(&test_err), check_answer(m, &before, (call), expected))

/* ---- rows ---- */

/* n values, in heap memory of their exact size. */
static inline void *random_values(kv_model *m, um_dtype type, size_t n) {
    size_t nbytes = n / um_dtype_block_values(type) * um_dtype_block_bytes(type);
    AUTO_FREE float *floats = allocate(n * sizeof *floats + 1);
    void *out = allocate(nbytes);
    REQUIRE(out != NULL);
    for (size_t i = 0; i < n; i++) {
        floats[i] = (float)(int32_t)test_random(&m->random) * 0x1p-28f;
    }
    CHECK(um_convert(out, type, floats, UM_F32, n, NULL) == UM_OK);
    return out;
}

/* The row of a token was given, and is now in the storage. `at`: token and number of tokens in
 * `in`. */
static inline void give_row(kv_model *m, size_t lane, uint64_t position, const unsigned char *in,
                            um_dtype type, um_kv_order order, uint64_t at, uint64_t n) {
    size_t heads = m->spec.n_kv_heads, dim = m->spec.head_dim, stream = lane % m->spec.batch;
    size_t in_head = dim / um_dtype_block_values(type) * um_dtype_block_bytes(type);
    unsigned char *row = given_row(m, lane, position);
    for (size_t h = 0; h < heads; h++) {
        size_t from = order == UM_KV_TOKEN_MAJOR ? ((size_t)at * m->spec.batch + stream) * heads + h
                                                 : (stream * heads + h) * (size_t)n + (size_t)at;
        CHECK(um_convert(row + h * (m->row_bytes / heads), m->spec.type, in + from * in_head, type,
                         dim, NULL) == UM_OK);
    }
    memcpy(image_row(m, lane, row_of(m, position)), row, m->row_bytes);
}

/* n tokens were given to a layer. */
static inline void give_tokens(kv_model *m, uint32_t layer, const void *k, const void *v,
                               um_dtype type, um_kv_order order, uint64_t n) {
    uint64_t rows = m->storage.n_rows, skip = model_is_ring(m) && n > rows ? n - rows : 0;
    for (uint64_t t = skip; t < n; t++) {
        uint64_t position = m->next[layer] + t;
        *holder_of(m, layer, position) = position;
        for (size_t stream = 0; stream < m->spec.batch; stream++) {
            give_row(m, lane_of(m, layer, 0, stream), position, k, type, order, t, n);
            give_row(m, lane_of(m, layer, 1, stream), position, v, type, order, t, n);
        }
    }
    m->next[layer] += n;
}

/* ---- calls ---- */

static inline um_error room_for(const kv_model *m, uint64_t end, uint64_t n) {
    uint64_t used = end - m->first, max = m->spec.max_seq_len, usable = m->kv.usable_rows;
    if (!model_is_ring(m) && (n > max || used + n > max)) {
        return full(UM_KV_FULL, max, used, n);
    }
    if (!model_is_ring(m) && row_of(m, end) + n > usable) {
        return full(UM_KV_ROWS, usable, row_of(m, end), n);
    }
    return end + n < end ? full(UM_KV_FULL, UINT64_MAX, end, n) : answer(UM_OK);
}

static inline um_status do_append(kv_model *m, uint32_t layer, uint64_t n, um_dtype type,
                                  um_kv_order order) {
    kv_picture before = picture_of(m);
    um_error expected = room_for(m, m->next[layer], n);
    if (m->reserved != 0) {
        expected = not_whole(m);
    }
    bool fits = expected.status == UM_OK;
    size_t values = fits ? (size_t)n * m->spec.batch * m->spec.n_kv_heads * m->spec.head_dim : 0;
    AUTO_FREE void *k = random_values(m, type, values), *v = random_values(m, type, values);
    if (fits) {
        give_tokens(m, layer, k, v, type, order, n);
    }
    um_status got =
        ANSWER(m, expected, um_kv_append(&m->kv, layer, k, v, type, order, n, &test_err));
    return got;
}

/* Appends n tokens to every layer. */
static inline void append_everywhere(kv_model *m, uint64_t n) {
    for (uint32_t layer = 0; layer < m->spec.n_layers; layer++) {
        CHECK_EQ(do_append(m, layer, n, m->spec.type, UM_KV_HEAD_MAJOR), UM_OK);
    }
}

static inline um_status do_append_all(kv_model *m, um_dtype type) {
    kv_picture before = picture_of(m);
    um_error expected = room_for(m, m->next[0], 1);
    if (m->reserved != 0 || model_differs(m)) {
        expected = not_whole(m);
    }
    size_t values = (size_t)m->spec.batch * m->spec.n_kv_heads * m->spec.head_dim;
    size_t row = values / um_dtype_block_values(type) * um_dtype_block_bytes(type);
    AUTO_FREE unsigned char *k = random_values(m, type, values * m->spec.n_layers);
    AUTO_FREE unsigned char *v = random_values(m, type, values * m->spec.n_layers);
    for (uint32_t layer = 0; expected.status == UM_OK && layer < m->spec.n_layers; layer++) {
        give_tokens(m, layer, k + layer * row, v + layer * row, type, UM_KV_TOKEN_MAJOR, 1);
    }
    um_status got = ANSWER(m, expected, um_kv_append_all(&m->kv, k, v, type, &test_err));
    return got;
}

/* Reserves n rows in every layer. Their old contents are lost. */
static inline um_status do_reserve(kv_model *m, uint64_t n) {
    kv_picture before = picture_of(m);
    uint64_t end = m->next[0], row = 777;
    um_error expected = model_is_ring(m) && n > m->storage.n_rows
                            ? full(UM_KV_FULL, m->storage.n_rows, 0, n)
                            : room_for(m, end, n);
    if (m->reserved != 0 || model_differs(m)) {
        expected = not_whole(m);
    }
    bool fits = expected.status == UM_OK;
    for (uint32_t layer = 0; fits && layer < m->spec.n_layers; layer++) {
        for (uint64_t t = 0; t < n; t++) {
            *holder_of(m, layer, end + t) = NOBODY;
        }
    }
    m->reserved = fits ? n : m->reserved;
    um_status got = ANSWER(m, expected, um_kv_reserve(&m->kv, n, &row, &test_err));
    CHECK_EQ(row, fits ? row_of(m, end) : 777);
    return got;
}

/* Writes the reserved rows, as an engine does. */
static inline void write_reserved(kv_model *m) {
    for (uint64_t t = 0; t < m->reserved; t++) {
        uint64_t position = m->next[0] + t;
        for (size_t lane = 0; lane < m->n_lanes; lane++) {
            size_t values = (size_t)m->spec.batch * m->spec.n_kv_heads * m->spec.head_dim;
            AUTO_FREE void *in = random_values(m, m->spec.type, values);
            give_row(m, lane, position, in, m->spec.type, UM_KV_TOKEN_MAJOR, 0, 1);
            memcpy(m->map + lane * m->storage.lane_stride + row_of(m, position) * m->row_bytes,
                   given_row(m, lane, position), m->row_bytes);
        }
    }
    check_model(m);
}

/* Takes the contents of the rows of n tokens as given. */
static inline void take_rows(kv_model *m, uint64_t position, uint64_t n) {
    for (uint64_t at = position; at < position + n; at++) {
        for (uint32_t layer = 0; layer < m->spec.n_layers; layer++) {
            *holder_of(m, layer, at) = at;
        }
        for (size_t lane = 0; lane < m->n_lanes; lane++) {
            memcpy(given_row(m, lane, at), image_row(m, lane, row_of(m, at)), m->row_bytes);
        }
    }
}

static inline um_status do_commit(kv_model *m, uint64_t n) {
    kv_picture before = picture_of(m);
    um_error expected = answer(n > m->reserved ? UM_E_INVALID : UM_OK);
    if (m->reserved == 0) {
        expected = (um_error){.status = UM_E_STATE, .detail = UM_KV_UNRESERVED};
    }
    if (expected.status == UM_OK) {
        take_rows(m, m->next[0], n);
        m->reserved = 0;
    }
    for (uint32_t layer = 0; expected.status == UM_OK && layer < m->spec.n_layers; layer++) {
        m->next[layer] += n;
    }
    return ANSWER(m, expected, um_kv_commit(&m->kv, n, &test_err));
}

static inline void do_rollback(kv_model *m) {
    uint64_t end = model_next(m);
    for (uint64_t t = 0; t < m->storage.n_rows && t < end; t++) {
        bool held = all_hold(m, end - 1 - t);
        for (uint32_t layer = 0; !held && layer < m->spec.n_layers; layer++) {
            if (is_held(m, layer, end - 1 - t)) {
                *holder_of(m, layer, end - 1 - t) = NOBODY;
            }
        }
    }
    for (uint32_t layer = 0; layer < m->spec.n_layers; layer++) {
        m->next[layer] = end;
    }
    m->reserved = 0;
    m->first = model_len(m) == 0 && model_is_ring(m) ? end : m->first;
    um_kv_rollback(&m->kv);
    check_model(m);
}

/* Whether a ring still holds the tokens that it must show when it ends at `end`. */
static inline bool can_end_at(const kv_model *m, uint64_t end) {
    bool held = true;
    for (uint64_t at = floor_of(m, end); at < end; at++) {
        held = held && all_hold(m, at);
    }
    return held;
}

static inline um_status do_crop(kv_model *m, uint64_t n) {
    kv_picture before = picture_of(m);
    uint64_t first = model_first(m), len = model_len(m), least = n;
    um_error expected = answer(UM_OK);
    if (m->reserved != 0 || model_differs(m)) {
        expected = not_whole(m);
    } else if (n > len) {
        expected = answer(UM_E_INVALID);
    } else {
        while (least < len && !can_end_at(m, first + least)) {
            least++;
        }
        if (least != n) {
            expected =
                (um_error){.status = UM_E_INVALID, .detail = UM_KV_OVERWRITTEN, .limit = least};
        }
    }
    for (uint32_t layer = 0; expected.status == UM_OK && layer < m->spec.n_layers; layer++) {
        m->next[layer] = first + n;
    }
    return ANSWER(m, expected, um_kv_crop(&m->kv, n, &test_err));
}

static inline um_status do_trim(kv_model *m, uint64_t n, uint64_t keep_first) {
    kv_picture before = picture_of(m);
    uint64_t from = model_first(m), len = model_len(m), end = model_next(m);
    um_error expected = answer(model_is_ring(m) && keep_first != 0 ? UM_E_INVALID : UM_OK);
    if (expected.status == UM_OK && (m->reserved != 0 || model_differs(m))) {
        expected = not_whole(m);
    }
    if (expected.status == UM_OK && n < len && keep_first < len - n) {
        uint64_t to = end - n - keep_first;
        for (uint64_t t = keep_first; t-- > 0;) {
            for (size_t lane = 0; lane < m->n_lanes; lane++) {
                unsigned char *row = given_row(m, lane, to + t);
                memcpy(row, given_row(m, lane, from + t), m->row_bytes);
                memcpy(image_row(m, lane, row_of(m, to + t)), row, m->row_bytes);
            }
        }
        m->row += to - m->first;
        m->first = to;
    }
    return ANSWER(m, expected, um_kv_trim(&m->kv, n, keep_first, &test_err));
}

static inline void do_clear(kv_model *m) {
    m->first = m->row = m->reserved = 0;
    memset(m->next, 0, sizeof m->next);
    memset(m->holder, 0xFF, m->spec.n_layers * m->storage.n_rows * sizeof *m->holder);
    um_kv_clear(&m->kv);
    check_model(m);
}

/* The row after the last one that is used or reserved. */
static inline uint64_t model_end_row(const kv_model *m) {
    uint64_t end = 0;
    for (uint32_t layer = 0; layer < m->spec.n_layers; layer++) {
        uint64_t row = row_of(m, m->next[layer]) + m->reserved;
        end = row > end ? row : end;
    }
    return end;
}

static inline um_status do_set_usable(kv_model *m, uint64_t n) {
    kv_picture before = picture_of(m);
    bool valid = !model_is_ring(m) && n <= m->storage.n_rows && n >= model_end_row(m);
    if (valid) {
        protect_rows(m, n);
    }
    um_error expected = answer(valid ? UM_OK : UM_E_INVALID);
    return ANSWER(m, expected, um_kv_set_usable(&m->kv, n, &test_err));
}

static inline um_status do_move(kv_model *m, uint64_t row) {
    kv_picture before = picture_of(m);
    uint64_t rows = model_end_row(m) - m->reserved - m->row, usable = m->kv.usable_rows;
    um_error expected = answer(UM_OK);
    if (model_is_ring(m) || row > usable || rows > usable - row) {
        expected = answer(UM_E_INVALID);
    } else if (m->reserved != 0) {
        expected = not_whole(m);
    } else {
        m->row = row;
        for (uint32_t layer = 0; layer < m->spec.n_layers; layer++) {
            for (uint64_t at = m->first; at < m->next[layer]; at++) {
                for (size_t i = 0; i < 2 * (size_t)m->spec.batch; i++) {
                    size_t lane = lane_of(m, layer, 0, 0) + i;
                    memcpy(image_row(m, lane, row_of(m, at)), given_row(m, lane, at), m->row_bytes);
                }
            }
        }
    }
    return ANSWER(m, expected, um_kv_move(&m->kv, row, &test_err));
}

static inline um_status do_adopt(kv_model *m, uint64_t next_position, uint64_t n) {
    kv_picture before = picture_of(m);
    uint64_t most = model_is_ring(m) ? m->spec.window : m->kv.usable_rows;
    um_error expected =
        answer(n > next_position || n > most || n > m->spec.max_seq_len ? UM_E_INVALID : UM_OK);
    if (expected.status == UM_OK) {
        m->first = model_is_ring(m) && n == m->spec.window ? 0 : next_position - n;
        m->row = m->reserved = 0;
        memset(m->holder, 0xFF, m->spec.n_layers * m->storage.n_rows * sizeof *m->holder);
        for (uint32_t layer = 0; layer < m->spec.n_layers; layer++) {
            m->next[layer] = next_position;
        }
        take_rows(m, next_position - n, n);
    }
    return ANSWER(m, expected, um_kv_adopt(&m->kv, next_position, n, &test_err));
}

static inline um_status do_read(kv_model *m, uint32_t layer, int v, uint64_t position, uint64_t n,
                                um_dtype type) {
    kv_picture before = picture_of(m);
    uint64_t first = model_layer_first(m, layer), end = m->next[layer];
    bool valid = position >= first && position <= end && n <= end - position;
    size_t heads = m->spec.n_kv_heads, dim = m->spec.head_dim;
    size_t head = dim / um_dtype_block_values(type) * um_dtype_block_bytes(type);
    size_t nbytes = valid ? m->spec.batch * heads * (size_t)n * head : 64;
    AUTO_FREE unsigned char *out = allocate(nbytes + 1), *expected = allocate(nbytes + 1);
    REQUIRE(expected != NULL);
    memset(out, FILL, nbytes + 1);
    memset(expected, FILL, nbytes + 1);
    unsigned char *to = expected;
    for (size_t i = 0; valid && i < m->spec.batch * heads; i++) {
        for (uint64_t t = 0; t < n; t++, to += head) {
            size_t lane = lane_of(m, layer, v, i / heads);
            const unsigned char *row = given_row(m, lane, position + t);
            CHECK(um_convert(to, type, row + i % heads * (m->row_bytes / heads), m->spec.type, dim,
                             NULL) == UM_OK);
        }
    }
    um_status got = ANSWER(m, answer(valid ? UM_OK : UM_E_INVALID),
                           um_kv_read(&m->kv, layer, v, position, n, out, type, &test_err));
    CHECK(memcmp(out, expected, nbytes + 1) == 0);
    return got;
}

#endif
