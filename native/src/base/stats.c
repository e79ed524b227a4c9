/* The ledger of mappings by category, and the counters of what this library costs the process. */
#include "base/stats.h"

#include "base/status.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct category_totals {
    _Atomic uint64_t n_mappings;
    _Atomic uint64_t mapped_bytes;
    _Atomic uint64_t high_water_bytes;
} category_totals;

static category_totals totals[UM_CAT_COUNT];
static _Atomic uint64_t n_os_calls;
static _Atomic uint64_t n_allocations;
static _Atomic uint64_t allocated_bytes;

static const char *const category_names[UM_CAT_COUNT] = {
    [UM_CAT_OTHER] = "other",     [UM_CAT_WEIGHTS] = "weights",
    [UM_CAT_SCRATCH] = "scratch", [UM_CAT_HISTORY] = "history",
    [UM_CAT_STAGING] = "staging", [UM_CAT_DIAGNOSTICS] = "diagnostics",
    [UM_CAT_LOGITS] = "logits",   [UM_CAT_TOKENS] = "tokens",
};

static bool is_category(um_category category) {
    return (unsigned)category < UM_CAT_COUNT;
}

const char *um_category_name(um_category category) {
    return is_category(category) ? category_names[category] : NULL;
}

um_status um_ledger_read(um_category category, um_ledger_row *out, um_error *err) {
    UM__INVALID_IF(!is_category(category), err, "category");
    category_totals *row = &totals[category];
    *out = (um_ledger_row){.n_mappings = atomic_load(&row->n_mappings),
                           .mapped_bytes = atomic_load(&row->mapped_bytes),
                           .high_water_bytes = atomic_load(&row->high_water_bytes)};
    return UM_OK;
}

void um_counters_read(um_counters *out) {
    *out = (um_counters){.n_os_calls = atomic_load(&n_os_calls),
                         .n_allocations = atomic_load(&n_allocations),
                         .allocated_bytes = atomic_load(&allocated_bytes)};
}

/* ---- marks ---- */

/* A bit for each set of marks: whether it has begun, and whether it is kept up to date. */
static _Atomic uint64_t marks_taken, marks_open;
static _Atomic uint64_t marks_bytes[UM_MAX_MARKS][UM_CAT_COUNT];
static_assert(UM_MAX_MARKS == 64, "a set is a bit of a word");

static void raise_to(_Atomic uint64_t *high, uint64_t now) {
    uint64_t seen = atomic_load(high);
    while (now > seen && !atomic_compare_exchange_weak(high, &seen, now)) {
    }
}

um_status um_marks_begin(unsigned *out, um_error *err) {
    uint64_t taken = atomic_load(&marks_taken);
    unsigned marks;
    do {
        UM__RETURN_IF(taken == UINT64_MAX,
                      um__fail_full(err, UM_MARKS_FULL, UM_MAX_MARKS, UM_MAX_MARKS, 1, "marks"));
        marks = (unsigned)__builtin_ctzll(~taken);
    } while (!atomic_compare_exchange_weak(&marks_taken, &taken, taken | (uint64_t)1 << marks));
    for (int i = 0; i < UM_CAT_COUNT; i++) {
        atomic_store(&marks_bytes[marks][i], 0);
    }
    /* From here on new mappings raise the marks; older ones are read now. */
    atomic_fetch_or(&marks_open, (uint64_t)1 << marks);
    for (int i = 0; i < UM_CAT_COUNT; i++) {
        raise_to(&marks_bytes[marks][i], atomic_load(&totals[i].mapped_bytes));
    }
    *out = marks;
    return UM_OK;
}

void um_marks_read(unsigned marks, uint64_t out[UM_CAT_COUNT]) {
    for (int i = 0; i < UM_CAT_COUNT; i++) {
        out[i] = atomic_load(&marks_bytes[marks][i]);
    }
}

void um_marks_end(unsigned marks) {
    atomic_fetch_and(&marks_open, ~((uint64_t)1 << marks));
    atomic_fetch_and(&marks_taken, ~((uint64_t)1 << marks));
}

/* ---- what is mapped ---- */

static void add_bytes(um_category category, uint64_t nbytes) {
    category_totals *row = &totals[category];
    uint64_t now = atomic_fetch_add(&row->mapped_bytes, nbytes) + nbytes;
    raise_to(&row->high_water_bytes, now);
    uint64_t open = atomic_load(&marks_open);
    for (unsigned marks = 0; open != 0; marks++, open >>= 1) {
        if (open & 1) {
            raise_to(&marks_bytes[marks][category], now);
        }
    }
}

void um__ledger_enter(um_category category, uint64_t nbytes) {
    atomic_fetch_add(&totals[category].n_mappings, 1);
    add_bytes(category, nbytes);
}

void um__ledger_leave(um_category category, uint64_t nbytes) {
    atomic_fetch_sub(&totals[category].mapped_bytes, nbytes);
    atomic_fetch_sub(&totals[category].n_mappings, 1);
}

void um__ledger_resize(um_category category, uint64_t from_nbytes, uint64_t to_nbytes) {
    if (to_nbytes < from_nbytes) {
        atomic_fetch_sub(&totals[category].mapped_bytes, from_nbytes - to_nbytes);
    } else {
        add_bytes(category, to_nbytes - from_nbytes);
    }
}

void um__count_os_call(void) {
    atomic_fetch_add_explicit(&n_os_calls, 1, memory_order_relaxed);
}

void *um__heap_alloc(size_t n, size_t item_bytes) {
    void *p = calloc(n, item_bytes); /* refuses a product that overflows */
    if (p != NULL) {
        atomic_fetch_add_explicit(&n_allocations, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&allocated_bytes, n * item_bytes, memory_order_relaxed);
    }
    return p;
}

void um__heap_free(void *p) {
    free(p);
}
