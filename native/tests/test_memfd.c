/* The files of shared memory: memfds that are made, and files from the caller. */
#include "blocks.h"

static um_block_options of_file(int fd, um_pages pages) {
    return *OPTIONS(.pages = pages, .category = UM_CAT_WEIGHTS, .sharing = UM_SHARING_FD, .fd = fd);
}

/* An empty file without a name in /dev/shm, or -1. */
static int make_shm_file(void) {
    return open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
}

TEST(memfd) {
    um_block_options options = *OPTIONS(.pages = UM_PAGES_4K, .category = UM_CAT_WEIGHTS,
                                        .sharing = UM_SHARING_MEMFD, .reserve_nbytes = 10 * page);
    AUTO_BLOCK block = make_block(3 * page, &options);
    char path[64], target[64] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%d", block.fd);
    CHECK(readlink(path, target, sizeof target - 1) > 0);
    CHECK(strncmp(target, "/memfd:unimem ", 14) == 0);
    CHECK_EQ(file_nbytes(block.fd), 10 * page);
    int seals = fcntl(block.fd, F_GET_SEALS);
    CHECK((seals & (F_SEAL_SHRINK | F_SEAL_GROW)) == (F_SEAL_SHRINK | F_SEAL_GROW));
    CHECK((seals & (F_SEAL_WRITE | F_SEAL_SEAL)) == 0);
    CHECK(ftruncate(block.fd, (off_t)(11 * page)) == -1);
    CHECK(ftruncate(block.fd, 0) == -1);
    CHECK((fcntl(block.fd, F_GETFD) & FD_CLOEXEC) != 0);
    unmap_block(&block);
    options.name = "a name of its own";
    block = make_block(page, &options);
    snprintf(path, sizeof path, "/proc/self/fd/%d", block.fd);
    CHECK(readlink(path, target, sizeof target - 1) > 0);
    CHECK(strncmp(target, "/memfd:a name of its own ", 25) == 0);
}

TEST(file_of_the_caller) {
    int fd = make_shm_file();
    SKIP_UNLESS(fd >= 0, "no file can be made in /dev/shm");
    um_block_options options = of_file(fd, UM_PAGES_4K);
    options.reserve_nbytes = 8 * page;
    um_block block = make_block(2 * page + 1, &options);
    CHECK(block.fd != fd);
    CHECK(block.sharing == UM_SHARING_FD);
    CHECK_EQ(file_nbytes(fd), 8 * page);
    memset(block.base, 7, block.nbytes);
    AUTO_BLOCK other = attach_block(fd, UM_ACCESS_READ);
    close(fd); /* the block has its own descriptor */
    CHECK(is_filled(other.base, 3 * page, 7));
    CHECK(is_filled(bytes_of(&other, 3 * page), page, 0));
    CHECK_OK(um_block_commit(&block, 3 * page, page, &test_err));
    memset(bytes_of(&block, 3 * page), 8, page);
    CHECK(is_filled(bytes_of(&other, 3 * page), page, 8));
    unmap_block(&block);
    CHECK(is_filled(other.base, 3 * page, 7));
}

static void check_refused(um_status status, const char *what, int fd, um_pages pages) {
    um_block_options options = of_file(fd, pages);
    uint64_t nbytes = fd < 0 ? 0 : file_nbytes(fd);
    CHECK_MAKES_NONE(status, what, um_block_map, page, &options);
    CHECK(fd < 0 || file_nbytes(fd) == nbytes);
}

TEST(refused_files) {
    AUTO_FD fd = make_shm_file();
    SKIP_UNLESS(fd >= 0, "no file can be made in /dev/shm");
    check_refused(UM_E_OS, "fcntl", -1, UM_PAGES_4K);
    check_refused(UM_E_INVALID, "pages", fd, UM_PAGES_2M);
    int read_only = reopen(fd, O_RDONLY);
    CHECK(read_only >= 0);
    check_refused(UM_E_OS, "ftruncate", read_only, UM_PAGES_4K);
    close(read_only);
    /* A file that could not be mapped is empty again. */
    int write_only = reopen(fd, O_WRONLY);
    CHECK(write_only >= 0);
    check_refused(UM_E_OS, "mmap", write_only, UM_PAGES_4K);
    close(write_only);
    CHECK(write(fd, "x", 1) == 1);
    check_refused(UM_E_INVALID, "empty", fd, UM_PAGES_4K); /* it may be data of another process */
}

/* A file of huge pages cannot have small ones. */
TEST(refused_hugetlb) {
    AUTO_FD fd = memfd_create("huge", MFD_CLOEXEC | MFD_HUGETLB);
    SKIP_UNLESS(fd >= 0, "the kernel has none");
    check_refused(UM_E_INVALID, "pages", fd, UM_PAGES_4K);
}

typedef struct mapping {
    um_block block;
    int fd;
    um_pages pages;
} mapping;

static um_status run_map(void *context, um_error *err) {
    mapping *m = context;
    um_block_options options = of_file(m->fd, m->pages);
    um_status status = um_block_map(&m->block, 3 * page, &options, err);
    CHECK(status == UM_OK || file_nbytes(m->fd) == 0);
    return status;
}

static void undo_map(void *context) {
    mapping *m = context;
    CHECK(um_block_unmap(&m->block, NULL) == UM_OK);
    SPOIL(m->block);
    CHECK(ftruncate(m->fd, 0) == 0);
}

TEST(faults) {
    um_pages kinds[] = {UM_PAGES_AUTO, UM_PAGES_4K, UM_PAGES_THP};
    mapping m = {.fd = make_shm_file()};
    SKIP_UNLESS(m.fd >= 0, "no file can be made in /dev/shm");
    for (size_t i = 0; i < COUNT(kinds); i++) {
        m.pages = kinds[i];
        SPOIL(m.block);
        CHECK_EACH_FAULT(run_map, undo_map, &m, m, HARMLESS_HUGE_PAGE);
    }
    close(m.fd);
}
