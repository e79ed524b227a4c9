/* Reads under way, in a ring and in threads: each ends once, with its own bytes. */
#include "blocks.h"
#include "pieces/reads.h"

enum { N_READS = 12, NBYTES = 3000, FILE_NBYTES = 100000 };

static bool is_refused(um_pieces_io io) {
    um__reads *reads = NULL;
    if (um__reads_open(&reads, io, 1, NULL) != UM_OK) {
        return true;
    }
    um__reads_close(reads, false);
    return false;
}

static um__read_end take_one(um__reads *reads) {
    um__read_end end;
    while (!um__reads_take(reads, &end)) {
        REQUIRE(um__reads_wait(reads) == 0);
    }
    return end;
}

static void check_reads(um_pieces_io io) {
    AUTO_FD fd = temp_file();
    fill_file(fd, 1, FILE_NBYTES);
    AUTO_FREE unsigned char *to = allocate(N_READS * NBYTES);
    um__reads *reads;
    REQUIRE(CHECK_OK(um__reads_open(&reads, io, N_READS, &test_err)));
    CHECK_EQ(um__reads_limit(reads), N_READS);
    CHECK_EQ(um__reads_has_ring(reads), io == UM_PIECES_IO_RING);
    um__read_end end;
    CHECK(!um__reads_take(reads, &end));
    CHECK_EQ(um__reads_begin(reads), 0);
    uint64_t offsets[N_READS], random = 7;
    bool busy[N_READS] = {false};
    uint32_t n_busy = 0;
    for (unsigned i = 0; i < 400; i++) {
        for (uint32_t id = 0; id < N_READS; id++) {
            if (!busy[id] && test_random(&random) % 2 == 0) {
                offsets[id] = test_random(&random) % (FILE_NBYTES - NBYTES);
                um__reads_put(reads, id, fd, to + id * NBYTES, NBYTES, offsets[id]);
                busy[id] = true;
                n_busy++;
            }
        }
        CHECK_EQ(um__reads_begin(reads), 0);
        for (uint32_t n = n_busy == 0 ? 0 : (uint32_t)(test_random(&random) % n_busy); n > 0; n--) {
            end = take_one(reads);
            REQUIRE(end.id < N_READS);
            CHECK(busy[end.id]);
            CHECK_EQ(end.os_errno, 0);
            CHECK_EQ(end.nbytes, NBYTES);
            CHECK(holds(to + end.id * NBYTES, 1, offsets[end.id], NBYTES));
            busy[end.id] = false;
            n_busy--;
        }
    }
    for (; n_busy > 0; n_busy--) {
        take_one(reads);
    }
    um__reads_put(reads, 5, -1, to, NBYTES, 0);
    end = take_one(reads);
    CHECK_EQ(end.id, 5);
    CHECK_EQ(end.os_errno, EBADF);
    CHECK_EQ(end.nbytes, 0);
    um__reads_close(reads, false);
}

TEST(a_ring_reads) {
    SKIP_UNLESS(!is_refused(UM_PIECES_IO_RING), "the kernel refuses io_uring");
    check_reads(UM_PIECES_IO_RING);
}

TEST(threads_read) {
    check_reads(UM_PIECES_IO_THREADS);
}

TEST(threads_read_where_a_ring_is_refused) {
    um__reads *reads = NULL;
    fault_os_fail_nth(1, EPERM); /* as seccomp's filters and kernel.io_uring_disabled do */
    CHECK_OK(um__reads_open(&reads, UM_PIECES_IO_AUTO, 3, &test_err));
    CHECK_STR(fault_os_failed(), "um__os_ring_setup");
    CHECK(!um__reads_has_ring(reads));
    CHECK_EQ(um__reads_limit(reads), 3);
    um__reads_close(reads, false);
    fault_os_fail_nth(1, EPERM);
    CHECK_STATUS(UM_E_OS, um__reads_open(&reads, UM_PIECES_IO_RING, 3, &test_err));
    CHECK_EQ(test_err.os_errno, EPERM);
}

TEST(limits) {
    um__reads *reads = NULL;
    CHECK_OK(um__reads_open(&reads, UM_PIECES_IO_THREADS, 1000, &test_err));
    CHECK_EQ(um__reads_limit(reads), 16);
    um__reads_close(reads, false);
    SKIP_UNLESS(!is_refused(UM_PIECES_IO_RING), "the kernel refuses io_uring");
    CHECK_OK(um__reads_open(&reads, UM_PIECES_IO_RING, 0, &test_err));
    CHECK_EQ(um__reads_limit(reads), 64);
    um__reads_close(reads, false);
}

/* The kernel has no memory for more reads until some have ended. */
TEST(a_full_kernel_is_asked_again) {
    SKIP_UNLESS(!is_refused(UM_PIECES_IO_RING), "the kernel refuses io_uring");
    AUTO_FD fd = temp_file();
    fill_file(fd, 1, FILE_NBYTES);
    unsigned char to[NBYTES];
    um__reads *reads;
    REQUIRE(CHECK_OK(um__reads_open(&reads, UM_PIECES_IO_RING, 2, &test_err)));
    static const int errnos[] = {EAGAIN, EBUSY};
    for (size_t i = 0; i < COUNT(errnos); i++) {
        um__reads_put(reads, 1, fd, to, NBYTES, i);
        fault_os_fail_nth(1, errnos[i]);
        CHECK_EQ(um__reads_wait(reads), 0);
        CHECK_STR(fault_os_failed(), "um__os_ring_enter");
        fault_os_fail_nth(0, 0);
        CHECK_EQ(take_one(reads).nbytes, NBYTES);
        CHECK(holds(to, 1, i, NBYTES));
    }
    um__reads_put(reads, 1, fd, to, NBYTES, 0);
    fault_os_fail_nth(1, EINTR);
    CHECK_EQ(um__reads_wait(reads), EINTR);
    fault_os_fail_nth(0, 0);
    CHECK_EQ(take_one(reads).nbytes, NBYTES); /* it was not lost */
    um__reads_close(reads, false);
}
