/* Blocks: mapped memory, its pages, and what the kernel says of it. */
#include "internal.h"
#include "os.h"

#include <errno.h>
#include <stdlib.h>

size_t um_page_bytes(void) {
    return um_os_page_bytes();
}

/* A small file of /proc or /sys as text; its length, or 0. */
static size_t read_text(const char *path, char *out, size_t capacity) {
    int fd;
    size_t n = 0;
    if (um_os_open_read(path, &fd) != 0) {
        return 0;
    }
    if (um_os_read(fd, out, capacity - 1, &n) != 0) {
        n = 0;
    }
    um_os_close(fd);
    out[n] = '\0';
    return n;
}

size_t um_huge_page_bytes(void) {
    char text[32];
    size_t n = read_text("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", text, sizeof text);
    return n == 0 ? 0 : (size_t)strtoull(text, NULL, 10);
}

um_status um_space_reserve(um_space *out, size_t nbytes, size_t align, size_t phase, size_t asked,
                           um_error *err) {
    size_t page = um_os_page_bytes(), reserved_nbytes;
    if (!um_add(nbytes, align + 2 * page, &reserved_nbytes)) {
        return um_fail(err, UM_E_INVALID, "nbytes");
    }
    void *reserved;
    int os_errno = um_os_reserve(reserved_nbytes, &reserved);
    if (os_errno != 0) {
        return um_fail_os(err, os_errno, asked, "mmap");
    }
    /* More was reserved than is needed, so that the data can be aligned inside it; the rest goes
     * back. */
    uintptr_t start = (uintptr_t)reserved, end = start + reserved_nbytes;
    uintptr_t data = ((start + page - phase + align - 1) & ~(uintptr_t)(align - 1)) + phase;
    uintptr_t map_base = data - page, map_end = data + nbytes + page;
    if (map_base > start) {
        os_errno = um_os_unmap(reserved, map_base - start);
        start = os_errno == 0 ? map_base : start;
    }
    if (os_errno == 0 && end > map_end) {
        os_errno = um_os_unmap((void *)map_end, end - map_end);
    }
    if (os_errno != 0) {
        /* Only what is still ours: another thread may have mapped what was given back. */
        um_os_unmap((void *)start, end - start);
        return um_fail_os(err, os_errno, asked, "munmap");
    }
    *out = (um_space){
        .data = (void *)data, .map_base = (void *)map_base, .map_nbytes = map_end - map_base};
    return UM_OK;
}

um_status um_block_map(um_block *out, size_t nbytes, um_pages pages, um_category category,
                       um_error *err) {
    size_t page = um_os_page_bytes();
    if (um_category_name(category) == NULL) {
        return um_fail(err, UM_E_INVALID, "category");
    }
    if (pages != UM_PAGES_AUTO && pages != UM_PAGES_4K && pages != UM_PAGES_THP) {
        return um_fail(err, UM_E_INVALID, "pages");
    }
    size_t huge_page = pages == UM_PAGES_4K ? 0 : um_huge_page_bytes();
    bool huge = huge_page != 0 && (pages == UM_PAGES_THP || nbytes >= huge_page);
    size_t align = huge ? huge_page : page;
    size_t data_nbytes;
    if (nbytes == 0 || !um_round_up(nbytes, align, &data_nbytes)) {
        return um_fail(err, UM_E_INVALID, "nbytes");
    }
    um_space space;
    um_status status = um_space_reserve(&space, data_nbytes, align, 0, nbytes, err);
    if (status != UM_OK) {
        return status;
    }
    const char *call = "mmap";
    int os_errno = um_os_map_at(space.data, data_nbytes);
    if (os_errno == 0 && (huge_page != 0 || pages == UM_PAGES_4K)) {
        call = "madvise";
        os_errno = um_os_advise_huge(space.data, data_nbytes, huge);
        if (os_errno == EINVAL && pages == UM_PAGES_4K) {
            os_errno = 0; /* a kernel without THP, where 4k pages need no advice */
        }
    }
    if (os_errno != 0) {
        um_os_unmap(space.map_base, space.map_nbytes);
        return um_fail_os(err, os_errno, nbytes, call);
    }
    *out = (um_block){.base = space.data,
                      .nbytes = data_nbytes,
                      .requested_nbytes = nbytes,
                      .requested_pages = pages,
                      .category = category,
                      .map_base = space.map_base,
                      .map_nbytes = space.map_nbytes,
                      .is_file = 0};
    um_ledger_enter(category, data_nbytes);
    return UM_OK;
}

um_status um_block_unmap(um_block *block, um_error *err) {
    if (block->map_base == NULL) {
        return UM_OK;
    }
    int os_errno = um_os_unmap(block->map_base, block->map_nbytes);
    if (os_errno != 0) {
        return um_fail_os(err, os_errno, block->map_nbytes, "munmap");
    }
    um_ledger_leave(block->category, block->map_nbytes - 2 * um_os_page_bytes());
    *block = (um_block){0};
    return UM_OK;
}

