/* What the kernel says of memory: smaps, numa_maps and the list of nodes, as texts of an input with
 * a zero byte between them. The files of os.h are replaced by these. The placement of a block has
 * to be the same however the reads cut a text, and whatever stands in front of the block. */
#include "fuzz.h"

#include <errno.h>

#include "os/os.h"
#include "unimem.h"

static const uintptr_t BASE = 0x7f0000000000;
enum { BLOCK_NBYTES = 1 << 22, PIECE_NBYTES = 1 << 20 };

/* A mapping of another file below the block. */
static const char foreign_smaps[] = "00400000-00401000 r-xp 00000000 00:1c 7 /bin/cat\n"
                                    "Rss: 4 kB\nPss: 4 kB\nAnonHugePages: 2048 kB\n"
                                    "THPeligible: 1\nVmFlags: rd ex lo\n";
static const char foreign_numa_maps[] = "00400000 default file=/bin/cat anon=1 N0=1 N1=9\n";

/* ---- the files ---- */

enum { SMAPS, NUMA_MAPS, NODES, HUGE_PAGE, N_FILES };
static const char *const paths[N_FILES] = {"/proc/self/smaps", "/proc/self/numa_maps",
                                           "/sys/devices/system/node/has_memory",
                                           "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size"};

typedef struct text {
    const char *bytes;
    size_t nbytes;
} text;

static struct {
    text front[N_FILES], rest[N_FILES]; /* read one behind the other */
    size_t at[N_FILES];
    size_t most;      /* bytes of a read */
    unsigned n_reads; /* every fifth one is interrupted first */
} files;

int __wrap_um__os_open_read(const char *path, int *out_fd);
int __wrap_um__os_read(int fd, void *out, size_t nbytes, size_t *out_nbytes);
int __wrap_um__os_close(int fd);

int __wrap_um__os_open_read(const char *path, int *out_fd) {
    for (int i = 0; i < N_FILES; i++) {
        if (strcmp(path, paths[i]) == 0) {
            files.at[i] = 0;
            *out_fd = i;
            return 0;
        }
    }
    return ENOENT;
}

int __wrap_um__os_read(int fd, void *out, size_t nbytes, size_t *out_nbytes) {
    if (files.most != 0 && files.n_reads++ % 5 == 4) {
        return EINTR;
    }
    const text *part = &files.front[fd];
    size_t at = files.at[fd];
    if (at >= part->nbytes) {
        at -= part->nbytes;
        part = &files.rest[fd];
    }
    size_t n = part->nbytes - at < nbytes ? part->nbytes - at : nbytes;
    n = files.most != 0 && n > files.most ? files.most : n;
    memcpy(out, part->bytes + at, n);
    files.at[fd] += n;
    *out_nbytes = n;
    return 0;
}

int __wrap_um__os_close(int fd) {
    PROMISED(fd >= 0 && fd < N_FILES);
    return 0;
}

/* ---- the placement ---- */

static um_placement placement_of(const um_block *block, size_t most) {
    um_placement found;
    um_error err;
    memset(&found, FUZZ_PATTERN, sizeof found);
    files.most = most;
    files.n_reads = 0;
    PROMISED(um_block_verify(block, &found, &err) == UM_OK);
    return found;
}

static void check_placement(const um_placement *found) {
    bool huge = found->pages == UM_PAGES_2M || found->pages == UM_PAGES_1G;
    PROMISED(huge || found->pages == UM_PAGES_4K || found->pages == UM_PAGES_THP);
    PROMISED(found->page_bytes != 0);
    PROMISED(found->pages != UM_PAGES_4K || found->page_bytes == um_page_bytes());
}

static void check_same(const um_placement *a, const um_placement *b) {
    PROMISED(a->pages == b->pages);
    PROMISED(a->page_bytes == b->page_bytes);
    PROMISED(a->resident_bytes == b->resident_bytes);
    PROMISED(a->pss_bytes == b->pss_bytes);
    PROMISED(a->huge_bytes == b->huge_bytes);
    PROMISED(a->locked_bytes == b->locked_bytes);
    PROMISED(a->swapped_bytes == b->swapped_bytes);
    PROMISED(memcmp(a->node_bytes, b->node_bytes, sizeof a->node_bytes) == 0);
}

static void try_block(const um_block *block, size_t most) {
    um_placement whole = placement_of(block, 0);
    check_placement(&whole);
    um_placement in_pieces = placement_of(block, most);
    check_same(&whole, &in_pieces);
    files.front[SMAPS] = (text){foreign_smaps, sizeof foreign_smaps - 1};
    files.front[NUMA_MAPS] = (text){foreign_numa_maps, sizeof foreign_numa_maps - 1};
    um_placement behind = placement_of(block, 0);
    files.front[SMAPS] = files.front[NUMA_MAPS] = (text){"", 0};
    check_same(&whole, &behind);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t nbytes) {
    const char *rest = (const char *)bytes, *end = rest + nbytes;
    const text defaults[N_FILES] = {{"", 0}, {"", 0}, {"0-1\n", 4}, {"2097152\n", 8}};
    for (int i = 0; i < N_FILES; i++) {
        files.front[i] = (text){"", 0};
        files.rest[i] = defaults[i];
        if (i < HUGE_PAGE && rest != NULL && rest < end) {
            const char *zero = memchr(rest, 0, (size_t)(end - rest));
            files.rest[i] = (text){rest, (size_t)((zero != NULL ? zero : end) - rest)};
            rest = zero != NULL ? zero + 1 : NULL;
        }
    }
    size_t most = 1 + (size_t)(fuzz_hash(bytes, nbytes) % 64);
    um_block block = {.base = (void *)BASE,
                      .nbytes = BLOCK_NBYTES,
                      .reserved_nbytes = BLOCK_NBYTES,
                      .committed_nbytes = BLOCK_NBYTES};
    try_block(&block, most);
    block.mirror_nbytes = block.mirror_other_nbytes = PIECE_NBYTES;
    block.mirror_run = 1;
    try_block(&block, most);
    return 0;
}
