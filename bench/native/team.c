#define _GNU_SOURCE
#include "team.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

typedef struct team {
    bench_work *work;
    void *job;
    int n;
    const int *cpus;
    int n_cpus;
    atomic_int failed;
} team;

typedef struct member {
    team *team;
    int index;
    pthread_t thread;
} member;

static int pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (cpu < 0 || cpu >= CPU_SETSIZE) {
        return EINVAL;
    }
    CPU_SET((size_t)cpu, &set);
    return sched_setaffinity(0, sizeof set, &set) ? errno : 0;
}

static void *run_member(void *arg) {
    member *m = arg;
    team *t = m->team;
    int failed = pin(t->cpus[m->index % t->n_cpus]);
    failed = failed ? failed : t->work(t->job, m->index, t->n);
    if (failed) {
        t->failed = failed;
    }
    return 0;
}

static int run_alone(bench_work *work, void *job, int cpu) {
    cpu_set_t before;
    if (sched_getaffinity(0, sizeof before, &before)) {
        return errno;
    }
    int failed = pin(cpu);
    if (failed) {
        return failed;
    }
    failed = work(job, 0, 1);
    sched_setaffinity(0, sizeof before, &before);
    return failed;
}

int bench_run_team(bench_work *work, void *job, int n, const int *cpus, int n_cpus) {
    if (n < 1 || n_cpus < 1) {
        return EINVAL;
    }
    if (n == 1) {
        return run_alone(work, job, cpus[0]);
    }
    team t = {.work = work, .job = job, .n = n, .cpus = cpus, .n_cpus = n_cpus};
    member *members = malloc((size_t)n * sizeof *members);
    if (!members) {
        return ENOMEM;
    }
    int started = 0;
    for (; started < n; started++) {
        member *m = &members[started];
        *m = (member){.team = &t, .index = started};
        int failed = pthread_create(&m->thread, 0, run_member, m);
        if (failed) {
            t.failed = failed;
            break;
        }
    }
    for (int i = 0; i < started; i++) {
        pthread_join(members[i].thread, 0);
    }
    free(members);
    return t.failed;
}
