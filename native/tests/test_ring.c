/* An io_uring: reads end with what pread would return. */
#include "blocks.h"
#include "os/ring.h"

enum { N_READS = 8, NBYTES = 20000 };

static bool is_refused(void) {
    um__ring ring;
    if (um__ring_open(&ring, 1) != 0) {
        return true;
    }
    um__ring_close(&ring, false);
    return false;
}

/* Waits for one read. */
static um__read_end take_one(um__ring *ring) {
    um__read_end end;
    while (!um__ring_take(ring, &end)) {
        REQUIRE(um__ring_enter(ring, 1) == 0);
    }
    return end;
}

TEST(reads) {
    SKIP_UNLESS(!is_refused(), "the kernel refuses io_uring");
    AUTO_FD fd = temp_file();
    fill_file(fd, 1, NBYTES);
    AUTO_FREE unsigned char *to = allocate(N_READS * NBYTES);
    um__ring ring;
    REQUIRE(um__ring_open(&ring, N_READS) == 0);
    um__read_end end;
    CHECK(!um__ring_take(&ring, &end));
    CHECK_EQ(um__ring_enter(&ring, 0), 0);
    for (uint32_t round = 0; round < 30; round++) { /* the rings go round */
        for (uint32_t i = 0; i < N_READS; i++) {
            um__ring_put(&ring, round * 100 + i, fd, to + i * NBYTES, 1000 + i, round * 10 + i);
        }
        bool seen[N_READS] = {false};
        for (uint32_t i = 0; i < N_READS; i++) {
            end = take_one(&ring);
            uint32_t id = end.id - round * 100;
            REQUIRE(id < N_READS);
            CHECK(!seen[id]);
            seen[id] = true;
            CHECK_EQ(end.os_errno, 0);
            CHECK_EQ(end.nbytes, 1000 + id);
            CHECK(holds(to + id * NBYTES, 1, round * 10 + id, 1000 + id));
        }
        CHECK(!um__ring_take(&ring, &end));
    }
    um__ring_close(&ring, false);
}

TEST(short_and_failing_reads) {
    SKIP_UNLESS(!is_refused(), "the kernel refuses io_uring");
    AUTO_FD fd = temp_file();
    fill_file(fd, 1, NBYTES);
    unsigned char to[1000];
    um__ring ring;
    REQUIRE(um__ring_open(&ring, N_READS) == 0);
    um__ring_put(&ring, 1, fd, to, sizeof to, NBYTES - 10);
    um__ring_put(&ring, 2, fd, to, sizeof to, NBYTES + 10);
    um__ring_put(&ring, 3, -1, to, sizeof to, 0);
    for (int i = 0; i < 3; i++) {
        um__read_end end = take_one(&ring);
        CHECK_EQ(end.nbytes, end.id == 1 ? 10 : 0);
        CHECK_EQ(end.os_errno, end.id == 3 ? EBADF : 0);
    }
    um__ring_close(&ring, false);
}

TEST(opening_fails_at_each_call) {
    SKIP_UNLESS(!is_refused(), "the kernel refuses io_uring");
    os_state_begin();
    unsigned n = 1;
    for (bool failed = true; failed; n++) {
        um__ring ring;
        SPOIL(ring);
        fault_os_fail_nth(n, EMFILE);
        int os_errno = um__ring_open(&ring, N_READS);
        failed = fault_os_failed() != NULL;
        fault_os_fail_nth(0, 0);
        CHECK_EQ(os_errno, failed ? EMFILE : 0);
        if (failed) {
            CHECK_SPOILT(ring);
        } else {
            um__ring_close(&ring, false);
        }
        CHECK(os_state_unchanged());
    }
    CHECK_EQ(n, 7);
}

TEST(closing_leaves_no_mapping_if_a_call_fails) {
    SKIP_UNLESS(!is_refused(), "the kernel refuses io_uring");
    os_state_begin();
    for (unsigned n = 1; n <= 2; n++) {
        um__ring ring;
        REQUIRE(um__ring_open(&ring, N_READS) == 0);
        fault_os_fail_nth(n, ENOMEM);
        um__ring_close(&ring, false);
        CHECK_STR(fault_os_failed(), "um__os_unmap");
        fault_os_fail_nth(0, 0);
        CHECK(os_state_unchanged());
    }
}

/* The rings are not mapped in a child: no entry of the parent's is changed there. */
TEST(a_forked_child_closes_only_the_descriptor) {
    SKIP_UNLESS(!is_refused(), "the kernel refuses io_uring");
    um__ring ring;
    REQUIRE(um__ring_open(&ring, N_READS) == 0);
    pid_t child = fork();
    if (child == 0) {
        bool is_mapped = os_state_permissions(ring.rings)[0] != '\0' ||
                         os_state_permissions(ring.entries)[0] != '\0';
        um__ring_close(&ring, true);
        _exit(is_mapped || fcntl(ring.fd, F_GETFD) >= 0);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK_EQ(status, 0);
    CHECK_STR(os_state_permissions(ring.rings), "rw-s");
    um__ring_close(&ring, false);
}
