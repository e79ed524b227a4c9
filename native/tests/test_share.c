/* Shared memory that is attached, here and in other processes, and sealed copies. */
#include "blocks.h"

static void check_attached(const um_block *block, um_access access, size_t nbytes, size_t step) {
    check_block(block, BLOCK(.nbytes = nbytes, .requested_nbytes = file_nbytes(block->fd),
                             .reserved_nbytes = nbytes, .step_nbytes = step,
                             .requested_pages = block->requested_pages, .category = UM_CAT_STAGING,
                             .sharing = UM_SHARING_FD, .access = access));
    CHECK_STR(os_state_permissions(block->base), access == UM_ACCESS_READ ? "r--s" : "rw-s");
    CHECK_STR(os_state_permissions((char *)block->base - 1), "---p");
    CHECK_STR(os_state_permissions((char *)block->base + nbytes), "---p");
    CHECK(has_vm_flag(block->base, "dc") == (access == UM_ACCESS_SHARED));
    um_ledger_row row = ledger_row(UM_CAT_STAGING);
    CHECK(row.n_mappings == 1);
    CHECK(row.mapped_bytes == nbytes);
}

TEST(attach) {
    um_block block = make_block(5 * page, of(UM_PAGES_4K, UM_SHARING_MEMFD, 0));
    memset(block.base, 1, block.nbytes);
    for (um_access access = UM_ACCESS_READ; access <= UM_ACCESS_SHARED; access += 2) {
        AUTO_BLOCK other = attach_block(block.fd, access);
        CHECK(other.fd != block.fd);
        CHECK((fcntl(other.fd, F_GETFD) & FD_CLOEXEC) != 0);
        check_attached(&other, access, 5 * page, page);
        CHECK(is_filled(other.base, other.nbytes, 1));
        *bytes_of(&block, page) = 2;
        CHECK(*bytes_of(&other, page) == 2);
        *bytes_of(&block, page) = 1;
    }
    um_block other = attach_block(block.fd, UM_ACCESS_SHARED);
    unmap_block(&block); /* the memory lives as long as another mapping of it */
    memset(other.base, 3, other.nbytes);
    AUTO_BLOCK third = attach_block(other.fd, UM_ACCESS_READ);
    unmap_block(&other);
    CHECK(is_filled(third.base, third.nbytes, 3));
}

/* Half a page at the end counts as a page; the rest of it is zeros. */
TEST(attach_odd_size) {
    AUTO_FD fd = memory_file(page + 10);
    AUTO_BLOCK block = attach_block(fd, UM_ACCESS_SHARED);
    check_attached(&block, UM_ACCESS_SHARED, 2 * page, page);
    memset(bytes_of(&block, page), 4, 10);
    CHECK(is_filled((char *)block.base + page + 10, page - 10, 0));
    CHECK_OK(um_block_warm(&block, 0, block.nbytes, 1, NULL, &test_err));
    CHECK_EQ(placement_of(&block).resident_bytes, 2 * page);
}

TEST(attach_lies_for_huge_pages) {
    SKIP_UNLESS(huge_page != 0, "the kernel has no huge pages");
    AUTO_BLOCK block = make_block(3 * huge_page, of(UM_PAGES_THP, UM_SHARING_MEMFD, 0));
    memset(block.base, 1, block.nbytes);
    AUTO_BLOCK other = attach_block(block.fd, UM_ACCESS_READ);
    CHECK_EQ((uintptr_t)other.base % huge_page, 0);
    CHECK_EQ(other.step_nbytes, page);
    if (um_block_collapse(&block, NULL) == UM_OK) {
        CHECK_OK(um_block_warm(&other, 0, other.nbytes, 1, NULL, &test_err));
        CHECK_EQ(placement_of(&other).huge_bytes, 3 * huge_page);
    } else {
        test_skip("the kernel cannot collapse shared memory");
    }
}

static bool child_attaches(void *arg) {
    int fd = *(int *)arg;
    um_block block;
    if (!CHECK(um_block_attach(&block, fd, UM_ACCESS_SHARED, UM_CAT_STAGING, NULL) == UM_OK)) {
        return false;
    }
    bool good = CHECK(is_filled(block.base, block.nbytes, 1));
    memset(block.base, 2, block.nbytes);
    return CHECK(um_block_unmap(&block, NULL) == UM_OK) && good;
}

