/* A cache of pieces of files.
 *
 *     piece 0 -> slot 7     pool 0:  | slot 0 | slot 1 | ...     free, reading, ready or failed
 *     piece 1 -> none       pool 1:  | slot 7 | slot 8 | ...
 *     ...
 *     demanded slots   -> reads \
 *     prefetched slots -> reads  > under way, at most n_reads -> ended: the slot is ready
 *
 * One lock guards all. It is dropped while reads begin, while a thread waits, and while parts are
 * moved. One waiting thread sleeps in the kernel until a read has ended, and takes all that have;
 * the others sleep until it has done so. If no thread waits, the next call takes them. */
#include "unimem_pieces.h"

#include "base/sizes.h"
#include "base/stats.h"
#include "base/status.h"
#include "os/lock.h"
#include "os/os.h"
#include "pieces/layout.h"
#include "pieces/policy.h"
#include "pieces/reads.h"
#include "pieces/slots.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

enum {
    MOST_READS = 1024,
    REQUEST_NBYTES = 1 << 20 /* of one read; whole units */
};

typedef struct source {
    int fd;
    int direct_fd; /* or -1 */
    _Atomic bool is_direct;
} source;

/* A read under way. */
typedef struct request {
    uint32_t slot, part;
    source *file;
    char *to;
    uint64_t offset;
    size_t left; /* bytes that are needed from there */
    bool is_direct, is_prefetch;
    uint32_t next; /* in the list of unused ones */
} request;

typedef struct queue {
    uint32_t first, last;
} queue;

struct um_pieces {
    um__lock lock;
    um__slots all;
    um__pool *pools;
    um_pieces_range *ranges;
    source *files;
    uint32_t n_files, n_open;
    uint32_t n_all_slots, least_slots; /* the sum of max_slots; the lowest n_slots */
    queue demanded, prefetched, moving;
    um__reads *reads;
    request *requests;
    uint32_t unused_request;
    uint32_t n_under_way, n_prefetches_under_way;
    bool has_waiter;        /* a thread waits in the kernel */
    uint32_t n_sleepers;    /* threads that wait for it */
    _Atomic uint32_t event; /* changes when they are to look again */
    uint32_t n_forks;       /* of this process, at the creation */
    um_pieces_stat stat;
};

struct um_pieces_holder {
    um_pieces *pieces;
    uint32_t n;
    uint32_t *slots; /* each once */
    uint64_t *bits;  /* of these */
};

/* ---- forks ---- */

static um__lock forks_lock;
static bool knows_forks;
static _Atomic uint32_t n_forks;

static void enter_child(void) {
    atomic_fetch_add(&n_forks, 1);
    atomic_store(&forks_lock, 0);
}

static int know_forks(void) {
    um__lock_take(&forks_lock);
    int os_errno = knows_forks ? 0 : um__os_at_fork(NULL, NULL, enter_child);
    knows_forks = os_errno == 0;
    um__lock_drop(&forks_lock);
    return os_errno;
}

static bool is_forked(const um_pieces *pieces) {
    return pieces->n_forks != atomic_load(&n_forks);
}

#define FORKED_IF(condition, err)                                                                  \
    UM__RETURN_IF(condition, um__fail_detail(err, UM_E_STATE, UM_PIECES_FORKED,                    \
                                             "a forked child has none of the reads"))

/* ---- queues of slots: with the lock, as all below ---- */

static void queue_add(um_pieces *pieces, queue *q, uint32_t number) {
    um__slot *slot = &pieces->all.slots[number];
    slot->next = UM__NO_SLOT;
    slot->previous = q->last;
    slot->is_queued = true;
    if (q->last == UM__NO_SLOT) {
        q->first = number;
    } else {
        pieces->all.slots[q->last].next = number;
    }
    q->last = number;
}

static void queue_remove(um_pieces *pieces, queue *q, uint32_t number) {
    um__slot *slot = &pieces->all.slots[number];
    slot->is_queued = false;
    if (slot->previous == UM__NO_SLOT) {
        q->first = slot->next;
    } else {
        pieces->all.slots[slot->previous].next = slot->next;
    }
    if (slot->next == UM__NO_SLOT) {
        q->last = slot->previous;
    } else {
        pieces->all.slots[slot->next].previous = slot->previous;
    }
}

static queue *queue_of(um_pieces *pieces, const um__slot *slot) {
    return slot->is_demanded ? &pieces->demanded : &pieces->prefetched;
}

/* ---- slots ---- */

static uint32_t number_of(const um_pieces *pieces, const um__slot *slot) {
    return (uint32_t)(slot - pieces->all.slots);
}

static size_t piece_nbytes(const um__pool *pool) {
    size_t nbytes = 0;
    for (uint32_t p = 0; p < pool->layout.n_parts; p++) {
        nbytes += pool->layout.part_nbytes[p];
    }
    return nbytes;
}

