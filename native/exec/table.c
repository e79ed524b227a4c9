/* The table of mappings. Each change is also written to a memfd that other processes read. The
 * table itself is private, so that a forked child has it as it was at the fork. */
#include "exec.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

_Static_assert(sizeof(um__record) == 32 && sizeof(um__ended) == 48, "others read them");
_Static_assert(sizeof(um__table) <= UM__HEAD_BYTES, "the records come behind it");

/* From this much on, a process shows its table. Small ones, as of a shell, need no descriptor. */
enum { SHOWN_BYTES = 16 << 20 };
enum { TABLE_BYTES = UM__HEAD_BYTES + UM__MOST_RECORDS * (int)sizeof(um__record) };
/* User addresses have 48 bits unless a program asks for more: slots of 2 MiB, in two levels. */
enum { SLOT_SHIFT = 21, LEAF_BITS = 13, TOP_BITS = 48 - SLOT_SHIFT - LEAF_BITS };
enum { LEAF_SLOTS = 1 << LEAF_BITS };
static const char MAGIC[8] = "unimem\0L";

typedef _Atomic uint32_t slot; /* the number of a record, and one */

/* So long do others wait for a fork, in naps: in a large process, it may take that long. */
enum { MOST_NAPS = 100, NAP_NS = 1000000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t signals_before; /* blocked, in the thread that has the lock */
static unsigned n_forking;      /* threads; under the lock */
static _Thread_local uint64_t signals_before_fork __attribute__((tls_model("initial-exec")));
static um__table *table;
static um__record *records;
static um__table *mirror; /* for other processes; NULL: not shown */
static bool was_tried;
static uint64_t first_free; /* the number of a record, and one */
static slot *_Atomic leaves[1 << TOP_BITS];
/* How many records there are, and the addresses that all ever lay between. */
static _Atomic size_t n_entered;
static _Atomic uintptr_t first_address = UINTPTR_MAX, last_address;

static um__record *records_of(um__table *of) {
    return (um__record *)((char *)of + UM__HEAD_BYTES);
}

static void *map_private(size_t nbytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    return um__sys_map(NULL, nbytes, PROT_READ | PROT_WRITE, flags, -1, 0);
}

bool um__table_init(void) {
    table = map_private(TABLE_BYTES);
    if (table == NULL) {
        return false;
    }
    records = records_of(table);
    return um__index_init(records);
}

const um__table *um__table_now(void) {
    return table;
}

void um__table_look(void) {
    uint64_t before = um__sys_block_signals();
    pthread_mutex_lock(&lock);
    signals_before = before;
}

bool um__table_lock(void) {
    um__table_look();
    for (int i = 0; i < MOST_NAPS && n_forking != 0; i++) {
        um__table_unlock();
        um__sys_rest(NAP_NS);
        um__table_look();
    }
    return n_forking == 0;
}

void um__table_unlock(void) {
    uint64_t before = signals_before;
    pthread_mutex_unlock(&lock);
    um__sys_restore_signals(before);
}

void um__table_begin(void) {
    if (mirror != NULL) {
        atomic_fetch_add(&mirror->n_changes, 1);
    }
}

void um__table_end(void) {
    if (mirror != NULL) {
        mirror->counts = table->counts;
        mirror->n_records = table->n_records;
        atomic_fetch_add(&mirror->n_changes, 1);
    }
}

/* Writes a record to the table and its mirror. */
static void put(um__record *at, um__record record) {
    *at = record;
    if (mirror != NULL) {
        records_of(mirror)[at - records] = record;
    }
}

void um__table_note_next(const char *path, bool malloc_is_ours) {
    um__table_look();
    um__table_begin();
    strncpy(table->next, path == NULL ? "" : path, sizeof table->next - 1);
    table->malloc_is_ours = malloc_is_ours;
    if (mirror != NULL) { /* libraries that began before this one may have placed memory */
        memcpy(mirror->next, table->next, sizeof mirror->next);
        mirror->malloc_is_ours = malloc_is_ours;
    }
    um__table_end();
    um__table_unlock();
}

/* Shows the table to other processes, once, if the system has memory for it. */
static void show(void) {
    was_tried = true;
    memcpy(table->magic, MAGIC, sizeof MAGIC);
    table->version = 2;
    table->pid = (uint32_t)um__sys_pid();
    table->started = um__sys_started();
    table->record_nbytes = sizeof(um__record);
    strncpy(table->text, um__settings_now.text == NULL ? "" : um__settings_now.text,
            UM__TEXT_BYTES - 1);
    um__table *mapped = map_private(TABLE_BYTES);
    if (mapped == NULL) {
        return;
    }
    if (um__sys_share(mapped, TABLE_BYTES, "unimem-ledger") < 0) {
        um__sys_unmap(mapped, TABLE_BYTES);
        return;
    }
    memcpy(records_of(mapped), records, table->n_records * sizeof(um__record));
    memcpy(mapped, table, sizeof *table);
    mirror = mapped;
}

/* ---- forks ---- */

void um__table_before_fork(void) {
    uint64_t before = um__sys_block_signals();
    um__table_look();
    n_forking++;
    um__table_unlock();
    signals_before_fork = before;
}

void um__table_after_fork(void) {
    um__table_look();
    n_forking--;
    um__table_unlock();
    um__sys_restore_signals(signals_before_fork);
}

/* The child shows itself when it maps something. Its parent's descriptor stays open: the program
 * may have closed it, and its number may be another file's. Another thread of the parent may have
 * had the lock. */
void um__table_in_child(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    n_forking = 0;
    if (mirror != NULL) {
        um__sys_unmap(mirror, TABLE_BYTES);
        mirror = NULL;
    }
    was_tried = false;
    um__sys_restore_signals(signals_before_fork);
}

/* ---- slots ---- */

static slot *slot_of(uintptr_t address, bool make) {
    if (address >> 48 != 0) {
        return NULL;
    }
    slot *_Atomic *at = &leaves[address >> (SLOT_SHIFT + LEAF_BITS)];
    slot *leaf = atomic_load_explicit(at, memory_order_acquire);
    if (leaf == NULL && make) {
        leaf = map_private(LEAF_SLOTS * sizeof(slot));
        atomic_store_explicit(at, leaf, memory_order_release); /* under the lock */
    }
    return leaf == NULL ? NULL : &leaf[(address >> SLOT_SHIFT) & (LEAF_SLOTS - 1)];
}

um__record *um__table_find(const void *address) {
    slot *found = slot_of((uintptr_t)address, false);
    uint32_t number = found == NULL ? 0 : atomic_load_explicit(found, memory_order_acquire);
    if (number == 0 || records[number - 1].address != (uintptr_t)address) {
        return NULL;
    }
    return &records[number - 1];
}

size_t um__table_asked(const void *address, size_t *out_nbytes) {
    const um__record *found = um__table_find(address);
    if (found == NULL) {
        return 0;
    }
    *out_nbytes = found->nbytes;
    return found->asked;
}

/* ---- records ---- */

/* Adds a mapping to the counts, or takes it away (-1). */
static void count(const um__record *record, int sign) {
    um__counts *counts = &table->counts;
    uint64_t nbytes = sign < 0 ? -record->nbytes : record->nbytes;
    counts->placed_bytes += nbytes;
    counts->prefaulted_bytes += (record->state & UM__IS_PREFAULTED) != 0 ? nbytes : 0;
    if (counts->placed_bytes > counts->most_bytes) {
        counts->most_bytes = counts->placed_bytes;
    }
}

static bool enter(um__record record) {
    slot *own = NULL;
    if (record.via != UM__MMAP && (own = slot_of(record.address, true)) == NULL) {
        return false;
    }
    uint64_t number = first_free;
    if (number != 0) {
        first_free = records[number - 1].asked;
    } else if (table->n_records < UM__MOST_RECORDS) {
        number = ++table->n_records;
    } else {
        return false;
    }
    put(&records[number - 1], record);
    um__index_add((uint32_t)number);
    count(&record, 1);
    if (own != NULL) {
        atomic_store_explicit(own, (uint32_t)number, memory_order_release);
    }
    n_entered++;
    uintptr_t end = record.address + record.nbytes;
    if (record.address < first_address) {
        first_address = record.address;
    }
    if (end > last_address) {
        last_address = end;
    }
    return true;
}

static void leave(um__record *record) {
    uint32_t number = (uint32_t)(record - records) + 1;
    count(record, -1);
    n_entered--;
    um__index_remove(number);
    if (record->via != UM__MMAP) {
        atomic_store_explicit(slot_of(record->address, false), 0, memory_order_release);
    }
    put(record, (um__record){.asked = first_free});
    first_free = number;
}

/* Returns the next record that overlaps a range; *at is where it ends. */
static um__record *overlapping(uintptr_t *at, uintptr_t end) {
    uint32_t number = *at < end ? um__index_first(*at) : 0;
    if (number == 0 || records[number - 1].address >= end) {
        return NULL;
    }
    *at = records[number - 1].address + records[number - 1].nbytes;
    return &records[number - 1];
}

/* Cuts a range out of the records of mmap's kind that it overlaps; adds a state to the others. */
static void cut(uintptr_t start, uintptr_t end, uint32_t state) {
    um__record *record;
    for (uintptr_t at = start; (record = overlapping(&at, end)) != NULL;) {
        um__record left = *record, right = *record;
        if (record->via != UM__MMAP || n_forking != 0) {
            left.state |= state;
            put(record, left);
            continue;
        }
        leave(record);
        if (left.address < start) {
            left.nbytes = left.asked = start - left.address;
            enter(left);
        }
        if (right.address + right.nbytes > end) {
            right.nbytes = right.asked = right.address + right.nbytes - end;
            right.address = end;
            enter(right);
        }
    }
}

bool um__table_add(um__record record) {
    if (n_forking != 0) {
        return false;
    }
    uint64_t nbytes = table->counts.placed_bytes + record.nbytes;
    if (!was_tried && (nbytes >= SHOWN_BYTES || um__settings_now.report)) {
        show();
    }
    um__table_begin();
    cut(record.address, record.address + record.nbytes, 0);
    bool done = enter(record);
    table->counts.n_placed += done;
    um__table_end();
    return done;
}

bool um__table_remove(void *address, um__record *out) {
    um__record *found = um__table_find(address);
    if (found == NULL) {
        return false;
    }
    um__table_begin();
    *out = *found;
    leave(found);
    um__table_end();
    return true;
}

void um__table_set_state(um__record *record, uint32_t state) {
    um__record now = *record;
    now.state = state;
    um__table_begin();
    put(record, now);
    um__table_end();
}

bool um__table_change(um__record *record, um__record now) {
    um__table_begin();
    leave(record);
    bool done = enter(now);
    um__table_end();
    return done;
}

bool um__table_may_overlap(uintptr_t address, size_t nbytes) {
    return n_entered != 0 && address < last_address &&
           (nbytes > UINTPTR_MAX - address || address + nbytes > first_address);
}

bool um__table_overlaps(uintptr_t address, size_t nbytes, um__record *out) {
    uintptr_t at = address;
    const um__record *found;
    do {
        found = overlapping(&at, address + nbytes);
    } while (found != NULL && found->via != UM__MMAP);
    if (found != NULL) {
        *out = *found;
    }
    return found != NULL;
}

bool um__table_is_hugetlb(uintptr_t address, size_t nbytes) {
    uintptr_t end = address;
    um__table_look();
    const um__record *found = overlapping(&end, address + nbytes);
    bool is_whole = found != NULL && (found->state & UM__IS_HUGETLB) != 0 &&
                    found->address <= address && nbytes <= end - address;
    um__table_unlock();
    return is_whole;
}

void um__table_cut(uintptr_t address, size_t nbytes) {
    um__table_begin();
    cut(address, address + nbytes, UM__IS_CHANGED);
    um__table_end();
}

void um__table_note_change(uintptr_t address, size_t nbytes) {
    uintptr_t at = address, end = nbytes > UINTPTR_MAX - address ? UINTPTR_MAX : address + nbytes;
    um__record *record;
    if (!um__table_may_overlap(address, nbytes)) {
        return;
    }
    um__table_look();
    um__table_begin();
    while ((record = overlapping(&at, end)) != NULL) {
        um__record now = *record;
        now.state |= UM__IS_CHANGED;
        put(record, now);
    }
    um__table_end();
    um__table_unlock();
}

um__record *um__table_any(uint32_t state) {
    for (uint32_t i = 0; i < table->n_records; i++) {
        if (records[i].address != 0 && (records[i].state & state) != 0) {
            return &records[i];
        }
    }
    return NULL;
}

um__counts *um__table_counts(void) {
    return &table->counts;
}

void um__table_note_end(const um__record *record) {
    uint64_t resident = 0, huge = 0;
    if (um__sys_scan((void *)(uintptr_t)record->address, record->nbytes, &resident, &huge) != 0) {
        resident = huge = UINT64_MAX;
    }
    if (!um__table_lock()) {
        um__table_unlock();
        return;
    }
    um__table_begin();
    uint32_t i = 0;
    while (i < table->n_ended && (table->ended[i].via != record->via ||
                                  table->ended[i].asked / table->ended[i].n != record->asked)) {
        i++;
    }
    /* If there are too many kinds, the last line adds up the rest. */
    i = i < UM__MOST_ENDED ? i : UM__MOST_ENDED - 1;
    um__ended *ended = &table->ended[i];
    table->n_ended = i < table->n_ended ? table->n_ended : i + 1;
    ended->via = record->via;
    ended->state |= record->state;
    ended->n++;
    ended->asked += record->asked;
    ended->nbytes += record->nbytes;
    ended->resident = resident == UINT64_MAX ? resident : ended->resident + resident;
    ended->huge = huge == UINT64_MAX ? huge : ended->huge + huge;
    if (mirror != NULL) {
        mirror->ended[i] = *ended;
        mirror->n_ended = table->n_ended;
    }
    um__table_end();
    um__table_unlock();
}
