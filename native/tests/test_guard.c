/* The guard: pages of truncated files, with many threads, and with handlers that are installed and
 * removed. */
#include "blocks.h"
#include <sys/syscall.h>

enum { FILE_PAGES = 4, N_THREADS = 6, N_FAULTS = 3000, EXIT_STATUS_OF_A_LOOP = 77 };

/* A mapped file whose pages were cut off, but for the first. */
static unsigned char *cut;
/* Another such file, which no run guards. */
static unsigned char *foreign;
static unsigned char buffer[FILE_PAGES * 65536];

static unsigned char *map_cut(void) {
    int fd = memfd_create("cut", MFD_CLOEXEC);
    REQUIRE(fd >= 0);
    REQUIRE(ftruncate(fd, (off_t)(FILE_PAGES * page)) == 0);
    void *base = mmap(NULL, FILE_PAGES * page, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    REQUIRE(base != MAP_FAILED);
    REQUIRE(pwrite(fd, "begin", 5, 0) == 5);
    REQUIRE(ftruncate(fd, (off_t)page) == 0);
    close(fd);
    return base;
}

static struct sigaction action_now(void) {
    struct sigaction action = {0};
    REQUIRE(sigaction(SIGBUS, NULL, &action) == 0);
    return action;
}

/* Whether this is still the action. The C library adds flags of its own, and leaves a part of its
 * masks unset. */
static bool is_action(const struct sigaction *a) {
    struct sigaction now = action_now(), *b = &now;
    int told = SA_SIGINFO | SA_ONSTACK | SA_RESTART | SA_NODEFER | (int)SA_RESETHAND;
    bool same = a->sa_handler == b->sa_handler && ((a->sa_flags ^ b->sa_flags) & told) == 0;
    for (int i = 1; same && i < NSIG; i++) {
        same = sigismember(&a->sa_mask, i) == sigismember(&b->sa_mask, i);
    }
    return same;
}

static void install(void (*handler)(int, siginfo_t *, void *), int flags,
                    struct sigaction *out_previous) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | flags};
    REQUIRE(sigaction(SIGBUS, &action, out_previous) == 0);
}

static void install_plain(void (*handler)(int)) {
    struct sigaction action = {.sa_handler = handler};
    REQUIRE(sigaction(SIGBUS, &action, NULL) == 0);
}

static void touch(void *at) {
    (void)*(volatile unsigned char *)at;
}

/* How a child process ends that calls `work`: the signal, or 256 plus the exit status. */
static int end_of(void (*work)(void)) {
    fflush(NULL);
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        atomic_store(&test_n_failures, 0);
        alarm(500); /* an endless chain of handlers must not hang the test */
        work();
        _exit(atomic_load(&test_n_failures) != 0);
    }
    int status = 0;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 256 + WEXITSTATUS(status);
}
enum { EXIT = 256 };

/* A test whose body runs in a child process, which must end like this. */
#define CHILD(name_, end)                                                                          \
    static void name_(void);                                                                       \
    TEST(name_) {                                                                                  \
        CHECK_EQ(end_of(name_), end);                                                              \
    }                                                                                              \
    static void name_(void)

/* The signal that must end the child ends it only if all checks before were right. */
static bool is_well(void) {
    return atomic_load(&test_n_failures) == 0;
}

static um_status read_cut(um_error *err) {
    return um_guard_copy(buffer, cut, FILE_PAGES * page, err);
}

static void mark(void *context) {
    *(bool *)context = true;
}

/* The first run of a process registers the handlers of fork. */
TEST(first) {
    REQUIRE(FILE_PAGES * page <= sizeof buffer);
    cut = map_cut();
    foreign = map_cut();
    bool ran = false;
    fault_os_fail_nth(2, ENOMEM);
    CHECK_STATUS(UM_E_NOMEM, um_guard_run(cut, page, mark, &ran, &test_err));
    CHECK_STR(test_err.what, "pthread_atfork");
    CHECK(!ran);
    fault_os_fail_nth(0, 0);
    CHECK_OK(um_guard_run(cut, page, mark, &ran, &test_err));
    CHECK(ran);
    CHECK_EQ(fault_os_calls_of("um__os_at_fork"), 1);
}

