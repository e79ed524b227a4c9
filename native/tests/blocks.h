/* Helpers for the tests of blocks: blocks, files, and the figures of the kernel. */
#ifndef UM_BLOCKS_H
#define UM_BLOCKS_H

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fault_os.h"
#include "huge_pool.h"

/* Of this machine. huge_page is 0 when the kernel has no huge pages: then a block gets base pages,
 * and says so. `unit` is the larger of the two. main.c sets them. */
extern size_t page, huge_page, unit;

#define OPTIONS(...) (&(um_block_options){__VA_ARGS__})
#define BLOCK(...) ((um_block){__VA_ARGS__})

static inline um_block make_block(size_t nbytes, const um_block_options *options) {
    um_block block;
    SPOIL(block);
    REQUIRE(CHECK_OK(um_block_map(&block, nbytes, options, &test_err)));
    return block;
}

static inline um_block make_pages(size_t nbytes, um_pages pages) {
    return make_block(nbytes, &(um_block_options){.pages = pages, .category = UM_CAT_SCRATCH});
}

/* Options that are valid until the next call, as the tests of growing blocks want them. */
static inline const um_block_options *of(um_pages pages, um_sharing sharing,
                                         size_t reserve_nbytes) {
    static um_block_options options;
    options = *OPTIONS(.pages = pages, .category = UM_CAT_HISTORY, .sharing = sharing,
                       .reserve_nbytes = reserve_nbytes);
    return &options;
}

static inline unsigned char *bytes_of(const um_block *block, size_t offset) {
    return (unsigned char *)block->base + offset;
}

static inline void unmap_block(um_block *block) {
    static const um_block zeroed;
    CHECK_OK(um_block_unmap(block, &test_err));
    CHECK(memcmp(block, &zeroed, sizeof zeroed) == 0);
}

/* Compares all that a user may read of a block that is one piece, but its address and its file. */
static inline void check_block(const um_block *got, um_block want) {
    CHECK_EQ(got->nbytes, want.nbytes);
    CHECK_EQ(got->requested_nbytes, want.requested_nbytes);
    CHECK_EQ(got->reserved_nbytes, want.reserved_nbytes);
    CHECK_EQ(got->committed_nbytes, want.reserved_nbytes);
    CHECK_EQ(got->step_nbytes, want.step_nbytes);
    CHECK_EQ((uintptr_t)got->base % want.step_nbytes, 0);
    CHECK_EQ(got->mirror_nbytes, want.mirror_nbytes);
    CHECK_EQ(got->requested_pages, want.requested_pages);
    CHECK_EQ(got->category, want.category);
    CHECK_EQ(got->sharing, want.sharing);
    CHECK_EQ(got->access, want.access);
    CHECK_EQ(got->lock, UM_LOCK_NONE);
    CHECK_EQ(got->is_file != 0, want.is_file != 0);
    CHECK_EQ(got->fd >= 0, want.sharing != UM_SHARING_NONE);
    CHECK(got->committed == NULL);
    CHECK(memcmp(&got->numa, &want.numa, sizeof want.numa) == 0);
}

/* A block that is unmapped where its scope ends; it may be unmapped before. */
#define AUTO_BLOCK __attribute__((cleanup(unmap_block))) um_block

static inline um_block attach_block(int fd, um_access access) {
    um_block block;
    SPOIL(block);
    REQUIRE(CHECK_OK(um_block_attach(&block, fd, access, UM_CAT_STAGING, &test_err)));
    return block;
}

static inline void commit(um_block *block, size_t offset, size_t nbytes) {
    void *base = block->base;
    CHECK_OK(um_block_commit(block, offset, nbytes, &test_err));
    CHECK(um_block_is_committed(block, offset, nbytes));
    CHECK(block->base == base);
}

static inline void release(um_block *block, size_t offset, size_t nbytes, size_t released) {
    size_t out = 12345;
    CHECK_OK(um_block_release(block, offset, nbytes, &out, &test_err));
    CHECK_EQ(out, released);
}

