/* Placement: what the kernel says of a block. */
#include "base/status.h"
#include "block/mirror.h"
#include "block/space.h"
#include "os/os.h"
#include "os/proc_file.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* An entry of smaps has 700 to 800 bytes, and a line of numa_maps 80 to 250: a read takes one or
 * two. */
enum { SMAPS_READ_BYTES = 1024, NUMA_MAPS_READ_BYTES = 256 };

/* Adds the bytes of a line such as "Rss:   1234 kB" if this is its name. */
static bool add_field(const char *line, const char *name, uint64_t *bytes) {
    size_t n = strlen(name);
    if (strncmp(line, name, n) != 0 || line[n] != ':') {
        return false;
    }
    *bytes += strtoull(line + n + 1, NULL, 10) * 1024;
    return true;
}

/* What smaps says of a range, summed over its entries. */
typedef struct smaps_sums {
    uint64_t rss, pss, huge, locked, swapped;
    uint64_t hugetlb, hugetlb_page; /* not contained in rss and pss */
    bool may_be_huge;               /* a page that is touched now could be a huge one */
} smaps_sums;

static uint64_t larger(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* Adds the two images of a piece of mirrored memory. smaps counts its memory once for each image,
 * so the larger figure is what is in RAM: a page may have been touched through one image alone. Pss
 * is added, since a page that both images map counts half in each: the sum is right even if each
 * image was touched elsewhere. */
static void add_images(const smaps_sums *images, smaps_sums *out) {
    const smaps_sums *a = &images[0], *b = &images[1];
    uint64_t pss = a->pss + b->pss;
    out->rss += larger(larger(a->rss, b->rss), pss);
    out->pss += pss;
    out->huge += larger(a->huge, b->huge);
    out->locked += larger(a->locked, b->locked);
    out->swapped += larger(a->swapped, b->swapped);
    out->hugetlb += larger(a->hugetlb, b->hugetlb);
    out->hugetlb_page = larger(out->hugetlb_page, larger(a->hugetlb_page, b->hugetlb_page));
    out->may_be_huge = out->may_be_huge || a->may_be_huge || b->may_be_huge;
}

/* Returns a number of the image that an address lies in: an even one for the first image of a
 * piece, and the next one for the second; 0 for memory without a mirror. */
static size_t image_of(const um_block *block, uintptr_t address) {
    uintptr_t base = (uintptr_t)block->base;
    if (block->mirror_nbytes == 0 || address < base) {
        return 0;
    }
    um__piece piece = um__mirror_piece(block, address - base);
    return piece.start + (address - base - piece.start) / piece.nbytes;
}

/* What the lines of one entry say. */
typedef struct smaps_entry {
    uintptr_t end;
    uint64_t rss, kernel_page, eligible;
    bool inside, accessible;
} smaps_entry;

/* Begins an entry with a line such as "7f0000000000-7f0000200000 rw-p ..."; returns false for any
 * other line. */
static bool begin_entry(const char *line, uintptr_t first, uintptr_t *out_start, smaps_entry *out) {
    char *after;
    uintptr_t start = (uintptr_t)strtoull(line, &after, 16);
    if (after == line || *after != '-') {
        return false;
    }
    *out_start = start;
    *out = (smaps_entry){.end = (uintptr_t)strtoull(after + 1, &after, 16)};
    out->inside = out->end > first;
    out->accessible = after[0] == ' ' && after[1] == 'r';
    return true;
}

/* Takes one line of an entry; returns whether it is the entry's last one. */
static bool take_line(const char *line, smaps_entry *entry, smaps_sums *sums) {
    if (strncmp(line, "VmFlags:", 8) != 0) {
        (void)(add_field(line, "KernelPageSize", &entry->kernel_page) ||
               add_field(line, "Rss", &entry->rss) || add_field(line, "Pss", &sums->pss) ||
               add_field(line, "AnonHugePages", &sums->huge) ||
               add_field(line, "ShmemPmdMapped", &sums->huge) ||
               add_field(line, "FilePmdMapped", &sums->huge) ||
               add_field(line, "Shared_Hugetlb", &sums->hugetlb) ||
               add_field(line, "Private_Hugetlb", &sums->hugetlb) ||
               add_field(line, "Swap", &sums->swapped) ||
               add_field(line, "THPeligible", &entry->eligible));
        return false;
    }
    sums->rss += entry->rss;
    /* The line "Locked" would count a page that n processes map as 1/n. */
    sums->locked += strstr(line, " lo") != NULL ? entry->rss : 0;
    if (entry->kernel_page > um__os_page_bytes()) {
        sums->hugetlb_page = entry->kernel_page;
    }
    /* The kernel calls the gaps between committed parts eligible, too: they do not count. */
    sums->may_be_huge = sums->may_be_huge || (entry->accessible && entry->eligible > 0);
    return true;
}

static um_status read_smaps(const um_block *block, smaps_sums *out, um_error *err) {
    uintptr_t first = (uintptr_t)block->base, last = first + block->reserved_nbytes;
    um__proc_lines lines;
    int os_errno;
    UM__TRY_OS(um__proc_lines_open(&lines, "/proc/self/smaps", SMAPS_READ_BYTES), err, 0,
               "open /proc/self/smaps");
    smaps_entry entry = {0};
    smaps_sums images[2] = {{0}};
    size_t image = 0;
    for (char *line; (os_errno = um__proc_lines_next(&lines, &line)) == 0 && line != NULL;) {
        uintptr_t start;
        if (begin_entry(line, first, &start, &entry)) {
            if (start >= last) {
                break; /* entries are in the order of addresses */
            }
            size_t next = image_of(block, start);
            if (next / 2 != image / 2) {
                add_images(images, out);
                memset(images, 0, sizeof images);
            }
            image = next;
        } else if (entry.inside && take_line(line, &entry, &images[image % 2]) &&
                   entry.end >= last) {
            break;
        }
    }
    add_images(images, out);
    um__proc_lines_close(&lines);
    return os_errno == 0 ? UM_OK : um__fail_io(err, os_errno, 0, "read /proc/self/smaps");
}

/* Adds what a line of numa_maps says of nodes, such as "7f0000000000 bind:1 anon=3 N0=1 N1=2
 * kernelpagesize_kB=4". Its counts are in pages of the size at its end. */
static void add_node_bytes(const char *line, uint64_t *node_bytes) {
    const char *size = strstr(line, " kernelpagesize_kB=");
    uint64_t page_bytes = size == NULL ? um__os_page_bytes()
                                       : strtoull(strchr(size, '=') + 1, NULL, 10) * UINT64_C(1024);
    /* Blanks in paths are escaped: a blank is always the beginning of a word. */
    for (const char *word = line; (word = strstr(word, " N")) != NULL;) {
        char *after;
        word += 2;
        unsigned long node = strtoul(word, &after, 10);
        if (after != word && *after == '=' && node < UM_MAX_NODES) {
            node_bytes[node] += strtoull(after + 1, NULL, 10) * page_bytes;
        }
    }
}

static void add_node_images(uint64_t images[2][UM_MAX_NODES], uint64_t *node_bytes) {
    for (unsigned node = 0; node < UM_MAX_NODES; node++) {
        node_bytes[node] += larger(images[0][node], images[1][node]);
    }
}

/* Reads the nodes from numa_maps, unless there is one node. The kernel walks the pages once more,
 * which costs a fourth of move_pages; and containers may refuse move_pages. */
static um_status read_nodes(const um_block *block, uint64_t resident_bytes, uint64_t *node_bytes,
                            um_error *err) {
    uintptr_t first = (uintptr_t)block->base, last = first + block->reserved_nbytes;
    int only_node = um__only_memory_node();
    if (only_node >= 0) {
        node_bytes[only_node] = resident_bytes;
        return UM_OK;
    }
    um__proc_lines lines;
    int os_errno = um__proc_lines_open(&lines, "/proc/self/numa_maps", NUMA_MAPS_READ_BYTES);
    if (os_errno == ENOENT) {
        node_bytes[0] = resident_bytes; /* a kernel that knows no nodes */
        return UM_OK;
    }
    UM__RETURN_IF(os_errno != 0, um__fail_os(err, os_errno, 0, "open /proc/self/numa_maps"));
    uint64_t images[2][UM_MAX_NODES] = {{0}};
    size_t image = 0;
    for (char *line; (os_errno = um__proc_lines_next(&lines, &line)) == 0 && line != NULL;) {
        uintptr_t start = (uintptr_t)strtoull(line, NULL, 16);
        if (start >= last) {
            break;
        }
        if (start >= first) {
            size_t next = image_of(block, start);
            if (next / 2 != image / 2) {
                add_node_images(images, node_bytes);
                memset(images, 0, sizeof images);
            }
            image = next;
            add_node_bytes(line, images[image % 2]);
        }
    }
    add_node_images(images, node_bytes);
    um__proc_lines_close(&lines);
    return os_errno == 0 ? UM_OK : um__fail_io(err, os_errno, 0, "read /proc/self/numa_maps");
}

/* Returns the size of the huge pages in smaps. If /sys does not tell, it is what one page of page
 * table entries covers, at 8 bytes each. */
static size_t thp_bytes(void) {
    size_t found = um_huge_page_bytes(), page = um__os_page_bytes();
    return found != 0 ? found : page * (page / 8);
}

um_status um_block_verify(const um_block *block, um_placement *out, um_error *err) {
    smaps_sums sums = {0};
    UM__TRY(read_smaps(block, &sums, err));
    /* smaps counts hugetlb pages apart, and does not say how many processes map one, so pss_bytes
     * counts it whole. They never leave RAM, so all of them count as locked. */
    um_placement found = {.resident_bytes = sums.rss + sums.hugetlb,
                          .pss_bytes = sums.pss + sums.hugetlb,
                          .huge_bytes = sums.huge + sums.hugetlb,
                          .locked_bytes = sums.locked + sums.hugetlb,
                          .swapped_bytes = sums.swapped};
    /* Resident pages show what they are; before the first one, eligibility shows what they will
     * be. */
    bool huge = sums.huge > 0 || (sums.rss == 0 && sums.may_be_huge);
    if (sums.hugetlb_page != 0) {
        found.pages = sums.hugetlb_page < UINT64_C(1) << 30 ? UM_PAGES_2M : UM_PAGES_1G;
        found.page_bytes = sums.hugetlb_page;
    } else {
        found.pages = huge ? UM_PAGES_THP : UM_PAGES_4K;
        found.page_bytes = huge ? thp_bytes() : um__os_page_bytes();
    }
    if (found.resident_bytes > 0) {
        UM__TRY(read_nodes(block, found.resident_bytes, found.node_bytes, err));
    }
    *out = found;
    return UM_OK;
}

um_status um_block_resident(const um_block *block, size_t offset, size_t nbytes,
                            uint64_t *out_bytes, um_error *err) {
    size_t end, page = um__os_page_bytes();
    size_t limit = block->is_file ? block->nbytes : block->reserved_nbytes;
    UM__TRY(um__block_check_range(block, offset, nbytes, false, &end, err));
    unsigned char pages[4096];
    uint64_t n_resident = 0;
    size_t last = (end + page - 1) / page * page;
    for (size_t at = offset / page * page; at < last && nbytes != 0;) {
        size_t step = last - at < sizeof pages * page ? last - at : sizeof pages * page;
        if (block->is_cache_hidden != 0) {
            /* The kernel tells only of pages that are mapped here, if at all. */
            size_t inside = limit - at < step ? limit - at : step;
            if (um_block_pages(block, at, inside, pages, NULL, NULL) != UM_OK) {
                memset(pages, UM_PAGE_UNKNOWN, step / page);
            }
        } else {
            UM__TRY_OS(um__os_residency((char *)block->base + at, step, pages), err, nbytes,
                       "mincore");
        }
        for (size_t i = 0; i < step / page; i++) {
            n_resident += pages[i] & UM_PAGE_IN_RAM; /* the lowest bit, as in mincore */
        }
        at += step;
    }
    *out_bytes = n_resident * page;
    return UM_OK;
}