static void set_free(um__slot *slot) {
    slot->state = UM__SLOT_FREE;
    slot->piece = UM__NO_PIECE;
}

/* Takes a piece out of its slot, as far as calls can see. */
static void forget_piece(um_pieces *pieces, um__slot *slot) {
    pieces->all.pieces[slot->piece].slot = UM__NO_SLOT;
    slot->piece = UM__NO_PIECE;
}

static void evict(um_pieces *pieces, um__slot *slot) {
    forget_piece(pieces, slot);
    pieces->stat.evicted++;
    pieces->stat.resident--;
    pieces->stat.resident_bytes -= piece_nbytes(&pieces->pools[slot->pool]);
}

/* Takes a slot of the pool for a piece, and queues its reads. Returns NULL if there is no slot. */
static um__slot *fetch(um_pieces *pieces, uint32_t piece, um__victims *victims) {
    um__piece *known = &pieces->all.pieces[piece];
    uint32_t number = um__policy_victim(&pieces->all, &pieces->pools[known->pool], victims);
    if (number == UM__NO_SLOT) {
        return NULL;
    }
    um__slot *slot = &pieces->all.slots[number];
    if (slot->state == UM__SLOT_READY) {
        evict(pieces, slot);
    }
    *slot = (um__slot){.piece = piece,
                       .pool = known->pool,
                       .state = UM__SLOT_READING,
                       .is_demanded = victims->are_demanded,
                       .is_prefetched = !victims->are_demanded};
    known->slot = number;
    pieces->pools[known->pool].n_fetched++;
    queue_add(pieces, queue_of(pieces, slot), number);
    return slot;
}

/* ---- reads ---- */

/* Puts a request into the ring, or to the threads. */
static void put(um_pieces *pieces, request *r) {
    size_t nbytes = r->left < REQUEST_NBYTES ? r->left : REQUEST_NBYTES;
    r->is_direct = r->file->is_direct;
    int fd = r->is_direct ? r->file->direct_fd : r->file->fd;
    um__reads_put(pieces->reads, (uint32_t)(r - pieces->requests), fd, r->to,
                  r->is_direct ? um__pieces_whole(nbytes) : nbytes, r->offset);
}

/* Puts the next read of a slot that has one. */
static void put_next(um_pieces *pieces, um__slot *slot) {
    const um__pool *pool = &pieces->pools[slot->pool];
    const um_pieces_pool *layout = &pool->layout;
    uint32_t number = number_of(pieces, slot);
    const um_pieces_range *range =
        &pieces->ranges[pieces->all.pieces[slot->piece].first_range + slot->part];
    size_t place = range->offset % UM__PIECES_UNIT;
    size_t room = layout->part_offset[slot->part] / UM__PIECES_UNIT * UM__PIECES_UNIT;
    size_t left = place + layout->part_nbytes[slot->part] - slot->at;
    request *r = &pieces->requests[pieces->unused_request];
    pieces->unused_request = r->next;
    *r = (request){.slot = number,
                   .part = slot->part,
                   .file = &pieces->files[range->file],
                   .to = (char *)layout->base + (number - pool->first) * layout->stride + room +
                         slot->at,
                   .offset = range->offset - place + slot->at,
                   .left = left < REQUEST_NBYTES ? left : REQUEST_NBYTES,
                   .is_prefetch = !slot->is_demanded};
    slot->at += REQUEST_NBYTES;
    if (left <= REQUEST_NBYTES) {
        slot->at = 0;
        slot->part++;
    }
    slot->n_under_way++;
    pieces->n_under_way++;
    pieces->n_prefetches_under_way += r->is_prefetch;
    put(pieces, r);
}

/* Puts as many reads as may be under way, what is demanded before what was prefetched. */
static void put_reads(um_pieces *pieces) {
    uint32_t limit = um__reads_limit(pieces->reads);
    while (pieces->n_under_way < limit) {
        queue *from = &pieces->demanded;
        if (from->first == UM__NO_SLOT) {
            from = &pieces->prefetched;
            if (from->first == UM__NO_SLOT || pieces->n_prefetches_under_way >= (limit + 1) / 2) {
                return;
            }
        }
        um__slot *slot = &pieces->all.slots[from->first];
        put_next(pieces, slot);
        if (slot->part == pieces->pools[slot->pool].layout.n_parts) {
            queue_remove(pieces, from, from->first);
        }
    }
}

/* Whether a part of a piece has to be moved to its place after the read. */
static bool is_to_be_moved(const um_pieces *pieces, const um__slot *slot) {
    const um_pieces_pool *layout = &pieces->pools[slot->pool].layout;
    const um_pieces_range *range = &pieces->ranges[pieces->all.pieces[slot->piece].first_range];
    bool found = false;
    for (uint32_t p = 0; p < layout->n_parts; p++) {
        found |= (range[p].offset - layout->part_offset[p]) % UM__PIECES_UNIT != 0;
    }
    return found;
}

