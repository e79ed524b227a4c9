/* Each system call on its own: what it does, that it reports an errno, and that it is counted. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "test.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fault_os.h"
#include "os.h"

static size_t page;

/* `call` is one system call, and gives this result. */
#define CHECK_CALL(expected, call)                                                                 \
    do {                                                                                           \
        um_counters counted_before, counted_after;                                                 \
        um_counters_read(&counted_before);                                                         \
        CHECK_EQ_U64(call, expected);                                                              \
        um_counters_read(&counted_after);                                                          \
        CHECK_EQ_U64(counted_after.n_os_calls, counted_before.n_os_calls + 1);                     \
    } while (0)

static void test_memory(void) {
    char *base = NULL;
    CHECK_CALL(0, um_os_reserve(16 * page, (void **)&base));
    REQUIRE(base != NULL && (uintptr_t)base % page == 0);
    CHECK(strcmp(os_state_permissions(base), "---p") == 0);
    CHECK(strcmp(os_state_permissions(base + 16 * page - 1), "---p") == 0);

    CHECK_CALL(0, um_os_map_at(base + 4 * page, 8 * page, 0));
    CHECK(strcmp(os_state_permissions(base + 4 * page - 1), "---p") == 0);
    CHECK(strcmp(os_state_permissions(base + 4 * page), "rw-p") == 0);
    CHECK(strcmp(os_state_permissions(base + 12 * page - 1), "rw-p") == 0);
    CHECK(strcmp(os_state_permissions(base + 12 * page), "---p") == 0);

    unsigned char pages[8];
    memset(pages, 0xFF, sizeof pages);
    CHECK_CALL(0, um_os_residency(base + 4 * page, 8 * page, pages));
    for (int i = 0; i < 8; i++) {
        CHECK((pages[i] & 1) == 0);
    }
    CHECK_CALL(0, um_os_advise(base + 5 * page, 2 * page, UM_OS_POPULATE_WRITE));
    CHECK_CALL(0, um_os_advise(base + 10 * page, page, UM_OS_POPULATE_READ));
    CHECK_CALL(0, um_os_residency(base + 4 * page, 8 * page, pages));
    CHECK((pages[0] & 1) == 0 && (pages[1] & 1) == 1 && (pages[2] & 1) == 1 && (pages[3] & 1) == 0);
    CHECK(base[5 * page] == 0 && base[7 * page - 1] == 0);

    if (um_huge_page_bytes() != 0) {
        CHECK_CALL(0, um_os_advise(base + 4 * page, 8 * page, UM_OS_HUGE));
        CHECK_CALL(0, um_os_advise(base + 4 * page, 8 * page, UM_OS_NO_HUGE));
    }
    CHECK_CALL(0, um_os_unmap(base, 16 * page));
    CHECK(strcmp(os_state_permissions(base + 5 * page), "") == 0);

    /* A failure leaves the output alone. */
    void *untouched = &page;
    CHECK_CALL(ENOMEM, um_os_reserve((size_t)1 << 62, &untouched));
    CHECK(untouched == &page);
    CHECK_CALL(EINVAL, um_os_unmap(base + 1, page));
    CHECK_CALL(ENOMEM, um_os_advise(base, page, UM_OS_POPULATE_WRITE));
    CHECK_CALL(ENOMEM, um_os_residency(base, page, pages));
    CHECK_CALL(EINVAL, um_os_advise(base + 1, page, UM_OS_HUGE));
}