/* A page that another process touches first is where the policy of the maker says. */
TEST(attach_in_another_process) {
    um_block_options options = *of(UM_PAGES_4K, UM_SHARING_MEMFD, 0);
    if (may_bind()) {
        options.numa = (um_numa){.mode = UM_NUMA_BIND, .nodes = {1}};
    }
    AUTO_BLOCK block = make_block(4 * page, &options);
    memset(block.base, 1, block.nbytes);
    CHECK(in_child(child_attaches, &block.fd));
    CHECK(is_filled(block.base, block.nbytes, 2));
    if (options.numa.mode != UM_NUMA_NONE) {
        AUTO_BLOCK other = attach_block(block.fd, UM_ACCESS_READ);
        CHECK_STR(policy_at(other.base), "bind:0");
    }
}

static void check_refused_attach(um_status status, const char *what, int fd, um_access access,
                                 um_category category) {
    CHECK_MAKES_NONE(status, what, um_block_attach, fd, access, category);
}

TEST(refused_attach) {
    AUTO_FD fd = memfd_create("refused", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(fd >= 0);
    check_refused_attach(UM_E_INVALID, "empty", fd, UM_ACCESS_READ, UM_CAT_OTHER);
    CHECK(ftruncate(fd, (off_t)page) == 0);
    check_refused_attach(UM_E_INVALID, "access", fd, UM_ACCESS_PRIVATE, UM_CAT_OTHER);
    check_refused_attach(UM_E_INVALID, "access", fd, (um_access)3, UM_CAT_OTHER);
    check_refused_attach(UM_E_INVALID, "access", fd, (um_access)-1, UM_CAT_OTHER);
    check_refused_attach(UM_E_INVALID, "category", fd, UM_ACCESS_READ, UM_CAT_COUNT);
    check_refused_attach(UM_E_OS, "fcntl", -1, UM_ACCESS_READ, UM_CAT_OTHER);
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    check_refused_attach(UM_E_INVALID, "empty", pipes[0], UM_ACCESS_READ, UM_CAT_OTHER);
    close(pipes[0]);
    close(pipes[1]);
    CHECK(ftruncate(fd, (off_t)1 << 60) == 0); /* more than the address space */
    check_refused_attach(UM_E_NOMEM, "mmap", fd, UM_ACCESS_READ, UM_CAT_OTHER);
    CHECK(ftruncate(fd, INT64_MAX) == 0);
    check_refused_attach(UM_E_NOMEM, "mmap", fd, UM_ACCESS_READ, UM_CAT_OTHER);
    CHECK(ftruncate(fd, (off_t)page) == 0);
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) == 0);
    check_refused_attach(UM_E_OS, "mmap", fd, UM_ACCESS_SHARED, UM_CAT_OTHER);
}

static um_block copy_sealed(const um_block *block, const um_block_options *options) {
    um_block copy;
    SPOIL(copy);
    REQUIRE(CHECK_OK(um_block_copy_sealed(&copy, block, options, &test_err)));
    return copy;
}

/* No process can change it, in any way. */
static void check_sealed(const um_block *copy) {
    int all = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
    CHECK((fcntl(copy->fd, F_GET_SEALS) & all) == all);
    CHECK((fcntl(copy->fd, F_GETFL) & O_ACCMODE) == O_RDONLY);
    CHECK((fcntl(copy->fd, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK_STR(os_state_permissions(copy->base), "r--s");
    CHECK(mprotect(copy->base, page, PROT_READ | PROT_WRITE) == -1);
    check_refused_attach(UM_E_OS, "mmap", copy->fd, UM_ACCESS_SHARED, UM_CAT_OTHER);
    int fd = reopen(copy->fd, O_RDWR);
    if (fd >= 0) {
        CHECK(write(fd, "x", 1) == -1); /* write() never works on huge pages: EINVAL */
        CHECK(ftruncate(fd, 0) == -1);
        CHECK(errno == EPERM);
        CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)page) == -1);
        check_refused_attach(UM_E_OS, "mmap", fd, UM_ACCESS_SHARED, UM_CAT_OTHER);
        close(fd);
    }
}

static void check_copy(const um_block *block, um_block_options options, size_t nbytes) {
    options.sharing = UM_SHARING_NONE; /* a sealed copy is shared all the same */
    um_block copy = copy_sealed(block, &options);
    CHECK_EQ(copy.nbytes, nbytes);
    CHECK_EQ(copy.requested_nbytes, block->nbytes);
    CHECK_EQ(copy.reserved_nbytes, nbytes);
    CHECK(copy.sharing == UM_SHARING_MEMFD);
    CHECK(copy.access == UM_ACCESS_READ);
    CHECK(copy.category == options.category);
    CHECK(copy.requested_pages == options.pages);
    CHECK_EQ(placement_of(&copy).resident_bytes, nbytes);
    CHECK(memcmp(copy.base, block->base, block->nbytes) == 0);
    CHECK(is_filled((char *)copy.base + block->nbytes, nbytes - block->nbytes, 0));
    check_sealed(&copy);
    CHECK_INVALID(um_block_release(&copy, 0, page, NULL, &test_err));
    AUTO_BLOCK other = attach_block(copy.fd, UM_ACCESS_READ);
    unmap_block(&copy);
    CHECK(memcmp(other.base, block->base, block->nbytes) == 0);
}

