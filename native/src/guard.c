/* The guard: touching a mapped file that somebody truncates, and living on.
 *
 * A page that cannot be had is a SIGBUS in the thread that touches it, at an address that the
 * kernel tells. While anybody runs guarded, a handler of ours is on top of whatever handled SIGBUS
 * before. It looks whether this thread is inside of a run whose range the address is in; then it
 * jumps back into um_guard_run. Everything else goes on to the handler below, as the kernel would
 * have called it. SIGSEGV is left alone: it says that nothing is mapped, or that it may not be
 * written, which is never the file's doing.
 *
 * Handlers are a stack that nobody can see. Whoever installs one keeps ours as his previous: he may
 * call it, or put it back, long after, when another of ours is on top of his. If there were one
 * function for both, it could not know which handler to go on to, and two that go on to each other
 * never end. So each action of others that we ever lay on top of has an entry of ours, whose
 * function goes on to that one action and no other, for as long as the process lives. */
#include "os.h"
#include "status.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* A run, in the frame of its um_guard_run. */
typedef struct guarded {
    uintptr_t first, end;
    struct guarded *outer;
    sigjmp_buf jump;
} guarded;

/* The handler asks this in any thread, and may not be the first to: memory for it comes with the
 * thread, and not when it is first asked for. musl has no other kind. */
#if defined(__GLIBC__)
#define WITH_THREAD __attribute__((tls_model("initial-exec")))
#else
#define WITH_THREAD
#endif
static _Thread_local guarded *volatile innermost WITH_THREAD;

typedef struct entry {
    struct sigaction below; /* never changes once the entry is used */
    atomic_bool is_spent;   /* of SA_RESETHAND: it was called, and SIG_DFL stands in its place */
} entry;

enum { MAX_ENTRIES = 16 };
static entry entries[MAX_ENTRIES];

/* Guards what follows; no handler takes it. 0: free, 1: taken, 2: taken, and others may wait. */
static _Atomic uint32_t lock;
static unsigned n_entries;
static unsigned n_users; /* threads inside of a run */
static bool knows_forks;

/* ---- the handler: async-signal-safe only ---- */

/* Whether a page could not be had, of a file that was truncated or cannot be read, or one that the
 * hardware has lost; and where. Signals that were sent have codes of 0 and below, and no address.
 */
static bool is_lost_page(const siginfo_t *info, uintptr_t *out_first, uintptr_t *out_end) {
    *out_first = (uintptr_t)info->si_addr;
    *out_end = *out_first + 1;
#ifdef BUS_MCEERR_AR
    if (info->si_code == BUS_MCEERR_AR) { /* the address is as exact as this */
        uintptr_t nbytes = (uintptr_t)1 << info->si_addr_lsb;
        *out_first &= ~(nbytes - 1);
        *out_end = *out_first + nbytes;
        return true;
    }
#endif
    return info->si_code == BUS_ADRERR || info->si_code == BUS_OBJERR;
}

/* Whether the signal is of an instruction, which is repeated when the handler returns. The kernel
 * lets nobody ignore those. */
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
    um_os_bus_action(&action, NULL);
    if (!is_repeated(info)) {
        um_os_raise_bus();
    }
}

/* The entry that this thread is going on from, and how deep in its stack. */
static _Thread_local const entry *volatile going_on WITH_THREAD;
static _Thread_local volatile uintptr_t going_on_at WITH_THREAD;

