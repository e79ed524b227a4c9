/* One mapping: where it lies, how it is placed, and its end. */
#include "exec.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "os/kernel.h" /* behind the system's headers */

/* Freed mappings, for the next allocation of their size: a program that takes and frees the same
 * again and again would fault it in each time. */
enum { MOST_KEPT = 16, KEPT_BYTES = 64 << 20 };

typedef struct kept {
    um__record record;
    uint64_t since; /* 0: none */
} kept;

static kept kept_now[MOST_KEPT]; /* under the table's lock */
static uint64_t kept_bytes, n_kept_ever;
/* Of a large mapping, so much is tried; other memory follows what the last trial has found. */
enum { TRIAL_SHARE = 16, MOST_TRIED = 32 << 20 };
static const uint64_t SLOW_FOR_NS = 2000000000;
static _Atomic uint64_t slow_until;
static _Atomic int was_said;
static _Atomic uint64_t n_taken;
static atomic_bool is_owing; /* something was freed while a thread forked */
enum { STRICT_WAITS = 10 };
void (*um__when_refused)(void);

static size_t round_up(size_t nbytes, size_t to) {
    return (nbytes + to - 1) / to * to;
}

void um__place_say(const char *text) {
    if (um__settings_now.pid != um__sys_pid() || atomic_exchange(&was_said, 1) != 0) {
        return;
    }
    static const char end[] = "; unimem report shows how much\n";
    char line[320] = "unimem exec: ";
    size_t n = strlen(line), room = sizeof line - n - sizeof end;
    strncat(line, text, room);
    strcat(line, end);
    um__sys_print(line);
}

/* ---- mapping ---- */

void *um__place_map(size_t nbytes, size_t align, int protection, int flags) {
    /* The kernel aligns large mappings to huge pages by itself (Linux 6.7). */
    char *mapped = um__sys_map(NULL, nbytes, protection, flags, -1, 0);
    if (mapped == NULL || (uintptr_t)mapped % align == 0) {
        return mapped;
    }
    um__sys_unmap(mapped, nbytes);
    size_t room = nbytes + align;
    if (room < nbytes) {
        errno = ENOMEM;
        return NULL;
    }
    mapped = um__sys_map(NULL, room, protection, flags, -1, 0);
    if (mapped == NULL) {
        return NULL;
    }
    char *start = mapped + (align - (uintptr_t)mapped % align) % align, *end = start + nbytes;
    if (start > mapped) {
        um__sys_unmap(mapped, (size_t)(start - mapped));
    }
    if (mapped + room > end) {
        um__sys_unmap(end, (size_t)(mapped + room - end));
    }
    return start;
}

static size_t hugetlb_bytes(void) {
    return um__settings_now.pages == UM__2M   ? (size_t)2 << 20
           : um__settings_now.pages == UM__1G ? (size_t)1 << 30
                                              : 0;
}

/* Returns the size of a mapping of malloc's kind, without hugetlb pages. */
static size_t rounded(size_t nbytes) {
    const um__settings *asked = &um__settings_now;
    size_t page = asked->page_bytes;
    /* From one huge page on, whole huge pages; `auto` rounds less up to base pages. */
    if (asked->thp_bytes != 0 && (nbytes >= asked->thp_bytes || asked->pages != UM__AUTO)) {
        page = asked->thp_bytes;
    }
    return round_up(nbytes, page);
}

/* ---- placing ---- */

static void *address_of(const um__record *record) {
    return (void *)(uintptr_t)record->address;
}

/* Sets pages and nodes before anything is touched, and locks. Returns false if a part of it fails
 * and `strict` is set. */
