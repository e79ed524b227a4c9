/* The harness of the C tests: checks that count and print, and TEST, which makes a test of a
 * function. The tests of a file are one program. The status checks use one um_error, `test_err`. It
 * is filled with a pattern before the call, so that they also check that a call that succeeds
 * leaves it alone, and that a call that fails fills all that matters. Threads use CHECK with an
 * um_error of their own. */
#ifndef UM_TEST_H
#define UM_TEST_H

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "unimem.h"

extern _Atomic unsigned test_n_checks;
extern _Atomic unsigned test_n_failures;
extern um_error test_err;
extern char *const *test_args; /* of the program, ended by NULL */

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* A function that main.c calls: it runs all tests of a file in the order in which they stand. After
 * the last one, nothing may be mapped. */
typedef struct test_case {
    const char *name;
    void (*run)(void);
    int line;
    struct test_case *next;
} test_case;
void test_add(test_case *added);
#define TEST(name_)                                                                                \
    static void test_##name_(void);                                                                \
    __attribute__((constructor)) static void add_##name_(void) {                                   \
        static test_case added = {#name_, test_##name_, __LINE__, NULL};                           \
        test_add(&added);                                                                          \
    }                                                                                              \
    static void test_##name_(void)

/* Reports what this machine cannot test. */
void test_skip(const char *reason);
#define SKIP_UNLESS(cond, reason)                                                                  \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            test_skip(reason);                                                                     \
            return;                                                                                \
        }                                                                                          \
    } while (0)

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

static inline bool test_str(const char *got, const char *expected, const char *file, int line,
                            const char *text) {
    char full[256];
    if (strcmp(got, expected) == 0) {
        return test_check(true, file, line, text);
    }
    snprintf(full, sizeof full, "%s: got \"%s\", expected \"%s\"", text, got, expected);
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
    } else if ((got == UM_E_FULL || got == UM_E_STATE) && test_err.detail == UM_DETAIL_NONE) {
        problem = "err->detail is not filled";
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
#define CHECK_EQ(got, expected)                                                                    \
    test_eq_u64((uint64_t)(got), (uint64_t)(expected), __FILE__, __LINE__, #got " == " #expected)
#define CHECK_STR(got, expected) test_str((got), (expected), __FILE__, __LINE__, #got)
/* `call` passes &test_err as its err. */
#define CHECK_STATUS(expected, call)                                                               \
    (test_err_pattern(&test_err), test_status((call), (expected), __FILE__, __LINE__, #call))
#define CHECK_DETAIL(status, detail_, call)                                                        \
    do {                                                                                           \
        if (CHECK_STATUS(status, call)) {                                                          \
            CHECK_EQ(test_err.detail, detail_);                                                    \
        }                                                                                          \
    } while (0)
#define CHECK_OK(call) CHECK_STATUS(UM_OK, call)
#define CHECK_INVALID(call) CHECK_STATUS(UM_E_INVALID, call)
/* fn(..., err) fails with this status, with an err and without. */
#define CHECK_FAILS(expected, fn, ...)                                                             \
    do {                                                                                           \
        CHECK_STATUS(expected, fn(__VA_ARGS__, &test_err));                                        \
        CHECK(fn(__VA_ARGS__, NULL) == (expected));                                                \
    } while (0)
/* Checks test_err after a call that failed for want of room. */
#define CHECK_ROOM(limit_, used_, asked_)                                                          \
    do {                                                                                           \
        CHECK_EQ(test_err.limit, limit_);                                                          \
        CHECK_EQ(test_err.used, used_);                                                            \
        CHECK_EQ(test_err.asked, asked_);                                                          \
    } while (0)
#define CHECK_FULL(detail_, call, limit_, used_, asked_)                                           \
    do {                                                                                           \
        CHECK_DETAIL(UM_E_FULL, detail_, call);                                                    \
        CHECK_ROOM(limit_, used_, asked_);                                                         \
    } while (0)
/* Checks test_err after a failed system call. The name is compared only if the errno is
 * right, since `what` is no valid pointer after a call that succeeded. */
#define CHECK_OS_ERR(os_errno_, name_)                                                             \
    do {                                                                                           \
        if (CHECK_EQ(test_err.os_errno, os_errno_)) {                                              \
            CHECK_STR(test_err.what, name_);                                                       \
        }                                                                                          \
    } while (0)
/* An output that a call that fails must leave alone. */
#define SPOIL(output) memset(&(output), 0x5A, sizeof(output))
#define CHECK_SPOILT(output) CHECK(is_filled(&(output), sizeof(output), 0x5A))
/* A condition that the test cannot go on without. */
#define REQUIRE(cond)                                                                              \
    do {                                                                                           \
        if (!CHECK(cond)) {                                                                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* Whether all bytes of a range are `byte`. */
static inline bool is_filled(const void *at, size_t nbytes, unsigned char byte) {
    const unsigned char *bytes = at;
    return nbytes == 0 || (bytes[0] == byte && memcmp(bytes, bytes + 1, nbytes - 1) == 0);
}

/* Memory of exactly nbytes, so that a sanitizer sees what is done behind it. */
static inline void *allocate(size_t nbytes) {
    void *p = malloc(nbytes + (nbytes == 0));
    REQUIRE(p != NULL);
    return p;
}

/* Memory that is freed where its scope ends. */
static inline void test_free(void *pointer) {
    void *p;
    memcpy(&p, pointer, sizeof p);
    free(p);
}
#define AUTO_FREE __attribute__((cleanup(test_free)))

static inline pthread_t start_thread(void *(*fn)(void *), void *arg) {
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, fn, arg) == 0);
    return thread;
}

/* Runs a thread for each of n arguments, which have this size, and waits for all. */
static inline void run_threads(size_t n, void *(*fn)(void *), void *args, size_t arg_nbytes) {
    pthread_t threads[64];
    REQUIRE(n <= COUNT(threads));
    for (size_t i = 0; i < n; i++) {
        threads[i] = start_thread(fn, (char *)args + i * arg_nbytes);
    }
    for (size_t i = 0; i < n; i++) {
        pthread_join(threads[i], NULL);
    }
}

/* A descriptor that is closed where its scope ends. */
static inline void test_close(const int *fd) {
    close(*fd);
}
#define AUTO_FD __attribute__((cleanup(test_close))) int

/* Random numbers that are the same in every run (SplitMix64). */
static inline uint64_t test_random(uint64_t *state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* How many rounds a test makes: more of them when UNIMEM_TESTS_ALL is set. */
static inline unsigned test_many(unsigned n, unsigned n_when_all) {
    const char *all = getenv("UNIMEM_TESTS_ALL");
    return all != NULL && all[0] != '\0' ? n_when_all : n;
}

/* Calls `handler` again and again in the calling thread, at any instruction, until it is NULL
 * again. What the handler sees another thread could see. The next interruption comes 1 to 40
 * microseconds after the end of the last one, so that the thread gets on, however slow it is. */
void test_interrupt(void (*handler)(int));

#endif