/* ---- warming ---- */

enum { CPU_MASK_WORDS = 1024 / 64, WARM_STEP_BYTES = 16 << 20, MAX_WARM_THREADS = 64 };

typedef struct warm_part {
    char *address;
    size_t nbytes;
    int write;
    int cpu; /* -1: anywhere */
    int os_errno;
    um_os_thread thread;
} warm_part;

/* Populates in steps, so that a signal or a full system is noticed between them. */
static void *warm_run(void *arg) {
    warm_part *part = arg;
    if (part->cpu >= 0) {
        uint64_t mask[CPU_MASK_WORDS] = {0};
        mask[part->cpu / 64] |= UINT64_C(1) << (part->cpu % 64);
        /* A thread that cannot be pinned still warms; it may only be slower. */
        um_os_set_affinity(mask, sizeof mask);
    }
    for (size_t done = 0; done < part->nbytes && part->os_errno == 0;) {
        size_t left = part->nbytes - done, step = left < WARM_STEP_BYTES ? left : WARM_STEP_BYTES;
        int os_errno = um_os_populate(part->address + done, step, part->write);
        if (os_errno == 0) {
            done += step;
        } else if (os_errno != EINTR && os_errno != EAGAIN) {
            part->os_errno = os_errno;
        }
    }
    return NULL;
}

/* The n-th CPU of the mask, counting round; -1 for an empty mask. */
static int nth_cpu(const uint64_t *mask, unsigned n) {
    int cpus[CPU_MASK_WORDS * 64], count = 0;
    for (int cpu = 0; cpu < CPU_MASK_WORDS * 64; cpu++) {
        if (mask[cpu / 64] >> (cpu % 64) & 1) {
            cpus[count++] = cpu;
        }
    }
    return count == 0 ? -1 : cpus[n % (unsigned)count];
}

um_status um_block_warm(um_block *block, size_t offset, size_t nbytes, unsigned n_threads,
                        um_error *err) {
    size_t end;
    if (!um_add(offset, nbytes, &end) || end > block->nbytes) {
        return um_fail(err, UM_E_INVALID, "the range is outside the block");
    }
    if (n_threads == 0) {
        return um_fail(err, UM_E_INVALID, "n_threads");
    }
    if (nbytes == 0) {
        return UM_OK;
    }
    size_t align = um_os_page_bytes();
    if (!block->is_file && block->requested_pages != UM_PAGES_4K) {
        /* Threads meet at huge page borders: two that fill one huge page together get small ones.
         */
        size_t huge_page = um_huge_page_bytes();
        align = huge_page > align && block->nbytes % huge_page == 0 ? huge_page : align;
    }
    size_t page = um_os_page_bytes();
    size_t first = offset / page * page, last = (end + page - 1) / page * page;
    if (n_threads > MAX_WARM_THREADS) {
        n_threads = MAX_WARM_THREADS;
    }
    /* From the border below the first byte: so there are never more parts than threads. */
    size_t share = ((last - first / align * align) / n_threads / align + 1) * align;

    uint64_t mask[CPU_MASK_WORDS] = {0};
    if (n_threads > 1 && um_os_get_affinity(mask, sizeof mask) != 0) {
        memset(mask, 0, sizeof mask);
    }
    warm_part parts[MAX_WARM_THREADS] = {0};
    unsigned n_parts = 0;
    for (size_t at = first; at < last; n_parts++) {
        size_t part_end = (at / align * align) + share;
        part_end = part_end < last ? part_end : last;
        parts[n_parts] = (warm_part){.address = (char *)block->base + at,
                                     .nbytes = part_end - at,
                                     .write = !block->is_file,
                                     .cpu = n_threads > 1 ? nth_cpu(mask, n_parts) : -1};
        at = part_end;
    }
    /* One thread of one's own is the caller's, unpinned: its affinity is not ours to change. */
    unsigned n_started = 0;
    int os_errno = 0;
    if (n_parts == 1) {
        warm_run(&parts[0]);
    } else {
        while (n_started < n_parts && os_errno == 0) {
            os_errno = um_os_thread_start(&parts[n_started].thread, warm_run, &parts[n_started]);
            n_started += os_errno == 0;
        }
        for (unsigned i = 0; i < n_started; i++) {
            um_os_thread_join(parts[i].thread);
        }
        if (os_errno != 0) {
            return um_fail_os(err, os_errno, nbytes, "pthread_create");
        }
    }
    for (unsigned i = 0; i < n_parts; i++) {
        if (parts[i].os_errno == EFAULT && block->is_file) {
            return um_fail(err, UM_E_IO, "madvise"); /* pages behind the end of the file */
        }
        if (parts[i].os_errno != 0) {
            return um_fail_os(err, parts[i].os_errno, nbytes, "madvise");
        }
    }
    return UM_OK;
}