static void move_parts(const um_pieces_pool *layout, char *slot, const um_pieces_range *range) {
    for (uint32_t p = 0; p < layout->n_parts; p++) {
        size_t to = layout->part_offset[p];
        size_t from = to / UM__PIECES_UNIT * UM__PIECES_UNIT + range[p].offset % UM__PIECES_UNIT;
        if (from != to) {
            memmove(slot + to, slot + from, layout->part_nbytes[p]);
        }
    }
}

static void wake_sleepers(um_pieces *pieces) {
    if (pieces->n_sleepers > 0) {
        atomic_fetch_add(&pieces->event, 1);
        um__os_wake(&pieces->event);
    }
}

static void set_ready(um_pieces *pieces, um__slot *slot) {
    if (slot->piece == UM__NO_PIECE) {
        set_free(slot);
    } else {
        slot->state = UM__SLOT_READY;
        pieces->stat.resident++;
        pieces->stat.resident_bytes += piece_nbytes(&pieces->pools[slot->pool]);
    }
    wake_sleepers(pieces);
}

/* Ends the reading of a slot, whose last read has ended. */
static void end_reading(um_pieces *pieces, um__slot *slot) {
    if (slot->is_failed) {
        pieces->stat.failed++;
        slot->state = UM__SLOT_FAILED;
        if (slot->n_holds == 0) {
            set_free(slot);
        }
        wake_sleepers(pieces);
    } else if (slot->piece != UM__NO_PIECE && is_to_be_moved(pieces, slot)) {
        slot->state = UM__SLOT_MOVING;
        queue_add(pieces, &pieces->moving, number_of(pieces, slot));
    } else {
        set_ready(pieces, slot);
    }
}

/* Gives a slot's reading up: no more reads begin. */
static void give_up(um_pieces *pieces, um__slot *slot) {
    if (slot->is_queued) {
        queue_remove(pieces, queue_of(pieces, slot), number_of(pieces, slot));
    }
    slot->part = pieces->pools[slot->pool].layout.n_parts;
    if (slot->piece != UM__NO_PIECE) {
        forget_piece(pieces, slot);
    }
}

static void end_request(um_pieces *pieces, request *r) {
    um__slot *slot = &pieces->all.slots[r->slot];
    r->next = pieces->unused_request;
    pieces->unused_request = (uint32_t)(r - pieces->requests);
    pieces->n_under_way--;
    pieces->n_prefetches_under_way -= r->is_prefetch;
    slot->n_under_way--;
    if (slot->n_under_way == 0 && slot->part == pieces->pools[slot->pool].layout.n_parts) {
        end_reading(pieces, slot);
    }
}

static void fail_request(um_pieces *pieces, request *r, int os_errno) {
    um__slot *slot = &pieces->all.slots[r->slot];
    if (!slot->is_failed && slot->piece != UM__NO_PIECE) {
        slot->is_failed = true;
        slot->failed_errno = os_errno;
        slot->failed_range = pieces->all.pieces[slot->piece].first_range + r->part;
        slot->failed_nbytes = pieces->pools[slot->pool].layout.part_nbytes[r->part];
        give_up(pieces, slot);
    }
    end_request(pieces, r);
}

static void take_end(um_pieces *pieces, const um__read_end *end) {
    request *r = &pieces->requests[end->id];
    const um__slot *slot = &pieces->all.slots[r->slot];
    size_t step = end->nbytes;
    if (step < r->left && r->is_direct) {
        step = step / UM__PIECES_UNIT * UM__PIECES_UNIT; /* the next read begins there */
    }
    pieces->stat.n_reads += end->os_errno == 0;
    pieces->stat.read_bytes += end->nbytes;
    if (end->os_errno == EINVAL && r->is_direct) {
        r->file->is_direct = false; /* units of this file system are larger */
    } else if (end->os_errno == EINTR || end->os_errno == ECANCELED || end->os_errno == EAGAIN) {
        step = 0; /* of ECANCELED: the thread that began it has ended */
    } else if (end->os_errno != 0 || step == 0) {
        fail_request(pieces, r, end->os_errno);
        return;
    }
    if (step >= r->left || slot->piece == UM__NO_PIECE) {
        end_request(pieces, r);
        return;
    }
    r->to += step;
    r->offset += step;
    r->left -= step;
    put(pieces, r);
}

/* Takes the reads that have ended, and moves parts, meanwhile without the lock. */
static void take_ends(um_pieces *pieces) {
    um__read_end end;
    if (pieces->n_under_way > 0 && !pieces->has_waiter) {
        while (um__reads_take(pieces->reads, &end)) {
            take_end(pieces, &end);
        }
    }
    while (pieces->moving.first != UM__NO_SLOT) {
        uint32_t number = pieces->moving.first;
        um__slot *slot = &pieces->all.slots[number];
        const um__pool *pool = &pieces->pools[slot->pool];
        um_pieces_pool layout = pool->layout;
        queue_remove(pieces, &pieces->moving, number);
        if (slot->piece != UM__NO_PIECE) {
            uint64_t range = pieces->all.pieces[slot->piece].first_range;
            char *at = (char *)layout.base + (number - pool->first) * layout.stride;
            um__lock_drop(&pieces->lock);
            move_parts(&layout, at, &pieces->ranges[range]);
            um__lock_take(&pieces->lock);
        }
        set_ready(pieces, slot);
    }
}