/* The bytes in RAM of a shared block's file. */
static inline uint64_t file_bytes(const um_block *block) {
    struct stat st;
    CHECK(fstat(block->fd, &st) == 0);
    return (uint64_t)st.st_blocks * 512;
}

static inline um_placement placement_of(const um_block *block) {
    um_placement placement;
    memset(&placement, 0, sizeof placement);
    CHECK_OK(um_block_verify(block, &placement, &test_err));
    return placement;
}

static inline uint64_t on_all_nodes(const um_placement *placement) {
    uint64_t sum = 0;
    for (size_t node = 0; node < UM_MAX_NODES; node++) {
        sum += placement->node_bytes[node];
    }
    return sum;
}

/* Checks the report on a block that no other process maps. */
static inline void check_placed(const um_block *block, um_pages pages, size_t page_bytes,
                                uint64_t resident_bytes, uint64_t huge_bytes,
                                uint64_t locked_bytes) {
    um_placement placement = placement_of(block);
    CHECK_EQ(placement.pages, pages);
    CHECK_EQ(placement.page_bytes, page_bytes);
    CHECK_EQ(placement.resident_bytes, resident_bytes);
    CHECK_EQ(placement.pss_bytes, resident_bytes);
    CHECK_EQ(placement.huge_bytes, huge_bytes);
    CHECK_EQ(placement.locked_bytes, locked_bytes);
    CHECK_EQ(placement.swapped_bytes, 0);
    CHECK_EQ(on_all_nodes(&placement), resident_bytes);
}

/* The page faults of this process so far. */
static inline long faults_now(void) {
    struct rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    return usage.ru_minflt + usage.ru_majflt;
}

static inline um_ledger_row ledger_row(um_category category) {
    um_ledger_row row;
    CHECK_OK(um_ledger_read(category, &row, &test_err));
    return row;
}

static inline uint64_t resident(const um_block *block, size_t offset, size_t nbytes) {
    uint64_t found = UINT64_MAX;
    CHECK_OK(um_block_resident(block, offset, nbytes, &found, &test_err));
    return found;
}

/* An empty file on a disk, without a name. */
static inline int temp_file(void) {
    const char *folder = getenv("TMPDIR");
    char path[4096];
    snprintf(path, sizeof path, "%s/unimem-test-XXXXXX", folder != NULL ? folder : "/tmp");
    int fd = mkostemp(path, O_CLOEXEC);
    REQUIRE(fd >= 0);
    unlink(path);
    return fd;
}

static inline int memory_file(size_t nbytes) {
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(fd >= 0);
    REQUIRE(ftruncate(fd, (off_t)nbytes) == 0);
    return fd;
}

/* A file of a file system in memory that has room for this many pages, or -1. */
static inline int file_in_room_for(size_t n_pages) {
    int folder, fd = -1;
    if (um_tmpfs_open(&folder, n_pages * page, 0, NULL) == UM_OK) {
        fd = openat(folder, "file", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        close(folder);
        REQUIRE(fd >= 0);
    }
    return fd;
}

static inline uint64_t file_nbytes(int fd) {
    struct stat st;
    CHECK(fstat(fd, &st) == 0);
    return (uint64_t)st.st_size;
}

/* The byte that a test file holds at an offset, and whether memory holds such bytes. */
static inline unsigned char byte_of(uint64_t seed, uint64_t at) {
    return (unsigned char)((at + seed * 977) * 2654435761u >> 13);
}

static inline void fill_file(int fd, uint64_t seed, size_t nbytes) {
    AUTO_FREE unsigned char *bytes = allocate(nbytes);
    for (size_t i = 0; i < nbytes; i++) {
        bytes[i] = byte_of(seed, i);
    }
    REQUIRE(pwrite(fd, bytes, nbytes, 0) == (ssize_t)nbytes);
}

static inline bool holds(const void *memory, uint64_t seed, uint64_t offset, size_t nbytes) {
    const unsigned char *bytes = memory;
    size_t n = 0;
    while (n < nbytes && bytes[n] == byte_of(seed, offset + n)) {
        n++;
    }
    return n == nbytes;
}

/* A descriptor of the same file that is opened in another way. */
static inline int reopen(int fd, int flags) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, flags | O_CLOEXEC);
}

