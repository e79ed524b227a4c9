/* In-memory file systems that are mounted nowhere. */
#include "blocks.h"
#include <sys/statfs.h>
#include <sys/syscall.h>

#define TMPFS_MAGIC 0x01021994
/* Since Linux 5.12, with the same number on every architecture. */
enum { SYS_MOUNT_SETATTR = 442, MOUNT_ATTR_RDONLY = 1 };

/* Containers often may not, and before Linux 5.2 no process could do it in this way. */
static bool may_mount(void) {
    int fd;
    um_status status = um_tmpfs_open(&fd, 1 << 20, 0, &test_err);
    if (status == UM_E_OS && (test_err.os_errno == EPERM || test_err.os_errno == ENOSYS)) {
        return false;
    }
    close(fd);
    return CHECK(status == UM_OK);
}

static int open_tmpfs(uint64_t nbytes, int huge) {
    int fd = -1;
    REQUIRE(CHECK_OK(um_tmpfs_open(&fd, nbytes, huge, &test_err)));
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    return fd;
}

static int make_file(int folder, const char *name) {
    int fd = openat(folder, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0444);
    REQUIRE(fd >= 0);
    return fd;
}

TEST(size) {
    SKIP_UNLESS(may_mount(), "this process may not mount a tmpfs");
    AUTO_FD fd = open_tmpfs(64 * um_page_bytes(), 0), file = make_file(fd, "a");
    struct statfs fs;
    REQUIRE(fstatfs(fd, &fs) == 0);
    CHECK_EQ(fs.f_type, TMPFS_MAGIC);
    CHECK_EQ(fs.f_blocks * (uint64_t)fs.f_bsize, 64 * um_page_bytes());
    CHECK(fallocate(file, 0, 0, (off_t)(64 * um_page_bytes())) == 0);
    CHECK(fallocate(file, 0, 0, (off_t)(65 * um_page_bytes())) == -1);
    CHECK(errno == ENOSPC);
}

/* Files outlive the folder, and no process sees the mount. */
TEST(detached) {
    SKIP_UNLESS(may_mount(), "this process may not mount a tmpfs");
    os_state_begin();
    int fd = open_tmpfs(1 << 20, 0), file = make_file(fd, "a");
    CHECK(write(file, "text", 4) == 4);
    FILE *mounts = fopen("/proc/self/mountinfo", "re");
    REQUIRE(mounts != NULL);
    struct stat st;
    char line[4096], device[32];
    REQUIRE(fstat(fd, &st) == 0);
    snprintf(device, sizeof device, " %u:%u ", (unsigned)(st.st_dev >> 8 & 0xFFF),
             (unsigned)(st.st_dev & 0xFF));
    while (fgets(line, sizeof line, mounts) != NULL) {
        CHECK(strstr(line, device) == NULL);
    }
    fclose(mounts);
    close(fd);
    char text[4] = "";
    CHECK(pread(file, text, 4, 0) == 4);
    CHECK(memcmp(text, "text", 4) == 0);
    close(file);
    CHECK(os_state_unchanged());
}

TEST(sealed) {
    SKIP_UNLESS(may_mount(), "this process may not mount a tmpfs");
    int fd = open_tmpfs(1 << 20, 0), file = make_file(fd, "a");
    CHECK(write(file, "text", 4) == 4);
    CHECK_STATUS(UM_E_OS, um_tmpfs_seal(fd, &test_err));
    CHECK_OS_ERR(EBUSY, "fsconfig");
    close(file);
    CHECK_OK(um_tmpfs_seal(fd, &test_err));
    CHECK(openat(fd, "a", O_RDWR | O_CLOEXEC) == -1);
    CHECK(errno == EROFS);
    CHECK(openat(fd, "b", O_RDWR | O_CREAT | O_CLOEXEC, 0600) == -1);
    CHECK(errno == EROFS);
    CHECK(unlinkat(fd, "a", 0) == -1);
    CHECK(errno == EROFS);
    file = openat(fd, "a", O_RDONLY | O_CLOEXEC);
    REQUIRE(file >= 0);
    char text[4] = "";
    CHECK(read(file, text, 4) == 4);
    CHECK(memcmp(text, "text", 4) == 0);
    CHECK(mmap(NULL, 4, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) == MAP_FAILED);
    CHECK(mmap(NULL, 4, PROT_READ | PROT_EXEC, MAP_SHARED, file, 0) == MAP_FAILED);
    close(file);
    /* Attributes of the mount do not change that, so clones of it cannot be written either. */
    uint64_t attributes[4] = {0, MOUNT_ATTR_RDONLY};
    long cleared = syscall(SYS_MOUNT_SETATTR, fd, "", AT_EMPTY_PATH, attributes, sizeof attributes);
    CHECK(cleared == 0 || errno == ENOSYS);
    CHECK(openat(fd, "a", O_RDWR | O_CLOEXEC) == -1);
    CHECK(errno == EROFS);
    close(fd);
}

/* The mount decides on huge pages, whatever shmem_enabled says. */
TEST(huge) {
    SKIP_UNLESS(may_mount(), "this process may not mount a tmpfs");
    size_t huge = um_huge_page_bytes();
    SKIP_UNLESS(huge != 0, "this kernel has none");
    for (int wanted = 0; wanted <= 1; wanted++) {
        AUTO_FD fd = open_tmpfs(2 * huge, wanted), file = make_file(fd, "a");
        um_block_options options = *OPTIONS(.sharing = UM_SHARING_FD, .fd = file,
                                            .pages = wanted ? UM_PAGES_AUTO : UM_PAGES_4K);
        um_block block;
        um_placement placement;
        REQUIRE(CHECK_OK(um_block_map(&block, 2 * huge, &options, &test_err)));
        CHECK_OK(um_block_warm(&block, 0, block.nbytes, 1, NULL, &test_err));
        CHECK_OK(um_block_verify(&block, &placement, &test_err));
        CHECK_EQ(placement.resident_bytes, 2 * huge);
        CHECK(placement.huge_bytes == (wanted ? 2 * huge : 0) || !gives_huge_pages(2));
        CHECK_OK(um_block_unmap(&block, &test_err));
    }
}

TEST(refused) {
    int fd = 777;
    CHECK_INVALID(um_tmpfs_open(&fd, 0, 0, &test_err));
    CHECK(fd == 777);
    CHECK_STATUS(UM_E_OS, um_tmpfs_seal(-1, &test_err));
    int os_errno = test_err.os_errno;
    CHECK(os_errno == EBADF || (os_errno == EPERM && !may_mount()));
}

static um_status run_open(void *context, um_error *err) {
    return um_tmpfs_open(context, 1 << 20, 1, err);
}

static void undo_open(void *context) {
    close(*(int *)context);
}

static um_status run_seal(void *context, um_error *err) {
    return um_tmpfs_seal(*(int *)context, err);
}

TEST(every_fault) {
    SKIP_UNLESS(may_mount(), "this process may not mount a tmpfs");
    AUTO_FD fd = 777;
    CHECK_EACH_FAULT(run_open, undo_open, &fd, fd, " um__os_close ");
    fd = open_tmpfs(1 << 20, 0);
    CHECK_EACH_FAULT(run_seal, NULL, &fd, fd, " um__os_close ");
    close(fd);
}