TEST(copy) {
    struct sigaction before = action_now();
    CHECK_OK(um_guard_copy(buffer, cut, page, &test_err));
    CHECK(memcmp(buffer, "begin", 6) == 0);
    CHECK_STATUS(UM_E_IO, read_cut(&test_err));
    CHECK(test_err.os_errno == 0);
    CHECK(test_err.offset == 0);
    CHECK_FAILS(UM_E_IO, um_guard_copy, buffer, cut + page, 1);
    CHECK_OK(um_guard_copy(buffer, cut + page, 0, &test_err));
    CHECK(is_action(&before));
    fault_os_fail_nth(0, 0);
    CHECK_OK(um_guard_copy(buffer, cut, page, &test_err));
    CHECK_EQ(fault_os_calls(), 5);
}

static void write_cut(void *context) {
    memset(context, 1, 2 * page);
}

TEST(writing) {
    CHECK_STATUS(UM_E_IO, um_guard_run(cut, FILE_PAGES * page, write_cut, cut, &test_err));
    CHECK(cut[0] == 1); /* partly written */
    CHECK(cut[page - 1] == 1);
    memcpy(cut, "begin", 6);
}

typedef struct nesting {
    size_t inner_from, inner_n, touched;
    um_status inner;
    bool came_back, ran;
} nesting;

static void touch_it(void *context) {
    const nesting *n = context;
    touch(cut + n->touched * page);
}

static void run_inner(void *context) {
    nesting *n = context;
    n->inner = um_guard_run(cut + n->inner_from * page, n->inner_n * page, touch_it, context, NULL);
    n->came_back = true;
    touch(cut + page);
    n->ran = true;
}

TEST(nested) {
    struct sigaction before = action_now();
    /* A page of the inner range ends the inner run; a page of the outer range ends both. */
    nesting inner = {.inner_from = 2, .inner_n = 1, .touched = 2};
    CHECK_STATUS(UM_E_IO, um_guard_run(cut, FILE_PAGES * page, run_inner, &inner, &test_err));
    CHECK(inner.inner == UM_E_IO);
    CHECK(inner.came_back);
    CHECK(!inner.ran);
    nesting outer = {.inner_from = 2, .inner_n = 1, .touched = 3};
    CHECK_STATUS(UM_E_IO, um_guard_run(cut, FILE_PAGES * page, run_inner, &outer, &test_err));
    CHECK(!outer.came_back);
    CHECK(is_action(&before));
}

static sigset_t mask_now(void) {
    sigset_t mask;
    REQUIRE(pthread_sigmask(SIG_SETMASK, NULL, &mask) == 0);
    return mask;
}

static bool is_blocked(int number) {
    sigset_t mask = mask_now();
    return sigismember(&mask, number) == 1;
}

static void *run_blocked(void *arg) {
    sigset_t all;
    sigfillset(&all);
    REQUIRE(pthread_sigmask(SIG_SETMASK, &all, NULL) == 0);
    for (int i = 0; i < 3; i++) {
        CHECK(read_cut(NULL) == UM_E_IO);
        CHECK(um_guard_copy(buffer, cut, page, NULL) == UM_OK);
        CHECK(is_blocked(SIGBUS));
        CHECK(is_blocked(SIGINT));
    }
    return arg;
}

TEST(blocked) {
    pthread_t thread = start_thread(run_blocked, NULL);
    pthread_join(thread, NULL);
    CHECK(read_cut(NULL) == UM_E_IO);
    CHECK(!is_blocked(SIGBUS));
}

static void default_action(void) {
    install_plain(SIG_DFL);
}

static void touch_foreign(void *context) {
    (void)context;
    touch(foreign + page);
}