/* Waits until something has changed. Returns 0 or an errno. */
static int wait_for_change(um_pieces *pieces) {
    uint64_t began = um__os_now_ns();
    int os_errno = 0;
    if (pieces->n_under_way > 0 && !pieces->has_waiter) {
        pieces->has_waiter = true;
        um__lock_drop(&pieces->lock);
        os_errno = um__reads_wait(pieces->reads);
        um__lock_take(&pieces->lock);
        pieces->has_waiter = false;
        take_ends(pieces);
        put_reads(pieces);
        wake_sleepers(pieces); /* another one is to wait now */
    } else {
        uint32_t event = atomic_load(&pieces->event);
        pieces->n_sleepers++;
        um__lock_drop(&pieces->lock);
        os_errno = um__reads_begin(pieces->reads);
        if (os_errno == 0) {
            os_errno = um__os_wait(&pieces->event, event, 1000);
        }
        um__lock_take(&pieces->lock);
        pieces->n_sleepers--;
        os_errno = os_errno == EAGAIN || os_errno == ETIMEDOUT ? 0 : os_errno;
    }
    pieces->stat.waited_ns += um__os_now_ns() - began;
    return os_errno;
}

/* ---- holders ---- */

static void hold(um_pieces_holder *holder, uint32_t number) {
    um_pieces *pieces = holder->pieces;
    um__slot *slot = &pieces->all.slots[number];
    uint64_t bit = UINT64_C(1) << number % 64;
    if ((holder->bits[number / 64] & bit) != 0) {
        return;
    }
    holder->bits[number / 64] |= bit;
    holder->slots[holder->n++] = number;
    slot->n_holds++;
    if (slot->is_prefetched) {
        slot->is_prefetched = false;
        pieces->stat.prefetch_hits++;
    }
    if (slot->state == UM__SLOT_READING && !slot->is_demanded) {
        if (slot->is_queued) {
            queue_remove(pieces, &pieces->prefetched, number);
            queue_add(pieces, &pieces->demanded, number);
        }
        slot->is_demanded = true;
    }
}

static void let_go(um_pieces_holder *holder) {
    um_pieces *pieces = holder->pieces;
    for (uint32_t i = 0; i < holder->n; i++) {
        uint32_t number = holder->slots[i];
        um__slot *slot = &pieces->all.slots[number];
        holder->bits[number / 64] = 0;
        if (--slot->n_holds == 0 && slot->state == UM__SLOT_FAILED) {
            set_free(slot);
        }
    }
    holder->n = 0;
}

/* errors: UM_E_INVALID. */
static um_status check_ids(const um_pieces *pieces, const int32_t *ids, size_t n, um_error *err) {
    for (size_t i = 0; i < n; i++) {
        UM__INVALID_IF((uint32_t)ids[i] >= pieces->all.n_pieces, err,
                       "ids: there is no such piece");
    }
    return UM_OK;
}

/* errors: UM_E_FULL. */
static um_status check_room(um_pieces *pieces, const int32_t *ids, size_t n, um_error *err) {
    if (n <= pieces->least_slots) {
        return UM_OK;
    }
    um__piece *known = pieces->all.pieces;
    for (uint32_t p = 0; p < pieces->all.n_pools; p++) {
        pieces->pools[p].n_asked = 0;
    }
    for (size_t i = 0; i < n; i++) {
        pieces->pools[known[ids[i]].pool].n_asked += !known[ids[i]].is_marked;
        known[ids[i]].is_marked = true;
    }
    for (size_t i = 0; i < n; i++) {
        known[ids[i]].is_marked = false;
    }
    for (uint32_t p = 0; p < pieces->all.n_pools; p++) {
        const um__pool *pool = &pieces->pools[p];
        UM__RETURN_IF(pool->n_asked > pool->layout.n_slots,
                      um__fail_full(err, UM_PIECES_FULL, pool->layout.n_slots, 0, pool->n_asked,
                                    "the pool has fewer slots than the call has pieces"));
    }
    return UM_OK;
}

typedef enum scarcity { HELD, ON_ITS_WAY, FREED } scarcity;

/* Looks for a slot that no holder keeps, and that is being read. If its reads have not begun, it is
 * free again. */
