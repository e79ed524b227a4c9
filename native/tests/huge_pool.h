/* Huge pages from the pool of the machine, for the duration of a test. */
#ifndef UM_HUGE_POOL_H
#define UM_HUGE_POOL_H

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

enum { HUGE_BYTES = 2 << 20 };

/* A number of /proc/meminfo. */
static inline uint64_t meminfo(const char *name) {
    char line[256];
    uint64_t found = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    REQUIRE(file != NULL);
    while (fgets(line, sizeof line, file) != NULL) {
        size_t n = strlen(name);
        if (strncmp(line, name, n) == 0 && line[n] == ':') {
            found = strtoull(line + n + 1, NULL, 10);
        }
    }
    fclose(file);
    return found;
}

/* Huge pages of the pool that are neither used nor reserved. */
static inline uint64_t huge_pages_available(void) {
    return meminfo("HugePages_Free") - meminfo("HugePages_Rsvd");
}

/* Tests share the pool, and one that borrows pages has it alone: a block of UM_PAGES_AUTO takes
 * them, whoever has reserved them. tests/support/kernel/huge_pages.py takes the same locks, on two
 * files that every user may open. A test that waits for the pool alone holds the gate, and later
 * ones wait behind it. */
#define HUGE_POOL_LOCK "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"
#define HUGE_POOL_GATE "/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages"
extern int huge_pool_lock;

/* LOCK_SH, LOCK_EX, or LOCK_UN; nothing on a kernel without the pool. */
static inline void huge_pool_take(int kind) {
    int gate = open(HUGE_POOL_GATE, O_RDONLY | O_CLOEXEC);
    if (gate < 0) {
        return;
    }
    flock(huge_pool_lock, LOCK_UN);
    if (kind != LOCK_UN) {
        CHECK(flock(gate, LOCK_EX) == 0 && flock(huge_pool_lock, kind) == 0);
    }
    close(gate);
}

static inline unsigned huge_pool_size(int pool) {
    char text[32] = "";
    return pread(pool, text, sizeof text - 1, 0) > 0 ? (unsigned)strtoul(text, NULL, 10) : 0;
}

static inline void huge_pool_resize(int pool, unsigned n) {
    char text[32];
    int length = snprintf(text, sizeof text, "%u", n);
    if (pwrite(pool, text, (size_t)length, 0) != length) {
        fprintf(stderr, "the pool of huge pages cannot be set to %u\n", n);
    }
}

/* Adds n pages to the pool, and says whether it has got them. Gives them back when the other end of
 * `to_test` closes: that happens whatever ends the test. */
static inline void huge_pool_keep(int to_test, unsigned n) {
    int pool = open("/proc/sys/vm/nr_hugepages", O_RDWR | O_CLOEXEC);
    unsigned borrowed = 0;
    char has_got = 0;
    if (pool >= 0 && flock(pool, LOCK_EX) == 0) { /* programs wait for each other */
        unsigned before = huge_pool_size(pool);
        huge_pool_resize(pool, before + n);
        unsigned now = huge_pool_size(pool);
        borrowed = now > before ? now - before : 0;
        has_got = borrowed == n;
    }
    if (write(to_test, &has_got, 1) == 1 && has_got) {
        while (read(to_test, &has_got, 1) > 0) {
        }
    }
    if (borrowed != 0) {
        unsigned now = huge_pool_size(pool); /* another process may have emptied the pool */
        huge_pool_resize(pool, now > borrowed ? now - borrowed : 0);
    }
}

static pid_t huge_pool_keeper;
static int huge_pool_to_keeper;

static inline void huge_pool_give_back(void) {
    close(huge_pool_to_keeper);
    CHECK(waitpid(huge_pool_keeper, NULL, 0) == huge_pool_keeper);
}

/* Adds n pages of 2 MiB to the pool. Returns false, and leaves the pool as it was, when this
 * process may not do so or when the machine has too few free pages. */
static inline bool huge_pool_borrow(unsigned n) {
    int ends[2];
    char has_got = 0;
    if (meminfo("Hugepagesize") * 1024 == HUGE_BYTES) {
        huge_pool_take(LOCK_EX);
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
        huge_pool_keeper = fork();
        REQUIRE(huge_pool_keeper >= 0);
        if (huge_pool_keeper == 0) {
            setsid(); /* an interruption from the keyboard is not for the keeper */
            close(ends[0]);
            huge_pool_keep(ends[1], n);
            _exit(0);
        }
        close(ends[1]);
        huge_pool_to_keeper = ends[0];
        REQUIRE(read(ends[0], &has_got, 1) == 1);
        if (!has_got) {
            huge_pool_give_back();
        }
    }
    if (!has_got) {
        test_skip("this process may not fill the pool of 2 MiB pages");
    }
    return has_got;
}

/* Pages of the pool until the scope ends; without them, the test ends. */
static inline void huge_pool_end(const bool *is_borrowed) {
    if (*is_borrowed) {
        huge_pool_give_back();
    }
}
#define BORROW_HUGE_PAGES(n)                                                                       \
    __attribute__((cleanup(huge_pool_end))) bool is_borrowed_ = huge_pool_borrow(n);               \
    if (!is_borrowed_) {                                                                           \
        return;                                                                                    \
    }

#endif
