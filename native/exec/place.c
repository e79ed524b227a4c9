/* One mapping: where it lies, how it is placed, and its end. */
#include "exec.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "os/kernel.h" /* behind the system's headers */

/* Freed mappings, for the next allocation of the size: programs that take and free the same over
 * and over again would fault it in each time. */
enum { MOST_KEPT = 16, KEPT_BYTES = 64 << 20 };

typedef struct kept {
    um_record record;
    uint64_t since; /* 0: none */
} kept;

static kept kept_now[MOST_KEPT]; /* under the table's lock */
static uint64_t kept_bytes, n_kept_ever;
static _Atomic int was_said;

static size_t round_up(size_t nbytes, size_t to) {
    return (nbytes + to - 1) / to * to;
}

void um_place_say(const char *text) {
    if (um_settings_now.pid != um_sys_pid() || atomic_exchange(&was_said, 1) != 0) {
        return;
    }
    static const char end[] = "; unimem report shows how much\n";
    char line[256] = "unimem exec: ";
    size_t n = strlen(line), room = sizeof line - n - sizeof end;
    strncat(line, text, room);
    strcat(line, end);
    ssize_t done = write(STDERR_FILENO, line, strlen(line));
    (void)done;
}

/* ---- mapping ---- */

void *um_place_map(size_t nbytes, size_t align, int protection, int flags) {
    /* The kernel aligns large mappings to huge pages by itself (Linux 6.7). */
    char *mapped = um_sys_map(NULL, nbytes, protection, flags, -1, 0);
    if (mapped == NULL || (uintptr_t)mapped % align == 0) {
        return mapped;
    }
    um_sys_unmap(mapped, nbytes);
    size_t room = nbytes + align;
    if (room < nbytes) {
        errno = ENOMEM;
        return NULL;
    }
    mapped = um_sys_map(NULL, room, protection, flags, -1, 0);
    if (mapped == NULL) {
        return NULL;
    }
    char *start = mapped + (align - (uintptr_t)mapped % align) % align, *end = start + nbytes;
    if (start > mapped) {
        um_sys_unmap(mapped, (size_t)(start - mapped));
    }
    if (mapped + room > end) {
        um_sys_unmap(end, (size_t)(mapped + room - end));
    }
    return start;
}

static size_t hugetlb_bytes(void) {
    return um_settings_now.pages == UM_EXEC_2M   ? (size_t)2 << 20
           : um_settings_now.pages == UM_EXEC_1G ? (size_t)1 << 30
                                                 : 0;
}

/* The size of a mapping of malloc's kind, without hugetlb pages. */
static size_t rounded(size_t nbytes) {
    const um_settings *asked = &um_settings_now;
    size_t page = asked->page_bytes;
    /* As a block's, in huge pages from one of them on; `auto` wastes nothing on less. */
    if (asked->thp_bytes != 0 && (nbytes >= asked->thp_bytes || asked->pages != UM_EXEC_AUTO)) {
        page = asked->thp_bytes;
    }
    return round_up(nbytes, page);
}

/* ---- placing ---- */

/* Sets pages and nodes before anything is touched, and locks. Returns false if this is asked for
 * strictly, and cannot be had. */
static bool place(um_record *record) {
    const um_settings *asked = &um_settings_now;
    void *at = (void *)(uintptr_t)record->address;
    bool hugetlb = (record->state & UM_IS_HUGETLB) != 0;
    if (!hugetlb && asked->thp_bytes != 0 && record->nbytes >= asked->thp_bytes &&
        um_sys_advise(at, record->nbytes, MADV_HUGEPAGE) == 0) {
        record->state |= UM_IS_ADVISED;
    }
    if (asked->numa_mode >= 0 &&
        um_sys_bind(at, record->nbytes, asked->numa_mode, asked->nodes) == 0) {
        record->state |= UM_IS_BOUND;
    }
    /* hugetlb pages are never swapped out. */
    if (asked->lock && (hugetlb || um_sys_lock(at, record->nbytes) == 0)) {
        record->state |= UM_IS_LOCKED;
    }
    bool all = (asked->numa_mode < 0 || (record->state & UM_IS_BOUND) != 0) &&
               (!asked->lock || (record->state & UM_IS_LOCKED) != 0);
    return all || !asked->strict;
}

/* Prefaults as much as there was room for at the start: beyond that, touching what the program
 * never touches could end it. */
static void prefault(um_record *record) {
    const um_settings *asked = &um_settings_now;
    um_table_lock();
    um_counts *counts = um_table_counts();
    bool has_room = counts->prefaulted_bytes + record->nbytes <= asked->prefault_bytes;
    if (has_room) {
        counts->prefaulted_bytes += record->nbytes;
    }
    um_table_unlock();
    if (!has_room) {
        return;
    }
    record->state |= UM_IS_PREFAULTED;
    bool huge = (record->state & UM_IS_ADVISED) != 0;
    if (um_prefault((void *)(uintptr_t)record->address, record->nbytes, huge, asked->n_threads)) {
        record->state |= UM_IS_STALLED;
        um_place_say("the kernel was slow in finding huge pages: small ones were taken instead");
    }
}

