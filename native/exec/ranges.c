/* mmap and its kind. A mapping stays the program's own, in its size: it is aligned to huge pages,
 * and gets pages, nodes and lock. The table follows what becomes of it. */
#include "exec.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "os/kernel.h"

static size_t in_pages(size_t nbytes) {
    size_t page = um__settings_now.page_bytes;
    return (nbytes + page - 1) / page * page;
}

/* Returns whether a mapping is memory that a program will read and write, at any address: neither a
 * stack nor a reservation. */
static bool is_plain(void *at, size_t nbytes, int protection, int flags) {
    const um__settings *asked = &um__settings_now;
    int known = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_POPULATE;
    return asked->active && nbytes >= asked->min_bytes && nbytes <= asked->most_bytes &&
           at == NULL && protection == (PROT_READ | PROT_WRITE) &&
           (flags & (MAP_PRIVATE | MAP_ANONYMOUS)) == (MAP_PRIVATE | MAP_ANONYMOUS) &&
           (flags & ~known) == 0;
}

static void *map_plain(size_t nbytes, int protection, int flags) {
    size_t huge = um__settings_now.thp_bytes;
    size_t align = huge != 0 && nbytes >= huge ? huge : um__settings_now.page_bytes;
    /* Pages that are found before the policy is set would lie anywhere. */
    void *mapped = um__place_map(in_pages(nbytes), align, protection, flags & ~MAP_POPULATE);
    if (mapped != NULL && !um__place_range(mapped, in_pages(nbytes), (flags & MAP_POPULATE) != 0)) {
        um__sys_unmap(mapped, in_pages(nbytes));
        errno = ENOMEM;
        return NULL;
    }
    return mapped;
}

void *um__ranges_map(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    void *mapped;
    if (at == NULL && (flags & MAP_FIXED) != 0) {
        /* To system.c, address 0 means a failure; programs that may map it are rare. */
        errno = EPERM;
        return MAP_FAILED;
    }
    if (is_plain(at, nbytes, protection, flags)) {
        mapped = map_plain(nbytes, protection, flags);
    } else if ((flags & MAP_FIXED) != 0 && (flags & MAP_FIXED_NOREPLACE) != MAP_FIXED_NOREPLACE &&
               um__table_may_overlap((uintptr_t)at, nbytes)) {
        um__table_lock();
        mapped = um__sys_map(at, nbytes, protection, flags, fd, offset);
        if (mapped != NULL) {
            um__table_cut((uintptr_t)at, in_pages(nbytes));
        }
        um__table_unlock();
    } else {
        mapped = um__sys_map(at, nbytes, protection, flags, fd, offset);
    }
    return mapped == NULL ? MAP_FAILED : mapped;
}

/* Records, for --report, what became of a whole mapping that ends. */
static void note_end(uintptr_t address, size_t nbytes) {
    um__record lost;
    um__table_look();
    bool whole = um__table_overlaps(address, nbytes, &lost) && lost.address == address &&
                 lost.nbytes == in_pages(nbytes);
    um__table_unlock();
    if (whole) {
        um__table_note_end(&lost);
    }
}

int um__ranges_unmap(void *at, size_t nbytes) {
    if (!um__table_may_overlap((uintptr_t)at, nbytes)) {
        return um__sys_unmap(at, nbytes);
    }
    if (um__settings_now.report) {
        note_end((uintptr_t)at, nbytes);
    }
    um__table_lock();
    int result = um__sys_unmap(at, nbytes);
    if (result == 0) {
        um__table_cut((uintptr_t)at, in_pages(nbytes));
    }
    um__table_unlock();
    return result;
}

void *um__ranges_remap(void *at, size_t nbytes, size_t new_nbytes, int flags, void *new_at) {
    um__record moved;
    bool replaces = (flags & MREMAP_FIXED) != 0;
    if (!um__table_may_overlap((uintptr_t)at, nbytes) &&
        !(replaces && um__table_may_overlap((uintptr_t)new_at, new_nbytes))) {
        void *mapped = um__sys_remap(at, nbytes, new_nbytes, flags, new_at);
        return mapped == NULL ? MAP_FAILED : mapped;
    }
    um__table_lock();
    bool ours = um__table_overlaps((uintptr_t)at, nbytes, &moved);
    void *mapped = um__sys_remap(at, nbytes, new_nbytes, flags, new_at);
    if (mapped != NULL) {
        if (replaces) {
            um__table_cut((uintptr_t)new_at, in_pages(new_nbytes));
        }
        if ((flags & MREMAP_DONTUNMAP) == 0) {
            um__table_cut((uintptr_t)at, in_pages(nbytes));
        }
        if (ours) {
            moved.address = (uintptr_t)mapped;
            moved.nbytes = in_pages(new_nbytes);
            moved.asked = new_nbytes;
            if (new_nbytes > nbytes) {
                um__place_again(&moved);
            }
            um__table_add(moved);
        }
    }
    um__table_unlock();
    return mapped == NULL ? MAP_FAILED : mapped;
}

/* Returns whether nothing of this advice is left when memory is freed and used again. */
static bool is_passing(int advice) {
    switch (advice) {
    case MADV_WILLNEED:
    case MADV_DONTNEED:
    case MADV_FREE:
    case MADV_REMOVE:
    case MADV_HUGEPAGE: /* as placed memory has them */
    case MADV_COLD:
    case MADV_PAGEOUT:
    case MADV_POPULATE_READ:
    case MADV_POPULATE_WRITE:
    case MADV_DONTNEED_LOCKED:
    case MADV_COLLAPSE:
        return true;
    default:
        return false;
    }
}

/* Gives back locked pages, which the kernel refuses. Clears hugetlb pages that the program gives
 * back: the kernel would refuse parts, and promise no other page for a whole one. */
int um__ranges_advise(void *at, size_t nbytes, int advice) {
    const um__settings *asked = &um__settings_now;
    bool gives = asked->active && (advice == MADV_DONTNEED || advice == MADV_FREE);
    bool may_be_hugetlb = asked->pages >= UM__2M && (uintptr_t)at % asked->page_bytes == 0;
    if (gives && may_be_hugetlb && um__table_is_hugetlb((uintptr_t)at, in_pages(nbytes))) {
        memset(at, 0, in_pages(nbytes));
        return 0;
    }
    if (!is_passing(advice)) {
        um__table_note_change((uintptr_t)at, nbytes);
    }
    int result = um__sys_advise(at, nbytes, advice);
    if (result == 0 || errno != EINVAL || !gives || !asked->lock) {
        return result;
    }
    um__record found;
    um__table_look();
    bool ours = um__table_overlaps((uintptr_t)at, nbytes, &found);
    um__table_unlock();
    return ours ? um__sys_advise(at, nbytes, MADV_DONTNEED_LOCKED) : result;
}