/* The line that begins with `name`, in the smaps entry that contains an address; "" when there is
 * none. Valid until the next call. */
static inline const char *smaps_line(const void *address, const char *name) {
    static char line[512];
    FILE *file = fopen("/proc/self/smaps", "r");
    bool inside = false;
    REQUIRE(file != NULL);
    while (fgets(line, sizeof line, file) != NULL) {
        char *after;
        uintptr_t start = (uintptr_t)strtoull(line, &after, 16);
        if (*after == '-') {
            uintptr_t end = (uintptr_t)strtoull(after + 1, NULL, 16);
            inside = (uintptr_t)address >= start && (uintptr_t)address < end;
        } else if (inside && strncmp(line, name, strlen(name)) == 0) {
            fclose(file);
            return line;
        }
    }
    fclose(file);
    line[0] = '\0';
    return line;
}

/* Flags are two letters of smaps: "lo" locked, "dc" not copied by fork, "ac" charged to the commit
 * limit. */
static inline bool has_vm_flag(const void *address, const char *flag) {
    char word[8];
    snprintf(word, sizeof word, " %s ", flag);
    return strstr(smaps_line(address, "VmFlags:"), word) != NULL;
}

static inline uint64_t smaps_bytes(const void *address, const char *name) {
    const char *line = smaps_line(address, name), *number = strchr(line, ':');
    return number == NULL ? 0 : strtoull(number + 1, NULL, 10) * 1024;
}

/* The policy of the mapping that begins at an address, as in numa_maps ("bind:0"). */
static inline const char *policy_at(const void *address) {
    static char line[4096], policy[256];
    FILE *file = fopen("/proc/self/numa_maps", "r");
    policy[0] = '\0';
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        char *after;
        if ((uintptr_t)strtoull(line, &after, 16) == (uintptr_t)address) {
            /* Some policy names contain a blank. The next word is a count or a path. */
            size_t n = strcspn(after + 1, "=\n"), colon = strcspn(after + 1, ":");
            n = colon < n ? colon + strcspn(after + 1 + colon, " \n") : strcspn(after + 1, " \n");
            snprintf(policy, sizeof policy, "%.*s", (int)n, after + 1);
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return policy;
}

/* Whether this process may set policies. Containers often may not. */
static inline bool may_bind(void) {
    um_block_options options = {.numa = {.mode = UM_NUMA_BIND, .nodes = {1}}};
    um_block block;
    if (access("/proc/self/numa_maps", R_OK) != 0 ||
        um_block_map(&block, 1, &options, NULL) != UM_OK) {
        return false;
    }
    unmap_block(&block);
    return true;
}

/* Whether the kernel gives this many huge pages at a touch: fragmented memory may have none. */
static inline bool gives_huge_pages(size_t n) {
    um_block block = make_pages(n * unit, UM_PAGES_THP);
    memset(block.base, 1, block.nbytes);
    bool gives = huge_page != 0 && placement_of(&block).huge_bytes == block.nbytes;
    unmap_block(&block);
    return gives;
}

/* fn(&block, ...) fails, with an error that names this, and leaves block and process alone. */
#define CHECK_MAKES_NONE(status, names, fn, ...)                                                   \
    do {                                                                                           \
        um_block none_;                                                                            \
        SPOIL(none_);                                                                              \
        os_state_begin();                                                                          \
        CHECK_FAILS(status, fn, &none_, __VA_ARGS__);                                              \
        CHECK(test_err.status == (status) && strstr(test_err.what, names) != NULL);                \
        CHECK_SPOILT(none_);                                                                       \
        CHECK(os_state_unchanged());                                                               \
    } while (0)

/* Runs fn(arg) in a child process, and returns its result. The child prints its own failures. */
static inline bool in_child(bool (*fn)(void *), void *arg) {
    fflush(NULL);
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        _exit(fn(arg) ? 0 : 1);
    }
    int status = -1;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

#endif