TEST(copy_sealed) {
    um_pages kinds[] = {UM_PAGES_AUTO, UM_PAGES_4K, UM_PAGES_THP};
    for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
        um_block_options options = *of(UM_PAGES_4K, UM_SHARING_MEMFD, 0);
        options.sharing = sharing;
        options.reserve_nbytes = 9 * page;
        AUTO_BLOCK block = make_block(9 * page, &options);
        memset(block.base, 1, block.nbytes);
        *bytes_of(&block, 3 * page + 5) = 2;
        for (size_t i = 0; i < COUNT(kinds); i++) {
            check_copy(&block, *of(kinds[i], UM_SHARING_MEMFD, 0),
                       kinds[i] == UM_PAGES_THP ? unit : 9 * page);
        }
        /* The copy ends at the first gap. */
        CHECK_OK(um_block_release(&block, 5 * page, page, NULL, &test_err));
        check_copy(&block, *of(UM_PAGES_4K, UM_SHARING_MEMFD, 0), 5 * page);
        /* A copy does not change with the block. */
        AUTO_BLOCK copy = copy_sealed(&block, of(UM_PAGES_4K, UM_SHARING_MEMFD, 0));
        memset(block.base, 3, page);
        CHECK(is_filled(copy.base, page, 1));
        check_copy(&copy, *of(UM_PAGES_4K, UM_SHARING_MEMFD, 0), 5 * page);
    }
}

TEST(copy_of_a_file) {
    AUTO_FD fd = memory_file(3 * page);
    CHECK(pwrite(fd, "end", 3, (off_t)(page + 100)) == 3);
    AUTO_BLOCK file;
    CHECK_OK(um_block_map_file(&file, fd, page, 103, UM_ACCESS_READ, UM_CAT_OTHER, &test_err));
    check_copy(&file, *of(UM_PAGES_AUTO, UM_SHARING_MEMFD, 0), page);
}

TEST(copy_with_policy) {
    SKIP_UNLESS(may_bind(), "this process may not set policies");
    AUTO_BLOCK block = make_block(4 * page, of(UM_PAGES_4K, UM_SHARING_MEMFD, 0));
    memset(block.base, 1, block.nbytes);
    um_block_options options = *of(UM_PAGES_4K, UM_SHARING_MEMFD, 0);
    options.numa = (um_numa){.mode = UM_NUMA_BIND, .nodes = {1}};
    AUTO_BLOCK copy = copy_sealed(&block, &options);
    CHECK_STR(policy_at(copy.base), "bind:0");
    CHECK_EQ(placement_of(&copy).node_bytes[0], 4 * page);
}

static void check_refused_copy(um_status status, const char *what, const um_block *block,
                               const um_block_options *options) {
    CHECK_MAKES_NONE(status, what, um_block_copy_sealed, block, options);
}

/* Truncated pages: of a mapped file, of a file mapped over a block, and of shared memory. */
TEST(copy_of_a_truncated_file) {
    AUTO_FD fd = memory_file(3 * page);
    AUTO_BLOCK file, shared = attach_block(fd, UM_ACCESS_READ);
    AUTO_BLOCK over = make_block(page, OPTIONS(.pages = UM_PAGES_4K, .reserve_nbytes = 4 * page));
    CHECK_OK(um_block_map_file(&file, fd, 0, 3 * page, UM_ACCESS_READ, UM_CAT_OTHER, &test_err));
    CHECK_OK(um_block_overlay(&over, page, fd, 0, 3 * page, &test_err));
    REQUIRE(ftruncate(fd, (off_t)(2 * page)) == 0);
    check_refused_copy(UM_E_IO, "cannot be had", &file, of(UM_PAGES_4K, UM_SHARING_MEMFD, 0));
    check_refused_copy(UM_E_IO, "cannot be had", &shared, of(UM_PAGES_4K, UM_SHARING_MEMFD, 0));
    check_refused_copy(UM_E_IO, "cannot be had", &over, of(UM_PAGES_4K, UM_SHARING_MEMFD, 0));
}