/* ---- verifying ---- */

/* Reads a file line by line through a buffer of its own. */
typedef struct line_reader {
    int fd;
    size_t used, at;
    char buffer[32768];
} line_reader;

/* The next line without its end, cut off at the buffer's size; NULL at the end (os_errno 0) or on
 * failure. */
static char *next_line(line_reader *reader, int *os_errno) {
    for (;;) {
        char *start = reader->buffer + reader->at;
        char *end = memchr(start, '\n', reader->used - reader->at);
        if (end != NULL) {
            *end = '\0';
            reader->at = (size_t)(end - reader->buffer) + 1;
            return start;
        }
        size_t rest = reader->used - reader->at, n;
        if (rest == sizeof reader->buffer) {
            rest = 0; /* a line longer than the buffer holds nothing that is looked for */
        }
        memmove(reader->buffer, reader->buffer + reader->used - rest, rest);
        reader->used = rest;
        reader->at = 0;
        do {
            *os_errno =
                um_os_read(reader->fd, reader->buffer + rest, sizeof reader->buffer - rest, &n);
        } while (*os_errno == EINTR);
        if (*os_errno != 0 || n == 0) {
            return NULL;
        }
        reader->used += n;
    }
}

/* Adds a line such as "Rss:   1234 kB" to *bytes when it has this name. */
static bool add_field(const char *line, const char *name, uint64_t *bytes) {
    size_t n = strlen(name);
    if (strncmp(line, name, n) != 0 || line[n] != ':') {
        return false;
    }
    *bytes += strtoull(line + n + 1, NULL, 10) * 1024;
    return true;
}

um_status um_block_verify(const um_block *block, um_placement *out, um_error *err) {
    uintptr_t first = (uintptr_t)block->base, last = first + block->nbytes;
    line_reader reader = {0};
    int os_errno = um_os_open_read("/proc/self/smaps", &reader.fd);
    if (os_errno != 0) {
        return um_fail_os(err, os_errno, 0, "open /proc/self/smaps");
    }
    um_placement found = {0};
    uint64_t eligible = 0;
    bool inside = false;
    for (char *line; (line = next_line(&reader, &os_errno)) != NULL;) {
        char *after;
        uintptr_t start = (uintptr_t)strtoull(line, &after, 16);
        if (after != line && *after == '-') {
            uintptr_t end = (uintptr_t)strtoull(after + 1, NULL, 16);
            if (start >= last) {
                break; /* entries are in the order of addresses */
            }
            inside = end > first;
        } else if (inside) {
            (void)(add_field(line, "Rss", &found.resident_bytes) ||
                   add_field(line, "Pss", &found.pss_bytes) ||
                   add_field(line, "AnonHugePages", &found.huge_bytes) ||
                   add_field(line, "ShmemPmdMapped", &found.huge_bytes) ||
                   add_field(line, "FilePmdMapped", &found.huge_bytes) ||
                   add_field(line, "Locked", &found.locked_bytes) ||
                   add_field(line, "Swap", &found.swapped_bytes) ||
                   add_field(line, "THPeligible", &eligible));
        }
    }
    um_os_close(reader.fd);
    if (os_errno != 0) {
        um_fail(err, UM_E_IO, "read /proc/self/smaps");
        if (err != NULL) {
            err->os_errno = os_errno;
        }
        return UM_E_IO;
    }
    /* Pages that are there say what they are; before the first one, eligibility says what they will
     * be. */
    bool huge = found.huge_bytes > 0 || (found.resident_bytes == 0 && eligible > 0);
    found.pages = huge ? UM_PAGES_THP : UM_PAGES_4K;
    found.page_bytes = huge ? um_huge_page_bytes() : um_os_page_bytes();
    *out = found;
    return UM_OK;
}

um_status um_block_resident(const um_block *block, size_t offset, size_t nbytes,
                            uint64_t *out_bytes, um_error *err) {
    size_t end, page = um_os_page_bytes();
    if (!um_add(offset, nbytes, &end) || end > block->nbytes) {
        return um_fail(err, UM_E_INVALID, "the range is outside the block");
    }
    unsigned char pages[4096];
    uint64_t n_resident = 0;
    size_t last = (end + page - 1) / page * page;
    for (size_t at = offset / page * page; at < last && nbytes != 0;) {
        size_t step = last - at < sizeof pages * page ? last - at : sizeof pages * page;
        int os_errno = um_os_residency((char *)block->base + at, step, pages);
        if (os_errno != 0) {
            return um_fail_os(err, os_errno, nbytes, "mincore");
        }
        for (size_t i = 0; i < step / page; i++) {
            n_resident += pages[i] & 1;
        }
        at += step;
    }
    *out_bytes = n_resident * page;
    return UM_OK;
}