static bool place(um__record *record) {
    const um__settings *asked = &um__settings_now;
    void *at = address_of(record);
    bool hugetlb = (record->state & UM__IS_HUGETLB) != 0;
    if (!hugetlb && asked->thp_bytes != 0 && record->nbytes >= asked->thp_bytes &&
        um__sys_advise(at, record->nbytes, MADV_HUGEPAGE) == 0) {
        record->state |= UM__IS_ADVISED;
    }
    if (asked->numa_mode >= 0 &&
        um__sys_bind(at, record->nbytes, asked->numa_mode, asked->nodes) == 0) {
        record->state |= UM__IS_BOUND;
    }
    /* hugetlb pages are never swapped out. */
    if (asked->lock && (hugetlb || um__sys_lock(at, record->nbytes) == 0)) {
        record->state |= UM__IS_LOCKED;
    }
    bool all = (asked->numa_mode < 0 || (record->state & UM__IS_BOUND) != 0) &&
               (!asked->lock || (record->state & UM__IS_LOCKED) != 0);
    return all || !asked->strict;
}

/* Notes that a mapping has small pages for now, which later.c joins. Beside an allocator of the
 * program that has no thread: what was touched is left to the kernel's own. */
static void note_stall(um__record *record) {
    bool joins = um__settings_now.heap_bytes != SIZE_MAX;
    um__sys_advise(address_of(record), record->nbytes, joins ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    record->state |= UM__IS_STALLED | (joins ? UM__IS_DUE : 0U);
}

/* Looks whether huge pages come at once. Of a small mapping, nothing is touched for that. */
static void try_pages(um__record *record) {
    bool stalled = um__sys_now_ns() < slow_until;
    size_t some = record->nbytes / TRIAL_SHARE;
    some = (some < MOST_TRIED ? some : MOST_TRIED) / UM__SLOT_BYTES * UM__SLOT_BYTES;
    if (!um__settings_now.trial || (record->state & UM__IS_ADVISED) == 0) {
        return;
    }
    if (!stalled && some != 0) {
        um__prefault(address_of(record), some, true, 1, &stalled);
        slow_until = stalled ? um__sys_now_ns() + SLOW_FOR_NS : 0;
    }
    if (stalled) {
        note_stall(record);
    }
}

/* Prefaults as much as there was room for at the start: more could end a program that would never
 * touch it. */
static void prefault(um__record *record) {
    const um__settings *asked = &um__settings_now;
    um__table_look();
    um__counts *counts = um__table_counts();
    bool has_room = counts->prefaulted_bytes + record->nbytes <= asked->prefault_bytes;
    if (has_room) {
        counts->prefaulted_bytes += record->nbytes;
    }
    um__table_unlock();
    if (!has_room) {
        return;
    }
    record->state |= UM__IS_PREFAULTED;
    bool huge = (record->state & UM__IS_ADVISED) != 0, stalled;
    um__prefault(address_of(record), record->nbytes, huge, asked->n_threads, &stalled);
    if (stalled) {
        note_stall(record);
        um__place_say("the kernel was slow in finding huge pages: small ones were taken instead");
    }
}

static void count_shortfalls(const um__record *record) {
    const um__settings *asked = &um__settings_now;
    um__counts *counts = um__table_counts();
    counts->n_fallback += (record->state & UM__IS_FALLBACK) != 0;
    counts->n_stalled += (record->state & UM__IS_STALLED) != 0;
    bool unbound = asked->numa_mode >= 0 && (record->state & UM__IS_BOUND) == 0;
    bool unlocked = asked->lock && (record->state & UM__IS_LOCKED) == 0;
    counts->n_unbound += unbound;
    counts->n_unlocked += unlocked;
    if (unlocked) {
        um__place_say("the limit on locked memory was reached (ulimit -l): the rest is not locked");
    } else if (unbound) {
        um__place_say("the kernel refused the NUMA policy of an allocation");
    } else if ((record->state & UM__IS_FALLBACK) != 0) {
        um__place_say(
            "the pool of huge pages has no more room for it: transparent ones were taken instead");
    }
}

/* Returns a state with the number of the next allocation; the last ones share the largest. */
static uint32_t numbered(uint32_t state) {
    uint64_t most = (1U << (32 - UM__NUMBER_SHIFT)) - 1, number = ++n_taken;
    return (state & ((1U << UM__NUMBER_SHIFT) - 1)) | (uint32_t)(number < most ? number : most)
                                                          << UM__NUMBER_SHIFT;
}

/* Enters what was placed. Returns false if the table has no room, or a thread forks. */
static bool enter(const um__record *record) {
    /* Programs end for what `strict` refuses: a slow fork gets a second. */
    for (int i = 1; !um__table_lock() && um__settings_now.strict && i < STRICT_WAITS; i++) {
        um__table_unlock();
    }
    bool done = um__table_add(*record);
    if ((record->state & UM__IS_PREFAULTED) != 0) {
        um__table_counts()->prefaulted_bytes -= record->nbytes; /* the table counts it now */
    }
    if (done) {
        um__table_begin();
        count_shortfalls(record);
        um__table_end();
    }
    um__table_unlock();
    if (done && (record->state & UM__IS_DUE) != 0) {
        um__later_begin();
    }
    return done;
}

/* Maps record->nbytes with these flags, and places them. hugetlb pages are touched at once where a
 * later touch could end the program: the limit of a cgroup, or the node, may have no room for one.
 */
static bool map_placed(um__record *record, size_t align, int flags) {
    void *at = um__place_map(record->nbytes, align, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | flags);
    if (at == NULL) {
        return false;
    }
    record->address = (uintptr_t)at;
    bool placed = place(record), stalled;
    if (placed && flags != 0 && um__settings_now.touch_pool) {
        placed = um__prefault(at, record->nbytes, false, um__settings_now.n_threads, &stalled);
    }
    if (!placed) {
        um__sys_unmap(at, record->nbytes);
    }
    return placed;
}

static bool map_hugetlb(um__record *record, size_t align) {
    size_t page = hugetlb_bytes();
    int shift = __builtin_ctzll(page);
    record->nbytes = round_up(record->asked, page);
    record->state = UM__IS_HUGETLB;
    return map_placed(record, align > page ? align : page, MAP_HUGETLB | shift << MAP_HUGE_SHIFT);
}

static bool map_plain(um__record *record, size_t align) {
    record->nbytes = rounded(record->asked);
    record->state = hugetlb_bytes() != 0 ? UM__IS_FALLBACK : 0;
    return map_placed(record, align, 0);
}

/* ---- freed mappings that are kept ---- */

static bool take_kept(size_t nbytes, size_t align, um__via via, um__record *out) {
    size_t wanted = rounded(nbytes);
    bool found = false, is_child = um__settings_now.pid != um__sys_pid();
    bool may_change = um__table_lock();
    for (int i = 0; i < MOST_KEPT && may_change && !found; i++) {
        um__record *record = &kept_now[i].record;
        um__record *entered = kept_now[i].since != 0 ? um__table_find(address_of(record)) : NULL;
        /* A child's memory is not locked. */
        uint32_t unfit = UM__IS_CHANGED | (is_child ? UM__IS_LOCKED : 0);
        if (entered != NULL && (entered->state & unfit) == 0 && record->nbytes >= wanted &&
            record->nbytes - wanted <= wanted / 8 && record->address % align == 0) {
            kept_now[i].since = 0;
            kept_bytes -= record->nbytes;
            um__record now = *entered;
            now.asked = nbytes;
            now.via = via;
            now.state = numbered(now.state & ~(uint32_t)UM__IS_KEPT);
            found = um__table_change(entered, now);
            *out = now;
        }
    }
    um__table_unlock();
    return found;
}

/* Keeps a mapping, and takes out those that have to go for it. Wants the lock. */
static bool keep(um__record *record, um__record *out_gone, int *out_n) {
    *out_n = 0;
    if (record->nbytes > KEPT_BYTES / 4 || (record->state & UM__IS_CHANGED) != 0) {
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
        um__table_remove(address_of(&kept_now[oldest].record), &out_gone[*out_n]);
        *out_n += 1;
    }
    um__record now = *record;
    now.state |= UM__IS_KEPT;
    if (!um__table_change(record, now)) {
        return false;
    }
    kept_now[at] = (kept){.record = now, .since = ++n_kept_ever};
    kept_bytes += now.nbytes;
    return true;
}

/* ---- malloc's kind ---- */

/* Says which allocation fails under `strict`, before the program ends for it; of a pool, how many
 * pages are missing, and the command that adds them. */
static void say_refused(size_t nbytes) {
    char text[224];
    size_t page = hugetlb_bytes();
    size_t needed = page == 0 ? 0 : (nbytes + page - 1) / page, total = 0, unused = 0;
    if (page == 0 || !um__sys_pool(page, &total, &unused) || unused >= needed) {
        um__place_say("--strict: an allocation that could not be placed as asked has failed");
    } else {
        snprintf(
            text, sizeof text,
            "--strict: an allocation of %zu MiB has failed: %zu huge pages are missing, and the"
            " program may need more: echo %zu > /sys/kernel/mm/hugepages/hugepages-%zukB/"
            "nr_hugepages",
            nbytes >> 20, needed - unused, total + needed - unused, page >> 10);
        um__place_say(text);
    }
    if (um__when_refused != NULL) {
        um__when_refused(); /* programs abort, and then nothing can report */
    }
}

void *um__place_take(size_t nbytes, size_t align, um__via via, bool *zeroed) {
    const um__settings *asked = &um__settings_now;
    um__record record = {.asked = nbytes, .via = via};
    if (nbytes > asked->most_bytes) {
        return NULL;
    }
    *zeroed = false;
    if (take_kept(nbytes, align, via, &record)) {
        return address_of(&record);
    }
    *zeroed = true;
    bool done = hugetlb_bytes() != 0 && map_hugetlb(&record, align);
    if (!done && (!asked->strict || hugetlb_bytes() == 0)) {
        done = map_plain(&record, align);
    }
    if (done) {
        /* Programs take tables by malloc that they hardly fill. */
        if (asked->prefault_bytes != 0 && via == UM__ALIGNED) {
            prefault(&record);
        } else {
            try_pages(&record);
        }
        record.state = numbered(record.state);
        if (enter(&record)) {
            return address_of(&record);
        }
        um__sys_unmap(address_of(&record), record.nbytes);
    }
    um__table_look();
    um__table_begin();
    um__table_counts()->n_passed_on++;
    um__table_end();
    um__table_unlock();
    if (asked->strict) {
        say_refused(nbytes);
    }
    return NULL;
}

/* Keeps a mapping, or takes it out: out_gone has room for all kept ones, and it. Wants the lock. */
static int give(um__record *record, um__record *out_gone) {
    int n = 0;
    if (!keep(record, out_gone, &n)) {
        um__table_remove(address_of(record), &out_gone[n++]);
    }
    return n;
}

static void end_mappings(const um__record *gone, int n) {
    for (int i = 0; i < n; i++) {
        if (um__settings_now.report) {
            um__table_note_end(&gone[i]);
        }
        um__sys_unmap(address_of(&gone[i]), gone[i].nbytes);
    }
}

bool um__place_give(void *address) {
    um__record gone[MOST_KEPT + 1];
    int n = 0;
    bool may_change = um__table_lock();
    um__record *found = um__table_find(address);
    if (found == NULL) {
        um__table_unlock();
        return false;
    }
    if ((found->state & (UM__IS_KEPT | UM__IS_OWED)) != 0) {
        um__table_unlock(); /* a handler of SIGABRT may allocate */
        abort();            /* freed twice: the C library ends it so, too */
    }
    if (may_change) {
        n = give(found, gone);
    } else {
        is_owing = true; /* first: the child may see only this */
        um__table_set_state(found, found->state | UM__IS_OWED);
    }
    um__table_unlock();
    end_mappings(gone, n);
    return true;
}

void um__place_settle(void) {
    um__record gone[MOST_KEPT + 1];
    while (is_owing) {
        int n = 0;
        bool may_change = um__table_lock();
        um__record *owed = may_change ? um__table_any(UM__IS_OWED) : NULL;
        is_owing = owed != NULL || !may_change;
        if (owed != NULL) {
            um__table_set_state(owed, owed->state & ~(uint32_t)UM__IS_OWED);
            n = give(owed, gone);
        }
        um__table_unlock();
        end_mappings(gone, n);
        if (!may_change) {
            return; /* another thread forks, and comes here afterwards */
        }
    }
}

/* Gives a mapping another size, and another address if it has no room. Wants the lock: no other
 * thread may enter the old addresses meanwhile. */
static void *resize(um__record *record, size_t wanted, size_t nbytes) {
    um__record now = *record;
    void *at = address_of(record), *old = at;
    size_t was = record->nbytes;
    if (wanted > was && um__sys_remap(old, was, wanted, 0, NULL) == NULL) {
        at = um__place_map(wanted, UM__SLOT_BYTES, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE);
        if (at == NULL) {
            return NULL;
        }
        /* Whole huge pages move with their tables. */
        if (um__sys_remap(old, was, wanted, MREMAP_MAYMOVE | MREMAP_FIXED, at) == NULL) {
            um__sys_unmap(at, wanted);
            return NULL;
        }
    }
    now.address = (uintptr_t)at;
    now.nbytes = wanted;
    now.asked = nbytes;
    if (wanted > was) { /* a mapping whose end was not seen may be on record there */
        size_t kept = at == old ? was : 0;
        um__table_cut(now.address + kept, wanted - kept);
    }
    um__table_change(record, now);
    if (wanted < was) {
        um__sys_unmap((char *)old + wanted, was - wanted);
    }
    return at;
}

void *um__place_resize(void *address, size_t nbytes) {
    void *result = NULL;
    um__record *found = um__table_lock() ? um__table_find(address) : NULL;
    if (found != NULL && (found->state & UM__IS_HUGETLB) != 0) {
        /* These neither grow nor move: a copy does. */
        result = nbytes <= found->nbytes && nbytes >= found->nbytes / 2 ? address : NULL;
    } else if (found != NULL && nbytes <= um__settings_now.most_bytes) {
        /* From small pages to huge ones, a copy of less than one. */
        size_t wanted = rounded(nbytes), huge = um__settings_now.thp_bytes;
        bool is_anew = huge != 0 && found->nbytes < huge && wanted >= huge;
        result = is_anew ? NULL : resize(found, wanted, nbytes);
    }
    um__table_unlock();
    return result;
}

/* ---- mmap's kind ---- */

void um__place_again(um__record *record) {
    place(record);
}

bool um__place_range(void *address, size_t nbytes, bool touch) {
    um__record record = {
        .address = (uintptr_t)address, .nbytes = nbytes, .asked = nbytes, .via = UM__MMAP};
    if (!place(&record)) {
        um__place_say("--strict: a mapping that could not be placed as asked has failed");
        return false;
    }
    bool huge = (record.state & UM__IS_ADVISED) != 0, stalled;
    if (touch) {
        um__prefault(address, nbytes, huge, um__settings_now.n_threads, &stalled);
        if (stalled) {
            note_stall(&record);
        }
    } else if (um__settings_now.prefault_bytes != 0) {
        prefault(&record);
    } else {
        try_pages(&record);
    }
    /* Without room in the table it is placed, and not shown: later.c does not know it. */
    if (!enter(&record) && (record.state & UM__IS_DUE) != 0) {
        um__sys_advise(address, nbytes, MADV_HUGEPAGE);
    }
    return true;
}