static scarcity look_for_slot(um_pieces *pieces, const um__pool *pool) {
    scarcity found = HELD;
    for (uint32_t i = pool->first; i < pool->first + pool->layout.n_slots; i++) {
        um__slot *slot = &pieces->all.slots[i];
        if (slot->n_holds == 0 && slot->state == UM__SLOT_READING && slot->n_under_way == 0) {
            give_up(pieces, slot);
            set_free(slot);
            return FREED;
        }
        bool is_coming = slot->state == UM__SLOT_READING || slot->state == UM__SLOT_MOVING;
        found = slot->n_holds == 0 && is_coming ? ON_ITS_WAY : found;
    }
    return found;
}

static um_status fail_wait(um_error *err, int os_errno) {
    um_status status = um__fail_os(err, os_errno, 0, "io_uring_enter");
    if (os_errno == EINTR && err != NULL) {
        err->detail = UM_PIECES_INTERRUPTED;
    }
    return status;
}

/* Holds a piece that was missing, in a slot into which it is read. errors: UM_E_BUSY, UM_E_OS,
 * UM_E_NOMEM. */
static um_status demand(um_pieces_holder *holder, uint32_t piece, um__victims *victims,
                        um_error *err) {
    um_pieces *pieces = holder->pieces;
    const um__piece *known = &pieces->all.pieces[piece];
    while (known->slot == UM__NO_SLOT) {
        if (fetch(pieces, piece, victims) != NULL) {
            pieces->stat.misses++;
            break;
        }
        scarcity scarce = look_for_slot(pieces, &pieces->pools[known->pool]);
        UM__RETURN_IF(scarce == HELD, um__fail_detail(err, UM_E_BUSY, UM_PIECES_HELD,
                                                      "other holders keep too many slots"));
        victims->pool = NULL; /* look again */
        if (scarce == ON_ITS_WAY) {
            put_reads(pieces);
            int os_errno = wait_for_change(pieces);
            UM__RETURN_IF(os_errno != 0, fail_wait(err, os_errno));
        }
    }
    hold(holder, known->slot);
    return UM_OK;
}

/* Holds all pieces: first those that are there. errors: as demand. */
static um_status hold_all(um_pieces_holder *holder, const int32_t *ids, size_t n, um_error *err) {
    um_pieces *pieces = holder->pieces;
    um__piece *known = pieces->all.pieces;
    um__victims victims = {.are_demanded = true};
    bool is_missing = false;
    pieces->all.now++;
    for (size_t i = 0; i < n; i++) {
        um__policy_use(&pieces->all, &known[ids[i]]);
        if (known[ids[i]].slot == UM__NO_SLOT) {
            is_missing = true;
        } else {
            hold(holder, known[ids[i]].slot);
        }
    }
    pieces->stat.hits += holder->n;
    um_status status = UM_OK;
    for (size_t i = 0; is_missing && status == UM_OK && i < n; i++) {
        status = demand(holder, (uint32_t)ids[i], &victims, err);
    }
    return status;
}

/* Waits until all that is held has been read. errors: UM_E_IO, UM_E_OS, UM_E_NOMEM. */
static um_status wait_for_held(const um_pieces_holder *holder, um_error *err) {
    um_pieces *pieces = holder->pieces;
    for (uint32_t i = 0; i < holder->n;) {
        const um__slot *slot = &pieces->all.slots[holder->slots[i]];
        if (slot->state == UM__SLOT_READY) {
            i++;
        } else if (slot->state == UM__SLOT_FAILED) {
            const um_pieces_range *range = &pieces->ranges[slot->failed_range];
            return um__fail_file(err, slot->failed_errno, range->file, range->offset,
                                 slot->failed_nbytes, "a part of a piece cannot be read");
        } else {
            int os_errno = wait_for_change(pieces);
            UM__RETURN_IF(os_errno != 0, fail_wait(err, os_errno));
        }
    }
    return UM_OK;
}

um_status um_pieces_ensure(um_pieces *pieces, um_pieces_holder *holder, const int32_t *ids,
                           size_t n, int32_t *slots, um_error *err) {
    FORKED_IF(is_forked(pieces), err);
    UM__INVALID_IF(holder->pieces != pieces, err, "holder: it is of other pieces");
    UM__TRY(check_ids(pieces, ids, n, err));
    um__lock_take(&pieces->lock);
    um_status status = check_room(pieces, ids, n, err);
    if (status != UM_OK) {
        um__lock_drop(&pieces->lock);
        return status;
    }
    let_go(holder);
    take_ends(pieces);
    status = hold_all(holder, ids, n, err);
    put_reads(pieces);
    if (status == UM_OK) {
        status = wait_for_held(holder, err);
    }
    const um__piece *known = pieces->all.pieces;
    for (size_t i = 0; status == UM_OK && slots != NULL && i < n; i++) {
        const um__piece *piece = &known[ids[i]];
        slots[i] = (int32_t)(piece->slot - pieces->pools[piece->pool].first);
    }
    if (status != UM_OK) {
        let_go(holder);
    }
    bool is_busy = pieces->n_under_way > 0;
    um__lock_drop(&pieces->lock);
    if (is_busy) {
        um__reads_begin(pieces->reads);
    }
    return status;
}