TEST(refused_copies) {
    um_block block = make_block(4 * page, of(UM_PAGES_4K, UM_SHARING_MEMFD, 0));
    um_block_options options = *of((um_pages)5, UM_SHARING_MEMFD, 0);
    check_refused_copy(UM_E_INVALID, "pages", &block, &options);
    options = *of(UM_PAGES_4K, UM_SHARING_MEMFD, 0);
    options.sharing = UM_SHARING_FD;
    check_refused_copy(UM_E_INVALID, "sharing", &block, &options);
    options = *of(UM_PAGES_4K, UM_SHARING_MEMFD, 0);
    options.reserve_nbytes = 8 * page;
    check_refused_copy(UM_E_INVALID, "reserve_nbytes", &block, &options);
    options = *of(UM_PAGES_4K, UM_SHARING_MEMFD, 0);
    options.category = UM_CAT_COUNT;
    check_refused_copy(UM_E_INVALID, "category", &block, &options);
    CHECK_OK(um_block_release(&block, 0, page, NULL, &test_err));
    options = *of(UM_PAGES_4K, UM_SHARING_MEMFD, 0);
    check_refused_copy(UM_E_INVALID, "committed", &block, &options);
    unmap_block(&block);
    check_refused_copy(UM_E_INVALID, "committed", &block, &options);
}

TEST(hugetlb) {
    BORROW_HUGE_PAGES(8);
    uint64_t available = huge_pages_available();
    um_block block = make_block(2 * HUGE_BYTES, of(UM_PAGES_2M, UM_SHARING_MEMFD, 0));
    memset(block.base, 1, block.nbytes);
    um_block other = attach_block(block.fd, UM_ACCESS_SHARED);
    check_attached(&other, UM_ACCESS_SHARED, 2 * HUGE_BYTES, HUGE_BYTES);
    CHECK(other.requested_pages == UM_PAGES_2M);
    CHECK_EQ(huge_pages_available(), available - 2);
    CHECK(is_filled(other.base, other.nbytes, 1));
    CHECK_EQ(placement_of(&other).huge_bytes, other.nbytes);
    CHECK_OK(um_block_collapse(&other, &test_err)); /* left as it is */
    unmap_block(&other);
    check_copy(&block, *of(UM_PAGES_2M, UM_SHARING_MEMFD, 0), 2 * HUGE_BYTES);
    check_copy(&block, *of(UM_PAGES_4K, UM_SHARING_MEMFD, 0), 2 * HUGE_BYTES);
    um_block_options options = *of(UM_PAGES_2M, UM_SHARING_MEMFD, 0);
    /* All pages of the pool but one: a copy needs as many again. */
    um_block large = make_block((huge_pages_available() - 1) * HUGE_BYTES, &options);
    check_refused_copy(UM_E_NOMEM, "mmap", &large, &options);
    unmap_block(&large);
    unmap_block(&block);
    CHECK_EQ(huge_pages_available(), available);
}

typedef struct sharing {
    um_block block; /* the block that is made */
    um_block source;
    um_pages pages;
} sharing;

static void undo(void *context) {
    sharing *s = context;
    CHECK(um_block_unmap(&s->block, NULL) == UM_OK);
    SPOIL(s->block);
}

static um_status run_attach(void *context, um_error *err) {
    sharing *s = context;
    return um_block_attach(&s->block, s->source.fd, UM_ACCESS_SHARED, UM_CAT_STAGING, err);
}

static um_status run_copy(void *context, um_error *err) {
    sharing *s = context;
    return um_block_copy_sealed(&s->block, &s->source, of(s->pages, UM_SHARING_MEMFD, 0), err);
}

static void check_faults(sharing *s, um_status (*run)(void *context, um_error *err)) {
    SPOIL(s->block);
    /* If no read-only descriptor can be opened, a new kernel maps the existing one. */
    CHECK_EACH_FAULT(run, undo, s, *s, HARMLESS_HUGE_PAGE);
}

TEST(faults) {
    um_pages kinds[] = {UM_PAGES_AUTO, UM_PAGES_4K, UM_PAGES_THP};
    sharing s = {.source = make_block(3 * page, of(UM_PAGES_4K, UM_SHARING_MEMFD, 0))};
    memset(s.source.base, 1, s.source.nbytes);
    check_faults(&s, run_attach);
    for (size_t i = 0; i < COUNT(kinds); i++) {
        s.pages = kinds[i];
        check_faults(&s, run_copy);
    }
    unmap_block(&s.source);
}
