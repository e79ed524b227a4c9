/* Joining small pages into huge ones, once the program has started. A thread does it, which exists
 * only while there is such work. */
#include "exec.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>

#include "os/kernel.h" /* behind the system's headers */

enum { STEP_BYTES = UM__SLOT_BYTES };
/* A program has started when it touches less than 4 MiB of new small pages in half a second. */
static const uint64_t LOOK_NS = 500000000, QUIET_FAULTS = 1024;
/* Of the time of one core, a tenth; and little enough of the lock's. */
static const uint64_t CPU_SHARE = 10, PAUSE_NS = 1000000;

/* Under the table's lock. */
static bool is_running, is_quiet;
static uint64_t faults_before;
/* The mapping that is worked on, and how much of it is done. */
static uintptr_t current;
static uint32_t current_number;
static size_t done;

static bool look(void) {
    uint64_t faults = um__sys_faults();
    is_quiet = faults - faults_before < QUIET_FAULTS;
    faults_before = faults;
    return is_quiet;
}

static void end_with(um__record *record) {
    um__table_set_state(record, record->state & ~(uint32_t)UM__IS_DUE);
    current = 0;
}

/* Joins the pages of 2 MiB. Only those of malloc's kind: what a program maps itself, it may also
 * clear, and the pages would come back. The kernel refuses where nothing was touched. */
static void join(um__record *record) {
    uint32_t number = record->state >> UM__NUMBER_SHIFT;
    if ((record->state & UM__IS_CHANGED) != 0) {
        end_with(record); /* the program's own advice stays */
        return;
    }
    /* Another mapping may lie where one has ended, and one may have shrunk. */
    if (current != record->address || current_number != number || done > record->nbytes) {
        current = record->address;
        current_number = number;
        done = 0;
        um__sys_advise((void *)record->address, record->nbytes, MADV_HUGEPAGE);
    }
    if (record->via == UM__MMAP || done + STEP_BYTES > record->nbytes) {
        end_with(record);
        return;
    }
    um__sys_advise((char *)record->address + done, STEP_BYTES, MADV_COLLAPSE);
    done += STEP_BYTES;
}

/* Leaves what is due to the kernel's own thread. */
static void give_up(void) {
    um__record *record;
    um__table_look();
    while ((record = um__table_any(UM__IS_DUE)) != NULL) {
        if ((record->state & UM__IS_CHANGED) == 0) {
            um__sys_advise((void *)record->address, record->nbytes, MADV_HUGEPAGE);
        }
        end_with(record);
    }
    is_running = false;
    um__table_unlock();
}

uint64_t um__later_step(void) {
    uint64_t wait = LOOK_NS;
    um__table_look();
    if (is_quiet || look()) {
        /* Its mapping cannot end meanwhile, since that wants the lock. */
        uint64_t began = um__sys_cpu_ns();
        um__record *record = um__table_any(UM__IS_DUE);
        if (record != NULL) {
            join(record);
        }
        is_running = record != NULL;
        wait = is_running ? PAUSE_NS + (CPU_SHARE - 1) * (um__sys_cpu_ns() - began) : 0;
    }
    um__table_unlock();
    return wait;
}

static void *run(void *unused) {
    for (uint64_t wait = LOOK_NS; wait != 0; wait = um__later_step()) {
        struct timespec rest = {.tv_sec = (time_t)(wait / 1000000000),
                                .tv_nsec = (long)(wait % 1000000000)};
        nanosleep(&rest, NULL);
    }
    return unused;
}

void um__later_begin(void) {
    um__table_look();
    bool runs = is_running;
    is_running = true;
    is_quiet = false;
    um__table_unlock();
    if (runs) {
        return;
    }
    /* The program's signals are for its own threads. */
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, run, NULL) != 0) {
        give_up();
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void um__later_in_child(void) {
    give_up(); /* the thread stays behind */
}