void um_pieces_release(um_pieces *pieces, um_pieces_holder *holder) {
    if (!is_forked(pieces)) {
        um__lock_take(&pieces->lock);
        let_go(holder);
        um__lock_drop(&pieces->lock);
    }
}

um_status um_pieces_prefetch(um_pieces *pieces, const int32_t *ids, size_t n, um_error *err) {
    FORKED_IF(is_forked(pieces), err);
    UM__TRY(check_ids(pieces, ids, n, err));
    um__lock_take(&pieces->lock);
    take_ends(pieces);
    const um__piece *known = pieces->all.pieces;
    um__victims victims = {.are_demanded = false};
    for (size_t i = 0; i < n; i++) {
        um__policy_await(&pieces->all, &pieces->all.pieces[ids[i]]);
    }
    for (size_t i = 0; i < n; i++) {
        if (known[ids[i]].slot == UM__NO_SLOT) {
            pieces->stat.prefetched += fetch(pieces, (uint32_t)ids[i], &victims) != NULL;
        }
    }
    put_reads(pieces);
    um__lock_drop(&pieces->lock);
    int os_errno = um__reads_begin(pieces->reads);
    return os_errno == 0 ? UM_OK : um__fail_os(err, os_errno, 0, "io_uring_enter");
}

/* ---- sizes and figures ---- */

/* Waits until no read into a slot from `first` on is under way. */
static void wait_for_slots(um_pieces *pieces, uint32_t first, uint32_t end) {
    for (uint32_t i = first; i < end;) {
        um__slot_state state = pieces->all.slots[i].state;
        if (state == UM__SLOT_READING || state == UM__SLOT_MOVING) {
            wait_for_change(pieces);
        } else {
            i++;
        }
    }
}

static void set_n_slots(um_pieces *pieces, um__pool *pool, uint32_t n_slots) {
    pool->layout.n_slots = n_slots;
    pieces->least_slots = UINT32_MAX;
    for (uint32_t p = 0; p < pieces->all.n_pools; p++) {
        uint32_t n = pieces->pools[p].layout.n_slots;
        pieces->least_slots = n < pieces->least_slots ? n : pieces->least_slots;
    }
}

um_status um_pieces_resize(um_pieces *pieces, uint32_t number, uint32_t n_slots, um_error *err) {
    FORKED_IF(is_forked(pieces), err);
    UM__INVALID_IF(number >= pieces->all.n_pools, err, "pool: there is no such pool");
    um__pool *pool = &pieces->pools[number];
    UM__INVALID_IF(n_slots == 0 || n_slots > pool->layout.max_slots, err, "n_slots");
    um__lock_take(&pieces->lock);
    uint32_t first = pool->first + n_slots, end = pool->first + pool->layout.n_slots;
    for (uint32_t i = first; i < end; i++) {
        if (pieces->all.slots[i].n_holds > 0) {
            um__lock_drop(&pieces->lock);
            return um__fail_detail(err, UM_E_BUSY, UM_PIECES_HELD,
                                   "a holder keeps a piece in a slot that would go");
        }
    }
    for (uint32_t i = first; i < end; i++) {
        um__slot *slot = &pieces->all.slots[i];
        if (slot->state == UM__SLOT_READY) {
            evict(pieces, slot);
            slot->state = UM__SLOT_FREE;
        } else if (slot->state == UM__SLOT_READING) {
            give_up(pieces, slot);
            slot->state = slot->n_under_way == 0 ? UM__SLOT_FREE : slot->state;
        } else if (slot->state == UM__SLOT_MOVING && slot->piece != UM__NO_PIECE) {
            forget_piece(pieces, slot); /* the thread that moves it makes it free */
        }
    }
    set_n_slots(pieces, pool, n_slots);
    wait_for_slots(pieces, first, end);
    um__lock_drop(&pieces->lock);
    return UM_OK;
}

int32_t um_pieces_slot(um_pieces *pieces, int32_t id) {
    int32_t found = -1;
    if (is_forked(pieces) || (uint32_t)id >= pieces->all.n_pieces) {
        return found;
    }
    um__lock_take(&pieces->lock);
    const um__piece *piece = &pieces->all.pieces[id];
    if (piece->slot != UM__NO_SLOT && pieces->all.slots[piece->slot].state == UM__SLOT_READY) {
        found = (int32_t)(piece->slot - pieces->pools[piece->pool].first);
    }
    um__lock_drop(&pieces->lock);
    return found;
}

void um_pieces_stat_read(um_pieces *pieces, um_pieces_stat *out) {
    *out = (um_pieces_stat){0};
    if (!is_forked(pieces)) {
        um__lock_take(&pieces->lock);
        *out = pieces->stat;
        um__lock_drop(&pieces->lock);
    }
}

uint64_t um_pieces_fetched(um_pieces *pieces, uint32_t pool) {
    um__lock_take(&pieces->lock);
    uint64_t n = pieces->pools[pool].n_fetched;
    um__lock_drop(&pieces->lock);
    return n;
}

