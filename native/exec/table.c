/* What is mapped now. Each change is also written to memory that other processes read, a memfd. The
 * table itself is private, so that a forked child has it as it was at the fork. */
#include "exec.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

_Static_assert(sizeof(um_record) == 32 && sizeof(um_ended) == 48, "others read them");
_Static_assert(sizeof(um_table) <= UM_HEAD_BYTES, "the records come behind it");

/* From so much on, a process is of interest to others. The many small ones, as of a shell, need no
 * descriptor for it. */
enum { SHOWN_BYTES = 16 << 20 };
enum { TABLE_BYTES = UM_HEAD_BYTES + UM_MOST_RECORDS * (int)sizeof(um_record) };
/* User addresses have 48 bits unless a program asks for more: slots of 2 MiB, in two levels. */
enum { SLOT_SHIFT = 21, LEAF_BITS = 13, TOP_BITS = 48 - SLOT_SHIFT - LEAF_BITS };
enum { LEAF_SLOTS = 1 << LEAF_BITS };
static const char MAGIC[8] = "unimem\0L";

typedef _Atomic uint32_t slot; /* the number of a record, and one */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static um_table *table;
static um_record *records;
static um_table *mirror; /* what others read, NULL: nothing */
static bool was_tried;
static uint64_t first_free; /* the number of a record, and one */
static slot *_Atomic leaves[1 << TOP_BITS];
/* Mappings of mmap's kind: how many, and the addresses that all ever lay between. */
static _Atomic size_t n_ranges;
static _Atomic uintptr_t ranges_start = UINTPTR_MAX, ranges_end;

static um_record *records_of(um_table *of) {
    return (um_record *)((char *)of + UM_HEAD_BYTES);
}

static void *map_private(size_t nbytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    return um_sys_map(NULL, nbytes, PROT_READ | PROT_WRITE, flags, -1, 0);
}

bool um_table_init(void) {
    table = map_private(TABLE_BYTES);
    if (table == NULL) {
        return false;
    }
    records = records_of(table);
    return true;
}

const um_table *um_table_now(void) {
    return table;
}

void um_table_lock(void) {
    pthread_mutex_lock(&lock);
}

void um_table_unlock(void) {
    pthread_mutex_unlock(&lock);
}

void um_table_begin(void) {
    if (mirror != NULL) {
        atomic_fetch_add(&mirror->n_changes, 1);
    }
}

void um_table_end(void) {
    if (mirror != NULL) {
        mirror->counts = table->counts;
        mirror->n_records = table->n_records;
        atomic_fetch_add(&mirror->n_changes, 1);
    }
}

/* Writes a record, for others as well. */
static void put(um_record *at, um_record record) {
    *at = record;
    if (mirror != NULL) {
        records_of(mirror)[at - records] = record;
    }
}

void um_table_note_next(const char *path, bool malloc_is_ours) {
    um_table_lock();
    um_table_begin();
    strncpy(table->next, path == NULL ? "" : path, sizeof table->next - 1);
    table->malloc_is_ours = malloc_is_ours;
    if (mirror != NULL) { /* other libraries begin before this one, and may have placed memory */
        memcpy(mirror->next, table->next, sizeof mirror->next);
        mirror->malloc_is_ours = malloc_is_ours;
    }
    um_table_end();
    um_table_unlock();
}

/* Shows the table to other processes, once. Where the system has no memory for it, nothing is
 * shown. */
static void show(void) {
    was_tried = true;
    memcpy(table->magic, MAGIC, sizeof MAGIC);
    table->version = 2;
    table->pid = (uint32_t)um_sys_pid();
    table->started = um_sys_started();
    table->record_nbytes = sizeof(um_record);
    strncpy(table->text, um_settings_now.text == NULL ? "" : um_settings_now.text,
            UM_TEXT_BYTES - 1);
    um_table *mapped = map_private(TABLE_BYTES);
    if (mapped == NULL) {
        return;
    }
    if (um_sys_share(mapped, TABLE_BYTES, "unimem-ledger") < 0) {
        um_sys_unmap(mapped, TABLE_BYTES);
        return;
    }
    memcpy(records_of(mapped), records, table->n_records * sizeof(um_record));
    memcpy(mapped, table, sizeof *table);
    mirror = mapped;
}

/* ---- forks ---- */

void um_table_before_fork(void) {
    um_table_lock();
}

void um_table_in_parent(void) {
    um_table_unlock();
}

/* The child shows itself when it maps something. Its parent's descriptor stays open: the program
 * may have closed it, and another file may have its number. */
