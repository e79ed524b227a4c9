/* What the C tests share: checks that count and print, and a report. Each test is one program.
 *
 * The status checks use one um_error, `test_err`. It is filled with a pattern before the call, so
 * that they also check that a call that succeeds leaves it alone, and that a call that fails fills
 * all that matters. Threads use CHECK with an um_error of their own. */
#ifndef UM_TEST_H
#define UM_TEST_H

#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

#include "unimem.h"

extern _Atomic unsigned test_n_checks;
extern _Atomic unsigned test_n_failures;
extern um_error test_err;

/* A loop that fails would print for minutes: only the first failures are printed. */
#define TEST_MAX_TOLD 40

static inline bool test_check(bool ok, const char *file, int line, const char *text) {
    atomic_fetch_add_explicit(&test_n_checks, 1, memory_order_relaxed);
    if (!ok && atomic_fetch_add(&test_n_failures, 1) < TEST_MAX_TOLD) {
        fprintf(stderr, "%s:%d: failed: %s\n", file, line, text);
    }
    return ok;
}

static inline bool test_eq_u64(uint64_t got, uint64_t expected, const char *file, int line,
                               const char *text) {
    char full[256];
    if (got == expected) {
        return test_check(true, file, line, text);
    }
    snprintf(full, sizeof full, "%s: got %" PRIu64 ", expected %" PRIu64, text, got, expected);
    return test_check(false, file, line, full);
}

static inline void test_err_pattern(um_error *err) {
    memset(err, 0xA5, sizeof *err);
}

static inline bool test_status(um_status got, um_status expected, const char *file, int line,
                               const char *text) {
    char full[256];
    um_error pattern;
    test_err_pattern(&pattern);
    const char *problem = NULL;
    if (got != expected) {
        problem = "wrong status";
    } else if (got == UM_OK && memcmp(&pattern, &test_err, sizeof pattern) != 0) {
        problem = "err was touched by a call that succeeded";
    } else if (got != UM_OK && test_err.status != got) {
        problem = "err->status differs from the status";
    } else if (got != UM_OK && (test_err.what == NULL || test_err.what == pattern.what ||
                                test_err.what[0] == '\0')) {
        problem = "err->what is not filled";
    }
    if (problem == NULL) {
        return test_check(true, file, line, text);
    }
    const char *what = test_err.what == pattern.what || test_err.what == NULL ? "" : test_err.what;
    snprintf(full, sizeof full, "%s: %s: got %s (%s), expected %s", text, problem,
             um_status_name(got), what, um_status_name(expected));
    return test_check(false, file, line, full);
}

#define CHECK(cond) test_check((cond), __FILE__, __LINE__, #cond)
#define CHECK_EQ_U64(got, expected)                                                                \
    test_eq_u64((uint64_t)(got), (uint64_t)(expected), __FILE__, __LINE__, #got " == " #expected)
/* `call` passes &test_err as its err. */
#define CHECK_STATUS(expected, call)                                                               \
    (test_err_pattern(&test_err), test_status((call), (expected), __FILE__, __LINE__, #call))
#define CHECK_OK(call) CHECK_STATUS(UM_OK, call)
/* What a call that failed for want of room has written to test_err. */
#define CHECK_ROOM(limit_, used_, asked_)                                                          \
    do {                                                                                           \
        CHECK_EQ_U64(test_err.limit, limit_);                                                      \
        CHECK_EQ_U64(test_err.used, used_);                                                        \
        CHECK_EQ_U64(test_err.asked, asked_);                                                      \
    } while (0)
#define CHECK_FULL(call, limit_, used_, asked_)                                                    \
    do {                                                                                           \
        CHECK_STATUS(UM_E_FULL, call);                                                             \
        CHECK_ROOM(limit_, used_, asked_);                                                         \
    } while (0)
/* What a failed system call has written to test_err. The name is compared only if the errno is
 * right, since `what` is no valid pointer after a call that succeeded. */
#define CHECK_OS_ERR(os_errno_, name_)                                                             \
    do {                                                                                           \
        if (CHECK_EQ_U64(test_err.os_errno, os_errno_)) {                                          \
            CHECK(strcmp(test_err.what, name_) == 0);                                              \
        }                                                                                          \
    } while (0)
/* A condition that the test cannot go on without. */
#define REQUIRE(cond)                                                                              \
    do {                                                                                           \
        if (!CHECK(cond)) {                                                                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* Reports what this machine cannot test. */
static inline void test_skip(const char *what, const char *reason) {
    fprintf(stderr, "SKIPPED: %s: %s\n", what, reason);
}

/* Random numbers that are the same in every run (SplitMix64). */
static inline uint64_t test_random(uint64_t *state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Interrupts the calling thread every 20 microseconds, at any instruction, until `handler` is NULL
 * again. What the handler sees another thread could see. */
static inline void test_interrupt(void (*handler)(int)) {
    struct itimerval every = {.it_interval = {.tv_usec = handler != NULL ? 20 : 0},
                              .it_value = {.tv_usec = handler != NULL ? 20 : 0}};
    struct sigaction action = {.sa_handler = handler != NULL ? handler : SIG_IGN,
                               .sa_flags = SA_RESTART};
    if (sigaction(SIGALRM, &action, NULL) != 0 || setitimer(ITIMER_REAL, &every, NULL) != 0) {
        exit(1);
    }
}

/* The exit status for main. A test without checks has failed. */
static inline int test_report(void) {
    unsigned n = atomic_load(&test_n_checks), failed = atomic_load(&test_n_failures);
    printf("%u checks, %u failed\n", n, failed);
    return failed != 0 || n == 0;
}

#endif