int um_pieces_has_ring(const um_pieces *pieces) {
    return um__reads_has_ring(pieces->reads);
}

int um_pieces_is_direct(um_pieces *pieces, uint32_t file) {
    return pieces->files[file].is_direct;
}

/* ---- beginning and end ---- */

/* errors: UM_E_INVALID, UM_E_NOMEM. */
static um_status check_spec(const um_pieces_spec *spec, um_error *err) {
    UM__INVALID_IF((unsigned)spec->policy >= UM_PIECES_POLICY_COUNT, err, "policy");
    UM__INVALID_IF((unsigned)spec->io >= UM_PIECES_IO_COUNT, err, "io");
    UM__INVALID_IF(spec->n_reads > MOST_READS, err, "n_reads");
    for (uint32_t i = 0; spec->group_of != NULL && i < spec->n_pieces; i++) {
        UM__INVALID_IF(spec->group_of[i] >= spec->n_groups, err, "group_of");
    }
    um_pieces_spec again = *spec;
    again.pools = um__heap_alloc(spec->n_pools, sizeof *again.pools);
    UM__RETURN_IF(again.pools == NULL, um__fail_nomem(err, ENOMEM, spec->n_pools, "calloc"));
    memcpy(again.pools, spec->pools, spec->n_pools * sizeof *again.pools);
    um_status status = um_pieces_layout(&again, err);
    uint64_t n_slots = 0;
    for (uint32_t i = 0; status == UM_OK && i < spec->n_pools; i++) {
        const um_pieces_pool *pool = &spec->pools[i];
        size_t nbytes;
        n_slots += pool->max_slots;
        if (memcmp(pool, &again.pools[i], sizeof *pool) != 0) {
            status = um__fail(err, UM_E_INVALID, "pools: expected those of um_pieces_layout");
        } else if (pool->n_slots == 0 || pool->n_slots > pool->max_slots || n_slots > INT32_MAX ||
                   !um__mul(pool->stride, pool->max_slots, &nbytes)) {
            status = um__fail(err, UM_E_INVALID, "n_slots, max_slots");
        } else if (pool->base == NULL || (uintptr_t)pool->base % UM__PIECES_UNIT != 0) {
            status = um__fail(err, UM_E_INVALID, "base");
        }
    }
    um__heap_free(again.pools);
    return status;
}

static void *array(bool *failed, size_t n, size_t item_nbytes) {
    void *made = um__heap_alloc(n, item_nbytes);
    *failed |= made == NULL;
    return made;
}

static bool fill_pools(um_pieces *pieces, const um_pieces_spec *spec) {
    bool failed = false;
    for (uint32_t i = 0; i < spec->n_pools; i++) {
        um__pool *pool = &pieces->pools[i];
        pool->layout = spec->pools[i];
        pool->first = pieces->n_all_slots;
        pieces->n_all_slots += pool->layout.max_slots;
    }
    pieces->all.slots = array(&failed, pieces->n_all_slots, sizeof(um__slot));
    for (uint32_t i = 0; !failed && i < spec->n_pools; i++) {
        um__pool *pool = &pieces->pools[i];
        for (uint32_t s = pool->first; s < pool->first + pool->layout.max_slots; s++) {
            pieces->all.slots[s] = (um__slot){.piece = UM__NO_PIECE, .pool = i};
        }
        set_n_slots(pieces, pool, pool->layout.n_slots);
    }
    return !failed;
}

/* Makes the tables. Returns false without memory for them. */
static bool fill_tables(um_pieces *pieces, const um_pieces_spec *spec) {
    bool failed = false;
    uint64_t n_ranges = 0;
    pieces->all.n_pools = spec->n_pools;
    pieces->all.n_pieces = spec->n_pieces;
    pieces->all.policy = spec->policy;
    um__policy_start(&pieces->all);
    pieces->all.n_groups = spec->group_of == NULL ? 1 : spec->n_groups;
    pieces->all.groups = array(&failed, pieces->all.n_groups, sizeof(um__group));
    pieces->pools = pieces->all.pools = array(&failed, spec->n_pools, sizeof(um__pool));
    pieces->all.pieces = array(&failed, spec->n_pieces, sizeof(um__piece));
    pieces->files = array(&failed, spec->n_files, sizeof(source));
    pieces->n_files = spec->n_files;
    for (uint32_t i = 0; !failed && i < spec->n_pieces; i++) {
        pieces->all.pieces[i] = (um__piece){.slot = UM__NO_SLOT,
                                            .pool = spec->pool_of[i],
                                            .group = spec->group_of ? spec->group_of[i] : 0,
                                            .first_range = n_ranges};
        n_ranges += spec->pools[spec->pool_of[i]].n_parts;
    }
    pieces->ranges = failed ? NULL : array(&failed, n_ranges, sizeof(um_pieces_range));
    if (!failed) {
        memcpy(pieces->ranges, spec->ranges, n_ranges * sizeof(um_pieces_range));
    }
    return !failed && fill_pools(pieces, spec);
}

