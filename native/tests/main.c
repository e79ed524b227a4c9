/* Runs the tests of a program, one after the other, and reports. */
#include <signal.h>
#include <sys/time.h>

#include "blocks.h"
#include "huge_pool.h"

_Atomic unsigned test_n_checks, test_n_failures;
um_error test_err;
char *const *test_args;
size_t page, huge_page, unit;
int huge_pool_lock;

static test_case *first_test, *running_test;

/* Constructors may run in any order: the tests are sorted by their lines. */
void test_add(test_case *added) {
    test_case **at = &first_test;
    while (*at != NULL && (*at)->line < added->line) {
        at = &(*at)->next;
    }
    added->next = *at;
    *at = added;
}

void test_skip(const char *reason) {
    fprintf(stderr, "SKIPPED: %s: %s\n", running_test->name, reason);
}

static void (*interruption)(int);

static void interrupt_once(unsigned microseconds) {
    struct itimerval once = {.it_value = {.tv_usec = microseconds}};
    REQUIRE(setitimer(ITIMER_REAL, &once, NULL) == 0);
}

static void on_alarm(int number) {
    static uint64_t random;
    if (interruption != NULL) {
        interruption(number);
        interrupt_once(1 + (unsigned)(test_random(&random) % 40));
    }
}

void test_interrupt(void (*handler)(int)) {
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    interrupt_once(0);
    interruption = handler;
    REQUIRE(sigaction(SIGALRM, &action, NULL) == 0);
    interrupt_once(handler != NULL);
}

int main(int argc, char **argv) {
    (void)argc;
    test_args = argv + 1;
    page = um_page_bytes();
    huge_page = um_huge_page_bytes();
    unit = huge_page != 0 ? huge_page : page;
    huge_pool_lock = open(HUGE_POOL_LOCK, O_RDONLY | O_CLOEXEC);
    for (running_test = first_test; running_test != NULL; running_test = running_test->next) {
        fault_os_reset();
        huge_pool_take(LOCK_SH);
        running_test->run();
        huge_pool_take(LOCK_UN);
    }
    for (int i = 0; i < UM_CAT_COUNT; i++) {
        um_ledger_row row = ledger_row((um_category)i);
        CHECK_EQ(row.n_mappings, 0);
        CHECK_EQ(row.mapped_bytes, 0);
    }
    CHECK_EQ(fault_os_n_held(), 0);
    unsigned n = atomic_load(&test_n_checks), failed = atomic_load(&test_n_failures);
    printf("%u checks, %u failed\n", n, failed);
    return failed != 0 || first_test == NULL;
}