static void count_shortfalls(const um_record *record) {
    const um_settings *asked = &um_settings_now;
    um_counts *counts = um_table_counts();
    counts->n_fallback += (record->state & UM_IS_FALLBACK) != 0;
    counts->n_stalled += (record->state & UM_IS_STALLED) != 0;
    bool unbound = asked->numa_mode >= 0 && (record->state & UM_IS_BOUND) == 0;
    bool unlocked = asked->lock && (record->state & UM_IS_LOCKED) == 0;
    counts->n_unbound += unbound;
    counts->n_unlocked += unlocked;
    if (unlocked) {
        um_place_say("the limit on locked memory was reached (ulimit -l): the rest is not locked");
    } else if (unbound) {
        um_place_say("the kernel refused the NUMA policy of an allocation");
    } else if ((record->state & UM_IS_FALLBACK) != 0) {
        um_place_say(
            "the pool of huge pages has no more room: transparent ones were taken instead");
    }
}

/* Enters what was placed. Returns false where there is no room in the table. */
static bool enter(const um_record *record) {
    um_table_lock();
    bool done = um_table_add(*record);
    if ((record->state & UM_IS_PREFAULTED) != 0) {
        um_table_counts()->prefaulted_bytes -= record->nbytes; /* the table counts it now */
    }
    if (done) {
        um_table_begin();
        count_shortfalls(record);
        um_table_end();
    }
    um_table_unlock();
    return done;
}

/* Maps hugetlb pages. Bound ones are touched at once: where their node had none, a later touch
 * would end the program. */
static bool map_hugetlb(um_record *record, size_t align) {
    size_t page = hugetlb_bytes();
    int shift = page == (size_t)2 << 20 ? 21 : 30;
    record->nbytes = round_up(record->asked, page);
    void *at = um_place_map(record->nbytes, align > page ? align : page, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | shift << MAP_HUGE_SHIFT);
    if (at == NULL) {
        return false;
    }
    record->address = (uintptr_t)at;
    record->state = UM_IS_HUGETLB;
    bool placed = place(record);
    if (placed && um_settings_now.numa_mode == UM__MPOL_BIND) {
        placed = um_sys_advise(at, record->nbytes, MADV_POPULATE_WRITE) == 0;
    }
    if (!placed) {
        um_sys_unmap(at, record->nbytes);
    }
    return placed;
}