/* errors: UM_E_OS, UM_E_NOMEM. */
static um_status open_files(um_pieces *pieces, const um_pieces_spec *spec, um_error *err) {
    for (; pieces->n_open < spec->n_files; pieces->n_open++) {
        source *file = &pieces->files[pieces->n_open];
        UM__TRY_OS(um__os_duplicate(spec->fds[pieces->n_open], &file->fd), err, 0, "fcntl");
        file->direct_fd = -1;
        file->is_direct = um__os_open_direct(file->fd, &file->direct_fd) == 0;
    }
    return UM_OK;
}

/* errors: UM_E_OS, UM_E_NOMEM. */
static um_status open_reads(um_pieces *pieces, const um_pieces_spec *spec, um_error *err) {
    UM__TRY(um__reads_open(&pieces->reads, spec->io, spec->n_reads, err));
    uint32_t n = um__reads_limit(pieces->reads);
    pieces->requests = um__heap_alloc(n, sizeof(request));
    UM__RETURN_IF(pieces->requests == NULL,
                  um__fail_nomem(err, ENOMEM, n * sizeof(request), "calloc"));
    for (uint32_t i = 0; i < n; i++) {
        pieces->requests[i].next = i + 1;
    }
    return UM_OK;
}

static void free_all(um_pieces *pieces) {
    if (pieces->reads != NULL) {
        um__reads_close(pieces->reads, is_forked(pieces));
    }
    for (uint32_t i = 0; i < pieces->n_open; i++) {
        um__os_close(pieces->files[i].fd);
        if (pieces->files[i].direct_fd >= 0) {
            um__os_close(pieces->files[i].direct_fd);
        }
    }
    um__heap_free(pieces->pools);
    um__heap_free(pieces->all.slots);
    um__heap_free(pieces->all.pieces);
    um__heap_free(pieces->all.groups);
    um__heap_free(pieces->files);
    um__heap_free(pieces->ranges);
    um__heap_free(pieces->requests);
    um__heap_free(pieces);
}

um_status um_pieces_create(um_pieces **out, const um_pieces_spec *spec, um_error *err) {
    UM__TRY(check_spec(spec, err));
    UM__TRY_OS(know_forks(), err, 0, "pthread_atfork");
    um_pieces *pieces = um__heap_alloc(1, sizeof *pieces);
    UM__RETURN_IF(pieces == NULL, um__fail_nomem(err, ENOMEM, sizeof *pieces, "calloc"));
    pieces->n_forks = atomic_load(&n_forks);
    pieces->demanded = pieces->prefetched = pieces->moving = (queue){UM__NO_SLOT, UM__NO_SLOT};
    um_status status = UM_OK;
    if (!fill_tables(pieces, spec)) {
        status = um__fail_nomem(err, ENOMEM, spec->n_pieces * sizeof(um__piece), "calloc");
    }
    if (status == UM_OK) {
        status = open_files(pieces, spec, err);
    }
    if (status == UM_OK) {
        status = open_reads(pieces, spec, err);
    }
    if (status != UM_OK) {
        free_all(pieces);
        return status;
    }
    *out = pieces;
    return UM_OK;
}

void um_pieces_destroy(um_pieces *pieces) {
    if (pieces == NULL) {
        return;
    }
    if (!is_forked(pieces)) {
        um__lock_take(&pieces->lock);
        for (uint32_t i = 0; i < pieces->n_all_slots; i++) {
            um__slot *slot = &pieces->all.slots[i];
            if (slot->state == UM__SLOT_READING) {
                give_up(pieces, slot);
            }
        }
        while (pieces->n_under_way > 0) {
            wait_for_change(pieces);
        }
        um__lock_drop(&pieces->lock);
    }
    free_all(pieces);
}

um_status um_pieces_holder_create(um_pieces_holder **out, um_pieces *pieces, um_error *err) {
    size_t n = pieces->n_all_slots;
    bool failed = false;
    um_pieces_holder *holder = array(&failed, 1, sizeof *holder);
    uint32_t *slots = array(&failed, n, sizeof *slots);
    uint64_t *bits = array(&failed, n / 64 + 1, sizeof *bits);
    if (failed) {
        um__heap_free(holder);
        um__heap_free(slots);
        um__heap_free(bits);
        return um__fail_nomem(err, ENOMEM, n * sizeof *slots, "calloc");
    }
    *holder = (um_pieces_holder){.pieces = pieces, .slots = slots, .bits = bits};
    *out = holder;
    return UM_OK;
}

void um_pieces_holder_destroy(um_pieces_holder *holder) {
    if (holder != NULL) {
        um_pieces_release(holder->pieces, holder);
        um__heap_free(holder->slots);
        um__heap_free(holder->bits);
        um__heap_free(holder);
    }
}