static void fault_outside(void) {
    um_guard_run(cut, FILE_PAGES * page, touch_foreign, NULL, NULL);
}

static void send_bus(void *context) {
    (void)context;
    pthread_kill(pthread_self(), SIGBUS);
}

static void queue_bus(void *context) {
    /* A signal that was sent has no fault address, whatever its value is. */
    union sigval value = {.sival_ptr = cut + page};
    (void)context;
    sigqueue(getpid(), SIGBUS, value);
}

CHILD(fault_by_default, SIGBUS) {
    default_action();
    fault_outside();
}

CHILD(fault_of_nobody, SIGBUS) {
    default_action();
    if (CHECK(read_cut(NULL) == UM_E_IO)) {
        touch(cut + page);
    }
}

CHILD(sent_by_default, SIGBUS) {
    default_action();
    um_guard_run(cut, page, send_bus, NULL, NULL);
}

CHILD(queued_by_default, SIGBUS) {
    default_action();
    um_guard_run(cut, FILE_PAGES * page, queue_bus, NULL, NULL);
}

CHILD(sent_and_ignored, EXIT) {
    install_plain(SIG_IGN);
    CHECK(um_guard_run(cut, page, send_bus, NULL, NULL) == UM_OK);
    CHECK(um_guard_run(cut, FILE_PAGES * page, queue_bus, NULL, NULL) == UM_OK);
    CHECK(action_now().sa_handler == SIG_IGN);
}

CHILD(fault_is_not_ignored, SIGBUS) {
    install_plain(SIG_IGN);
    fault_outside();
}

/* ThreadSanitizer calls the handlers itself, with all signals blocked; one that a handler raises
 * waits until it has returned. */
#ifdef __SANITIZE_THREAD__
enum { IS_TSAN = 1 };
#else
enum { IS_TSAN = 0 };
#endif

static _Atomic int n_called;
static siginfo_t seen;
static sigset_t seen_mask;
static int seen_number;

static void count(int number) {
    seen_number = number;
    seen_mask = mask_now();
    atomic_fetch_add(&n_called, 1);
}

static void note(int number, siginfo_t *info, void *context) {
    CHECK(context != NULL);
    seen = *info;
    count(number);
}