static void test_files(void) {
    int fd = memfd_create("unimem-test", MFD_CLOEXEC), opened = 777;
    REQUIRE(fd >= 0);
    CHECK(pwrite(fd, "first", 5, 0) == 5 && pwrite(fd, "second", 6, (off_t)page) == 6);
    uint64_t file_nbytes = 777;
    CHECK_CALL(0, um_os_file_nbytes(fd, &file_nbytes));
    CHECK_EQ_U64(file_nbytes, page + 6);

    char path[64], bytes[16] = "";
    size_t n = 777;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    CHECK_CALL(0, um_os_open_read(path, &opened));
    REQUIRE(opened != 777);
    CHECK((fcntl(opened, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK((fcntl(opened, F_GETFL) & O_ACCMODE) == O_RDONLY);
    CHECK_CALL(0, um_os_read(opened, bytes, 3, &n));
    CHECK(n == 3 && memcmp(bytes, "fir", 3) == 0);
    CHECK_CALL(0, um_os_read(opened, bytes, 2, &n));
    CHECK(n == 2 && memcmp(bytes, "st", 2) == 0);
    CHECK_CALL(0, um_os_pread(opened, bytes, sizeof bytes, page, &n));
    CHECK(n == 6 && memcmp(bytes, "second", 6) == 0);
    CHECK_CALL(0, um_os_pread(opened, bytes, sizeof bytes, page + 6, &n));
    CHECK_EQ_U64(n, 0);
    CHECK_CALL(0, um_os_close(opened));
    CHECK_CALL(EBADF, um_os_close(opened));

    unsigned char *shared, *private;
    CHECK_CALL(0, um_os_reserve(page, (void **)&shared));
    CHECK_CALL(0, um_os_reserve(2 * page, (void **)&private));
    CHECK_CALL(0, um_os_map_file_at(shared, fd, page, page, UM_ACCESS_READ));
    CHECK_CALL(0, um_os_map_file_at(private, fd, 0, 2 * page, UM_ACCESS_PRIVATE));
    CHECK(strcmp(os_state_permissions(shared), "r--s") == 0);
    CHECK(strcmp(os_state_permissions(private), "rw-p") == 0);
    CHECK(memcmp(shared, "second", 6) == 0 && memcmp(private + page, "second", 6) == 0);
    private[page] = 'S';
    CHECK(shared[0] == 's');
    CHECK_CALL(0, um_os_unmap(private, 2 * page));
    CHECK_CALL(0, um_os_unmap(shared, page));

    /* A failure leaves the output alone. */
    n = 777;
    file_nbytes = 777;
    opened = 777;
    CHECK_CALL(0, um_os_reserve(page, (void **)&shared));
    CHECK_CALL(EBADF, um_os_map_file_at(shared, -1, 0, page, UM_ACCESS_READ));
    CHECK_CALL(EINVAL, um_os_map_file_at(shared, fd, 1, page, UM_ACCESS_READ));
    CHECK(strcmp(os_state_permissions(shared), "---p") == 0);
    CHECK_CALL(0, um_os_unmap(shared, page));
    CHECK_CALL(EBADF, um_os_pread(-1, bytes, 1, 0, &n));
    CHECK_CALL(EINVAL, um_os_pread(fd, bytes, 1, UINT64_MAX, &n));
    CHECK_CALL(EBADF, um_os_read(-1, bytes, 1, &n));
    CHECK_CALL(EBADF, um_os_file_nbytes(-1, &file_nbytes));
    CHECK_CALL(ENOENT, um_os_open_read("/no/such/file", &opened));
    CHECK(n == 777 && file_nbytes == 777 && opened == 777);
    close(fd);
}

typedef struct runner {
    size_t cpu;
    _Atomic int ran;
    int result;
    cpu_set_t cpus;
} runner;

static void *run_on_cpu(void *arg) {
    runner *r = arg;
    cpu_set_t mask;
    CPU_ZERO(&mask);
    CPU_SET(r->cpu, &mask);
    r->result = um_os_set_affinity(&mask, sizeof mask);
    sched_getaffinity(0, sizeof r->cpus, &r->cpus);
    atomic_store(&r->ran, 1);
    return NULL;
}

static void test_threads(void) {
    cpu_set_t mine, mask;
    CPU_ZERO(&mask);
    CHECK(sched_getaffinity(0, sizeof mine, &mine) == 0);
    CHECK_CALL(0, um_os_get_affinity(&mask, sizeof mask));
    CHECK(CPU_EQUAL(&mine, &mask));
    CHECK(CPU_COUNT(&mask) > 0);

    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &mine)) {
            continue;
        }
        runner r = {.cpu = cpu, .result = -1};
        um_os_thread thread;
        um_counters start, end;
        um_counters_read(&start);
        CHECK_EQ_U64(um_os_thread_start(&thread, run_on_cpu, &r), 0);
        CHECK_EQ_U64(um_os_thread_join(thread), 0);
        um_counters_read(&end);
        CHECK_EQ_U64(end.n_os_calls, start.n_os_calls + 3); /* start, set_affinity, join */
        CHECK_EQ_U64(atomic_load(&r.ran), 1);
        CHECK_EQ_U64(r.result, 0);
        CHECK(CPU_COUNT(&r.cpus) == 1 && CPU_ISSET(cpu, &r.cpus));
    }
    /* Pinning a thread leaves the others where they were. */
    CPU_ZERO(&mask);
    CHECK_CALL(EINVAL, um_os_set_affinity(&mask, sizeof mask));
    CHECK_CALL(0, um_os_set_affinity(&mine, sizeof mine));
    CHECK_CALL(0, um_os_get_affinity(&mask, sizeof mask));
    CHECK(CPU_EQUAL(&mine, &mask));
}

int main(void) {
    page = um_os_page_bytes();
    CHECK_EQ_U64(page, sysconf(_SC_PAGESIZE));
    test_memory();
    test_files();
    test_threads();
    return test_report();
}