void um_table_in_child(void) {
    if (mirror != NULL) {
        um_sys_unmap(mirror, TABLE_BYTES);
        mirror = NULL;
    }
    was_tried = false;
    um_table_unlock();
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

static um_record *record_at(const void *address) {
    slot *found = slot_of((uintptr_t)address, false);
    uint32_t number = found == NULL ? 0 : atomic_load_explicit(found, memory_order_acquire);
    if (number == 0 || records[number - 1].address != (uintptr_t)address) {
        return NULL;
    }
    return &records[number - 1];
}

bool um_table_has(const void *address) {
    return record_at(address) != NULL;
}

size_t um_table_asked(const void *address, size_t *out_nbytes) {
    const um_record *found = record_at(address);
    if (found == NULL) {
        return 0;
    }
    *out_nbytes = found->nbytes;
    return found->asked;
}

um_record *um_table_find(void *address) {
    return record_at(address);
}

/* ---- records ---- */

/* Adds a mapping to the counts, or with -1 takes it away. */
static void count(const um_record *record, int sign) {
    um_counts *counts = &table->counts;
    uint64_t nbytes = sign < 0 ? -record->nbytes : record->nbytes;
    counts->placed_bytes += nbytes;
    counts->prefaulted_bytes += (record->state & UM_IS_PREFAULTED) != 0 ? nbytes : 0;
    if (counts->placed_bytes > counts->most_bytes) {
        counts->most_bytes = counts->placed_bytes;
    }
}

static bool enter(um_record record) {
    slot *own = NULL;
    if (record.via != UM_VIA_MMAP && (own = slot_of(record.address, true)) == NULL) {
        return false;
    }
    uint64_t number = first_free;
    if (number != 0) {
        first_free = records[number - 1].asked;
    } else if (table->n_records < UM_MOST_RECORDS) {
        number = ++table->n_records;
    } else {
        return false;
    }
    put(&records[number - 1], record);
    count(&record, 1);
    if (own != NULL) {
        atomic_store_explicit(own, (uint32_t)number, memory_order_release);
        return true;
    }
    n_ranges++;
    uintptr_t end = record.address + record.nbytes;
    if (record.address < ranges_start) {
        ranges_start = record.address;
    }
    if (end > ranges_end) {
        ranges_end = end;
    }
    return true;
}

static void leave(um_record *record) {
    count(record, -1);
    if (record->via == UM_VIA_MMAP) {
        n_ranges--;
    } else {
        atomic_store_explicit(slot_of(record->address, false), 0, memory_order_release);
    }
    put(record, (um_record){.asked = first_free});
    first_free = (uint64_t)(record - records) + 1;
}

bool um_table_add(um_record record) {
    uint64_t nbytes = table->counts.placed_bytes + record.nbytes;
    if (!was_tried && (nbytes >= SHOWN_BYTES || um_settings_now.report)) {
        show();
    }
    um_table_begin();
    bool done = enter(record);
    table->counts.n_placed += done;
    um_table_end();
    return done;
}

bool um_table_remove(void *address, um_record *out) {
    um_record *found = record_at(address);
    if (found == NULL) {
        return false;
    }
    um_table_begin();
    *out = *found;
    leave(found);
    um_table_end();
    return true;
}

bool um_table_change(um_record *record, um_record now) {
    um_table_begin();
    leave(record);
    bool done = enter(now);
    um_table_end();
    return done;
}

/* The next record of mmap's kind that overlaps a range, from a number on. */
static um_record *overlapping(uint32_t *at, uintptr_t start, uintptr_t end) {
    for (; n_ranges != 0 && *at < table->n_records; ++*at) {
        um_record *record = &records[*at];
        if (record->via == UM_VIA_MMAP && record->address != 0 && record->address < end &&
            record->address + record->nbytes > start) {
            return record;
        }
    }
    return NULL;
}

bool um_table_may_overlap(uintptr_t address, size_t nbytes) {
    return n_ranges != 0 && address < ranges_end && address + nbytes > ranges_start;
}

bool um_table_overlaps(uintptr_t address, size_t nbytes, um_record *out) {
    uint32_t at = 0;
    if (!um_table_may_overlap(address, nbytes)) {
        return false;
    }
    const um_record *found = overlapping(&at, address, address + nbytes);
    if (found != NULL) {
        *out = *found;
    }
    return found != NULL;
}

bool um_table_is_hugetlb(uintptr_t address, size_t nbytes) {
    bool found = false;
    um_table_lock();
    for (uint32_t i = 0; i < table->n_records && !found; i++) {
        const um_record *record = &records[i];
        found = record->address != 0 && (record->state & UM_IS_HUGETLB) != 0 &&
                record->address <= address && address - record->address < record->nbytes &&
                nbytes <= record->nbytes - (address - record->address);
    }
    um_table_unlock();
    return found;
}

bool um_table_cut(uintptr_t address, size_t nbytes, um_record *out) {
    uintptr_t end = address + nbytes;
    if (!um_table_overlaps(address, nbytes, out)) {
        return false;
    }
    um_record *record;
    um_table_begin();
    for (uint32_t at = 0; (record = overlapping(&at, address, end)) != NULL; at++) {
        um_record left = *record, right = *record;
        leave(record);
        if (left.address < address) {
            left.nbytes = left.asked = address - left.address;
            enter(left);
        }
        if (right.address + right.nbytes > end) {
            right.nbytes = right.asked = right.address + right.nbytes - end;
            right.address = end;
            enter(right);
        }
    }
    um_table_end();
    return true;
}

um_counts *um_table_counts(void) {
    return &table->counts;
}

void um_table_note_end(const um_record *record) {
    uint64_t resident = 0, huge = 0;
    if (um_sys_scan((void *)(uintptr_t)record->address, record->nbytes, &resident, &huge) != 0) {
        resident = huge = UINT64_MAX;
    }
    um_table_lock();
    um_table_begin();
    uint32_t i = 0;
    while (i < table->n_ended && (table->ended[i].via != record->via ||
                                  table->ended[i].asked / table->ended[i].n != record->asked)) {
        i++;
    }
    /* Where there are too many kinds, the last line adds up all others. */
    i = i < UM_MOST_ENDED ? i : UM_MOST_ENDED - 1;
    um_ended *ended = &table->ended[i];
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
    um_table_end();
    um_table_unlock();
}