/* Maps the page, so that the instruction succeeds. */
static void mend(int number, siginfo_t *info, void *context) {
    note(number, info, context);
    mmap(foreign + page, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

CHILD(goes_on_to_a_handler, EXIT) {
    struct sigaction action = {.sa_handler = count};
    sigaddset(&action.sa_mask, SIGUSR1);
    REQUIRE(sigaction(SIGBUS, &action, NULL) == 0);
    CHECK(um_guard_run(cut, page, send_bus, NULL, NULL) == UM_OK);
    CHECK(atomic_load(&n_called) == 1);
    CHECK(seen_number == SIGBUS);
    CHECK(sigismember(&seen_mask, SIGBUS) == 1);
    CHECK(sigismember(&seen_mask, SIGUSR1) == 1);
    CHECK(!is_blocked(SIGBUS));
    CHECK(!is_blocked(SIGUSR1));

    install(mend, SA_NODEFER, NULL);
    fault_outside();
    CHECK(atomic_load(&n_called) == 2);
    CHECK(seen.si_addr == foreign + page);
    CHECK(seen.si_code == BUS_ADRERR);
    if (!IS_TSAN) {
        CHECK(sigismember(&seen_mask, SIGBUS) == 0);
        CHECK(sigismember(&seen_mask, SIGUSR1) == 0);
    }
    CHECK(um_guard_run(cut, FILE_PAGES * page, queue_bus, NULL, NULL) == UM_OK);
    CHECK(atomic_load(&n_called) == 3);
    CHECK(seen.si_code == SI_QUEUE);
    CHECK(seen.si_value.sival_ptr == cut + page);
    CHECK(seen.si_pid == getpid());
    CHECK(read_cut(NULL) == UM_E_IO);
    CHECK(atomic_load(&n_called) == 3);
}

CHILD(calls_once, SIGBUS) {
    install(note, (int)SA_RESETHAND, NULL);
    CHECK(um_guard_run(cut, page, send_bus, NULL, NULL) == UM_OK);
    CHECK(atomic_load(&n_called) == 1);
    CHECK(action_now().sa_handler == SIG_DFL);
    /* A handler that is installed again is called again, once. */
    install(note, (int)SA_RESETHAND, NULL);
    CHECK(um_guard_run(cut, page, send_bus, NULL, NULL) == UM_OK);
    CHECK(atomic_load(&n_called) == 2);
    install(note, (int)SA_RESETHAND, NULL);
    if (is_well()) {
        fault_outside();
    }
}

/* Sends a signal like the kernel's for a page that the hardware has lost. */
static void send_code(int code, void *address, unsigned lsb) {
    siginfo_t info = {0};
    info.si_signo = SIGBUS;
    info.si_code = code;
    info.si_addr = address;
    info.si_addr_lsb = (short)lsb;
    REQUIRE(syscall(SYS_rt_tgsigqueueinfo, getpid(), gettid(), SIGBUS, &info) == 0);
}

static void lose_by_hardware(void *context) {
    (void)context;
    send_code(BUS_MCEERR_AR, cut - 1 + page / 2, 12);
    touch(NULL); /* does not get here */
}

static void tell_of_loss(void *context) {
    (void)context;
    send_code(BUS_MCEERR_AO, cut, 12);
}

CHILD(hardware_losses, SIGBUS) {
    default_action();
    /* The kernel reports the beginning of the page, whichever byte was touched. */
    CHECK(um_guard_run(cut + page - 1, 1, lose_by_hardware, NULL, NULL) == UM_E_IO);
    /* A lost page that was not touched is no fault of the run. */
    install(note, 0, NULL);
    CHECK(um_guard_run(cut, page, tell_of_loss, NULL, NULL) == UM_OK);
    CHECK(atomic_load(&n_called) == 1);
    CHECK(seen.si_code == BUS_MCEERR_AO);
    default_action();
    if (is_well()) {
        um_guard_run(cut, page, tell_of_loss, NULL, NULL);
    }
}

static struct sigaction previous;

/* Does what faulthandler does: notes the signal, restores the previous handler, and raises the
 * signal again. */
static void tell_and_end(int number, siginfo_t *info, void *context) {
    note(number, info, context);
    sigaction(SIGBUS, &previous, NULL);
    raise(number);
}

/* Does what other handlers do: calls the previous one. */
static void tell_and_call(int number, siginfo_t *info, void *context) {
    note(number, info, context);
    if ((previous.sa_flags & SA_SIGINFO) != 0) {
        previous.sa_sigaction(number, info, context);
    }
}

static void come_between(void *context) {
    install(context == NULL ? tell_and_end : tell_and_call, SA_NODEFER, &previous);
}

static void check_between(bool calls) {
    default_action();
    CHECK(um_guard_run(cut, page, come_between, calls ? &calls : NULL, NULL) == UM_OK);
    struct sigaction theirs = action_now();
    CHECK(theirs.sa_sigaction == (calls ? tell_and_call : tell_and_end));
    for (int i = 0; i < 3; i++) {
        CHECK(read_cut(NULL) == UM_E_IO);
        CHECK(is_action(&theirs));
    }
    CHECK(atomic_load(&n_called) == 0);
}

CHILD(ends_between, SIGBUS) {
    check_between(false);
    if (is_well()) {
        fault_outside(); /* from our handler to theirs, to ours, to the default */
    }
}

CHILD(calls_between, SIGBUS) {
    check_between(true);
    if (is_well()) {
        fault_outside();
    }
}

/* Their handler is removed while ours is on top once more: from then on nothing is passed to it. */
static void put_back(void *context) {
    (void)context;
    REQUIRE(sigaction(SIGBUS, &previous, NULL) == 0);
}

CHILD(is_given_up, SIGBUS) {
    check_between(false);
    CHECK(um_guard_run(cut, page, put_back, NULL, NULL) == UM_OK);
    CHECK(action_now().sa_handler == SIG_DFL);
    CHECK(read_cut(NULL) == UM_E_IO);
    /* If it is restored while no run is under way, ours stays, and passes on to the default. */
    put_back(NULL);
    CHECK(action_now().sa_handler != SIG_DFL);
    if (is_well()) {
        touch(foreign + page);
    }
}

/* A fault in the run during which their handler was installed goes to theirs first. */
static void come_and_fault(void *context) {
    come_between(context);
    touch(cut + page);
}

CHILD(hears_first, EXIT) {
    int calls = 1;
    default_action();
    CHECK(um_guard_run(cut, FILE_PAGES * page, come_and_fault, &calls, NULL) == UM_E_IO);
    CHECK(atomic_load(&n_called) == 1);
    CHECK(seen.si_addr == cut + page);
    CHECK(!is_blocked(SIGBUS));
    /* A handler that blocks the signal is skipped, too. */
    install(tell_and_call, 0, NULL);
    CHECK(um_guard_run(cut, FILE_PAGES * page, come_and_fault, &calls, NULL) == UM_E_IO);
    CHECK(!is_blocked(SIGBUS));
    CHECK(read_cut(NULL) == UM_E_IO);
}

enum { MANY = 20 };
static int n_met;

static void install_another(void *context) {
    struct sigaction action = {.sa_handler = count};
    (void)context;
    for (int i = 0; i < 5; i++) { /* another mask makes another action */
        if ((n_met >> i & 1) != 0) {
            sigaddset(&action.sa_mask, SIGRTMIN + i);
        }
    }
    REQUIRE(sigaction(SIGBUS, &action, NULL) == 0);
}

CHILD(meets_many, EXIT) {
    int n_at_first =
        action_now().sa_handler == SIG_DFL ? 1 : 2; /* a sanitizer has its own handler */
    default_action();
    um_status status = UM_OK;
    for (n_met = 0; n_met < MANY && status == UM_OK; n_met++) {
        status = um_guard_run(cut, page, install_another, NULL, NULL);
    }
    CHECK(n_met + n_at_first == 18); /* there is room for 16, and the last is refused */
    CHECK_STATUS(UM_E_OS, um_guard_copy(buffer, cut, page, &test_err));
    CHECK_OS_ERR(EBUSY, "sigaction");
    CHECK(action_now().sa_handler == count);
    /* The handlers that were known before still work. */
    default_action();
    CHECK(read_cut(NULL) == UM_E_IO);
}

static void keeps_restarting(void *context) {
    *(int *)context = action_now().sa_flags & SA_RESTART;
}

CHILD(restarts_as_before, EXIT) {
    int flag = -1;
    install(note, 0, NULL);
    CHECK(um_guard_run(cut, page, keeps_restarting, &flag, NULL) == UM_OK);
    CHECK(flag == 0);
    install(note, SA_RESTART, NULL);
    CHECK(um_guard_run(cut, page, keeps_restarting, &flag, NULL) == UM_OK);
    CHECK(flag != 0);
    install_plain(SIG_IGN);
    CHECK(um_guard_run(cut, page, keeps_restarting, &flag, NULL) == UM_OK);
    CHECK(flag != 0);
}

#ifndef __SANITIZE_THREAD__ /* see IS_TSAN */
/* Does what faulthandler does: restores the previous handler, and raises the signal for it. */
static struct sigaction kept_by_him;
static volatile int n_handed_on;

static void hands_on(int number, siginfo_t *info, void *context) {
    (void)info, (void)context;
    n_handed_on++;
    if (n_handed_on > 2) {
        _exit(EXIT_STATUS_OF_A_LOOP);
    }
    sigaction(number, &kept_by_him, NULL);
    raise(number);
}

static void keeps_on_top(void *context) {
    (void)context;
    kept_by_him = action_now();
}

/* The handler is below an entry that it keeps as its previous one: as if it had been installed
 * between our look at the handler on top and our own installation. */
CHILD(keeps_what_goes_on_to_him, SIGBUS) {
    install(hands_on, SA_NODEFER, NULL);
    REQUIRE(um_guard_run(cut, page, keeps_on_top, NULL, NULL) == UM_OK);
    touch(foreign + page);
}

/* Two entries go on to the same handler, which keeps both as previous ones, by turns. */
static struct sigaction kept_by_turns[2];

static void hands_on_by_turns(int number, siginfo_t *info, void *context) {
    (void)info, (void)context;
    n_handed_on++;
    if (n_handed_on > 3) {
        _exit(EXIT_STATUS_OF_A_LOOP);
    }
    sigaction(number, &kept_by_turns[n_handed_on % 2], NULL);
    raise(number);
}

CHILD(keeps_two_by_turns, SIGBUS) {
    install(hands_on_by_turns, SA_NODEFER, NULL);
    REQUIRE(um_guard_run(cut, page, keeps_on_top, NULL, NULL) == UM_OK);
    kept_by_turns[0] = kept_by_him;
    install(hands_on_by_turns, SA_NODEFER | SA_RESTART, NULL);
    REQUIRE(um_guard_run(cut, page, keeps_on_top, NULL, NULL) == UM_OK);
    kept_by_turns[1] = kept_by_him;
    REQUIRE(kept_by_turns[0].sa_sigaction != kept_by_turns[1].sa_sigaction);
    touch(foreign + page);
}
#endif

static _Atomic bool is_over;

static void *fault_often(void *arg) {
    unsigned char *own = map_cut(), *out = allocate(page);
    for (int i = 0; i < N_FAULTS; i++) {
        um_error err;
        size_t at = (size_t)(1 + i % (FILE_PAGES - 1)) * page + (size_t)i % page;
        CHECK(um_guard_copy(out, own + at, 1, &err) == UM_E_IO);
        CHECK(err.status == UM_E_IO);
        CHECK(um_guard_copy(out, own, 5, &err) == UM_OK);
        CHECK(memcmp(out, "begin", 5) == 0);
        CHECK(um_guard_copy(out, own + page - 1, 2, &err) == UM_E_IO);
    }
    munmap(own, FILE_PAGES * page);
    free(out);
    return arg;
}

TEST(threads) {
    struct sigaction before = action_now();
    run_threads(N_THREADS, fault_often, NULL, 0);
    CHECK(is_action(&before));
}

#ifndef __SANITIZE_THREAD__ /* it takes every SIGBUS for a fault, also amid its own work */
/* Several threads at once. */
static void count_only(int number) {
    CHECK(number == SIGBUS);
    atomic_fetch_add(&n_called, 1);
}

/* Sends signals to the process, which must reach the installed handler. */
static void *send_often(void *arg) {
    unsigned *n = arg;
    do {
        kill(getpid(), SIGBUS);
        (*n)++;
        usleep(100);
    } while (!atomic_load(&is_over));
    return NULL;
}

CHILD(others_hear_theirs, EXIT) {
    unsigned n_sent = 0;
    install_plain(count_only);
    pthread_t sender = start_thread(send_often, &n_sent);
    run_threads(N_THREADS, fault_often, NULL, 0);
    atomic_store(&is_over, true);
    pthread_join(sender, NULL);
    /* Pending signals are merged into one. */
    CHECK(n_sent > 0);
    CHECK(atomic_load(&n_called) > 0);
    CHECK((unsigned)atomic_load(&n_called) <= n_sent);
    CHECK(action_now().sa_handler == count_only);
}
#endif

/* A handler that is installed during a run hears of a fault of the run first. The run goes on when
 * ours is on top again. */
static void hear_one(int number) {
    (void)number;
}
static void hear_another(int number) {
    (void)number;
}

static void *come_often(void *arg) {
    for (int i = 0; !atomic_load(&is_over); i++) {
        install_plain(i % 2 == 0 ? hear_one : hear_another);
        CHECK(read_cut(NULL) == UM_E_IO);
    }
    install_plain(hear_one);
    return arg;
}

CHILD(others_come, EXIT) {
    pthread_t other = start_thread(come_often, NULL);
    run_threads(N_THREADS, fault_often, NULL, 0);
    atomic_store(&is_over, true);
    pthread_join(other, NULL);
    CHECK(action_now().sa_handler == hear_one);
    CHECK(read_cut(NULL) == UM_E_IO);
    CHECK(action_now().sa_handler == hear_one);
}

static pthread_barrier_t inside, forked;

static void wait_inside(void *context) {
    (void)context;
    pthread_barrier_wait(&inside);
    pthread_barrier_wait(&forked);
}

static void *stay_inside(void *arg) {
    CHECK(um_guard_run(cut, page, wait_inside, NULL, NULL) == UM_OK);
    return arg;
}

static void child_of_a_run(void) {
    CHECK(read_cut(NULL) == UM_E_IO);
    CHECK(action_now().sa_handler == SIG_DFL); /* the child has no part in the run of its parent */
    if (is_well()) {
        touch(foreign + page);
    }
}

CHILD(fork_while_guarded, EXIT) {
    default_action();
    pthread_barrier_init(&inside, NULL, 2);
    pthread_barrier_init(&forked, NULL, 2);
    pthread_t other = start_thread(stay_inside, NULL);
    pthread_barrier_wait(&inside);
    CHECK(end_of(child_of_a_run) == SIGBUS);
    CHECK(action_now().sa_handler != SIG_DFL); /* in the parent the run goes on */
    CHECK(read_cut(NULL) == UM_E_IO);
    CHECK(action_now().sa_handler != SIG_DFL);
    pthread_barrier_wait(&forked);
    pthread_join(other, NULL);
    CHECK(action_now().sa_handler == SIG_DFL);
}

static void *run_often(void *arg) {
    while (!atomic_load(&is_over)) {
        CHECK(um_guard_copy(arg, cut, 1, NULL) == UM_OK);
    }
    return arg;
}

static void one_run(void) {
    CHECK(read_cut(NULL) == UM_E_IO);
}

/* A child process never waits for a lock that a thread of its parent had. */
CHILD(fork_between, EXIT) {
    unsigned char out;
    pthread_t other = start_thread(run_often, &out);
    for (int i = 0; i < 100; i++) {
        CHECK(end_of(one_run) == EXIT);
    }
    atomic_store(&is_over, true);
    pthread_join(other, NULL);
}

TEST(faults) {
    struct sigaction before = action_now();
    /* Setting the mask, reading the handler, and installing ours on top. */
    static const char *const calls[] = {"um__os_signal_mask", "um__os_bus_action",
                                        "um__os_bus_action"};
    for (unsigned nth = 1; nth <= 3; nth++) {
        bool ran = false;
        fault_os_fail_nth(nth, EPERM);
        CHECK_STATUS(UM_E_OS, um_guard_run(cut, page, mark, &ran, &test_err));
        CHECK_STR(fault_os_failed(), calls[nth - 1]);
        CHECK(test_err.os_errno == EPERM);
        CHECK(!ran);
        CHECK(is_action(&before));
    }
    /* A handler that cannot be removed keeps working, and the next run removes it. */
    for (unsigned nth = 4; nth <= 5; nth++) {
        fault_os_fail_nth(nth, EPERM);
        CHECK_OK(um_guard_copy(buffer, cut, page, &test_err));
        CHECK_STR(fault_os_failed(), "um__os_bus_action");
        CHECK(!is_action(&before));
        CHECK_STATUS(UM_E_IO, read_cut(&test_err));
        CHECK(is_action(&before));
    }
}
