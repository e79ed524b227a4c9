/* The bump allocator. One word says how much is used; a take moves it by one
 * compare-and-exchange. */
#include "base/sizes.h"
#include "base/status.h"

#include <stdatomic.h>
#include <stdint.h>

um_status um_tape_init(um_tape *tape, void *base, size_t total, um_error *err) {
    UM__INVALID_IF(base == NULL || total == 0, err, base == NULL ? "base" : "total");
    tape->base = base;
    tape->total = total;
    atomic_init(&tape->used, 0);
    atomic_init(&tape->kept, 0);
    atomic_init(&tape->peak, 0);
    atomic_init(&tape->limit, total);
    atomic_init(&tape->n_takes, 0);
    atomic_init(&tape->frozen, 0);
    return UM_OK;
}

um_status um_tape_take(um_tape *tape, size_t nbytes, size_t align, void **out, um_error *err) {
    UM__INVALID_IF(!um__is_power_of_two(align), err, "align is not a power of two");
    uintptr_t base = (uintptr_t)tape->base;
    size_t used = atomic_load_explicit(&tape->used, memory_order_relaxed), start, end;
    do {
        /* Aligns the address: the base may be less aligned than the take. */
        size_t address, limit = atomic_load_explicit(&tape->limit, memory_order_relaxed);
        if (!um__round_up(base + used, align, &address) ||
            !um__add(start = address - base, nbytes, &end) || end > limit ||
            limit == 0 /* frozen to no take at all, not even of 0 bytes */) {
            UM__RETURN_IF(atomic_load_explicit(&tape->frozen, memory_order_relaxed),
                          um__fail_frozen(err, tape->total, used, nbytes));
            return um__fail_full(err, UM_TAPE_FULL, tape->total, used, nbytes, "tape");
        }
    } while (!atomic_compare_exchange_weak_explicit(&tape->used, &used, end, memory_order_acq_rel,
                                                    memory_order_relaxed));
    atomic_fetch_add_explicit(&tape->n_takes, 1, memory_order_relaxed);
    *out = tape->base + start;
    return UM_OK;
}

/* Lets `used` fall, and records how high it was, which spares takes to do so. */
static void fall_to(um_tape *tape, size_t floor) {
    size_t kept = atomic_load(&tape->kept);
    size_t used = atomic_exchange(&tape->used, floor > kept ? floor : kept);
    size_t peak = atomic_load(&tape->peak);
    while (used > peak && !atomic_compare_exchange_weak(&tape->peak, &peak, used)) {
    }
}

void um_tape_clear(um_tape *tape) {
    fall_to(tape, 0);
}

void um_tape_keep(um_tape *tape) {
    atomic_store(&tape->kept, atomic_load(&tape->used));
}

size_t um_tape_mark(const um_tape *tape) {
    return atomic_load(&tape->used);
}

um_status um_tape_rewind(um_tape *tape, size_t mark, um_error *err) {
    UM__INVALID_IF(mark > atomic_load(&tape->used), err, "the mark is above what is used");
    fall_to(tape, mark);
    return UM_OK;
}

um_status um_tape_freeze(um_tape *tape, size_t limit, um_error *err) {
    UM__INVALID_IF(limit > tape->total, err, "limit is above the tape's size");
    atomic_store(&tape->limit, limit);
    atomic_store(&tape->frozen, 1);
    return UM_OK;
}

void um_tape_thaw(um_tape *tape) {
    atomic_store(&tape->frozen, 0);
    atomic_store(&tape->limit, tape->total);
}

int um_tape_frozen(const um_tape *tape) {
    return atomic_load(&tape->frozen);
}

size_t um_tape_used(const um_tape *tape) {
    return atomic_load(&tape->used);
}

size_t um_tape_kept(const um_tape *tape) {
    return atomic_load(&tape->kept);
}

size_t um_tape_high_water(const um_tape *tape) {
    size_t used = atomic_load(&tape->used), peak = atomic_load(&tape->peak);
    return used > peak ? used : peak;
}

uint64_t um_tape_n_takes(const um_tape *tape) {
    return atomic_load(&tape->n_takes);
}

int um_tape_owns(const um_tape *tape, const void *address) {
    /* One comparison is enough: an address below the base wraps round to a large offset. */
    return (uintptr_t)address - (uintptr_t)tape->base < tape->total;
}
