/* Which CPU each thread of a call is pinned to. */
#include "fault_os.h"
#include "os/cpus.h"
#include <sched.h>

TEST(init) {
    um__cpus cpus;
    SPOIL(cpus);
    int chosen[UM__MAX_THREADS + 1] = {[1] = -1, [2] = 8191, [UM__MAX_THREADS] = 8192};
    CHECK_INVALID(um__cpus_init(&cpus, 0, NULL, &test_err));
    CHECK_INVALID(um__cpus_init(&cpus, 1, chosen + UM__MAX_THREADS, &test_err));
    CHECK_SPOILT(cpus);
    CHECK_OK(um__cpus_init(&cpus, UINT32_MAX, chosen, &test_err));
    CHECK_EQ(cpus.n_threads, UM__MAX_THREADS);
    CHECK(um__cpus_at(&cpus, 0) == 0);
    CHECK(um__cpus_at(&cpus, 1) == -1);
    CHECK(um__cpus_at(&cpus, 2) == 8191);
    fault_os_fail_nth(0, 0);
    um__cpus_allow(&cpus); /* for chosen CPUs the kernel is not asked */
    CHECK_EQ(fault_os_calls(), 0);
}

TEST(in_turn) {
    static const int numbers[] = {0, 5, 63, 64, 127, 4096, 8191};
    enum { N = COUNT(numbers) };
    um__cpus cpus;
    CHECK_OK(um__cpus_init(&cpus, 3, NULL, &test_err));
    CHECK_EQ(cpus.n_threads, 3);
    CHECK(um__cpus_at(&cpus, 0) == -1);
    CHECK(um__cpus_at(&cpus, 2) == -1);
    for (unsigned i = 0; i < N; i++) {
        cpus.allowed[numbers[i] / 64] |= UINT64_C(1) << numbers[i] % 64;
    }
    for (unsigned i = 0; i < 3 * N; i++) {
        CHECK(um__cpus_at(&cpus, i) == numbers[i % N]);
    }
}

TEST(allowed) {
    cpu_set_t mine;
    um__cpus cpus;
    REQUIRE(sched_getaffinity(0, sizeof mine, &mine) == 0);
    CHECK_OK(um__cpus_init(&cpus, 4, NULL, &test_err));
    um__cpus_allow(&cpus);
    unsigned n_allowed = 0;
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        bool allowed = (cpus.allowed[cpu / 64] >> (cpu % 64) & 1) != 0;
        CHECK(allowed == (CPU_ISSET(cpu, &mine) != 0));
        n_allowed += allowed;
    }
    CHECK_EQ(n_allowed, CPU_COUNT(&mine));
    /* When the allowed CPUs cannot be read, no thread is pinned. */
    fault_os_fail_nth(1, EINVAL);
    um__cpus_allow(&cpus);
    fault_os_fail_nth(0, 0);
    CHECK(um__cpus_at(&cpus, 0) == -1);
}

TEST(pin) {
    cpu_set_t mine, now;
    REQUIRE(sched_getaffinity(0, sizeof mine, &mine) == 0);
    fault_os_fail_nth(0, 0);
    um__cpus_pin(-1);
    CHECK_EQ(fault_os_calls(), 0);
    um__cpus_pin(8191); /* no machine has this CPU */
    CHECK_EQ(fault_os_pinned_to(8191), 1);
    REQUIRE(sched_getaffinity(0, sizeof now, &now) == 0);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET((size_t)cpu, &mine)) {
            um__cpus_pin(cpu);
            REQUIRE(sched_getaffinity(0, sizeof now, &now) == 0);
            CHECK(CPU_COUNT(&now) == 1);
            CHECK(CPU_ISSET((size_t)cpu, &now));
        }
    }
    REQUIRE(sched_setaffinity(0, sizeof mine, &mine) == 0);
}
