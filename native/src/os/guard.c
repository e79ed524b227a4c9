/* The guard: surviving a lost page of a mapped file.
 *
 * A lost page raises SIGBUS in the thread that touches it, and the kernel tells the address. While
 * any thread runs guarded, our handler is on top of the previous one. If the address is in a range
 * of this thread's runs, our handler jumps back into um_guard_run. All other signals go on to the
 * handler below, as the kernel would have called it. SIGSEGV is left alone: it never means a lost
 * page.
 *
 * Handlers form a stack that no code can inspect. Code that installs a handler keeps ours as its
 * previous one, and may call it or put it back long after, when another one of ours is on top. A
 * single function of ours could not know which handler to go on to, and two handlers that go on to
 * each other never end. So each foreign action that we ever cover has an entry with a function of
 * its own, which goes on to that one action for as long as the process lives. */
#include "base/status.h"
#include "os/lock.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* A run. It lies in the frame of its um_guard_run. */
typedef struct guarded {
    uintptr_t first, end;
    struct guarded *outer;
    sigjmp_buf jump;
} guarded;

/* The handler may be the first to read this in a thread, so its memory has to come with the thread,
 * not with the first access. musl has no other kind. */
#if defined(__GLIBC__)
#define WITH_THREAD __attribute__((tls_model("initial-exec")))
#else
#define WITH_THREAD
#endif
static _Thread_local guarded *volatile innermost WITH_THREAD;

typedef struct entry {
    struct sigaction below; /* never changes once the entry is used */
    atomic_bool is_spent;   /* of SA_RESETHAND: it was called, and SIG_DFL counts now */
} entry;

enum { MAX_ENTRIES = 16 };
static entry entries[MAX_ENTRIES];

/* The lock of the next three; no handler takes it. */
static um__lock lock;
static unsigned n_entries;
static unsigned n_users; /* threads inside of a run */
static bool knows_forks;

/* ---- the handler: async-signal-safe only ---- */

/* Returns whether the file or the hardware lost a page, and the lost range. Signals that were sent
 * have codes of 0 and below, and no address. */
static bool is_lost_page(const siginfo_t *info, uintptr_t *out_first, uintptr_t *out_end) {
    *out_first = (uintptr_t)info->si_addr;
    *out_end = *out_first + 1;
#ifdef BUS_MCEERR_AR
    if (info->si_code == BUS_MCEERR_AR) { /* si_addr_lsb is how exact the address is */
        uintptr_t nbytes = (uintptr_t)1 << info->si_addr_lsb;
        *out_first &= ~(nbytes - 1);
        *out_end = *out_first + nbytes;
        return true;
    }
#endif
    return info->si_code == BUS_ADRERR || info->si_code == BUS_OBJERR;
}

/* Returns whether the signal is of an instruction, which is repeated when the handler returns. Such
 * signals cannot be ignored. */
static bool is_repeated(const siginfo_t *info) {
#ifdef BUS_MCEERR_AO
    if (info->si_code == BUS_MCEERR_AO) {
        return false;
    }
#endif
    return info->si_code > 0;
}

static void die_of(const siginfo_t *info) {
    struct sigaction action = {.sa_handler = SIG_DFL};
    um__os_bus_action(&action, NULL);
    if (!is_repeated(info)) {
        um__os_raise_bus();
    }
}

/* The entries whose handlers this thread is running, from the outermost on, and how deep in its
 * stack each was called. A deeper one was left by a jump. */
static _Thread_local struct {
    const entry *of;
    uintptr_t at;
} going_on[MAX_ENTRIES] WITH_THREAD;
static _Thread_local volatile unsigned n_going_on WITH_THREAD;

/* Returns whether the handler below an entry is running further out in this thread. */
static bool is_going_on(const entry *from, uintptr_t here) {
    while (n_going_on > 0 && going_on[n_going_on - 1].at <= here) {
        n_going_on--;
    }
    bool found = false;
    for (unsigned i = 0; i < n_going_on && !found; i++) {
        found = going_on[i].of == from;
    }
    return found;
}