/* Does as the kernel would have done with the action below. */
static void go_on(entry *from, int number, siginfo_t *info, void *context) {
    const struct sigaction *below = &from->below;
    bool is_once = (below->sa_flags & (int)SA_RESETHAND) != 0;
    bool is_default = below->sa_handler == SIG_DFL || (is_once && atomic_load(&from->is_spent));
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
    bool is_masked = um_os_signal_mask(SIG_BLOCK, &blocked, &before) == 0;
    /* Who installs a handler in the moment between our looking what is on top and our being there
     * can keep the very entry that goes on to him. When he hands on what he was called for, as
     * faulthandler does by restoring his previous and raising the signal, it comes back here:
     * nobody is left to hear of it. */
    const entry *outer = going_on;
    uintptr_t outer_at = going_on_at, here = (uintptr_t)__builtin_frame_address(0);
    if (info->si_code == SI_TKILL && outer == from && here < outer_at) {
        die_of(info);
        return;
    }
    going_on = from;
    going_on_at = here;
    if ((below->sa_flags & SA_SIGINFO) != 0) {
        below->sa_sigaction(number, info, context);
    } else {
        below->sa_handler(number);
    }
    going_on = outer; /* before the next signal may come */
    going_on_at = outer_at;
    if (is_masked) {
        um_os_signal_mask(SIG_SETMASK, &before, NULL);
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
HANDLER(0)
HANDLER(1)
HANDLER(2)
HANDLER(3)
HANDLER(4)
HANDLER(5)
HANDLER(6)
HANDLER(7)
HANDLER(8)
HANDLER(9)
HANDLER(10)
HANDLER(11)
HANDLER(12)
HANDLER(13)
HANDLER(14)
HANDLER(15)

static void (*const handlers[MAX_ENTRIES])(int, siginfo_t *, void *) = {
    handler_0, handler_1, handler_2,  handler_3,  handler_4,  handler_5,  handler_6,  handler_7,
    handler_8, handler_9, handler_10, handler_11, handler_12, handler_13, handler_14, handler_15};

/* ---- on top, and away: with the lock ---- */

/* The entry whose function this action is; NULL: it is somebody else's. */
static entry *entry_of(const struct sigaction *action) {
    for (unsigned i = 0; i < n_entries && (action->sa_flags & SA_SIGINFO) != 0; i++) {
        if (action->sa_sigaction == handlers[i]) {
            return &entries[i];
        }
    }
    return NULL;
}

/* The C library adds flags of its own, and its masks have room that it does not fill. */
static bool is_same(const struct sigaction *a, const struct sigaction *b) {
    int told = SA_SIGINFO | SA_ONSTACK | SA_RESTART | SA_NODEFER | (int)SA_RESETHAND;
    bool same = a->sa_handler == b->sa_handler && ((a->sa_flags ^ b->sa_flags) & told) == 0;
    for (int i = 1; same && i < NSIG; i++) {
        same = sigismember(&a->sa_mask, i) == sigismember(&b->sa_mask, i);
    }
    return same;
}

/* The entry that goes on to this action; NULL: there are too many. */
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
    return &entries[n_entries++];
}

/* Returns 0 or an errno. */
static int put_on_top(void) {
    struct sigaction top = {0};
    int os_errno = um_os_bus_action(NULL, &top);
    while (os_errno == 0 && entry_of(&top) == NULL) {
        const entry *over = entry_over(&top);
        if (over == NULL) {
            return EBUSY;
        }
        /* A call that a sent signal interrupts goes on, or not, as it would without us. */
        bool restarts = top.sa_handler == SIG_IGN || (top.sa_flags & SA_RESTART) != 0;
        struct sigaction ours = {.sa_sigaction = handlers[over - entries],
                                 .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK |
                                             (restarts ? SA_RESTART : 0)},
                         was = {0};
        os_errno = um_os_bus_action(&ours, &was);
        if (is_same(&was, &top)) {
            break;
        }
        top = was; /* somebody was faster: his is below now */
    }
    return os_errno;
}

static void take_away(void) {
    struct sigaction top = {0}, was = {0}, none = {.sa_handler = SIG_DFL};
    const entry *ours = um_os_bus_action(NULL, &top) == 0 ? entry_of(&top) : NULL;
    if (ours == NULL) {
        return; /* whoever is on top keeps ours as his previous */
    }
    const struct sigaction *below = atomic_load(&ours->is_spent) ? &none : &ours->below;
    if (um_os_bus_action(below, &was) == 0 && !is_same(&was, &top)) {
        um_os_bus_action(&was, NULL); /* somebody was faster: his stays */
    }
}

/* ---- runs ---- */

static void take_lock(void) {
    uint32_t is_free = 0;
    if (!atomic_compare_exchange_strong(&lock, &is_free, 1)) {
        while (atomic_exchange(&lock, 2) != 0) {
            um_os_wait(&lock, 2, 1000);
        }
    }
}

static void drop_lock(void) {
    if (atomic_exchange(&lock, 0) == 2) {
        um_os_wake(&lock);
    }
}

/* A child has the thread that forked, and no other. */
static void enter_child(void) {
    n_users = innermost != NULL;
    atomic_store(&lock, 0);
}

static um_status enter(um_error *err) {
    const char *call = "pthread_atfork";
    take_lock();
    int os_errno = knows_forks ? 0 : um_os_at_fork(take_lock, drop_lock, enter_child);
    knows_forks = os_errno == 0;
    if (os_errno == 0) {
        call = "sigaction";
        os_errno = put_on_top();
        n_users += os_errno == 0;
    }
    drop_lock();
    return os_errno == 0 ? UM_OK : um_fail_os(err, os_errno, 0, call);
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
    int os_errno = um_os_signal_mask(SIG_UNBLOCK, &bus, &before);
    if (os_errno != 0) {
        return um_fail_os(err, os_errno, 0, "pthread_sigmask");
    }
    /* A thread is one user, however deep its runs are nested: so one that is jumped over has
     * nothing to undo. */
    um_status status = here.outer == NULL ? enter(err) : UM_OK;
    if (status == UM_OK) {
        if (sigsetjmp(here.jump, 0) == 0) {
            innermost = &here;
            atomic_signal_fence(memory_order_seq_cst);
            run(context);
            atomic_signal_fence(memory_order_seq_cst);
        } else {
            status = um_fail(err, UM_E_IO, "a page of a mapped file cannot be had");
        }
        innermost = here.outer;
        if (here.outer == NULL) {
            leave();
        }
    }
    /* A handler that was jumped over may have blocked more. */
    if (status != UM_OK || sigismember(&before, SIGBUS) == 1) {
        um_os_signal_mask(SIG_SETMASK, &before, NULL);
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