static bool map_plain(um_record *record, size_t align) {
    record->nbytes = rounded(record->asked);
    record->state = hugetlb_bytes() != 0 ? UM_IS_FALLBACK : 0;
    void *at =
        um_place_map(record->nbytes, align, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
    if (at == NULL) {
        return false;
    }
    record->address = (uintptr_t)at;
    if (!place(record)) {
        um_sys_unmap(at, record->nbytes);
        return false;
    }
    return true;
}

/* ---- what was freed, and is kept ---- */

static bool take_kept(size_t nbytes, size_t align, um_via via, um_record *out) {
    size_t wanted = rounded(nbytes);
    bool found = false;
    um_table_lock();
    for (int i = 0; i < MOST_KEPT && !found; i++) {
        um_record *record = &kept_now[i].record;
        if (kept_now[i].since != 0 && record->nbytes >= wanted &&
            record->nbytes - wanted <= wanted / 8 && record->address % align == 0) {
            kept_now[i].since = 0;
            kept_bytes -= record->nbytes;
            um_record *entered = um_table_find((void *)(uintptr_t)record->address);
            um_record now = *entered;
            now.asked = nbytes;
            now.via = via;
            now.state &= ~(uint32_t)UM_IS_KEPT;
            found = um_table_change(entered, now);
            *out = now;
        }
    }
    um_table_unlock();
    return found;
}

/* Keeps a mapping; gives those that have to go for it. Wants the lock. */
static bool keep(um_record *record, um_record *out_gone, int *out_n) {
    *out_n = 0;
    if (record->nbytes > KEPT_BYTES / 4) {
        return false;
    }
    int at = -1;
    while (at < 0 || kept_bytes + record->nbytes > KEPT_BYTES) {
        int oldest = -1;
        for (int i = 0; i < MOST_KEPT; i++) {
            if (kept_now[i].since == 0) {
                at = i;
            } else if (oldest < 0 || kept_now[i].since < kept_now[oldest].since) {
                oldest = i;
            }
        }
        if (at >= 0 && kept_bytes + record->nbytes <= KEPT_BYTES) {
            break;
        }
        kept_now[oldest].since = 0;
        kept_bytes -= kept_now[oldest].record.nbytes;
        um_table_remove((void *)(uintptr_t)kept_now[oldest].record.address, &out_gone[*out_n]);
        *out_n += 1;
    }
    um_record now = *record;
    now.state |= UM_IS_KEPT;
    if (!um_table_change(record, now)) {
        return false;
    }
    kept_now[at] = (kept){.record = now, .since = ++n_kept_ever};
    kept_bytes += now.nbytes;
    return true;
}

/* ---- malloc's kind ---- */

void *um_place_take(size_t nbytes, size_t align, um_via via, bool *zeroed) {
    const um_settings *asked = &um_settings_now;
    um_record record = {.asked = nbytes, .via = via};
    if (nbytes > asked->most_bytes) {
        return NULL;
    }
    *zeroed = false;
    if (take_kept(nbytes, align, via, &record)) {
        return (void *)(uintptr_t)record.address;
    }
    *zeroed = true;
    bool done = hugetlb_bytes() != 0 && map_hugetlb(&record, align);
    if (!done && (!asked->strict || hugetlb_bytes() == 0)) {
        done = map_plain(&record, align);
    }
    if (!done) {
        um_table_lock();
        um_table_begin();
        um_table_counts()->n_passed_on++;
        um_table_end();
        um_table_unlock();
        if (asked->strict) {
            um_place_say("--strict: an allocation that could not be placed as asked has failed");
        }
        return NULL;
    }
    if (asked->prefault_bytes != 0) {
        prefault(&record);
    }
    void *address = (void *)(uintptr_t)record.address;
    if (!enter(&record)) {
        um_sys_unmap(address, record.nbytes);
        return NULL;
    }
    return address;
}

static void end_mapping(const um_record *record) {
    if (um_settings_now.report) {
        um_table_note_end(record);
    }
    um_sys_unmap((void *)(uintptr_t)record->address, record->nbytes);
}

bool um_place_give(void *address) {
    um_record gone[MOST_KEPT + 1];
    int n = 0;
    um_table_lock();
    um_record *found = um_table_find(address);
    if (found == NULL) {
        um_table_unlock();
        return false;
    }
    if ((found->state & UM_IS_KEPT) != 0) {
        abort(); /* freed twice, as the C library ends it */
    }
    if (!keep(found, gone, &n)) {
        um_table_remove(address, &gone[n++]);
    }
    um_table_unlock();
    for (int i = 0; i < n; i++) {
        end_mapping(&gone[i]);
    }
    return true;
}

/* Gives a mapping another size, and another address where it has no room. Wants the lock: no other
 * thread may enter the old addresses meanwhile. */
static void *resize(um_record *record, size_t wanted, size_t nbytes) {
    um_record now = *record;
    void *at = (void *)(uintptr_t)record->address, *old = at;
    size_t was = record->nbytes;
    if (wanted > was && um_sys_remap(old, was, wanted, 0, NULL) == NULL) {
        at = um_place_map(wanted, UM_SLOT_BYTES, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE);
        if (at == NULL) {
            return NULL;
        }
        /* Whole huge pages move with their tables. */
        if (um_sys_remap(old, was, wanted, MREMAP_MAYMOVE | MREMAP_FIXED, at) == NULL) {
            um_sys_unmap(at, wanted);
            return NULL;
        }
    }
    now.address = (uintptr_t)at;
    now.nbytes = wanted;
    now.asked = nbytes;
    um_table_change(record, now);
    if (wanted < was) {
        um_sys_unmap((char *)old + wanted, was - wanted);
    }
    return at;
}

void *um_place_resize(void *address, size_t nbytes) {
    void *result = NULL;
    um_table_lock();
    um_record *found = um_table_find(address);
    if (found != NULL && (found->state & UM_IS_HUGETLB) != 0) {
        /* These neither grow nor move: a copy does. */
        result = nbytes <= found->nbytes && nbytes >= found->nbytes / 2 ? address : NULL;
    } else if (found != NULL && nbytes <= um_settings_now.most_bytes) {
        result = resize(found, rounded(nbytes), nbytes);
    }
    um_table_unlock();
    return result;
}

/* ---- mmap's kind ---- */

bool um_place_range(void *address, size_t nbytes, bool touch) {
    um_record record = {
        .address = (uintptr_t)address, .nbytes = nbytes, .asked = nbytes, .via = UM_VIA_MMAP};
    if (!place(&record)) {
        um_place_say("--strict: a mapping that could not be placed as asked has failed");
        return false;
    }
    if (touch) {
        um_prefault(address, nbytes, (record.state & UM_IS_ADVISED) != 0,
                    um_settings_now.n_threads);
    } else if (um_settings_now.prefault_bytes != 0) {
        prefault(&record);
    }
    enter(&record); /* without room in the table it is placed, and not shown */
    return true;
}