/* Does what the kernel would have done with the action below. */
static void go_on(entry *from, int number, siginfo_t *info, void *context) {
    bool is_spent = atomic_load(&from->is_spent); /* first: what is below was written before it */
    const struct sigaction *below = &from->below;
    bool is_once = (below->sa_flags & (int)SA_RESETHAND) != 0;
    bool is_default = below->sa_handler == SIG_DFL || (is_once && is_spent);
    bool is_ignored = below->sa_handler == SIG_IGN;
    if (is_ignored && !is_repeated(info)) {
        return;
    }
    if (is_default || is_ignored || (is_once && atomic_exchange(&from->is_spent, true))) {
        die_of(info);
        return;
    }
    sigset_t blocked = below->sa_mask, before;
    if ((below->sa_flags & SA_NODEFER) == 0) {
        sigaddset(&blocked, number);
    }
    bool is_masked = um__os_signal_mask(SIG_BLOCK, &blocked, &before) == 0;
    /* Code that installs a handler between our look at the top and our own installation may keep
     * the very entry that goes on to it, or two handlers each other's. If it passes the signal on,
     * as faulthandler does by restoring the previous action and raising the signal, it comes back
     * here: no handler is left. */
    uintptr_t here = (uintptr_t)__builtin_frame_address(0);
    bool comes_back = is_going_on(from, here);
    unsigned n_outer = n_going_on;
    if (n_outer == MAX_ENTRIES || (comes_back && info->si_code == SI_TKILL)) {
        die_of(info);
        return;
    }
    going_on[n_outer].of = from;
    going_on[n_outer].at = here;
    n_going_on = n_outer + 1;
    if ((below->sa_flags & SA_SIGINFO) != 0) {
        below->sa_sigaction(number, info, context);
    } else {
        below->sa_handler(number);
    }
    n_going_on = n_outer; /* before signals are unblocked */
    if (is_masked) {
        um__os_signal_mask(SIG_SETMASK, &before, NULL);
    }
}

static void handle(entry *of, int number, siginfo_t *info, void *context) {
    uintptr_t first, end;
    if (is_lost_page(info, &first, &end)) {
        for (guarded *run = innermost; run != NULL; run = run->outer) {
            if (first < run->end && end > run->first) {
                siglongjmp(run->jump, 1);
            }
        }
    }
    go_on(of, number, info, context);
}

#define HANDLER(i)                                                                                 \
    static void handler_##i(int number, siginfo_t *info, void *context) {                          \
        handle(&entries[i], number, info, context);                                                \
    }
#define NAME(i) handler_##i,
#define EACH_ENTRY(DO)                                                                             \
    DO(0)                                                                                          \
    DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13) DO(14) DO(15)
EACH_ENTRY(HANDLER)
static void (*const handlers[MAX_ENTRIES])(int, siginfo_t *, void *) = {EACH_ENTRY(NAME)};

/* ---- on top, and away: with the lock ---- */

/* Returns the entry whose function this action is; NULL if the action is foreign. */
static entry *entry_of(const struct sigaction *action) {
    for (unsigned i = 0; i < n_entries && (action->sa_flags & SA_SIGINFO) != 0; i++) {
        if (action->sa_sigaction == handlers[i]) {
            return &entries[i];
        }
    }
    return NULL;
}

/* Returns whether two actions are the same, but for flags that the C library adds, and room in its
 * masks that it does not fill. */
static bool is_same(const struct sigaction *a, const struct sigaction *b) {
    int told = SA_SIGINFO | SA_ONSTACK | SA_RESTART | SA_NODEFER | (int)SA_RESETHAND;
    bool same = a->sa_handler == b->sa_handler && ((a->sa_flags ^ b->sa_flags) & told) == 0;
    for (int i = 1; same && i < NSIG; i++) {
        same = sigismember(&a->sa_mask, i) == sigismember(&b->sa_mask, i);
    }
    return same;
}

/* Returns the entry that goes on to this action; NULL if there are too many. */
static entry *entry_over(const struct sigaction *below) {
    for (unsigned i = 0; i < n_entries; i++) {
        if (is_same(&entries[i].below, below)) {
            atomic_store(&entries[i].is_spent, false);
            return &entries[i];
        }
    }
    if (n_entries == MAX_ENTRIES) {
        return NULL;
    }
    entries[n_entries].below = *below;
    atomic_store(&entries[n_entries].is_spent, false);
    return &entries[n_entries++];
}

/* Returns 0 or an errno. */
static int put_on_top(void) {
    struct sigaction top = {0};
    int os_errno = um__os_bus_action(NULL, &top);
    while (os_errno == 0 && entry_of(&top) == NULL) {
        const entry *over = entry_over(&top);
        if (over == NULL) {
            return EBUSY;
        }
        /* An interrupted system call is restarted, or not, as without us. */
        bool restarts = top.sa_handler == SIG_IGN || (top.sa_flags & SA_RESTART) != 0;
        struct sigaction ours = {.sa_sigaction = handlers[over - entries],
                                 .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK |
                                             (restarts ? SA_RESTART : 0)},
                         was = {0};
        os_errno = um__os_bus_action(&ours, &was);
        if (is_same(&was, &top)) {
            break;
        }
        top = was; /* another thread was faster: its action is below now */
    }
    return os_errno;
}

static void take_away(void) {
    struct sigaction top = {0}, was = {0}, none = {.sa_handler = SIG_DFL};
    const entry *ours = um__os_bus_action(NULL, &top) == 0 ? entry_of(&top) : NULL;
    if (ours == NULL) {
        return; /* a foreign handler is on top, and keeps ours as its previous one */
    }
    struct sigaction put = atomic_load(&ours->is_spent) ? none : ours->below;
    /* An action that another thread installed meanwhile goes back on top. Until then the action
     * below is installed once more: code that covers it just now keeps it as its previous one, and
     * faulthandler then calls itself until its stack ends. */
    while (um__os_bus_action(&put, &was) == 0 && !is_same(&was, &top)) {
        top = put;
        put = was;
    }
}

/* ---- runs ---- */

static void take_lock(void) {
    um__lock_take(&lock);
}

static void drop_lock(void) {
    um__lock_drop(&lock);
}

/* A child has only the thread that forked. */
static void enter_child(void) {
    n_users = innermost != NULL;
    atomic_store(&lock, 0);
}

static um_status enter(um_error *err) {
    const char *call = "pthread_atfork";
    take_lock();
    int os_errno = knows_forks ? 0 : um__os_at_fork(take_lock, drop_lock, enter_child);
    knows_forks = os_errno == 0;
    if (os_errno == 0) {
        call = "sigaction";
        os_errno = put_on_top();
        n_users += os_errno == 0;
    }
    drop_lock();
    return os_errno == 0 ? UM_OK : um__fail_os(err, os_errno, 0, call);
}

static void leave(void) {
    take_lock();
    if (--n_users == 0) {
        take_away();
    }
    drop_lock();
}

um_status um_guard_run(const void *base, size_t nbytes, um_guarded *run, void *context,
                       um_error *err) {
    guarded here = {.first = (uintptr_t)base, .end = (uintptr_t)base + nbytes, .outer = innermost};
    /* The kernel kills a thread that blocks the signal of its own fault. */
    sigset_t bus, before;
    sigemptyset(&bus);
    sigaddset(&bus, SIGBUS);
    UM__TRY_OS(um__os_signal_mask(SIG_UNBLOCK, &bus, &before), err, 0, "pthread_sigmask");
    /* A thread is one user, however deep its runs are nested: a run that is jumped over undoes
     * nothing. */
    um_status status = here.outer == NULL ? enter(err) : UM_OK;
    if (status == UM_OK) {
        if (sigsetjmp(here.jump, 0) == 0) {
            innermost = &here;
            atomic_signal_fence(memory_order_seq_cst);
            run(context);
            atomic_signal_fence(memory_order_seq_cst);
        } else {
            status = um__fail(err, UM_E_IO, "a page of a mapped file cannot be had");
        }
        innermost = here.outer;
        if (here.outer == NULL) {
            leave();
        }
    }
    /* A handler that was jumped over may have blocked more signals. */
    if (status != UM_OK || sigismember(&before, SIGBUS) == 1) {
        um__os_signal_mask(SIG_SETMASK, &before, NULL);
    }
    return status;
}

typedef struct copying {
    void *out;
    const void *from;
    size_t nbytes;
} copying;

static void run_copy(void *context) {
    const copying *copy = context;
    memcpy(copy->out, copy->from, copy->nbytes);
}

um_status um_guard_copy(void *out, const void *from, size_t nbytes, um_error *err) {
    copying copy = {.out = out, .from = from, .nbytes = nbytes};
    return um_guard_run(from, nbytes, run_copy, &copy, err);
}
